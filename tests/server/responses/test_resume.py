"""A stream outlives its connection: what a resume brings, to which key; real sockets, raw bytes."""

from __future__ import annotations

import random
from typing import Any

import httpx
import openai
import pytest

from streamer.demo import CHECKPOINT
from streamer.fake.model import expected_text, expected_tokens
from tests.server.support.counting import CHAT, Event, sse
from tests.server.support.cutting import cut_after, follow
from tests.server.support.running import Running

NUM_TOKENS = 12
RESPONSE: dict[str, Any] = {
    "input": "count",
    "stream": True,
    "max_output_tokens": NUM_TOKENS,
    "ignore_eos": True,
    "return_token_ids": True,
    "detach_s": 30,
    "seed": 5,  # every event has the same length each time
}
CHAT_BODY: dict[str, Any] = {
    **CHAT,
    "stream": True,
    "max_tokens": NUM_TOKENS,
    "ignore_eos": True,
    "return_token_ids": True,
    "detach_s": 30,
    "stream_options": {"include_usage": True, "include_event_ids": True},
}


def response_of(events: list[Event]) -> tuple[str, list[int], list[int]]:
    """Joined text, joined token ids, and the numbers."""
    deltas = [e.json for e in events if e.kind == "response.output_text.delta"]
    return (
        "".join(d["delta"] for d in deltas),
        [t for d in deltas for t in d["token_ids"]],
        [e.json["sequence_number"] for e in events],
    )


def check_response(events: list[Event], num_tokens: int = NUM_TOKENS) -> None:
    """The joined events are an uninterrupted run's: all text, all ids, every other event once."""
    text, ids, numbers = response_of(events)
    assert (text, ids) == (expected_text(num_tokens), expected_tokens(0, num_tokens))
    assert numbers == sorted(set(numbers))
    others = [e.kind for e in events if e.kind != "response.output_text.delta"]
    assert others == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    final = events[-1].json["response"]
    assert final["output"][0]["content"][0]["text"] == text
    assert final["usage"]["output_tokens"] == num_tokens


def test_a_resume_is_one_merged_delta_then_live(slow: Running) -> None:
    body = {**RESPONSE, "max_output_tokens": 200}
    first = cut_after(slow, 1500, "POST", "/v1/responses", body)
    response_id = first[0].json["response"]["id"]
    stream = slow.engine.get(response_id)
    assert stream is not None
    while stream.num_output_tokens < 40:
        httpx.get(slow.url + f"/v1/responses/{response_id}")
    rest = follow(slow, f"/v1/responses/{response_id}?stream=true&starting_after={first[-1].id}")
    deltas = [e.json for e in rest if e.kind == "response.output_text.delta"]
    assert len(deltas[0]["token_ids"]) >= 30
    assert max(len(d["token_ids"]) for d in deltas[1:]) < 30
    check_response(first + rest, 200)


def test_a_second_reader_while_the_first_is_attached(slow: Running) -> None:
    body = {**RESPONSE, "max_output_tokens": 300, "detach_s": 0}
    with httpx.stream("POST", slow.url + "/v1/responses", json=body) as response:
        first = sse(response)
        seen = [next(first) for _ in range(10)]
        path = f"/v1/responses/{seen[0].json['response']['id']}?stream=true"
        second = follow(slow, path)
        check_response(seen + list(first), 300)
    check_response(second, 300)
    assert len(second) == 308  # unmerged


def test_without_a_cursor_it_is_replayed_unmerged_and_as_it_was(slow: Running) -> None:
    with httpx.stream("POST", slow.url + "/v1/responses", json=RESPONSE) as response:
        live = list(sse(response))
    path = f"/v1/responses/{live[0].json['response']['id']}?stream=true"
    for _ in range(2):
        replay = follow(slow, path)
        check_response(replay)
        assert [e.id for e in replay] == [str(n) for n in range(8 + NUM_TOKENS)]
        others = [e.json for e in live if "delta" not in e.json]
        assert [e.json for e in replay if "delta" not in e.json] == others
    assert follow(slow, path + f"&starting_after={live[-1].id}") == []


@pytest.mark.parametrize("cursor", [None, 0, 3, 4, 9, 14, 15, 17])
def test_the_official_helper_resumes(slow: Running, cursor: int | None) -> None:
    client = openai.OpenAI(base_url=slow.url + "/v1", api_key="none", max_retries=0)
    with client:
        created = client.responses.create(
            model="fake", input="count to 10", background=True, stream=True
        )
        response_id = next(iter(created)).response.id  # type: ignore[union-attr]
        created.close()
        options: Any = {} if cursor is None else {"starting_after": cursor}
        with client.responses.stream(response_id=response_id, **options) as stream:
            events = list(stream)
            final = stream.get_final_response()
    after = -1 if cursor is None else cursor
    # the end token, which has no text, has no number
    assert [e.sequence_number for e in events] == list(range(after + 1, 19))
    assert final.output_text == expected_text(10)
    assert events[-1].type == "response.completed"


# ---------------------------------------------------------------- chat


def chat_of(events: list[Event], n: int) -> tuple[list[str], list[list[int]]]:
    texts, ids = [""] * n, [[] for _ in range(n)]  # type: ignore[var-annotated]
    for event in events:
        for choice in [] if event.is_done else event.json["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
            ids[choice["index"]] += choice.get("token_ids", ())
    return texts, ids


@pytest.mark.parametrize("n", [1, 3])
def test_a_chat_is_cut_and_resumed(slow: Running, n: int) -> None:
    random.seed(n)
    body = {**CHAT_BODY, "n": n}
    for round_ in range(5):
        size = random.randrange(500, 5000)
        events = cut_after(slow, size, "POST", "/v1/chat/completions", body)
        chat_id = events[0].json["id"]
        while not events[-1].is_done:
            path, last = f"/v1/chat/completions/{chat_id}?stream=true", str(events[-1].id)
            headers = {"Last-Event-ID": last} if round_ % 2 else {}
            path += "" if headers else f"&starting_after={last}"
            events += cut_after(slow, random.randrange(300, 4000), "GET", path, **headers)
        texts, ids = chat_of(events, n)
        assert texts == [expected_text(NUM_TOKENS)] * n
        assert ids == [expected_tokens(0, NUM_TOKENS)] * n
        plain = [e.json for e in events if not e.is_done]
        ends = [c["choices"][0]["finish_reason"] for c in plain if c["choices"]]
        assert [e for e in ends if e] == ["length"] * n
        assert [c["usage"]["completion_tokens"] for c in plain if c["usage"]] == [n * NUM_TOKENS]
        assert sum("role" in c["choices"][0]["delta"] for c in plain if c["choices"]) == n


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("", "stream"),
        ("?stream=perhaps", "stream"),
        ("?stream=true&starting_after=x", "starting_after"),
        ("?stream=true&starting_after=1.2", "starting_after"),
        ("?stream=true&starting_after=-1", "starting_after"),
        ("?stream=true&starting_after=" + "9" * 30, "starting_after"),
    ],
)
def test_what_a_chat_resume_refuses(slow: Running, query: str, param: str) -> None:
    answer = httpx.post(slow.url + "/v1/chat/completions", json={**CHAT, "max_tokens": 1})
    path = f"/v1/chat/completions/{answer.json()['id']}"
    refused = httpx.get(slow.url + path + query)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert httpx.get(slow.url + path + "0?stream=true").status_code == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/responses", RESPONSE), ("/v1/chat/completions", CHAT_BODY)],
)
def test_a_number_not_yet_sent_is_refused_while_the_answer_is_generated(
    slow: Running, path: str, body: dict[str, Any]
) -> None:
    """Otherwise that reader would be ahead of all others for ever, and nothing would pause."""
    tokens = "max_output_tokens" if "input" in body else "max_tokens"
    first, *_ = cut_after(slow, 1200, "POST", path, {**body, tokens: 400})
    response_id = first.json.get("id") or first.json["response"]["id"]
    stream = slow.engine.get(response_id)
    assert stream is not None
    refused = httpx.get(f"{slow.url}{path}/{response_id}?stream=true&starting_after=9999")
    assert not stream.is_finished
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "starting_after")


# ---------------------------------------------------------------- a real model


@pytest.mark.skipif(not CHECKPOINT.is_dir(), reason="the bundled model is not there")
def test_the_bundled_model_is_resumed_to_the_same_tokens(server_with: Any) -> None:
    """Sampled, with characters of several bytes and held-back text: cut, resumed, equal."""
    server = server_with(model=str(CHECKPOINT), num_gpu_blocks_override=64)
    body: dict[str, Any] = {"input": "What is paged attention?", "seed": 7, "temperature": 0.8}
    body |= {"max_output_tokens": 60, "return_token_ids": True, "detach_s": 30, "stop": ["zzz"]}
    url = server.url + "/v1/responses"
    whole = httpx.post(url, json=body, timeout=60).json()
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=60) as response:
        text, ids, _ = response_of(list(sse(response)))
    assert text == whole["output"][0]["content"][0]["text"]
    assert len(ids) == whole["usage"]["output_tokens"] > 5
    random.seed(3)
    for _ in range(4):
        size = random.randrange(900, 6000)
        events = cut_after(server, size, "POST", "/v1/responses", {**body, "stream": True})
        while not events[-1].kind.startswith(("response.completed", "response.incomplete")):
            path = f"/v1/responses/{events[0].json['response']['id']}?stream=true"
            path += f"&starting_after={events[-1].id}"
            events += cut_after(server, random.randrange(200, 3000), "GET", path)
        assert response_of(events)[:2] == (text, ids)
    follow_up = {**body, "input": "Why?", "previous_response_id": whole["id"]}
    second = httpx.post(url, json=follow_up, timeout=60).json()
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > whole["usage"]["input_tokens"]
