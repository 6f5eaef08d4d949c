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

from streamer.constraints.grammars import Compiled
from streamer.core.plan import RowJoin

if TYPE_CHECKING:
    import llguidance

Words = NDArray[np.int32]


class Constraint:
    """A row's place in its grammar.

    Its end tokens end the answer; the row's stop_ids are allowed where they are. Both are banned
    while the row must not end (min_tokens, ignore_eos), unless the grammar allows nothing else.
    """

    __slots__ = ("_behind", "_floor", "_held", "_matcher", "_stops", "ends")

    def __init__(self, compiled: Compiled, join: RowJoin, vocab_size: int) -> None:
        ends = [t for t in compiled.end_ids if t < vocab_size]
        stops = [t for t in join.stop_ids if 0 <= t < vocab_size]
        self._matcher = compiled.matcher()
        self._behind = list(join.tokens[join.num_prompt :])  # drawn, not followed yet
        words = -(-vocab_size // 32)
        self.ends, self._stops = _bits(ends, words), _bits(stops, words)
        self._held = self.ends & ~self._stops  # ends that end nothing: ignore_eos
        self._floor = join.num_prompt + join.params.min_tokens

    def is_end(self, token: int) -> bool:
        """Whether the text ends with this token."""
        word = int(self.ends[token >> 5] | self._stops[token >> 5])
        return bool(word >> (token & 31) & 1)

    def drew(self, token: int) -> None:
        """The row's next token is this one."""
        self._behind.append(token)

    def advance(self) -> llguidance.LLMatcher:
        """The matcher, after all drawn tokens."""
        if self._behind:
            behind, self._behind = self._behind, []
            self._matcher.consume_tokens(behind)
        return self._matcher

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
        if not self._matcher.is_error():
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
        at, errors, starts = 0, dict[int, str](), []
        for each in wanted:
            matcher = each.constraint.advance()
            starts.append(at)
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
        for start, each in zip(starts, wanted, strict=True):
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
