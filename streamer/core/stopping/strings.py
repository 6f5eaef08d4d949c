"""Stop strings: where the text of an output meets one.

Matched on bytes, by the tokenizer's bytes of each token. Pure; called by results.py for each drawn
token, and by a beam search for each candidate.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple


class Stop(NamedTuple):
    """text_bytes: of the output before the stop string; which: of the request's list."""

    text_bytes: int
    which: int


class StopStrings(NamedTuple):
    """One request's, as bytes, and the bytes of each token; an id beyond them has none."""

    strings: Seq[bytes]
    token_bytes: Seq[bytes]

    def may_end_in(self, token: int) -> bool:
        """Whether one can end within this token, whatever comes before it."""
        return can_end(self._piece(token), self.strings)

    def find(self, tokens: Seq[int], begin: int, end: int, token: int) -> Stop | None:
        """The one that ends within `token`, the next after the output tokens[begin:end]."""
        earlier = (tokens[i] for i in range(end - 1, begin - 1, -1))
        tail = last_bytes(map(self._piece, earlier), max(map(len, self.strings)) - 1)
        found = find_stop(tail, self._piece(token), self.strings)
        if found is None:
            return None
        before = sum(len(self._piece(tokens[i])) for i in range(begin, end))
        return Stop(before - len(tail) + found[0], found[1])

    def _piece(self, token: int) -> bytes:
        return self.token_bytes[token] if token < len(self.token_bytes) else b""


def find_stop(tail: bytes, piece: bytes, stops: Seq[bytes]) -> tuple[int, int] | None:
    """(offset, index) of the earliest stop string that ends in `piece`, or None.

    tail   the output's last bytes before `piece`; longest stop string less one byte are enough
    offset counts from the start of `tail + piece`; of two that start together the first listed wins
    """
    text = tail + piece
    best: tuple[int, int] | None = None
    for index, stop in enumerate(stops):
        # A match that ended before `piece` would have ended the sequence then.
        offset = text.find(stop, max(0, len(tail) - len(stop) + 1))
        if offset >= 0 and (best is None or offset < best[0]):
            best = (offset, index)
    return best


def can_end(piece: bytes, stops: Seq[bytes]) -> bool:
    """Whether a stop string can end within `piece`, whatever comes before it."""
    ends = [piece[: i + 1] for i in range(len(piece))]
    return any(end.endswith(stop) or stop.endswith(end) for stop in stops for end in ends)


def last_bytes(pieces: Iterable[bytes], length: int) -> bytes:
    """The last `length` bytes of a text, or all, from its pieces, last to first."""
    text = b""
    for piece in pieces if length else ():
        text = piece + text
        if len(text) >= length:
            return text[len(text) - length :]
    return text
