"""POST /v1/responses and everything by id: whole, SSE, background, lineage, forks, other keys."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from streamer.fake.model import expected_text
from tests.server.support.counting import CHAT, check_counting, sse
from tests.server.support.greedy import story, telling
from tests.server.support.running import Running

ENDLESS: dict[str, Any] = {"max_output_tokens": 30_000, "ignore_eos": True}


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def post(server: Running, path: str = "/v1/responses", **body: Any) -> httpx.Response:
    body.setdefault("max_output_tokens", 100)
    return httpx.post(server.url + path, json=body, timeout=20)


def text_of(response: Any) -> str:
    return "".join(p["text"] for item in response["output"] for p in item["content"])


# ---------------------------------------------------------------- whole and streamed


def test_whole(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model="fake", input="count to 5", instructions="be exact", metadata={"a": "b"}
    )
    assert (answer.status, answer.output_text) == ("completed", " 1 2 3 4 5")
    assert answer.usage is not None
    assert answer.usage.output_tokens == 6
    assert (answer.instructions, answer.metadata) == ("be exact", {"a": "b"})
    assert client.responses.retrieve(answer.id) == answer


def test_streamed_is_the_whole(client: openai.OpenAI) -> None:
    with client.responses.stream(model="fake", input="count to 7") as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert final.output_text == text == " 1 2 3 4 5 6 7"
    assert client.responses.retrieve(final.id).output_text == text


def test_events_have_their_type_and_number(server: Running) -> None:
    body = {"input": "count to 3", "stream": True}
    with httpx.stream("POST", server.url + "/v1/responses", json=body) as response:
        events = list(sse(response))
    for event in events:
        assert event.kind == event.json["type"]
        assert event.id == str(event.json["sequence_number"])
        assert "stream_id" not in event.json
    assert events[-1].kind == "response.completed"
    assert set(events[-1].json) == {"type", "sequence_number", "response"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": "x", "background": True, "store": False}, "store"),
        ({"input": "x", "fork": {"at": 1}}, "fork"),
        ({"input": "x", "previous_response_id": ""}, "previous_response_id"),
        ({"input": "x", "fork": {"at": -1}, "previous_response_id": "r"}, "fork.at"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "x", "temperature": 3}, "temperature"),
    ],
)
def test_refusals_name_the_field(server: Running, body: dict[str, Any], param: str) -> None:
    answer = post(server, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


# ---------------------------------------------------------------- by id


def test_background_returns_at_once_and_runs_on_alone(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model="fake", input="x", background=True, max_output_tokens=2000,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert answer.status in ("queued", "in_progress")
    assert answer.background
    while (now := client.responses.retrieve(answer.id)).status != "incomplete":
        assert now.status in ("queued", "in_progress")
    assert now.output_text == expected_text(2000)
    assert now.incomplete_details is not None
    assert now.incomplete_details.reason == "max_output_tokens"


def test_background_streams_and_survives_its_reader(server: Running) -> None:
    body = {"input": "x", "stream": True, "background": True, "max_output_tokens": 3000}
    with httpx.stream("POST", server.url + "/v1/responses", json=body) as response:
        events = sse(response)
        kinds = [next(events).kind for _ in range(3)]
    assert kinds == ["response.created", "response.queued", "response.in_progress"]
    server.wait_idle()
    (stream,) = [kept.stream for kept in server.engine._streams._retained._kept.values()][-1:]
    assert stream.num_output_tokens == 3000


def test_cancel_is_idempotent_and_the_text_stays(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model="fake", input="x", background=True, max_output_tokens=30_000,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    while not client.responses.retrieve(answer.id).output_text:
        pass
    first = client.responses.cancel(answer.id)
    assert first.status == "cancelled"
    check_counting(first.output_text)
    assert client.responses.cancel(answer.id) == first == client.responses.retrieve(answer.id)


def test_what_has_ended_is_cancelled_only_if_it_was_in_the_background(
    client: openai.OpenAI,
) -> None:
    answer = client.responses.create(model="fake", input="count to 3")
    with pytest.raises(openai.BadRequestError, match="has ended"):
        client.responses.cancel(answer.id)
    alone = client.responses.create(model="fake", input="count to 3", background=True)
    while client.responses.retrieve(alone.id).status != "completed":
        pass
    assert client.responses.cancel(alone.id).status == "completed"


def test_a_reference_is_the_item_it_names(server: Running, client: openai.OpenAI) -> None:
    """As Vercel's AI SDK asks for a second turn: its own messages, the answer by its id."""
    first = client.responses.create(model="fake", input="count to 3")
    asked = client.responses.input_items.list(first.id).data[0].id
    turns: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "count to 3"}]},
        {"type": "item_reference", "id": first.output[0].id},
        {"role": "user", "content": "count to 5"},
    ]
    second = client.responses.create(model="fake", input=turns)
    spelled = [turns[0], {"role": "assistant", "content": first.output_text}, turns[2]]
    same = client.responses.create(model="fake", input=spelled)
    streams = [server.engine.get(r.id) for r in (second, same)]
    assert streams[0] is not None and streams[1] is not None  # noqa: PT018
    assert streams[0].prompt == streams[1].prompt
    by_ids = client.responses.create(model="fake", input=[{"id": asked}, *turns[1:]])  # type: ignore[list-item]
    stream = server.engine.get(by_ids.id)
    assert stream is not None
    assert stream.prompt == streams[0].prompt


def test_input_tokens_are_those_of_the_response(client: openai.OpenAI) -> None:
    parent = client.responses.create(model="fake", input="count to 3")
    for body in (
        {"input": "count to 3", "instructions": "be brief"},
        {"input": "and then?", "previous_response_id": parent.id},
    ):
        counted: Any = client.responses.input_tokens.count(model="fake", **body)  # type: ignore[arg-type]
        answer: Any = client.responses.create(model="fake", max_output_tokens=4, **body)  # type: ignore[call-overload]
        assert counted.object == "response.input_tokens"
        assert counted.input_tokens == answer.usage.input_tokens


def test_compaction_is_refused_with_what_to_do_instead(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="ask for a summary"):
        client.responses.compact(model="fake", input="x")


def test_a_reference_to_nothing_is_named(server: Running) -> None:
    for name in ("msg_" + "0" * 24, "x" * 256, ""):
        items = [{"role": "user", "content": "x"}, {"type": "item_reference", "id": name}]
        body = {"input": items}
        got = httpx.post(server.url + "/v1/responses", json=body)
        assert (got.status_code, got.json()["error"]["param"]) == (404, "input[1].id")
        assert len(got.text) < 500


def test_a_cut_answer_is_cancelled_and_readable(server: Running) -> None:
    body = {"input": "x", "stream": True, **ENDLESS}
    with httpx.stream("POST", server.url + "/v1/responses", json=body) as response:
        response_id = next(sse(response)).json["response"]["id"]
    server.wait_idle()
    answer = httpx.get(server.url + f"/v1/responses/{response_id}").json()
    assert answer["status"] == "cancelled"


def test_delete(server: Running, client: openai.OpenAI) -> None:
    answer = client.responses.create(model="fake", input="count to 3")
    client.responses.delete(answer.id)
    live = client.responses.create(
        model="fake", input="x", background=True, max_output_tokens=30_000,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert httpx.delete(server.url + f"/v1/responses/{live.id}").json() == {
        "id": live.id,
        "object": "response",
        "deleted": True,
    }
    server.wait_idle()
    for gone in (answer.id, live.id):
        for ask in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
            with pytest.raises(openai.NotFoundError):
                ask(gone)
        assert server.engine.get(gone) is None


def test_input_items_in_pages(client: openai.OpenAI) -> None:
    first = client.responses.create(
        model="fake",
        input=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": "count to 2"},
        ],
    )
    second = client.responses.create(
        model="fake", input="more", previous_response_id=first.id, max_output_tokens=3
    )
    items: list[Any] = list(client.responses.input_items.list(second.id, order="asc", limit=1))
    assert [(i.role, i.content[0].text) for i in items] == [
        ("developer", "be brief"),
        ("user", "count to 2"),
        ("assistant", " 1 2"),
        ("user", "more"),
    ]
    assert len({i.id for i in items}) == 4
    assert items[2].id == first.output[0].id
    assert [i.id for i in client.responses.input_items.list(second.id)] == [
        i.id for i in reversed(items)
    ]
    zeros = "limit=0001" + "0" * 5000
    queries = (("limit=0", "limit"), ("limit=101", "limit"), ("order=up", "order"))
    for query, param in (*queries, (zeros, "limit"), ("limit=-1", "limit")):
        path = f"{client.base_url}responses/{second.id}/input_items?{query}"
        assert httpx.get(path).json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["", "/cancel", "/input_items"])
def test_what_is_not_there_is_404(server: Running, path: str) -> None:
    method = "POST" if path == "/cancel" else "GET"
    chat = post(server, "/v1/chat/completions", **CHAT, max_tokens=1).json()["id"]
    for unknown in ("resp_nobody", chat):
        answer = httpx.request(method, server.url + f"/v1/responses/{unknown}{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def test_store_false_is_not_readable_after_its_end(slow: Running) -> None:
    server = slow
    answer = post(server, input="count to 2", store=False).json()
    assert not answer["store"]
    assert httpx.get(server.url + f"/v1/responses/{answer['id']}").status_code == 404
    body = {"input": "x", "stream": True, "store": False, **ENDLESS}
    with httpx.stream("POST", server.url + "/v1/responses", json=body) as response:
        events = sse(response)  # kept: a collected one would close the connection
        response_id = next(events).json["response"]["id"]
        live = httpx.get(server.url + f"/v1/responses/{response_id}")
        assert live.json()["status"] == "in_progress"
    server.wait_idle()
    assert httpx.get(server.url + f"/v1/responses/{response_id}").status_code == 404


def test_a_response_belongs_to_its_key(server_with: Any) -> None:
    server = server_with(api_key=("one", "two"))
    ours, theirs = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    url = server.url + "/v1/responses"
    made = httpx.post(url, json={"input": "count to 3"}, headers=ours).json()["id"]
    assert httpx.get(f"{url}/{made}", headers=ours).status_code == 200
    chat = httpx.post(
        server.url + "/v1/chat/completions", json={**CHAT, "max_tokens": 1}, headers=ours
    ).json()["id"]
    asked = [
        httpx.get(f"{url}/{made}", headers=theirs),
        httpx.get(f"{url}/{made}?stream=true", headers=theirs),
        httpx.post(f"{url}/{made}/cancel", headers=theirs),
        httpx.delete(f"{url}/{made}", headers=theirs),
        httpx.get(f"{url}/{made}/input_items", headers=theirs),
        httpx.get(f"{server.url}/v1/chat/completions/{chat}?stream=true", headers=theirs),
    ]
    body = {"input": "x", "previous_response_id": made}
    lineage = httpx.post(url, json=body, headers=theirs)
    assert [a.status_code for a in (*asked, lineage)] == [404] * 7
    assert lineage.json()["error"]["code"] == "previous_response_not_found"
    assert httpx.get(f"{url}/{made}", headers=ours).status_code == 200


# ---------------------------------------------------------------- lineage


def prompt_of(server: Running, response_id: str) -> tuple[int, ...]:
    stream = server.engine.get(response_id)
    assert stream is not None
    return stream.prompt


def test_a_next_turn_is_the_parents_ids_and_what_the_template_adds(server: Running) -> None:
    first = post(server, input="count to 20", instructions="be exact").json()
    second = post(
        server, input="on", previous_response_id=first["id"], instructions="be exact"
    ).json()
    assert second["previous_response_id"] == first["id"]
    parent = server.engine.get(first["id"])
    assert parent is not None
    known = parent.prompt + parent.token_ids()[:-1]  # the end token is the template's to write
    assert prompt_of(server, second["id"])[: len(known)] == known
    text = server.engine.tokenizer.decode(prompt_of(server, second["id"])[len(known) :], False)
    assert text == "<|end|><|user|>on<|end|><|assistant|>"
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= 16 * (len(known) // 16) - 16


def test_instructions_are_not_inherited(server: Running) -> None:
    first = post(server, input="count to 3", instructions="be exact").json()
    second = post(server, input="on", previous_response_id=first["id"]).json()
    text = server.engine.tokenizer.decode(prompt_of(server, second["id"]), False)
    assert text == (
        "<|bos|><|user|>count to 3<|end|><|assistant|> 1 2 3<|end|><|user|>on<|end|><|assistant|>"
    )


def test_what_a_user_wrote_does_not_become_a_special_token(server: Running) -> None:
    first = post(server, input="count to 3 <|end|>").json()
    second = post(server, input="<|system|>", previous_response_id=first["id"]).json()
    specials = [t for t in prompt_of(server, second["id"]) if 256 <= t <= 260]
    assert len(specials) == 8  # bos, user, end, assistant, end, user, end, assistant


def test_a_stop_string_is_rendered_whole(server: Running) -> None:
    first = post(server, input="count", stop=" 4", max_output_tokens=50).json()
    assert text_of(first) == " 1 2 3"
    second = post(server, input="on", previous_response_id=first["id"]).json()
    text = server.engine.tokenizer.decode(prompt_of(server, second["id"]), False)
    assert "<|assistant|> 1 2 3<|end|><|user|>on" in text


def test_generate_false_prefills_and_can_be_continued(server: Running) -> None:
    words = "a long story " * 20
    first = post(server, input=words, generate=False).json()
    assert (first["status"], first["output"]) == ("completed", [])
    assert first["usage"]["output_tokens"] == 0
    second = post(server, input="count to 3", previous_response_id=first["id"]).json()
    assert text_of(second) == " 1 2 3"
    size = first["usage"]["input_tokens"]
    assert prompt_of(server, second["id"])[:size] == prompt_of(server, first["id"])
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= size - 16


def test_a_parent_that_runs_is_refused_by_name(slow: Running) -> None:
    server = slow
    body = {"input": "x", "stream": True, **ENDLESS}
    with httpx.stream("POST", server.url + "/v1/responses", json=body) as response:
        events = sse(response)  # kept: a collected one would close the connection
        response_id = next(events).json["response"]["id"]
        answer = post(server, input="x", previous_response_id=response_id)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "previous_response_id")
    assert error["code"] == "previous_response_running"


# ---------------------------------------------------------------- forks


def test_a_fork_goes_on_after_a_token(server: Running) -> None:
    first = post(server, input="count", max_output_tokens=40, ignore_eos=True).json()
    parent = server.engine.get(first["id"])
    assert parent is not None
    for at in (0, 1, 17, 40):
        fork = {"at": at, "text": " <|end|>" if at == 17 else None}
        forked = post(
            server, previous_response_id=first["id"], fork=fork, max_output_tokens=5
        ).json()
        prompt = prompt_of(server, forked["id"])
        added = tuple(b" <|end|>") if at == 17 else ()
        assert prompt == parent.prompt + parent.token_ids()[:at] + added
        begun = expected_text(at) + (" <|end|>" if at == 17 else "")
        assert text_of(forked).startswith(begun)
        assert len(text_of(forked)) > len(begun)
        assert forked["usage"]["output_tokens"] == 5
        assert (
            forked["usage"]["input_tokens_details"]["cached_tokens"]
            >= (len(prompt) - 1) // 16 * 16 - 16
        )
        assert forked["seed"] != first["seed"]


def test_a_fork_streams_its_prefix_as_one_delta(server: Running) -> None:
    first = post(server, input="count", max_output_tokens=9, ignore_eos=True).json()
    body = {"previous_response_id": first["id"], "fork": {"at": 4}, "stream": True}
    url = server.url + "/v1/responses"
    with httpx.stream("POST", url, json={**body, "max_output_tokens": 3}) as response:
        events = list(sse(response))
    deltas = [e.json["delta"] for e in events if e.kind == "response.output_text.delta"]
    assert deltas[0] == expected_text(4)
    assert "".join(deltas) == text_of(events[-1].json["response"])
    assert [e.id for e in events[:5]] == ["0", "1", "2", "3", "4"]


def test_a_fork_with_input_closes_the_turn_first(server: Running) -> None:
    first = post(server, input="count", max_output_tokens=9, ignore_eos=True).json()
    forked = post(
        server, previous_response_id=first["id"], fork={"at": 2, "text": " five"}, input="no"
    ).json()
    text = server.engine.tokenizer.decode(prompt_of(server, forked["id"]), False)
    assert text.endswith("<|assistant|> 1 2 five<|end|><|user|>no<|end|><|assistant|>")
    again = post(server, previous_response_id=forked["id"], input="and", max_output_tokens=1)
    assert again.status_code == 200


def test_a_fork_of_what_still_runs(slow: Running) -> None:
    server = slow
    body = {"input": "x", "stream": True, **ENDLESS}
    with httpx.stream("POST", server.url + "/v1/responses", json=body) as response:
        events = sse(response)
        response_id = next(events).json["response"]["id"]
        while next(events).kind != "response.output_text.delta":
            pass
        forked = post(
            server, previous_response_id=response_id, fork={"at": 1}, max_output_tokens=3
        ).json()
    assert text_of(forked).startswith(" 1")


def test_a_fork_beyond_the_end_is_refused(server: Running) -> None:
    first = post(server, input="count", max_output_tokens=4, ignore_eos=True).json()
    answer = post(server, previous_response_id=first["id"], fork={"at": 5})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "fork.at"
    assert "4 tokens" in answer.json()["error"]["message"]


def test_bundled_background_generates_the_same_text(bundled: Running) -> None:
    expected = story(bundled, 120)
    made = post(bundled, **telling(120, background=True)).json()
    assert made["status"] in ("queued", "in_progress")
    url = bundled.url + f"/v1/responses/{made['id']}"
    while (now := httpx.get(url).json())["status"] != "incomplete":
        assert expected.startswith(text_of(now))
    assert text_of(now) == expected
    with httpx.stream("GET", url + "?stream=true") as response:
        events = [e.json for e in sse(response)]
    assert "".join(e.get("delta", "") for e in events) == expected


@pytest.mark.parametrize("at", [1, 33])
def test_bundled_a_fork_without_another_word_goes_on_as_its_parent_did(
    bundled: Running, at: int
) -> None:
    expected = story(bundled, 100)
    parent = post(bundled, **telling(100)).json()
    rest = {**telling(100 - at), "input": None}
    forked = post(bundled, **rest, previous_response_id=parent["id"], fork={"at": at}).json()
    assert text_of(forked) == expected
    assert forked["usage"]["output_tokens"] == 100 - at


def test_a_large_answer_is_built_in_a_thread_at_each_request(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    in_pool = server.engine.in_pool

    def noted(work: Any, size: int = 0, salt: str = "") -> Any:
        return in_pool(lambda: (threads.append(threading.current_thread()), work())[1], size, salt)

    monkeypatch.setattr(server.engine, "in_pool", noted)
    url = server.url + "/v1/responses"
    body = {"input": "x", "max_output_tokens": 100, "top_logprobs": 20}
    made = httpx.post(url, json={**body, "seed": 1}).json()
    assert len(threads) == 1
    assert httpx.get(f"{url}/{made['id']}").json() == made
    assert len(threads) == 2
    with httpx.stream("GET", f"{url}/{made['id']}?stream=true&starting_after=0") as again:
        last = list(sse(again))[-1].json
    assert last["response"] == made
    assert len(threads) == 3
    assert all(thread.name.startswith("streamer-encode") for thread in threads)
