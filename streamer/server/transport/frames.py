"""What streams are cut into: an SSE frame, its end mark, and how many deltas go out together.

A leaf: values in, bytes or values out. Bodies of openai/ and of responses/ are built with it, and
every transport may use it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from streamer.engine.stream import Delta, TokenStream

DONE: Final = b"data: [DONE]\n\n"
SPLIT: Final = 256  # events of an unmerged replay that are sent together


def frame(number: str, data: bytes, event: str = "") -> bytes:
    """One event; `data` is one line. Without a number it has no `id:` line."""
    head = (f"id: {number}\n" if number else "") + (f"event: {event}\n" if event else "")
    return b"%sdata: %s\n\n" % (head.encode(), data)


def portions(
    stream: TokenStream, deltas: Sequence[Delta], is_split: bool
) -> Iterator[Sequence[Delta]]:
    """What to send together: all of it, or, token by token, SPLIT deltas at a time."""
    if not is_split:
        return iter((deltas,))
    pieces = (piece for delta in deltas for piece in stream.split(delta))
    return iter(lambda: list(islice(pieces, SPLIT)), [])
