"""Masks: which tokens each constrained row may draw next, as bits, filled beside a step.

A row's Constraint follows the tokens that it drew; provisional tokens are followed and rolled back.
Made by the samplers; filler.py fills the masks of a step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from streamer.constraints.grammars import SLOW_S, Compiled, Vocabulary
from streamer.constraints.reasoning import Place
from streamer.core.plan import RowJoin

if TYPE_CHECKING:
    import llguidance

Words = NDArray[np.int32]
MAX_BEHIND: Final = 256  # tokens to follow, of a row that comes back, that a step waits for


class Constraint:
    """A row's place in its answer, and what may come next there: of its grammar, and by its budget.

    A grammar's end tokens end the answer; the row's stop_ids are allowed where they are. Both are
    banned while the row must not end (min_tokens, ignore_eos), unless the grammar allows nothing
    else. Where the reasoning stands, no token is banned but those stop_ids, and the end tokens
    where a grammar follows.

    newest    its last known token
    used_s    what its masks took for which no step waits, or the turn at which it came
    was_late  a mask of it was not there in time, once
    """

    __slots__ = (
        "_behind", "_compiled", "_crossing", "_end_ids", "_held", "_matcher", "_size", "_stops",
        "_vocabulary", "end_bits", "ends", "floor", "newest", "place", "row", "used_s", "was_late",
    )  # fmt: skip

    def __init__(
        self, compiled: Compiled | None, join: RowJoin, vocabulary: Vocabulary, vocab_size: int
    ) -> None:
        ends = [t for t in vocabulary.end_ids if t < vocab_size]
        stops = [t for t in join.stop_ids if 0 <= t < vocab_size]
        self.row, self.newest = join.row, join.tokens[-1]
        self.used_s, self.was_late = 0.0, False
        self._compiled = compiled
        self._matcher = None if compiled is None else compiled.matcher()
        self._behind = list(join.tokens[join.num_prompt :])  # drawn, not followed yet
        self._vocabulary, self._size = vocabulary, vocab_size
        words = -(-vocab_size // 32)
        self.ends, self._stops = _bits(ends, words), _bits(stops, words)
        bits = np.array([1 << (t & 31) for t in ends], np.uint32).view(np.int32)
        self.end_bits = np.array([t >> 5 for t in ends], np.int64), bits  # words of `ends`, bits
        self._held = self.ends & ~self._stops  # ends that end nothing: ignore_eos
        self._end_ids = frozenset((*ends, *stops))
        self.floor = join.num_prompt + join.params.min_tokens  # the first position to end at
        self.place: Place | None = None
        self._crossing: set[int] = set()  # tokens that may be of the reasoning and of the answer
        if join.reasoning is not None:
            budget = join.params.thinking_token_budget
            self.place = Place(join.reasoning, vocabulary.text, budget)
            if compiled is not None:
                for end in join.reasoning.ends:
                    self._crossing.update(vocabulary.going_on(end.encode()))

    def is_end(self, token: int) -> bool:
        """Whether the text ends with this token."""
        return token in self._end_ids

    def drew(self, token: int) -> None:
        """The row's next token is this one."""
        self._behind.append(token)
        self.newest = token

    @property
    def is_quick(self) -> bool:
        """Whether its masks are known to take no longer than a step may wait."""
        if len(self._behind) > MAX_BEHIND:
            return False
        return self._compiled is None or self._compiled.is_quick

    @property
    def is_slow(self) -> bool:
        """Whether a step does not wait for its masks."""
        if len(self._behind) > MAX_BEHIND:
            return True
        return self._compiled is not None and self._compiled.is_slow

    def took(self, took_s: float, count: int) -> None:
        """So many masks, or tokens that it followed, took this much of a thread's time."""
        self.used_s += took_s
        if self._compiled is not None:
            self._compiled.took(took_s, count)

    def advance(self) -> llguidance.LLMatcher | None:
        """The matcher, after all drawn tokens; None while it does not decide alone."""
        behind, self._behind = self._behind, []
        if self.place is not None:
            behind = self._followed(self.place, behind)
            if self.place.stage == "answer":
                self.place = None
        matcher = self._matcher
        if matcher is not None and behind:
            began_s = time.thread_time()
            for token in behind:
                if matcher.is_stopped():  # more ends, where min_tokens had not come yet
                    break
                matcher.consume_token(token)
            self.took(time.thread_time() - began_s, len(behind))
        return matcher if self.place is None else None

    @property
    def forced(self) -> tuple[int, ...]:
        """The tokens that alone may come next, as far as that is certain: 11 us, or under a slow
        grammar 1 ms, which no step waits for."""
        if self.is_slow or (self._behind and self.is_end(self._behind[-1])):
            return ()
        matcher = self.advance()
        if matcher is None:
            return () if self.place is None else self.place.closing
        if self._compiled is not None and self._compiled.is_slow:  # to follow the last token was
            return ()
        began_s = time.thread_time()
        found = tuple(matcher.compute_ff_tokens())
        if (took_s := time.thread_time() - began_s) > SLOW_S:
            self.took(took_s, 1)
        return found

    def fill(self, words: Words, position: int, tokens: Sequence[int]) -> None:
        """What may come at this position and after each of the tokens [1 + tokens, words]; to be
        called where `advance` had no matcher, and slow."""
        place = None if self.place is None else self.place.copy()
        answer: list[int] = []
        for n in range(len(words)):
            if n and place is not None:
                answer += self._followed(place, tokens[n - 1 : n])
            elif n:
                answer.append(tokens[n - 1])
            self._fill(words[n], position + n, place, answer)

    def _fill(self, words: Words, position: int, place: Place | None, answer: list[int]) -> None:
        if place is not None and (forced := place.forced) is not None:
            words[:] = _bits([forced], len(words))
            return
        if self._matcher is None or (place is not None and place.stage == "reasoning"):
            words[:] = -1
            if self._crossing and place is not None:
                crossing = [t for t in place.crossing(self._crossing) if t < self._size]
                words &= ~_bits(crossing, len(words))
            if position < self.floor:
                words &= ~self._stops
            if self._matcher is not None:
                words &= ~self.ends  # it would end before the grammar's text has begun
            return
        self._fill_after(words, answer if place is None else [*answer, *place.held])
        self.finish(words, position)
        if place is not None and place.stage == "opening" and place.opening:
            tokens = self._vocabulary.beginning(place.opening)
            words |= _bits([t for t in tokens if t < self._size], len(words))
        if place is not None and place.stage == "spaces":
            spaces = self._vocabulary.spaces(place.spaces_left)
            words |= _bits([t for t in spaces if t < self._size], len(words))

    def _fill_after(self, words: Words, answer: list[int]) -> None:
        """What the grammar allows after these tokens; nothing if it does not allow them."""
        words[:] = 0
        matcher = self._matcher
        if matcher is None:
            return
        if answer and self.is_end(answer[-1]):
            words[:] = self.ends  # llguidance stops before these
            return
        taken = matcher.try_consume_tokens(answer)
        if taken == len(answer):
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        matcher.rollback(taken)

    def _followed(self, place: Place, tokens: Sequence[int]) -> list[int]:
        matcher, found = self._matcher, list[int]()
        is_answer = None if matcher is None else lambda t: matcher.validate_tokens([t])
        for token in tokens:
            found += place.follow(token, is_answer)
        return found

    def finish(self, words: Words, position: int) -> None:
        """What llguidance allows at this position, with the row's own ends, in place."""
        if (words & self.ends).any():
            words |= self._stops
        banned = self._held if position >= self.floor else self._held | self._stops
        if banned.any() and (left := words & ~banned).any():
            words[:] = left

    @property
    def error(self) -> str:
        """Why it can't go on; empty if it can."""
        if self._compiled is None or self._matcher is None or not self._matcher.is_error():
            return ""
        return self._compiled.gave_up(self._matcher.get_error())


def _bits(tokens: Sequence[int], num_words: int) -> Words:
    bits = np.zeros(32 * num_words, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
