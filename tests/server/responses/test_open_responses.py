"""Responses against the Open Responses specification (openresponses.org, 2026-04-24).

Its schemas as strict types: every field that it requires is there, null or not, and of its type;
times are integers. The requests are those of its compliance suite that want text alone.
"""

from __future__ import annotations

from typing import Any, Literal, get_args, get_type_hints

import httpx
import msgspec
import pytest

from tests.server.support.counting import sse
from tests.server.support.running import Running


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class Logprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any]
    logprobs: list[Logprob]


class Message(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class Usage(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens_details: dict[str, int]


class TextFormat(msgspec.Struct, tag_field="type", tag="text"):
    pass


class Text(msgspec.Struct):
    format: TextFormat


class Resource(msgspec.Struct, tag_field="object", tag="response"):
    """ResponseResource: what it requires, in its order."""

    id: str
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    incomplete_details: dict[str, str] | None
    model: str
    previous_response_id: str | None
    instructions: str | None
    output: list[Message]
    error: dict[str, str] | None
    tools: list[Any]
    tool_choice: Literal["none", "auto", "required"]
    truncation: Literal["auto", "disabled"]
    parallel_tool_calls: bool
    text: Text
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    temperature: float
    reasoning: dict[str, str | None] | None
    user: str | None
    usage: Usage | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    store: bool
    background: bool
    service_tier: str
    metadata: dict[str, str]
    safety_identifier: str | None
    prompt_cache_key: str | None


class Event(msgspec.Struct):
    sequence_number: int
    type: str


class OfResponse(Event):
    type: Literal["response.created", "response.in_progress", "response.completed"]
    response: Resource


class OfItem(Event):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: Message


class OfPart(Event):
    type: Literal["response.content_part.added", "response.content_part.done"]
    item_id: str
    output_index: int
    content_index: int
    part: OutputText


class OfDelta(Event):
    type: Literal["response.output_text.delta"]
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[Logprob]


class OfText(Event):
    type: Literal["response.output_text.done"]
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[Logprob]


EVENTS: tuple[type[Event], ...] = (OfResponse, OfItem, OfPart, OfDelta, OfText)
ASKED = [{"type": "message", "role": "user", "content": "count to 5"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "basic": {"input": ASKED},
    "system": {"input": [{"type": "message", "role": "system", "content": "Be a pirate."}, *ASKED]},
    "turns": {
        "input": [
            {"type": "message", "role": "user", "content": "My name is Alice."},
            {"type": "message", "role": "assistant", "content": "Hello Alice!"},
            *ASKED,
        ]
    },
    "everything": {
        "input": ASKED,
        "instructions": "be brief",
        "metadata": {"a": "b"},
        "top_logprobs": 2,
        "max_output_tokens": 30,
        "safety_identifier": "u1",
    },
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_response_is_what_the_specification_requires(server: Running, name: str) -> None:
    body = {"model": "fake", **REQUESTS[name]}
    whole = httpx.post(server.url + "/v1/responses", json={**body, "stream": False}, timeout=20)
    made = msgspec.json.decode(whole.content, type=Resource)
    assert made.status == "completed"
    assert made.completed_at is not None
    assert made.output[0].content[0].text == " 1 2 3 4 5"


@pytest.mark.parametrize("name", REQUESTS)
def test_its_events_are_what_the_specification_requires(server: Running, name: str) -> None:
    body = {"model": "fake", **REQUESTS[name], "stream": True}
    with httpx.stream("POST", server.url + "/v1/responses", json=body, timeout=20) as response:
        events = list(sse(response))
    for event in events:
        (kind,) = (k for k in EVENTS if event.kind in get_args(get_type_hints(k)["type"]))
        assert msgspec.json.decode(event.data, type=kind).type == event.kind
    numbers = [e.json["sequence_number"] for e in events if e.kind != "response.output_text.delta"]
    assert numbers[:4] == [0, 1, 2, 3]
    last = max(e.json["sequence_number"] for e in events if "delta" in e.json)
    assert numbers[4:] == list(range(last + 1, last + 5))
