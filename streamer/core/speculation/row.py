"""RowMatch: where a row's last tokens occurred before, followed token by token.

Every known token is first compared with what the match predicted, whether or not that was proposed:
so acceptance is measured by match length at no cost, and a row whose proposals failed needs no
trial step to be taken up again. Owned by the speculator.
"""

from __future__ import annotations

from typing import Final

from streamer.core.speculation.index import ANCHOR, LONGEST, SEPARATOR, Text

# Acceptance of the next token by the match's length so far: 0 stands for the token after a long
# match failed, taken to be replaced; 1 and 2 for one taken up again nearby.
_LENGTHS: Final = (0, 1, 2, 3, 4, 5, 7, 10, 16, 24)
_PRIORS: Final = (0.3, 0.3, 0.4, 0.5, 0.55, 0.65, 0.75, 0.85, 0.93, 0.95)
BUCKETS: Final = tuple(sum(n >= low for low in _LENGTHS) - 1 for n in range(LONGEST + 1))
ROW_WEIGHT: Final = 1 / 16  # of a token in a row's running means
SHARED_WEIGHT: Final = 1 / 64  # in those that new rows begin with

RESUMED: Final = 8  # a match this long that fails is searched for nearby
RESUME_TOKENS: Final = 16  # for this many tokens, and this far beyond


class Rates:
    """Running means of acceptance, by match length, of one type of source."""

    __slots__ = ("rates",)

    def __init__(self) -> None:
        self.rates = list(_PRIORS)


class Source:
    """A Text that a row may continue, and how often its continuations were right in this row."""

    __slots__ = ("rates", "shared", "text")

    def __init__(self, text: Text, shared: Rates) -> None:
        self.text = text
        self.shared = shared.rates
        self.rates = list(shared.rates)


class RowMatch:
    """One row's own output as an index, its other sources, and the current match.

    own      its output, in a Text of the sequence's own tokens
    others   its prompt and prediction, then its owner's recent outputs
    source   the match: source.text.tokens[at] is predicted next, after `length` equal tokens
    grows    whether its own output is indexed as it comes
    """

    __slots__ = (
        "_max_match",
        "_resume_at",
        "_resume_from",
        "_resume_left",
        "at",
        "grows",
        "length",
        "others",
        "own",
        "source",
    )

    def __init__(self, own: Source, given: Source, max_match: int = LONGEST) -> None:
        self.own = own
        self.others = [given]
        self.grows = True
        self.source: Source | None = None
        self.at = 0
        self.length = 0
        self._max_match = max_match
        self._resume_from: Source | None = None
        self._resume_at = 0
        self._resume_left = 0

    def follow(self, seen: int, end: int) -> None:
        """Take the sequence's known tokens from index `seen` up to `end`, in order.

        With a match each token is compared with it. Without one they are indexed together, and
        only after the last is a match looked for: 0.25 us a token (EPYC Zen 5, Python 3.11,
        2026-11-22).
        """
        while seen < end and (self.source is not None or self._resume_left or seen < 2):
            self._follow_one(seen)
            seen += 1
        if seen == end:
            return
        text = self.own.text
        recent = text.tokens[seen - 2 : end]
        if self.grows:
            key = text.index(recent, seen + 1)
            position = text.before[-1]
        else:
            key, position = hash(tuple(recent[-3:])), 0
        self._find(end - 1, key, position)

    def _follow_one(self, index: int) -> None:
        text = self.own.text
        known, token = text.tokens, text.tokens[index]
        key = hash((known[index - 2], known[index - 1], token))
        position = 0
        if self.grows:
            position = text.last.get(key, 0)
            text.last[key] = index + 1
            text.before.append(position)
        if self.source is not None:
            self._compare(token)
            if self.length >= ANCHOR:
                return
        if self._resume_left:
            self._resume(token, index)
        self._find(index, key, position)

    def _find(self, index: int, key: int, position: int) -> None:
        """Look for a match that ends with the token at `index`, if its key occurred before."""
        if position or any(key in source.text.last for source in self.others):
            self._look_up(index, key, position)

    def _compare(self, token: int) -> None:
        """Follow the match by one token, or end it; either is an observation of its length."""
        source = self.source
        if source is None:
            return
        tokens, at, length = source.text.tokens, self.at, self.length
        if at >= len(tokens) or tokens[at] == SEPARATOR:
            self.source, self.length = None, 0  # the document ended: nothing was predicted
            return
        bucket = BUCKETS[length] if length < LONGEST else BUCKETS[LONGEST]
        is_right = tokens[at] == token
        source.rates[bucket] += ROW_WEIGHT * (is_right - source.rates[bucket])
        source.shared[bucket] += SHARED_WEIGHT * (is_right - source.shared[bucket])
        self.at = at + 1
        if is_right:
            self.length = length + 1
            return
        self.length = 0
        if length >= RESUMED:  # taken to be replaced by one token
            self._resume_from, self._resume_at = source, at
            self._resume_left = RESUME_TOKENS
        else:
            self.source = None

    def _resume(self, token: int, index: int) -> None:
        """After a long match failed: continue it where the newest token occurs nearby."""
        self._resume_left -= 1
        source = self._resume_from
        if source is None or self.length:
            return
        start, stop = self._resume_at, self._resume_at + RESUME_TOKENS
        if source is self.own:
            stop = min(stop, index)
        try:
            found = source.text.tokens.index(token, start, stop)
        except ValueError:
            return
        self.source, self.at, self.length = source, found + 1, 1

    def _look_up(self, index: int, key: int, position: int) -> None:
        """Take up the longest match of all sources, if it is longer than the current one.

        position  after the previous occurrence in its own output; 0: there is none
        """
        recent = self.own.text.tokens[max(0, index + 1 - self._max_match) : index + 1]
        candidates = [(self.own, position)] if position else []
        candidates += [(s, at) for s in self.others if (at := s.text.last.get(key))]
        best = self.length
        for source, latest in candidates:
            at, length, is_disputed = source.text.longest(latest, recent)
            if length > best:
                best = length
                self.source, self.at = source, at
                self.length = 1 if is_disputed else length

    # ------------------------------------------------------------ the proposal

    def survivals(self, count: int, smallest: float) -> list[float]:
        """The chance that the first, the first two, ... proposed tokens are all right.

        Up to `count`, and as long as it is at least `smallest`; none without a match.
        """
        source, chance = self.source, 1.0
        found: list[float] = []
        if source is None:
            return found
        rates, length = source.rates, self.length
        if source is not self.own:
            count = min(count, len(source.text.tokens) - self.at)
        for i in range(length, length + count):
            chance *= rates[BUCKETS[i] if i < LONGEST else BUCKETS[LONGEST]]
            if chance < smallest:
                break
            found.append(chance)
        return found

    def proposal(self, count: int) -> list[int]:
        """Up to `count` tokens that followed the match.

        Where it ends at the row's newest token, the row repeats itself, and goes on doing so.
        """
        if self.source is None:
            return []
        run = self.source.text.continuation(self.at, count)
        if self.source is self.own and run:
            while len(run) < count:
                run += run[: count - len(run)]
        return run
