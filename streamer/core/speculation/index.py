"""Text: known tokens, and where each run of ANCHOR of them occurred before.

The index behind suffix proposals: what followed the longest earlier occurrence of a row's last
tokens is likely to follow again. Pure Python, no model; owned by the speculator on the GPU thread.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Final

# Two tokens occur again everywhere, four miss short edits.
ANCHOR: Final = 3
LONGEST: Final = 32  # of a match: longer ones are as good
CANDIDATES: Final = 4  # occurrences that are compared, latest first
SEPARATOR: Final = -1  # between documents; no token


class Text:
    """Documents of token ids, one after the other, each position indexed by the ANCHOR before it.

    An entry costs about 130 bytes and 0.4 us (EPYC Zen 5, Python 3.11, 2026-11-22). The keys are
    hashes of the tokens: a collision costs one comparison, since every occurrence is compared.

    tokens  all of them, its own list or a sequence's, which then grows elsewhere
    last    hash of ANCHOR tokens -> the latest position after them
    before  of each indexed token, the position before it with the same key, or 0
    start   the first indexed token
    """

    __slots__ = ("_tail", "before", "last", "start", "tokens")

    def __init__(self, tokens: list[int] | None = None, start: int = 0) -> None:
        self.tokens: list[int] = [] if tokens is None else tokens
        self.start = start
        self.last: dict[int, int] = {}
        self.before: list[int] = []
        self._tail = (SEPARATOR, SEPARATOR)

    def __len__(self) -> int:
        """Indexed tokens."""
        return len(self.before)

    def add(self, tokens: Seq[int]) -> None:
        """Append tokens to the last document."""
        first = len(self.tokens) + 1
        self.tokens += tokens
        self.index((*self._tail, *tokens), first)
        for token in tokens[-2:]:
            self._tail = (self._tail[1], token)

    def index(self, tokens: Seq[int], first: int) -> int:
        """Index positions from `first` on, of which each is after one of `tokens` but the first
        two; returns the last one's key."""
        last, append = self.last, self.before.append
        get, key = last.get, 0
        for position, key in enumerate(
            map(hash, zip(tokens, tokens[1:], tokens[2:], strict=False)), first
        ):
            append(get(key, 0))
            last[key] = position
        return key

    def end_document(self) -> None:
        """What follows is another document: no match goes across."""
        self.tokens.append(SEPARATOR)
        self.before.append(0)
        self._tail = (SEPARATOR, SEPARATOR)

    def longest(self, position: int, recent: list[int]) -> tuple[int, int, bool]:
        """Where `recent` (a row's last tokens) matches longest: position, length, is_disputed.

        `position` is the latest occurrence; up to CANDIDATES are compared. Of those equally long
        the token that follows most of them wins, and the latest with it; is_disputed: another token
        follows some. Length 0: the key was another's, or nothing follows.
        """
        tokens, before, start = self.tokens, self.before, self.start + 1
        best = ANCHOR - 1
        found: list[int] = []
        for _ in range(CANDIDATES):
            length = common_suffix(tokens, position, recent)
            if position == len(tokens) or tokens[position] == SEPARATOR:
                length = 0  # nothing follows there
            if length > best:
                best, found = length, [position]
            elif length == best:
                found.append(position)
            position = before[position - start]
            if not position:
                break
        if best < ANCHOR:
            return 0, 0, False
        if len(found) == 1:
            return found[0], best, False
        nexts = [tokens[p] for p in found]
        token = max(nexts, key=nexts.count)  # the first of equals: the latest
        return found[nexts.index(token)], best, nexts.count(token) < len(nexts)

    def continuation(self, position: int, count: int) -> list[int]:
        """Up to `count` tokens from `position` on, within its document."""
        run = self.tokens[position : position + count]
        if SEPARATOR in run:
            del run[run.index(SEPARATOR) :]
        return run


def common_suffix(tokens: list[int], position: int, recent: list[int]) -> int:
    """How many tokens before `position` equal the last of `recent`."""
    limit = min(position, len(recent))
    length = 0
    while length < limit and tokens[position - 1 - length] == recent[-1 - length]:
        length += 1
    return length
