"""Content blocks of a message: what the parser of an answer finds, as events or as whole blocks.

Pure. A stream begins a block with the first event of its kind and ends it with the next kind's;
answer.py puts the message around them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Final, Protocol

import msgspec

from streamer.server.anthropic import types as wire
from streamer.server.openai.common import encode
from streamer.server.parsing.events import (
    Event,
    Reasoning,
    Text,
    ToolArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from streamer.server.transport.frames import frame

_TEXT_HERE: Final = "(text)"


class CallId(Protocol):
    """The id of a call that the model gave none."""

    def __call__(self, index: int) -> str: ...


def sent(event: wire.Event) -> bytes:
    """An event as it is sent."""
    return frame("", encode(event), str(event.__struct_config__.tag))


class Blocks:
    """The events of an answer's blocks, one block at a time."""

    def __init__(self, call_id: CallId) -> None:
        self._call_id = call_id
        self._num_begun = 0
        self._kind: type[Event] | None = None  # of what fills the open block
        self._around = (b"", b"")  # of the event of more text in it
        self._digest = blake2b(digest_size=16)

    def put(self, events: Iterable[Event]) -> bytes:
        """The events of the stream for these."""
        return b"".join(part for event in events for part in self._put(event))

    def close(self) -> bytes:
        """The end of the open block, if there is one."""
        if self._kind is None:
            return b""
        index, signed = self._num_begun - 1, b""
        if self._kind is Reasoning:
            delta = wire.SignatureDelta(self._digest.hexdigest())
            signed = sent(wire.ContentBlockDelta(index, delta))
        self._kind = None
        return signed + sent(wire.ContentBlockStop(index))

    def _put(self, event: Event) -> Iterator[bytes]:
        match event:
            case Text(text):
                if self._kind is not Text:
                    yield self._begin(Text, wire.TextContent(""), wire.TextDelta(_TEXT_HERE))
                yield self._more(text)
            case Reasoning(text):
                if self._kind is not Reasoning:
                    self._digest = blake2b(digest_size=16)
                    empty, more = wire.ThinkingContent("", ""), wire.ThinkingDelta(_TEXT_HERE)
                    yield self._begin(Reasoning, empty, more)
                self._digest.update(text.encode())
                yield self._more(text)
            case ToolCallBegin(index, call_id, name):
                content = wire.ToolUseContent(call_id or self._call_id(index), name, {})
                yield self._begin(ToolArguments, content, wire.InputJsonDelta(_TEXT_HERE))
            case ToolArguments(_, text):
                yield self._more(text)
            case ToolCallEnd():
                yield self.close()

    def _begin(
        self,
        kind: type[Event],
        empty: wire.Content,
        more: wire.TextDelta | wire.ThinkingDelta | wire.InputJsonDelta,
    ) -> bytes:
        closed = self.close()
        index = self._num_begun
        self._num_begun += 1
        self._kind = kind
        before, _, after = sent(wire.ContentBlockDelta(index, more)).partition(encode(_TEXT_HERE))
        self._around = before, after
        return closed + sent(wire.ContentBlockStart(index, empty))

    def _more(self, text: str) -> bytes:
        before, after = self._around
        return b"".join((before, encode(text), after))


def whole_blocks(events: Iterable[Event], call_id: CallId) -> list[wire.Content]:
    """The blocks of a whole answer. A call whose arguments are not whole is text."""
    found: list[wire.Content] = []
    for begun, parts in _grouped(events):
        text = "".join(parts)
        if isinstance(begun, ToolCallBegin):
            found.append(_call(begun, text, call_id))
        elif isinstance(begun, Reasoning):
            signature = blake2b(text.encode(), digest_size=16).hexdigest()
            found.append(wire.ThinkingContent(text, signature))
        else:
            found.append(wire.TextContent(text))
    return found


def _grouped(events: Iterable[Event]) -> list[tuple[Event, list[str]]]:
    """The first event of each block, and the texts in it."""
    groups: list[tuple[Event, list[str]]] = []
    for event in events:
        match event:
            case Text(text) | Reasoning(text):
                if not groups or type(groups[-1][0]) is not type(event):
                    groups.append((event, []))
                groups[-1][1].append(text)
            case ToolCallBegin():
                groups.append((event, []))
            case ToolArguments(_, text):
                groups[-1][1].append(text)
    return groups


def _call(begun: ToolCallBegin, arguments: str, call_id: CallId) -> wire.Content:
    try:
        given = msgspec.json.decode(arguments or "{}", type=dict[str, object])
    except (msgspec.DecodeError, RecursionError):
        return wire.TextContent(arguments)
    return wire.ToolUseContent(begun.id or call_id(begun.index), begun.name, given)
