"""Filling masks beside a step, which waits for them a short time only.

Owns the threads that fill them. A row whose mask is not there in time draws nothing; its mask is
filled on, and it draws when that is there. So a grammar whose masks take long costs its own rows
time, and no others. Called by the samplers, on their thread.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import PriorityQueue
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamer.constraints.masks import Constraint, Words

if TYPE_CHECKING:
    import llguidance

# What every rank finds of every row, made one.
Agree = Callable[[Sequence[int]], Sequence[int]]
# Masks of a step that take longer are filled by all of llguidance's threads: waking those takes
# 60 us, 16 masks where a text is forced 10 to 20 (2 cores of an EPYC Zen 5, 2026-11-22).
TOGETHER_S: Final = 0.3e-3
MAX_TOGETHER: Final = 16  # steps of long masks, before each of them is timed again
# A step waits this long for masks beside rows that draw without, or as long as it computed.
LATE_S: Final = 2e-3
# A step of nothing but late rows waits this long: what comes meanwhile, a command, waits too.
ALONE_S: Final = 20e-3
NICE: Final = 10  # of the thread that no step waits for
NO_WORDS: Final[Words] = np.zeros((0, 0), np.int32)


class Wanted:
    """Masks of one row in a step: of `constraint` at `position` and, after each of `tokens`, the
    next.

    words      [1 + tokens, words] int32, once it `is_done`: bit t % 32 of word t // 32 is token t
    reason     why there is no mask
    failure    of the thread that was to fill them
    is_behind  no step waits for it
    is_dropped  nothing needs it any more
    """

    __slots__ = (
        "constraint", "failure", "is_behind", "is_done", "is_dropped", "position", "reason",
        "tokens", "words",
    )  # fmt: skip

    def __init__(self, constraint: Constraint, position: int, tokens: Sequence[int] = ()) -> None:
        self.constraint = constraint
        self.position = position
        self.tokens = list(tokens)
        self.words: Words = NO_WORDS
        self.reason = ""
        self.failure: Exception | None = None
        self.is_behind = self.is_done = self.is_dropped = False

    def has(self, position: int, tokens: Sequence[int]) -> bool:
        """Whether its first masks are there, and are those of this position and these tokens."""
        if not self.is_done or self.position != position:
            return False
        return self.tokens[: len(tokens)] == tokens


Followed = tuple["llguidance.LLMatcher", int, Wanted]  # and where its masks begin


class Filled(NamedTuple):
    """The masks of a step.

    words    [n, words] int32, in order, as in Wanted
    errors   index -> why there is no mask
    late     indices of those that are not there yet: their words allow all
    """

    words: Words
    errors: dict[int, str]
    late: Sequence[int] = ()


class MaskFiller:
    """Fills masks in a thread beside the step, and in llguidance's where they take long; those of
    grammars that were slow in another one, for which no step waits.

    agree  what all ranks find of every row, made one: 1, where the masks are there; None: there is
           one rank

    Its methods are called by one thread, but those that its own threads run.
    """

    def __init__(self, vocab_size: int) -> None:
        self.agree: Agree | None = None
        self.num_words = -(-vocab_size // 32)
        self._threads = ThreadPoolExecutor(1, "streamer-masks")
        self._behind: Behind | None = None
        self._changed = threading.Condition()
        self._executor: llguidance.LLExecutor | None = None
        self._is_long = False  # what the last masks of a step took
        self._num_together = 0  # steps since each mask was timed
        self._late: dict[int, Wanted] = {}  # row -> what it did not have when it was to draw
        self._missing: dict[int, Wanted] = {}  # of them those that `late_rows` gave last

    def begin(self, wanted: Sequence[Wanted]) -> Begun:
        """Begin to fill these masks, but those of rows that were late."""
        fresh = [each for each in wanted if each.constraint.row not in self._late]
        slow = [each for each in fresh if each.constraint.is_slow]
        begun = Begun(self, wanted, self._late)
        if slow:
            self._leave_behind(slow)
            fresh = [each for each in fresh if not each.is_behind]
        if fresh:
            self._threads.submit(self._safely, self._fill_in_order, fresh)
        return begun

    def wait(self, is_over: Callable[[], bool], wait_s: float) -> None:
        """Wait until this is so, at most so long."""
        with self._changed:
            self._changed.wait_for(is_over, wait_s)

    def wait_for_late(self) -> None:
        """Wait until one of the rows that `late_rows` gave has its masks, at most ALONE_S. Of those
        that had them, a row may be waiting for blocks: it is no reason to plan again at once."""
        missing = [each for row, each in self._missing.items() if self._late.get(row) is each]
        if missing:
            self.wait(lambda: any(each.is_done for each in missing), ALONE_S)

    def late_rows(self) -> tuple[int, ...]:
        """The rows that were late, and do not have their masks yet."""
        self._missing = {row: each for row, each in self._late.items() if not each.is_done}
        return tuple(self._missing)

    def reset(self) -> None:
        """All rows are empty."""
        for row in list(self._late):
            self.drop(row)

    def drop(self, row: int) -> None:
        """The row is empty."""
        if (late := self._late.pop(row, None)) is not None:
            late.is_dropped = True

    def fill(self, wanted: Sequence[Wanted]) -> Filled:
        """Fill these masks here."""
        words = self._fill(wanted)
        return Filled(words, errors_of(wanted))

    def fill_last(self, wanted: Sequence[Wanted]) -> Filled:
        """Fill these masks here, and return each one's last: that after all its tokens. Those of
        rows that were late once would take too long: they allow all."""
        words = np.full((len(wanted), self.num_words), -1, np.int32)
        at = [n for n, each in enumerate(wanted) if not each.constraint.was_late]
        if at:
            quick = [wanted[n] for n in at]
            ends = np.cumsum([1 + len(each.tokens) for each in quick]) - 1
            words[at] = self._fill(quick)[ends]
        return Filled(words, {})

    def close(self) -> None:
        """End the threads."""
        self.reset()
        self._threads.shutdown()
        if self._behind is not None:
            self._behind.close()

    # ------------------------------------------------------------ in the threads

    def _safely(self, fill: Callable[[Sequence[Wanted]], object], wanted: Sequence[Wanted]) -> None:
        try:
            fill(wanted)
        except BaseException as error:  # a panic in Rust is no Exception
            what = f"a mask failed: {error!r}"
            failure = error if isinstance(error, Exception) else RuntimeError(what)
            for each in wanted:  # of the step that takes these masks
                each.failure = each.failure or failure
            self._are_done(wanted)

    def _are_done(self, wanted: Sequence[Wanted]) -> None:
        with self._changed:
            for each in wanted:
                each.is_done = True
            self._changed.notify_all()

    def _fill_in_order(self, wanted: Sequence[Wanted]) -> None:
        """First all of grammars that are known to be quick; then one by one, up to a slow one."""
        quick = [each for each in wanted if each.constraint.is_quick]
        if quick:
            self._fill(quick)
        for each in wanted if len(quick) < len(wanted) else ():
            if not (each.is_done or each.is_behind):
                self._fill([each])
                if each.constraint.is_slow:
                    self._leave_behind([one for one in wanted if not one.is_done])

    def _leave_behind(self, wanted: Sequence[Wanted]) -> None:
        """Leave these to the other thread. Of a run it fills the first mask: a row that was late
        verifies no more."""
        with self._changed:
            if self._behind is None:
                self._behind = Behind(partial(self._safely, self._fill))
            for each in wanted:
                each.tokens, each.is_behind = [], True
                self._behind.put(each)
            self._changed.notify_all()

    def _fill(self, wanted: Sequence[Wanted]) -> Words:
        """The masks of all, in order; each has its own as well."""
        count = sum(1 + len(each.tokens) for each in wanted)
        words = np.zeros((count, self.num_words), np.int32)
        at, followed = 0, list[Followed]()
        for each in wanted:
            each.words = words[at : at + 1 + len(each.tokens)]
            matcher = each.constraint.advance()
            if matcher is None:
                each.constraint.fill(each.words, each.position, each.tokens)
            else:
                followed.append((matcher, at, each))
            at += 1 + len(each.tokens)
        if followed:
            self._compute(words, followed)
            _finish(words, followed)
        self._are_done(wanted)
        return words

    def _compute(self, words: Words, followed: Sequence[Followed]) -> None:
        if len(followed) == 1:
            self._fill_each(words, followed)
            return
        began, is_long = time.perf_counter(), self._is_long
        (self._fill_together if is_long else self._fill_each)(words, followed)
        took_s = time.perf_counter() - began
        self._num_together = 1 + self._num_together if is_long else 0
        # Only one by one it is seen which of them is slow.
        is_unseen = took_s > LATE_S and self._num_together >= MAX_TOGETHER
        is_long = took_s > (TOGETHER_S / 2 if is_long else TOGETHER_S)
        self._is_long = is_long and not is_unseen

    def _fill_each(self, words: Words, followed: Sequence[Followed]) -> None:
        start, row_bytes = words.ctypes.data, 4 * self.num_words
        began_s = time.thread_time()
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
            ended_s = time.thread_time()  # of no other thread, which may have the core meanwhile
            each.constraint.took(ended_s - began_s, 1 + taken)
            began_s = ended_s

    def _fill_together(self, words: Words, followed: Sequence[Followed]) -> None:
        if self._executor is None:
            import llguidance

            self._executor = llguidance.LLExecutor()
        where = words.ctypes.data, 4 * self.num_words, len(words)
        plain = [(matcher, at) for matcher, at, each in followed if not each.tokens]
        runs = [(matcher, at, each.tokens) for matcher, at, each in followed if each.tokens]
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *where)
        if runs:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(runs, *where)


class Behind:
    """A thread that fills masks for which no step waits, one row's after the other's: that row's
    first that has used it least, so that a grammar that was slow once does not wait for one that
    always is. It gives way to the threads that compute."""

    def __init__(self, fill: Callable[[Sequence[Wanted]], None]) -> None:
        self._fill = fill
        self._queue: PriorityQueue[tuple[float, int, Wanted | None]] = PriorityQueue()
        self._numbers = itertools.count()
        self._now_s = 0.0  # what the row had used whose masks it fills
        self._thread = threading.Thread(target=self._run, name="streamer-slow-masks", daemon=True)
        self._thread.start()

    def put(self, wanted: Wanted) -> None:
        """Fill these masks in their turn."""
        constraint = wanted.constraint
        constraint.used_s = max(constraint.used_s, self._now_s)
        self._queue.put((constraint.used_s, next(self._numbers), wanted))

    def close(self) -> None:
        """End the thread, after what it is filling."""
        self._queue.put((-math.inf, 0, None))
        self._thread.join()

    def _run(self) -> None:
        if sys.platform == "linux":  # where a priority is a thread's
            with suppress(OSError):  # a sandbox may forbid it
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while True:
            used_s, _, wanted = self._queue.get()
            if wanted is None:
                return
            self._now_s = used_s
            if not wanted.is_dropped:
                self._fill([wanted])


class Begun:
    """Masks of one step on their way, in order."""

    __slots__ = ("_asked", "_awaited", "_filler", "_late", "_masks")

    def __init__(
        self, filler: MaskFiller, wanted: Sequence[Wanted], late: dict[int, Wanted]
    ) -> None:
        self._filler = filler
        self._late = late
        self._asked = [(each.constraint, each.position, each.tokens) for each in wanted]
        self._masks = [late.get(each.constraint.row, each) for each in wanted]
        # A row that was late in the step before may be at a position that does not exist.
        self._awaited = [
            mask
            for mask, each in zip(self._masks, wanted, strict=True)
            if mask.position == each.position
        ]

    def wait(self, wait_s: float) -> bool:
        """Wait for those that a step waits for; False: they are not there in time."""

        def is_over() -> bool:
            return all(each.is_done or each.is_behind for each in self._awaited)

        if not is_over():
            self._filler.wait(is_over, wait_s)
        return is_over()

    def take(self, *, is_alone: bool) -> Filled:
        """The masks that are there; the rows of the others are late.

        is_alone  nothing else is in the step: wait until a row has its masks, of these or of those
                  that were late before, at most ALONE_S
        """
        missing = [each for each in (*self._masks, *self._late.values()) if not each.is_done]
        if is_alone and missing and not any(self.are_there()):
            self._filler.wait(lambda: any(each.is_done for each in missing), ALONE_S)
        are_there: Sequence[int] = self.are_there()
        for each in self._masks:
            if each.failure is not None:
                raise each.failure
        if self._filler.agree is not None:
            are_there = self._filler.agree(are_there)
        if all(are_there) and not self._late:
            return Filled(_joined(self._masks), errors_of(self._masks))
        return self._sort(are_there)

    def are_there(self) -> list[int]:
        """Of each row: 1, if its masks are there."""
        return [
            int(mask.has(position, tokens))
            for mask, (_, position, tokens) in zip(self._masks, self._asked, strict=True)
        ]

    def _sort(self, are_there: Sequence[int]) -> Filled:
        """What is there, and what is late from here on."""
        parts, errors, lacking = list[Words](), dict[int, str](), list[int]()
        at = 0
        for n, (constraint, _, tokens) in enumerate(self._asked):
            mask, size = self._masks[n], 1 + len(tokens)
            if are_there[n]:
                self._late.pop(constraint.row, None)
                parts.append(mask.words[:size])
                errors |= dict.fromkeys(range(at, at + size), mask.reason) if mask.reason else {}
            else:
                self._late[constraint.row] = mask
                constraint.was_late = True
                parts.append(np.full((size, self._filler.num_words), -1, np.int32))
                lacking += range(at, at + size)
            at += size
        return Filled(np.concatenate(parts), errors, lacking)


def _joined(masks: Sequence[Wanted]) -> Words:
    """The masks of all, in order; those that were filled together are so already."""
    whole = masks[0].words.base
    parts = [each.words for each in masks]
    is_whole = all(part.base is whole for part in parts)
    if is_whole and isinstance(whole, np.ndarray) and len(whole) == sum(map(len, parts)):
        return whole
    return np.concatenate(parts)


def errors_of(masks: Sequence[Wanted]) -> dict[int, str]:
    """Filled.errors of masks that are all there."""
    errors: dict[int, str] = {}
    at = 0
    for each in masks:
        if each.reason:
            errors |= dict.fromkeys(range(at, at + len(each.words)), each.reason)
        at += len(each.words)
    return errors


def _finish(words: Words, followed: Sequence[Followed]) -> None:
    """Add the rows' own ends to what llguidance allows, in place; and why there is no mask."""
    at, bits = followed[0][2].constraint.end_bits
    may_end: NDArray[np.bool_] = np.logical_or.reduce(words[:, at] & bits, axis=1)
    for _, start, each in followed:
        constraint = each.constraint
        each.reason = constraint.error
        for n in range(1 + len(each.tokens)):
            is_after = n > 0 and constraint.is_end(each.tokens[n - 1])
            if is_after:
                words[start + n] = constraint.ends  # llguidance stops before these
            if is_after or may_end[start + n] or each.position + n < constraint.floor:
                constraint.finish(words[start + n], each.position + n)
            if each.reason:
                words[start + n] = 0  # llguidance then allows the ends: the text is not whole
