"""SSE on the wire: framing, numbers, and what ends a stream. Real sockets, raw bytes."""

from __future__ import annotations

import json
import re
import socket
from typing import Any

import httpx
import openai
import pytest

from streamer.server.transport.frames import SSE_WITH_IDS, frame
from tests.server.support.counting import CHAT, ENDLESS, Event, check_counting, sse
from tests.server.support.running import Running

IDS: dict[str, Any] = {"stream_options": {"include_event_ids": True}}


def events_of(server: Running, path: str, body: dict[str, Any]) -> list[Event]:
    asked = {**body, "stream": True}
    with httpx.stream("POST", server.url + path, json=asked, timeout=20) as response:
        assert response.status_code == 200, response.read()
        return list(sse(response))


def chat(server: Running, **body: Any) -> list[Event]:
    return events_of(server, "/v1/chat/completions", {**CHAT, **body})


def test_headers(server: Running) -> None:
    body = {**CHAT, "stream": True, "max_tokens": 1}
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache, no-transform"
        assert response.headers["x-accel-buffering"] == "no"
        first, *_ = (event.json for event in sse(response) if not event.is_done)
        assert response.headers["x-request-id"] == first["id"]


def test_chat_stream_from_role_to_done(server: Running) -> None:
    *events, done = chat(server, max_tokens=20, ignore_eos=True)
    assert done.is_done
    assert done.id is None
    chunks = [e.json for e in events]
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [c for c in chunks[1:] if "role" in c["choices"][0]["delta"]] == []
    assert isinstance(chunks[0]["seed"], int)
    assert [c for c in chunks[1:] if "seed" in c] == []
    assert chunks[-1]["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert len({c["system_fingerprint"] for c in chunks}) == 1
    assert [c for c in chunks[:-1] if c["choices"][0]["finish_reason"]] == []
    assert [c for c in chunks if "usage" in c or "token_ids" in c["choices"][0]] == []
    check_counting("".join(c["choices"][0]["delta"].get("content", "") for c in chunks))


def test_numbers_count_role_tokens_finish_and_usage(server: Running) -> None:
    options = {"include_usage": True, "include_event_ids": True}
    *events, _ = chat(
        server, max_tokens=9, ignore_eos=True, return_token_ids=True, stream_options=options
    )
    seen = 0
    for event in events[1:-2]:
        seen += len(event.json["choices"][0]["token_ids"])
        assert event.id == str(1 + seen)
    assert seen == 9
    assert [e.id for e in events[:1] + events[-2:]] == ["1", "11", "12"]


def test_usage_only_when_requested(server: Running) -> None:
    *events, _ = chat(server, max_tokens=3, stream_options={"include_usage": True})
    chunks = [e.json for e in events]
    assert [c["usage"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] == 3
    assert usage["total_tokens"] == usage["prompt_tokens"] + 3
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0


@pytest.mark.parametrize(
    ("path", "prompts", "num_choices"),
    [("/v1/chat/completions", CHAT, 2), ("/v1/completions", {"prompt": ["one", "two"]}, 4)],
)
def test_usage_along_the_way_counts_what_was_sent(
    server: Running, path: str, prompts: dict[str, Any], num_choices: int
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**prompts, "n": 2, "max_tokens": 5, "ignore_eos": True, "return_token_ids": True}
    *events, last, _ = events_of(server, path, {**body, "stream_options": options})
    seen = [0] * num_choices
    for event in events:
        (choice,) = event.json["choices"]
        seen[choice["index"]] += len(choice.get("token_ids", ()))
        assert event.json["usage"]["completion_tokens"] == seen[choice["index"]]
    assert seen == [5] * num_choices
    assert last.json["usage"]["completion_tokens"] == sum(seen)


def test_several_choices_have_a_number_each(server: Running) -> None:
    *events, _ = chat(server, max_tokens=5, n=3, ignore_eos=True, **IDS)
    numbers = [0, 0, 0]
    texts = ["", "", ""]
    roles = 0
    for event in events:
        (choice,) = event.json["choices"]
        assert event.id is not None
        now = [int(x) for x in event.id.split(".")]
        assert [i for i in range(3) if now[i] != numbers[i]] == [choice["index"]]
        assert now[choice["index"]] > numbers[choice["index"]]
        numbers = now
        roles += "role" in choice["delta"]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert numbers == [7, 7, 7]
    assert roles == 3
    for text in texts:
        check_counting(text)


def test_completion_stream_of_a_batch(server: Running) -> None:
    body = {"prompt": ["one", "two"], "n": 2, "max_tokens": 6, "ignore_eos": True}
    *events, done = events_of(server, "/v1/completions", {**body, "return_token_ids": True})
    assert done.is_done
    texts = dict.fromkeys(range(4), "")
    prompts: dict[int, list[int]] = {}
    finishes = []
    for event in events:
        chunk = event.json
        assert event.id is None  # it can't be resumed
        assert chunk["object"] == "text_completion"
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        if "prompt_token_ids" in choice:
            assert choice["index"] not in prompts
            prompts[choice["index"]] = choice["prompt_token_ids"]
        if choice["finish_reason"]:
            finishes.append((choice["index"], choice["finish_reason"]))
    assert sorted(finishes) == [(i, "length") for i in range(4)]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
    for text in texts.values():
        check_counting(text)


def test_token_ids_and_prompt_token_ids_once(server: Running) -> None:
    *events, _ = chat(server, max_tokens=6, ignore_eos=True, return_token_ids=True)
    chunks = [e.json for e in events]
    assert [i for i, c in enumerate(chunks) if "prompt_token_ids" in c] == [0]
    streamed = [t for c in chunks for t in c["choices"][0].get("token_ids", ())]
    body = {**CHAT, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    body["seed"] = chunks[0]["seed"]
    whole = httpx.post(server.url + "/v1/chat/completions", json=body).json()
    assert whole["choices"][0]["token_ids"] == streamed
    assert whole["prompt_token_ids"] == chunks[0]["prompt_token_ids"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_what_can_be_refused_is_refused_before_the_200(server: Running, path: str) -> None:
    body = {**CHAT, "prompt": "x", "stream": True, "temperature": 9}
    response = httpx.post(server.url + path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "temperature"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_reader_that_knows_data_lines_alone_reads_every_line(server: Running, path: str) -> None:
    """vllm bench serve, SGLang's benchmark and llmperf parse what follows six characters."""
    body = {**CHAT, "prompt": "count", "stream": True, "max_tokens": 4, "ignore_eos": True}
    raw = httpx.post(server.url + path, json=body, timeout=20).text
    *lines, done = [line for line in raw.split("\n") if line]
    assert done == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    texts = [c.get("text") or c.get("delta", {}).get("content", "") for x in chunks
             for c in x["choices"]]  # fmt: skip
    check_counting("".join(texts))


def test_a_chat_that_asks_for_event_ids_has_them_on_every_chunk(server: Running) -> None:
    body = {**CHAT, **IDS, "stream": True, "max_tokens": 4}
    raw = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=20).text
    assert raw.endswith("data: [DONE]\n\n")
    for block in raw.removesuffix("\n\n").split("\n\n")[:-1]:
        assert re.fullmatch(r"id: [0-9.]+\ndata: \{.*\}", block), block


def test_the_official_client_reads_on_after_a_keep_alive() -> None:
    """To it a blank line after an id is an event without data."""
    sent = [frame(str(n), b'{"type": "response.in_progress"}', "a") for n in range(2)]
    transport = httpx.MockTransport(
        lambda _: httpx.Response(200, content=sent[0] + SSE_WITH_IDS.keep_alive + sent[1])
    )
    with httpx.Client(transport=transport) as bare:
        client = openai.OpenAI(base_url="http://here/v1", api_key="none", http_client=bare)
        assert len(list(client.responses.create(model="m", input="x", stream=True))) == 2


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("extra", [{}, {"n": 2}])
def test_closing_the_connection_cancels(server: Running, path: str, extra: dict[str, int]) -> None:
    body = {**CHAT, **ENDLESS, **extra, "prompt": ["a", "b"], "stream": True}
    with httpx.stream("POST", server.url + path, json=body) as response:
        events = sse(response)  # dropping the generator would close the connection
        stream = server.engine.get(next(events).json["id"])
        assert stream is not None
        assert not stream.is_finished
    server.wait_idle()
    assert {f.reason.value for f in stream.finishes if f is not None} == {"cancelled"}


def post_raw(server: Running, **fields: Any) -> socket.socket:
    """A request on a bare socket, so that the test decides what is read and when."""
    host, port = server.url.removeprefix("http://").split(":")
    body = httpx.Request("POST", server.url, json={**CHAT, **ENDLESS, **fields}).read()
    raw = socket.create_connection((host, int(port)))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
    raw.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return raw


def test_a_reader_that_reads_nothing_is_paused_alone(server: Running) -> None:
    with post_raw(server, stream=True):
        server.wait_metric('streamer_requests{state="paused"}', 1)
        *events, _ = chat(server, max_tokens=2000, ignore_eos=True)
        text = "".join(e.json["choices"][0]["delta"].get("content", "") for e in events)
        assert check_counting(text)[-1] == 2000
        # It stays paused, except for moments: the kernel's buffers may take a little more.
        server.wait_metric('streamer_requests{state="paused"}', 1)
    server.wait_idle()


def test_closing_while_a_whole_answer_is_awaited_cancels(server: Running) -> None:
    with post_raw(server):
        server.wait_metric('streamer_requests{state="running"}', 1)
    server.wait_idle()


def test_detach_s_lets_it_run_on(server: Running) -> None:
    body = {**CHAT, "max_tokens": 200, "ignore_eos": True, "stream": True, "detach_s": 60}
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=body) as response:
        stream = server.engine.get(next(sse(response)).json["id"])
        assert stream is not None
    server.on_loop(stream.wait())
    assert [f.num_tokens for f in stream.finishes if f is not None] == [200]
    check_counting(stream.text())
