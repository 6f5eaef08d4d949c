"""TextStream: tokens of one choice become text as they arrive, through the token-to-bytes table.

Holds back what may still change: incomplete UTF-8 and what may be the beginning of a stop string.
The core decides where the text ends. Needs no tokenizer library; the engine room calls it on the
event loop.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

_UTF8 = codecs.getincrementaldecoder("utf-8")


class TextStream:
    """Incremental text of one choice.

    token_bytes  token id -> its bytes; special tokens and ids beyond it have none
    stop         stop strings as bytes
    special      token id -> how a special token is shown; empty where they are left out
    is_plain     it has neither: a token's text follows from its bytes and an incomplete character
    is_whole     no incomplete character is held
    table        token_bytes
    """

    __slots__ = (
        "_decoder",
        "_held",
        "_marks",
        "_seen",
        "_special",
        "_stop",
        "is_plain",
        "is_whole",
        "table",
    )

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        stop: Sequence[bytes] = (),
        special: Mapping[int, bytes] | None = None,
    ) -> None:
        self.table = token_bytes
        self._stop = [_StopPrefix(each) for each in stop]
        self._special = special or {}
        # Bytes that never become valid turn into U+FFFD at once: the decoder holds at most three.
        self._decoder = _UTF8("replace")
        self.is_whole = True  # the decoder holds nothing
        self.is_plain = not self._stop and not self._special
        self._seen = 0  # bytes
        self._held = b""  # may be the beginning of a stop string
        self._marks: list[tuple[int, bytes]] = []  # (offset in _held, special token shown there)

    def push(self, token_id: int) -> str:
        """The text that can be released now that this token has come; may be empty."""
        if self.is_plain:
            table = self.table
            piece = table[token_id] if token_id < len(table) else b""
            self._seen += len(piece)
            return self._decode(piece)
        piece = self._hold(token_id)
        held_back = max([stop.push(piece) for stop in self._stop], default=0)
        return self._release(len(self._held) - held_back)

    def pass_over(self, token_ids: Iterable[int]) -> list[bytes]:
        """Count tokens each of which is text by itself; returns their bytes."""
        table = self.table
        pieces = [table[token_id] for token_id in token_ids]
        self._seen += sum(map(len, pieces))
        return pieces

    def finish(self, text_bytes: int | None = None, token_id: int | None = None) -> str:
        """The remaining text, with the last token's if given, cut at output byte `text_bytes`."""
        if token_id is not None:
            self._hold(token_id)
        keep = len(self._held)
        if text_bytes is not None:
            released = self._seen - len(self._held)
            keep = max(0, min(keep, text_bytes - released))
        text = self._release(keep) + self._decoder.decode(b"", final=True)
        self._held, self._marks = b"", []
        return text

    def _decode(self, piece: bytes) -> str:
        """Whole characters of the held and these bytes; an incomplete character is held."""
        if self.is_whole:
            try:
                return piece.decode()  # a quarter of the incremental decoder's time
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(piece)
        self.is_whole = not self._decoder.getstate()[0]
        return text

    def _hold(self, token_id: int) -> bytes:
        """Take a token's bytes without releasing them."""
        table = self.table
        piece = table[token_id] if token_id < len(table) else b""
        if token_id in self._special:
            self._marks.append((len(self._held), self._special[token_id]))
        self._held += piece
        self._seen += len(piece)
        return piece

    def _release(self, upto: int) -> str:
        """Text of the held bytes before `upto`, special tokens shown where they came."""
        text, start = "", 0
        while self._marks and self._marks[0][0] <= upto:
            at, shown = self._marks.pop(0)
            text += self._decoder.decode(self._held[start:at], final=True)
            text += shown.decode("utf-8", "replace")
            start = at
        text += self._decode(self._held[start:upto])
        self._held = self._held[upto:]
        self._marks = [(at - upto, shown) for at, shown in self._marks]
        return text


class _StopPrefix:
    """Number of bytes at the end of the output that begin one stop string.

    Knuth, Morris and Pratt 1977: constant time a byte, also for stop strings made to be slow.
    """

    __slots__ = ("_fallback", "_length", "_stop")

    def __init__(self, stop: bytes) -> None:
        self._stop = stop
        self._fallback = _fallbacks(stop)
        self._length = 0

    def push(self, piece: bytes) -> int:
        """The length after `piece`; a whole stop string that ended nothing is not counted."""
        stop, fallback, length = self._stop, self._fallback, self._length
        for byte in piece:
            while length and stop[length] != byte:
                length = fallback[length]
            if stop[length] == byte:
                length += 1
                if length == len(stop):
                    length = fallback[length]
        self._length = length
        return length


@lru_cache(maxsize=256)
def _fallbacks(stop: bytes) -> tuple[int, ...]:
    """[i]: length of the longest proper prefix of stop[:i] that also ends it."""
    table = [0, 0]
    for i in range(1, len(stop)):
        length = table[i]
        while length and stop[length] != stop[i]:
            length = table[length]
        table.append(length + 1 if stop[length] == stop[i] else 0)
    return tuple(table)
