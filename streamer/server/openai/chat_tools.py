"""Chats with tools or reasoning: their fields in a body, and answers whose text is parsed.

Pure. ParsedChatAnswer is the ChatAnswer of a request whose format has more than prose; all others
never come here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from streamer.core.plan import FinishReason
from streamer.server.openai.chat import ChatAnswer
from streamer.server.openai.chat_types import (
    CalledFunction,
    ChunkChoice,
    ChunkDelta,
    ChunkToolCall,
    Logprobs,
    Message,
    ToolCall,
)
from streamer.server.openai.common import (
    chat_logprobs,
    failure,
    finish_reason,
    only_if,
    scores_of,
    stop_reason,
)
from streamer.server.parsing.events import Event, Reasoning, Text, ToolArguments, ToolCallBegin

if TYPE_CHECKING:
    from streamer.core.plan import Finish
    from streamer.engine.stream import Delta
    from streamer.server.parsing.tools import AnyParser, Parsing


class ParsedChatAnswer(ChatAnswer):
    """A ChatAnswer whose text is reasoning, prose and calls.

    One chunk brings everything that a delta's tokens released, so that the numbers are those of
    every chat; what only the end of the text decides comes with the finish.
    """

    def __init__(self, parsing: Parsing, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._parsing = parsing
        self._parsers = [parsing.parser() for _ in self._numbers]
        self._seen = self.cursors
        self._places = [(place, 0) for place in self._stream.places()]  # and tokens followed

    @property
    def begins_at(self) -> list[int]:
        """The first token: the parser needs the text that the reader has too.

        All of it is here only once it was drawn again, after a restart that lost the last tokens.
        """
        return [0] * self._n

    def deltas(self, source: int, deltas: Sequence[Delta]) -> bytes:
        """The chunks of the deltas of one step or several."""
        parts = []
        for d in deltas:
            parser, choice = self._parsers[d.choice], d.choice
            if d.start < self._seen[choice]:
                d = self._beyond_seen(d)
            events = parser.feed(d.text)
            number = 1 + d.start + len(d.token_ids)
            if d.finish is not None:
                number += self._stream.has_rest(choice)
            is_shown = events or (d.token_ids and (d.logprobs or self._body.return_token_ids))
            if is_shown and number > self._numbers[choice]:
                self._numbers[choice] = number
                parts.append(self._event_frame(d, events))
            if d.finish is not None and failure(d.finish) is None:
                last = parser.end()
                number = self._end(choice, d.finish)
                if number > self._numbers[choice]:
                    self._numbers[choice] = number
                    parts.append(self._finish_frame(choice, d.finish, last, parser))
        return b"".join(parts)

    def _beyond_seen(self, d: Delta) -> Delta:
        """What the reader does not have of a delta; the parser is fed the rest."""
        seen = min(self._seen[d.choice], d.start + len(d.token_ids))
        num, text = seen - d.start, self._stream.text_before(seen, d.choice)
        text = text[len(self._stream.text_before(d.start, d.choice)) :]
        self._parsers[d.choice].feed(text)
        return msgspec.structs.replace(
            d,
            start=seen,
            token_ids=d.token_ids[num:],
            text=d.text[len(text) :],
            logprobs=d.logprobs and d.logprobs[num:],
        )

    def _event_frame(self, d: Delta, events: Sequence[Event]) -> bytes:
        choice = ChunkChoice(
            d.choice,
            self._delta(d.choice, events),
            Logprobs(chat_logprobs(d.logprobs, self._text, self._names)) if d.logprobs else None,
            None,
            only_if(bool(self._body.return_token_ids), d.token_ids),
        )
        return self._frame([choice], usage=self._so_far(d.choice, d.start + len(d.token_ids)))

    def _finish_frame(
        self, choice: int, finish: Finish, last: Sequence[Event], parser: AnyParser
    ) -> bytes:
        chunk = ChunkChoice(
            choice,
            self._delta(choice, last),
            None,
            _reason(finish, parser.num_calls > 0),
            UNSET,
            stop_reason(finish, self._stream.params),
            *scores_of(finish),
        )
        return self._frame([chunk], usage=self._so_far(choice, finish.num_tokens))

    def _num_reasoning(self, choice: int, num_tokens: int) -> int:
        if not self._places:
            return 0
        place, seen = self._places[choice]
        if seen < num_tokens:
            place.pass_over(self._stream.token_ids(choice, seen)[: num_tokens - seen])
            self._places[choice] = place, num_tokens
        return place.num_tokens

    def _delta(self, choice: int, events: Sequence[Event]) -> ChunkDelta:
        text = "".join(e.text for e in events if isinstance(e, Text))
        thought = "".join(e.text for e in events if isinstance(e, Reasoning))
        calls: dict[int, ChunkToolCall] = {}
        for event in events:
            if isinstance(event, ToolCallBegin):
                calls[event.index] = ChunkToolCall(
                    event.index,
                    CalledFunction("", event.name),
                    event.id or self._call_id(choice, event.index),
                    "function",
                )
            elif isinstance(event, ToolArguments):
                known = calls.get(event.index) or ChunkToolCall(event.index, CalledFunction(""))
                function = msgspec.structs.replace(known.function, arguments=event.text)
                calls[event.index] = msgspec.structs.replace(known, function=function)
        return ChunkDelta(
            content=text or UNSET,
            reasoning_content=thought or UNSET,
            reasoning=thought or UNSET,
            tool_calls=list(calls.values()) or UNSET,
        )

    def _call_id(self, choice: int, index: int) -> str:
        return self._parsing.call_id(self.request_id, choice, index)

    def _message(self, choice: int, text: str, finish: Finish | None) -> tuple[Message, str]:
        parser = self._parsing.parser()
        delta = self._delta(choice, [*parser.feed(text), *parser.end()])
        calls = [
            ToolCall(c.id or "", CalledFunction(c.function.arguments, c.function.name))
            for c in delta.tool_calls or ()
        ]
        content = delta.content or ""
        message = Message(
            None if calls and not content else content,
            tool_calls=calls or UNSET,
            reasoning_content=delta.reasoning_content,
            reasoning=delta.reasoning,
        )
        return message, _reason(finish, bool(calls))


def _reason(finish: Finish | None, has_calls: bool) -> str:
    if finish is None or finish.reason is FinishReason.STOP:
        return "tool_calls" if has_calls else "stop"
    return finish_reason(finish.reason)
