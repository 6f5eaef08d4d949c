"""Contexts as the journal has them: whatever a body says comes back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from streamer.server.context import Context, TurnItem
from streamer.server.openai.chat import ChatRequest
from streamer.server.parsing.formats import REASONING_FORMATS, TOOL_FORMATS, Channels, ModelFormat
from streamer.server.parsing.tools import Parsing
from streamer.server.responses.body import READER
from streamer.server.restored import Contexts

BODIES: list[dict[str, Any]] = [
    {"input": "x", "logit_bias": {"5": 1.5}, "metadata": {"a": "b"}, "seed": 2**53},
    {"input": [{"role": "user", "content": [{"type": "input_text", "text": "y"}]}], "stop": "z"},
    {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"a": [1]}}}},
    {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}]},
    {"input": "x", "tool_choice": "auto", "fork": {"at": 3}, "previous_response_id": "resp_1"},
]


def again(context: Context) -> Context:
    contexts = Contexts(lambda info, stream: None)
    return contexts.decode(contexts.encode(context))


@pytest.mark.parametrize("given", BODIES)
def test_a_response_has_its_body_and_conversation(given: dict[str, Any]) -> None:
    body = READER.decode(msgspec.json.encode(given))
    items = (TurnItem("msg_1", "user", "x"), TurnItem("fc_1", "call", "{}", "call_1", "f"))
    context = Context(
        kind="response", tenant="t", body=body, model="m", items=items, prefix="so", session="s"
    )
    found = again(context)
    for name in Context.__struct_fields__:
        assert getattr(found, name) == getattr(context, name), name


def test_it_has_how_its_text_is_read() -> None:
    body = READER.decode(b'{"input": "x"}')
    forms = [ModelFormat(calls=calls) for calls in TOOL_FORMATS.values()]
    for each in REASONING_FORMATS.values():
        is_channels = isinstance(each, Channels)
        forms.append(ModelFormat(channels=each) if is_channels else ModelFormat(think=each))
    for form in forms:
        parsing = Parsing(form, {"f": {"type": "object"}}, True, 3, frozenset([7]))
        context = Context(kind="response", tenant="", body=body, model="m", parsing=parsing)
        assert again(context).parsing == parsing


def test_a_chat_leaves_its_messages_out() -> None:
    """Its prompt has them, and a body's own may hold fields as they came."""
    given = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "logprobs": True}
    body = msgspec.json.decode(msgspec.json.encode(given), type=ChatRequest)
    found = again(Context(kind="chat", tenant="t", body=body, model="m"))
    assert (found.body.messages, found.body.n, found.body.logprobs) == ([], 2, True)
