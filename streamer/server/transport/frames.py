"""SSE frames, what else a stream sends, and how many deltas are sent together.

Values in, bytes or values out; imports nothing of the server. openai/ and responses/ build their
bodies with it, and every transport may use it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from streamer.engine.stream import Delta, TokenStream

DONE: Final = b"data: [DONE]\n\n"
SPLIT: Final = 128  # entries of an unmerged replay that are sent together: 2 ms


class Framing(msgspec.Struct, frozen=True):
    """The media type of a stream, and what is sent while no event comes."""

    media: bytes
    keep_alive: bytes


# Clients of streams without ids may parse only `data: ` and blank lines (SGLang's benchmark and
# llmperf parse a comment as JSON). A client of streams with ids must not get a lone blank line:
# openai 3.54 takes one after an id for an event without data, and fails.
SSE: Final = Framing(b"text/event-stream; charset=utf-8", b"\n")
SSE_WITH_IDS: Final = Framing(SSE.media, b": keep-alive\n")


def frame(number: str, data: bytes, event: str = "") -> bytes:
    """One event; `data` is one line. Without a number it has no `id:` line."""
    head = (f"id: {number}\n" if number else "") + (f"event: {event}\n" if event else "")
    return b"%sdata: %s\n\n" % (head.encode(), data)


def portions(
    stream: TokenStream, deltas: Sequence[Delta], is_split: bool
) -> Iterator[Sequence[Delta]]:
    """The deltas to send together: all, or, split by token, SPLIT entries at a time."""
    if not is_split:
        return iter((deltas,))
    pieces = (piece for delta in deltas for piece in stream.split(delta))
    count = max(1, SPLIT // _entries_of_token(stream))
    return iter(lambda: list(islice(pieces, count)), [])


def num_entries(stream: TokenStream, deltas: Sequence[Delta]) -> int:
    """The cost of building these, in tokens and log probabilities; at an end the whole answer's."""
    num, is_end = 0, False  # without generators, which cost 0.6 us here
    for d in deltas:
        num += len(d.token_ids)
        is_end = is_end or d.finish is not None
    return num * _entries_of_token(stream) + (whole_entries(stream) if is_end else 0)


def whole_entries(stream: TokenStream) -> int:
    """The cost of building the whole answer: of its log probabilities; its text counts nothing."""
    is_plain = stream.params.logprobs is None
    return 0 if is_plain else stream.num_output_tokens * _entries_of_token(stream)


def _entries_of_token(stream: TokenStream) -> int:
    k = stream.params.logprobs
    return 1 if k is None else 2 + k
