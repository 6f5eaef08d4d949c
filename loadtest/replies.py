"""Streamed chat completions and completions, read chunk by chunk. No socket, no clock.

Works on what every OpenAI-compatible server sends; token counts come from `usage` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from .sse import BadAnswer, Read, events, started


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class ReplyUsage(msgspec.Struct):
    completion_tokens: int
    prompt_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class Chunk(msgspec.Struct):
    """A chunk of a stream, or a whole answer."""

    choices: list[Choice] = []
    usage: ReplyUsage | None = None
    error: Any = None

    @property
    def text(self) -> str:
        """The chunk's text, reasoning included."""
        found = ""
        for choice in self.choices:
            found += choice.text or ""
            if choice.delta is not None:
                found += (choice.delta.reasoning_content or "") + (choice.delta.content or "")
        return found


DECODER = msgspec.json.Decoder(Chunk)


class Reply(msgspec.Struct):
    """A finished answer. `text_at`: arrival time of each piece of text, on the reads' clock."""

    text: str
    text_at: list[float]
    usage: ReplyUsage | None
    ended_at: float

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer from the server's `usage`; 0 without one."""
        return self.usage.completion_tokens if self.usage else 0

    @property
    def num_prompt_tokens(self) -> int:
        return self.usage.prompt_tokens if self.usage else 0

    @property
    def num_cached_tokens(self) -> int:
        details = self.usage.prompt_tokens_details if self.usage else None
        return (details.cached_tokens or 0) if details else 0


def read_reply(reads: Iterator[Read], on_text: Callable[[float], None] | None = None) -> Reply:
    """Read a stream to its end; `on_text` gets each text's time. BadAnswer: an error or a cut."""
    _, bodies = started(reads)
    text, text_at, usage, is_finished, at = "", [], None, False, 0.0
    for at, event in events(bodies):
        try:
            chunk = DECODER.decode(event)
        except msgspec.DecodeError as error:
            raise BadAnswer(f"{error}: {event[:200].decode(errors='replace')}") from None
        if chunk.error is not None:
            raise BadAnswer(f"an error in the stream: {chunk.error}")
        usage = chunk.usage or usage
        is_finished |= any(choice.finish_reason for choice in chunk.choices)
        if piece := chunk.text:
            text += piece
            text_at.append(at)
            if on_text is not None:
                on_text(at)
    if not is_finished:
        raise BadAnswer("the stream ended without a finish_reason")
    return Reply(text, text_at, usage, at)
