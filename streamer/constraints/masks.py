"""Masks: which tokens each constrained row may draw next, as bits, filled beside a step.

Owns a thread that waits for llguidance's own ones. A row's Constraint follows the tokens that it
drew; provisional tokens are followed and rolled back. Called by the samplers, on their thread.
"""

from __future__ import annotations

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


class Constraint:
    """A row's place in its answer, and what may come next there: of its grammar, and by its budget.

    A grammar's end tokens end the answer; the row's stop_ids are allowed where they are. Both are
    banned while the row must not end (min_tokens, ignore_eos), unless the grammar allows nothing
    else. Where the reasoning stands, no token is banned but those stop_ids, and the end tokens
    where a grammar follows.
    """

    __slots__ = (
        "_behind", "_crossing", "_floor", "_held", "_matcher", "_size", "_stops", "_vocabulary",
        "ends", "place",
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
        self._held = self.ends & ~self._stops  # ends that end nothing: ignore_eos
        self._floor = join.num_prompt + join.params.min_tokens
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
        word = int(self.ends[token >> 5] | self._stops[token >> 5])
        return bool(word >> (token & 31) & 1)

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
        if behind and self._matcher is not None:
            self._matcher.consume_tokens(behind)
        return self._matcher if self.place is None else None

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
            if position < self._floor:
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
        banned = self._held if position >= self._floor else self._held | self._stops
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


class Filled:
    """The masks of a step.

    words    [n, words] int32, in order: bit t % 32 of word t // 32 is token t
    errors   index -> why there is no mask
    """

    __slots__ = ("errors", "words")

    def __init__(self, words: Words, errors: dict[int, str]) -> None:
        self.words = words
        self.errors = errors

    def allowed(self, vocab_size: int) -> NDArray[np.uint8]:
        """[n, V] 1 where a token is allowed."""
        return np.unpackbits(self.words.view(np.uint8), axis=1, count=vocab_size, bitorder="little")


class MaskFiller:
    """Fills masks in llguidance's threads; `begin` returns at once."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)
        self._threads = ThreadPoolExecutor(1, "streamer-masks")
        self._executor: llguidance.LLExecutor | None = None

    def begin(self, wanted: Sequence[Wanted]) -> Callable[[], Filled]:
        """Begin to fill these masks; the result waits for them."""
        future: Future[Filled] = self._threads.submit(partial(self.fill, wanted))
        return future.result

    def fill(self, wanted: Sequence[Wanted]) -> Filled:
        """Fill these masks here."""
        count = sum(1 + len(each.tokens) for each in wanted)
        words = np.zeros((count, self._num_words), np.int32)
        plain: list[tuple[llguidance.LLMatcher, int]] = []
        runs: list[tuple[llguidance.LLMatcher, int, list[int]]] = []
        at, errors, followed = 0, dict[int, str](), []
        for each in wanted:
            matcher = each.constraint.advance()
            if matcher is None:
                here = words[at : at + 1 + len(each.tokens)]
                each.constraint.fill(here, each.position, each.tokens)
            else:
                followed.append((at, each))
                if each.tokens:
                    runs.append((matcher, at, each.tokens))
                else:
                    plain.append((matcher, at))
            at += 1 + len(each.tokens)
        where = words.ctypes.data, 4 * self._num_words, count
        if plain:
            self._of_threads().unsafe_compute_mask_ptr(plain, *where)
        if runs:
            self._of_threads().unsafe_compute_mask_ptr_with_draft_token(runs, *where)
        for start, each in followed:
            reason = each.constraint.error
            for n in range(1 + len(each.tokens)):
                if n and each.constraint.is_end(each.tokens[n - 1]):
                    words[start + n] = each.constraint.ends  # llguidance stops before these
                each.constraint.finish(words[start + n], each.position + n)
                if reason:
                    errors[start + n] = reason
        return Filled(words, errors)

    def fill_last(self, wanted: Sequence[Wanted]) -> Filled:
        """Fill these masks, and return each one's last: that after all its tokens."""
        filled = self.fill(wanted)
        ends = np.cumsum([1 + len(each.tokens) for each in wanted]) - 1
        return Filled(filled.words[ends], {})

    def close(self) -> None:
        """End the thread."""
        self._threads.shutdown()

    def _of_threads(self) -> llguidance.LLExecutor:
        if self._executor is None:
            import llguidance

            self._executor = llguidance.LLExecutor()
        return self._executor


def _bits(tokens: Sequence[int], num_words: int) -> Words:
    bits = np.zeros(32 * num_words, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
