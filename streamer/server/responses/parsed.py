"""Responses whose text is parsed: reasoning, messages and calls as items, and their events.

ParsedEvents replaces ResponseEvents where a response's context says how its text is read; all
others never come here. Its numbers count, token by token, the events that the token completes: one
event over several tokens carries the number of the last, as everywhere.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from streamer.engine.stream import Delta
from streamer.server.context import TurnItem, context_of
from streamer.server.openai.common import TokenText, chat_logprobs
from streamer.server.parsing import events as found
from streamer.server.responses.events import ResponseEvents, item_id
from streamer.server.responses.sealed import seal
from streamer.server.responses.types import (
    ArgumentsDelta,
    ArgumentsDone,
    DeltaEvent,
    Event,
    FunctionCall,
    Item,
    ItemEvent,
    OutputItem,
    Part,
    PartEvent,
    ReasoningDelta,
    ReasoningDone,
    ReasoningItem,
    ReasoningPart,
    TextDone,
)

if TYPE_CHECKING:
    from streamer.core.plan import Finish, TokenLogprob
    from streamer.engine.stream import TokenStream
    from streamer.errors import StreamerError

Made = Callable[[int], Event]  # an event, given its number
DELTAS = (DeltaEvent, ReasoningDelta, ArgumentsDelta)


class _Open(msgspec.Struct):
    """The item that is being written."""

    kind: str
    id: str
    index: int
    pieces: list[str] = []
    call_id: str = ""
    name: str = ""
    logprobs: list[TokenLogprob] = []

    def item(self, status: str, text: TokenText | None) -> OutputItem:
        """As it is now."""
        written = "".join(self.pieces)
        if self.kind == "reasoning":
            return ReasoningItem(self.id, status, [ReasoningPart(written)] if written else [])
        if self.kind == "call":
            return FunctionCall(self.id, self.call_id, self.name, written, status)
        return Item(self.id, status, [self.part(text)])

    def part(self, text: TokenText | None) -> Part:
        """A message's one part."""
        written = "".join(self.pieces)
        values = self.logprobs if text is not None else []
        return Part(written, logprobs=chat_logprobs(values, text) if text is not None else [])


class _Items:
    """A response's items, from its text; `take` returns what became of each piece.

    text  of tokens, for log probabilities; None: without them
    """

    def __init__(self, stream: TokenStream, text: TokenText | None, lane: Any) -> None:
        context = context_of(stream)
        parsing = context.parsing
        if parsing is None:
            raise TypeError(f"{stream.request_id} is not parsed")
        self._parsing, self._parser, self._stream = parsing, parsing.parser(), stream
        self._text, self._lane = text, lane
        self._tenant = context.tenant if context.body.wants_encrypted else None
        self._base = stream.request_id.removeprefix("resp_")
        self._done: list[OutputItem] = []
        self._open: _Open | None = None
        self._waiting: list[TokenLogprob] = []

    def take(self, text: str, logprobs: Sequence[TokenLogprob] | None = None) -> list[Made]:
        """The events of more text."""
        self._waiting += logprobs or ()
        events = self._parser.feed(text)
        made = self._made(events)
        if events:
            self._waiting = []
        return made

    def end(self, status: str) -> list[Made]:
        """The events of the end."""
        return [*self._made(self._parser.end()), *self._close(status)]

    def items(self, status: str) -> list[OutputItem]:
        """All items; `status` of the one that is being written."""
        last = [] if self._open is None else [self._open.item(status, self._text)]
        return self._done + last

    def _made(self, events: Sequence[found.Event]) -> list[Made]:
        made: list[Made] = []
        for event in events:
            match event:
                case found.Text(text):
                    made += self._opened("message", "msg")
                    made.append(self._said(text))
                case found.Reasoning(text):
                    made += self._opened("reasoning", "rs")
                    made.append(self._delta(ReasoningDelta, text))
                case found.ToolCallBegin(index, call_id, name):
                    made += self._close("completed")
                    made += self._opened("call", "fc", call_id or self._call_id(index), name)
                case found.ToolArguments(_, text):
                    made.append(self._delta(ArgumentsDelta, text))
                case found.ToolCallEnd():
                    made += self._close("completed")
        return made

    def _call_id(self, index: int) -> str:
        return self._parsing.call_id(self._stream.request_id, 0, index)

    def _opened(self, kind: str, prefix: str, call_id: str = "", name: str = "") -> list[Made]:
        now = self._open
        if now is not None and now.kind == kind and kind != "call":
            return []
        made = self._close("completed")
        index = len(self._done)
        now = self._open = _Open(kind, f"{prefix}_{self._base}_o{index}", index)
        now.call_id, now.name = call_id, name
        item: OutputItem = Item(now.id, "in_progress", [])
        if kind != "message":
            item = now.item("in_progress", None)
        lane, item_name = self._lane, now.id
        made.append(lambda n: ItemEvent("response.output_item.added", n, item, index, lane))
        if kind != "call":
            part = Part("") if kind == "message" else ReasoningPart("")
            made.append(
                lambda n: PartEvent(
                    "response.content_part.added", n, item_name, part, index, 0, lane
                )
            )
        return made

    def _delta(self, kind: type[ReasoningDelta] | type[ArgumentsDelta], text: str) -> Made:
        now, lane = self._now(), self._lane
        now.pieces.append(text)
        name, index = now.id, now.index
        return lambda n: kind(n, name, text, output_index=index, stream_id=lane)

    def _said(self, text: str) -> Made:
        now, lane = self._now(), self._lane
        now.pieces.append(text)
        scores, self._waiting = self._waiting, []
        now.logprobs += scores
        logprobs = chat_logprobs(scores, self._text) if self._text is not None else []
        name, index = now.id, now.index
        return lambda n: DeltaEvent(n, name, text, index, 0, logprobs, lane)

    def _now(self) -> _Open:
        if self._open is None:
            raise TypeError("no item is open")
        return self._open

    def _close(self, status: str) -> list[Made]:
        """The events that close the item that is being written."""
        now, lane = self._open, self._lane
        if now is None:
            return []
        self._open = None
        item, text = now.item(status, self._text), "".join(now.pieces)
        if isinstance(item, ReasoningItem) and self._tenant is not None:
            item = msgspec.structs.replace(item, encrypted_content=seal(text, self._tenant))
        self._done.append(item)
        name, index = now.id, now.index
        made: list[Made] = []
        if now.kind == "call":
            made.append(lambda n: ArgumentsDone(n, name, text, index, lane))
        else:
            part: Part | ReasoningPart = ReasoningPart(text)
            if now.kind == "message":
                spoken = part = now.part(self._text)
                scores = spoken.logprobs
                made.append(lambda n: TextDone(n, name, text, index, 0, scores, lane))
            else:
                made.append(lambda n: ReasoningDone(n, name, text, index, 0, lane))
            made.append(
                lambda n: PartEvent("response.content_part.done", n, name, part, index, 0, lane)
            )
        made.append(lambda n: ItemEvent("response.output_item.done", n, item, index, lane))
        return made


class ParsedEvents(ResponseEvents):
    """The events of a response whose text is parsed.

    A reader begins at the first token, whatever it has seen: the parser must, and events up to its
    number are left out.
    """

    def __init__(self, stream: TokenStream, text: TokenText, **more: Any) -> None:
        super().__init__(stream, text, **more)
        self._num_opening = 2 + bool(self._context.body.background)
        wants = self._has_logprobs and stream.params.logprobs is not None
        self._token_text = text if wants else None
        self._items = _Items(stream, self._token_text, self._lane)
        self._ends = array("q")  # number of the last event of each token so far
        self._last = self._num_opening - 1

    def tokens_at(self, number: int) -> int:
        """Tokens whose events have all come by this number, of those that this reader was given."""
        return bisect_right(self._ends, number)

    def opening(self) -> list[Event]:
        """created, in_progress, and what the text begins with."""
        out = self._announced()
        if self._context.prefix and not self._is_silent:
            out += self._numbered(self._items.take(self._context.prefix))
        return self._beyond(out)

    def deltas(self, deltas: Sequence[Delta]) -> list[Event]:
        """The events of these tokens, and the closing events after the last."""
        out: list[Event] = []
        for d in deltas:
            made: list[Event] = []
            for piece in self._stream.split(d):
                if not self._is_silent:
                    made += self._numbered(self._items.take(piece.text, piece.logprobs))
                if piece.token_ids:
                    self._ends.append(self._last)
                if piece.finish is not None:
                    made += self._closing(piece.finish)
            out += _merged(self._beyond(made))
        return out

    def failed(self, error: StreamerError) -> list[Event]:
        """response.failed, for an error that no finish reported."""
        return self._beyond([self._terminal(self._last + 1, self._final("failed", error.message))])

    def _numbered(self, made: Sequence[Made]) -> list[Event]:
        events = [make(self._last + 1 + i) for i, make in enumerate(made)]
        self._last += len(made)
        return events

    def _closing(self, finish: Finish) -> list[Event]:
        status = self._status(finish)
        out: list[Event] = []
        if not self._is_silent and status != "failed":
            out = self._numbered(self._items.end(_state(status)))
        return [*out, self._terminal(self._last + 1, self._final(status, finish.detail))]

    def _output(self, state: str) -> list[OutputItem]:
        stream, items = self._stream, _Items(self._stream, self._token_text, self._lane)
        items.take(self._context.prefix)
        whole = Delta(0, 0, stream.token_ids(0), stream.text(0), stream.logprobs(0))
        if self._token_text is None:
            items.take(whole.text)
        else:
            for piece in stream.split(whole):
                items.take(piece.text, piece.logprobs)
            items.take(stream.text(0)[len(stream.text_before(len(whole.token_ids))) :])
        if state != "in_progress":
            items.end(state)
        return items.items(state)


def _state(status: str) -> str:
    return "completed" if status == "completed" else "incomplete"


def _merged(events: Sequence[Event]) -> list[Event]:
    """Adjacent deltas of one item as one, under the last's number."""
    out: list[Any] = []
    event: Any
    for event in events:
        last: Any = out[-1] if out else None
        is_more = type(last) is type(event) and isinstance(event, DELTAS)
        if is_more and last.item_id == event.item_id:
            changes: dict[str, Any] = {"delta": last.delta + event.delta}
            if isinstance(event, DeltaEvent):
                changes["logprobs"] = [*last.logprobs, *event.logprobs]
            out[-1] = msgspec.structs.replace(event, **changes)
            continue
        out.append(event)
    return out


def response_events(stream: TokenStream, text: TokenText, **more: Any) -> ResponseEvents:
    """The events of a response, parsed where its context says so; see ResponseEvents."""
    kind = ResponseEvents if context_of(stream).parsing is None else ParsedEvents
    return kind(stream, text, **more)


def answer_items(stream: TokenStream, text: str) -> tuple[TurnItem, ...]:
    """An answer, of which `text` follows its prefix, as items of the conversation."""
    context = context_of(stream)
    if context.parsing is None:
        whole = context.prefix + text
        return (TurnItem(item_id(stream.request_id), "assistant", whole),) if whole else ()
    items = _Items(stream, None, msgspec.UNSET)
    items.take(context.prefix)
    items.take(text)
    items.end("completed")
    return tuple(map(_turn_item, items.items("completed")))


def _turn_item(item: OutputItem) -> TurnItem:
    if isinstance(item, FunctionCall):
        return TurnItem(item.id, "call", item.arguments, item.call_id, item.name)
    role = "reasoning" if isinstance(item, ReasoningItem) else "assistant"
    return TurnItem(item.id, role, "".join(part.text for part in item.content))
