"""Masks: which tokens each constrained row may draw next, as bits, filled beside a step.

Owns a thread that waits for llguidance's own ones. A row's Constraint follows the tokens that it
drew; provisional tokens are followed and rolled back. Called by the samplers, on their thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from streamer.constraints.grammars import Compiled, Vocabulary
from streamer.constraints.reasoning import Place
from streamer.core.plan import RowJoin

if TYPE_CHECKING:
    import llguidance

Words = NDArray[np.int32]
# Masks of a step that take longer are filled by all of llguidance's threads: waking those takes
# 60 us, 16 masks where a text is forced 10 to 20 (2 cores of an EPYC Zen 5, 2026-11-22).
TOGETHER_S = 0.3e-3


class Constraint:
    """A row's place in its answer, and what may come next there: of its grammar, and by its budget.

    A grammar's end tokens end the answer; the row's stop_ids are allowed where they are. Both are
    banned while the row must not end (min_tokens, ignore_eos), unless the grammar allows nothing
    else. Where the reasoning stands, no token is banned but those stop_ids, and the end tokens
    where a grammar follows.
    """

    __slots__ = (
        "_behind", "_crossing", "_end_ids", "_held", "_matcher", "_size", "_stops", "_vocabulary",
        "end_bits", "ends", "floor", "place",
    )  # fmt: skip

    def __init__(
        self, compiled: Compiled | None, join: RowJoin, vocabulary: Vocabulary, vocab_size: int
    ) -> None:
        ends = [t for t in vocabulary.end_ids if t < vocab_size]
        stops = [t for t in join.stop_ids if 0 <= t < vocab_size]
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

    def advance(self) -> llguidance.LLMatcher | None:
        """The matcher, after all drawn tokens; None while it does not decide alone."""
        behind, self._behind = self._behind, []
        if self.place is not None:
            behind = self._followed(self.place, behind)
            if self.place.stage == "answer":
                self.place = None
        matcher = self._matcher
        if matcher is not None:
            for token in behind:
                if matcher.is_stopped():  # more ends, where min_tokens had not come yet
                    break
                matcher.consume_token(token)
        return matcher if self.place is None else None

    @property
    def forced(self) -> tuple[int, ...]:
        """The tokens that alone may come next, as far as that is certain: 11 us."""
        if self._behind and self.is_end(self._behind[-1]):
            return ()
        matcher = self.advance()
        if matcher is not None:
            return tuple(matcher.compute_ff_tokens())
        return () if self.place is None else self.place.closing

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
        if self._matcher is None or not self._matcher.is_error():
            return ""
        return f"the answer's grammar: {self._matcher.get_error()}".partition("\n")[0]


class Wanted:
    """Masks of one step: of `constraint` at `position` and, after each of `tokens`, the next."""

    __slots__ = ("constraint", "position", "tokens")

    def __init__(self, constraint: Constraint, position: int, tokens: Sequence[int] = ()) -> None:
        self.constraint = constraint
        self.position = position
        self.tokens = list(tokens)


Followed = tuple["llguidance.LLMatcher", int, Wanted]  # and where its masks begin


class Filled:
    """The masks of a step.

    words    [n, words] int32, in order: bit t % 32 of word t // 32 is token t
    errors   index -> why there is no mask
    """

    __slots__ = ("errors", "words")

    def __init__(self, words: Words, errors: dict[int, str]) -> None:
        self.words = words
        self.errors = errors


class MaskFiller:
    """Fills masks in a thread beside the step, and in llguidance's where they take long; `begin`
    returns at once."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)
        self._threads = ThreadPoolExecutor(1, "streamer-masks")
        self._executor: llguidance.LLExecutor | None = None
        self._is_slow = False  # the last step's masks

    def begin(self, wanted: Sequence[Wanted]) -> Callable[[], Filled]:
        """Begin to fill these masks; the result waits for them."""
        future: Future[Filled] = self._threads.submit(partial(self.fill, wanted))
        return future.result

    def fill(self, wanted: Sequence[Wanted]) -> Filled:
        """Fill these masks here."""
        count = sum(1 + len(each.tokens) for each in wanted)
        words = np.zeros((count, self._num_words), np.int32)
        at, followed = 0, list[Followed]()
        for each in wanted:
            matcher = each.constraint.advance()
            if matcher is None:
                here = words[at : at + 1 + len(each.tokens)]
                each.constraint.fill(here, each.position, each.tokens)
            else:
                followed.append((matcher, at, each))
            at += 1 + len(each.tokens)
        if followed:
            began = time.perf_counter()
            (self._fill_together if self._is_slow else self._fill_each)(words, followed)
            took_s = time.perf_counter() - began
            self._is_slow = took_s > (TOGETHER_S / 2 if self._is_slow else TOGETHER_S)
        return Filled(words, _finished(words, followed))

    def _fill_each(self, words: Words, followed: Sequence[Followed]) -> None:
        start, row_bytes = words.ctypes.data, 4 * self._num_words
        for matcher, at, each in followed:
            where, taken = start + at * row_bytes, 0
            matcher.unsafe_compute_mask_ptr(where, row_bytes)
            for token in each.tokens:
                if each.constraint.is_end(token) or not matcher.try_consume_tokens([token]):
                    break  # llguidance stops before ends
                taken += 1
                matcher.unsafe_compute_mask_ptr(where + taken * row_bytes, row_bytes)
            if taken:
                matcher.rollback(taken)

    def _fill_together(self, words: Words, followed: Sequence[Followed]) -> None:
        if self._executor is None:
            import llguidance

            self._executor = llguidance.LLExecutor()
        where = words.ctypes.data, 4 * self._num_words, len(words)
        plain = [(matcher, at) for matcher, at, each in followed if not each.tokens]
        runs = [(matcher, at, each.tokens) for matcher, at, each in followed if each.tokens]
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *where)
        if runs:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(runs, *where)

    def fill_last(self, wanted: Sequence[Wanted]) -> Filled:
        """Fill these masks, and return each one's last: that after all its tokens."""
        filled = self.fill(wanted)
        ends = np.cumsum([1 + len(each.tokens) for each in wanted]) - 1
        return Filled(filled.words[ends], {})

    def close(self) -> None:
        """End the thread."""
        self._threads.shutdown()


def _finished(words: Words, followed: Sequence[Followed]) -> dict[int, str]:
    """Add the rows' own ends to what llguidance allows, in place; index -> why there is no mask."""
    errors: dict[int, str] = {}
    if not followed:
        return errors
    at, bits = followed[0][2].constraint.end_bits
    may_end: NDArray[np.bool_] = np.logical_or.reduce(words[:, at] & bits, axis=1)
    for _, start, each in followed:
        constraint, reason = each.constraint, each.constraint.error
        for n in range(1 + len(each.tokens)):
            is_after = n > 0 and constraint.is_end(each.tokens[n - 1])
            if is_after:
                words[start + n] = constraint.ends  # llguidance stops before these
            if is_after or may_end[start + n] or each.position + n < constraint.floor:
                constraint.finish(words[start + n], each.position + n)
            if reason:
                words[start + n] = 0  # llguidance then allows the ends: the text is not whole
                errors[start + n] = reason
    return errors


def _bits(tokens: Sequence[int], num_words: int) -> Words:
    bits = np.zeros(32 * num_words, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
