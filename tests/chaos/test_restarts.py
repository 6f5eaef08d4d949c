"""A real restart, step by step: official clients, what was stored, a drain, a page."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import APIConnectionError, NotFoundError, OpenAI

from tests.chaos.clients import Events
from tests.chaos.killable import Killable
from tests.server.support.counting import check_counting

SCRIPT = [
    {
        "when": "weather",
        "answer": "<think>\nThe weather is asked for.\n</think>\n\nI look it up.\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Zürich", "days": [1, 2, 3]}}\n</tool_call>',
    }
]
KEY, OTHER = "key-of-one", "key-of-another"
NUM = 120


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killable]:
    """A server over the fake model, which counts, at 150 tokens a second."""
    folder = tmp_path_factory.mktemp("restarts")
    (folder / "script").write_text(json.dumps(SCRIPT))
    settings = {"model": "fake:tokens_per_s=150", "journal": folder / "journal"}
    settings["script"] = folder / "script"
    with Killable(folder / "log", api_key=f"{KEY},{OTHER}", drain_timeout=0.1, **settings) as it:
        it.start()
        it.wait_ready()
        yield it


@pytest.fixture
def client(process: Killable) -> Iterator[OpenAI]:
    with OpenAI(base_url=process.url + "/v1", api_key=KEY, max_retries=0) as client:
        yield client


def begin(client: OpenAI, num_events: int = 20, **body: Any) -> tuple[str, int, str]:
    """A streamed response of NUM tokens: its id, the last number that came, and the text so far."""
    given = {"model": "fake", "input": "Count.", "max_output_tokens": NUM, **body}
    name, last, text = "", -1, ""
    with client.responses.create(**given, stream=True) as events:
        for event in events:
            last = event.sequence_number
            if event.type == "response.created":
                name = event.response.id
            if event.type == "response.output_text.delta":
                text += event.delta
            if last >= num_events:
                break
    return name, last, text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_official_client_goes_on_in_the_background(
    process: Killable, client: OpenAI, number: int
) -> None:
    name, last, text = begin(client, background=True)
    process.restart(number)
    kinds = []
    for event in client.responses.retrieve(name, stream=True, starting_after=last):
        assert event.sequence_number > last
        last = event.sequence_number
        kinds.append(event.type)
        text += getattr(event, "delta", "")
    assert kinds[-1] == "response.incomplete"  # at max_output_tokens
    assert len(check_counting(text)) == NUM
    assert last == 5 + NUM + 3  # five of the opening, four of the end
    found = client.responses.retrieve(name)
    assert (found.output_text, found.usage and found.usage.output_tokens) == (text, NUM)


def drained(process: Killable, events: list[dict[str, Any]]) -> None:
    """Follow a response into `events`, and have the server stopped in it."""
    body = {"model": "fake", "input": "Count.", "max_output_tokens": NUM, "stream": True}
    url, headers = process.url + "/v1/responses", {"authorization": f"Bearer {KEY}"}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=20.0) as response:
        for line in response.iter_lines():
            if line.startswith("data:"):
                events.append(json.loads(line[5:]))
                if len(events) == 10:
                    process.kill(signal.SIGTERM)


def test_calls_and_reasoning_go_on_with_their_numbers(process: Killable, client: OpenAI) -> None:
    tool = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
    body: dict[str, Any] = {"model": "fake", "input": "The weather?", "tools": [tool]}
    whole, cut = Events(), Events()
    for event in client.responses.create(**body, stream=True):
        whole.take(event.to_dict())
    for at in (10, 35, 60):  # in the reasoning, in the text, in a call's arguments
        cut = Events()
        with client.responses.create(**body, stream=True, background=True) as events:
            for event in events:
                cut.take(event.to_dict())
                if cut.last >= at:
                    break
        assert cut.final is None
        process.restart()
        for event in client.responses.retrieve(cut.id, stream=True, starting_after=cut.last):
            cut.take(event.to_dict())
        shifted = [(number + (number > 0), kind) for number, kind in whole.kinds]  # `queued`
        assert [k for k in cut.kinds if k[1] != "response.queued"] == shifted
        assert cut.texts == whole.texts
        assert cut.final["output"] == whole.final["output"]
    assert {item["type"] for item in cut.final["output"]} == {
        "reasoning",
        "message",
        "function_call",
    }


def test_a_drain_cuts_a_stream_without_an_end(process: Killable, client: OpenAI) -> None:
    """Over HTTP without `background`: its client comes back within --detach-timeout."""
    events: list[dict[str, Any]] = []
    with pytest.raises(httpx.RequestError):
        drained(process, events)
    assert events[-1]["type"] == "response.output_text.delta"
    process.start()
    process.wait_ready()
    text = "".join(event.get("delta", "") for event in events)
    name, last = events[0]["response"]["id"], events[-1]["sequence_number"]
    for event in client.responses.retrieve(name, stream=True, starting_after=last):
        text += getattr(event, "delta", "")
    assert len(check_counting(text)) == NUM


def test_what_was_stored_is_there_and_belongs_to_its_key(process: Killable, client: OpenAI) -> None:
    def create(**body: Any) -> Any:
        return client.responses.create(
            model="fake", input="Count.", max_output_tokens=12, metadata={"a": "b"}, **body
        )

    kept, deleted, unstored = create(), create(), create(store=False)
    client.responses.delete(deleted.id)
    running, _, _ = begin(client, background=True, max_output_tokens=50 * NUM)
    process.restart()
    assert client.responses.retrieve(kept.id) == kept
    items = client.responses.input_items.list(kept.id)
    assert [item.content[0].text for item in items] == ["Count."]  # type: ignore[union-attr]
    follower = create(previous_response_id=kept.id)
    assert follower.previous_response_id == kept.id
    for name in (deleted.id, unstored.id):
        with pytest.raises(NotFoundError):
            client.responses.retrieve(name)
    other = client.with_options(api_key=OTHER)
    for name in (kept.id, running):
        with pytest.raises(NotFoundError):
            other.responses.retrieve(name)
    assert client.responses.cancel(running).status == "cancelled"
    client.responses.delete(kept.id)
    process.restart()
    assert client.responses.retrieve(running).status == "cancelled"
    with pytest.raises(NotFoundError):
        client.responses.retrieve(kept.id)


def test_a_client_that_comes_too_early_is_told_to_wait(process: Killable, client: OpenAI) -> None:
    name, _, _ = begin(client, background=True)
    process.kill()
    process.start()
    seen = set()
    url, headers = f"{process.url}/v1/responses/{name}", {"authorization": f"Bearer {KEY}"}
    while 200 not in seen:
        try:
            found = httpx.get(url, headers=headers)
        except httpx.HTTPError:
            continue
        seen.add(found.status_code)
        assert found.status_code == 200 or "retry-after" in found.headers
    assert seen <= {200, 503}
    with pytest.raises((APIConnectionError, NotFoundError)):
        client.responses.retrieve("resp_unknown")


def test_no_key_is_on_disk(process: Killable, client: OpenAI) -> None:
    begin(client, background=True)
    process.kill()
    data = b"".join(f.read_bytes() for f in (process.log.parent / "journal").iterdir())
    assert b"Count." in data
    assert KEY.encode() not in data
    process.start()
    process.wait_ready()
