"""Masks that take long: no step waits for them, and they are the same when they come."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from streamer.constraints import filler as module
from streamer.constraints.filler import Behind, MaskFiller, Wanted
from streamer.constraints.grammars import SLOW_S, TRIAL, Compiled, Grammars, Vocabulary
from streamer.constraints.masks import MAX_BEHIND, Constraint
from streamer.core.plan import RowJoin
from streamer.core.sampling import Grammar, SamplingParams

END, SIZE = 256, 257
TOKENS = [bytes([i]) for i in range(256)] + [b""]
DEADLINE_S = 30.0


@pytest.fixture
def grammars() -> Grammars:
    return Grammars(Vocabulary(TOKENS, {END: b"<end>"}, (END,), lambda text: list(text.encode())))


class Held(Constraint):
    """One whose masks are not filled before its gate is open; `fails`: what it raises then."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.gate, self.begun = threading.Event(), threading.Event()
        self.fails: BaseException | None = None

    def advance(self) -> Any:
        self.begun.set()
        assert self.gate.wait(DEADLINE_S)
        if self.fails is not None:
            raise self.fails
        return super().advance()


class Rows:
    """Rows with a regular expression each, all held; row i has the i-th."""

    def __init__(self, grammars: Grammars, *patterns: str) -> None:
        self.filler = MaskFiller(SIZE)
        self.compiled = [grammars.compile(Grammar("regex", pattern)) for pattern in patterns]
        self.rows = [
            Held(compiled, join(row), grammars.vocabulary, SIZE)
            for row, compiled in enumerate(self.compiled)
        ]

    def open(self, *rows: int) -> None:
        for row in rows:
            self.rows[row].gate.set()

    def wanted(self, *rows: int, position: int = 1) -> list[Wanted]:
        return [Wanted(self.rows[row], position) for row in rows]

    def texts(self, words: Any) -> list[str]:
        """The letters that each mask allows; all of them: "*"."""
        bits = np.unpackbits(words.view(np.uint8), axis=1, count=SIZE, bitorder="little")
        found = ["".join(map(chr, row.nonzero()[0])) for row in bits]
        return ["*" if len(each) == SIZE else each for each in found]


def join(row: int, output: tuple[int, ...] = ()) -> RowJoin:
    params = SamplingParams()
    return RowJoin(row, "r", 0, (7, *output), 1, 0, (), params, frozenset((END,)))


@pytest.fixture
def rows(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rows]:
    """Whoever waits for them waits until something comes, and no mask is slow of which a test does
    not say so, however slow the machine is."""
    monkeypatch.setattr(module, "ALONE_S", DEADLINE_S)
    for name in ("grammars", "masks"):
        monkeypatch.setattr(f"streamer.constraints.{name}.SLOW_S", 0.5)
    made = Rows(grammars, "[ab]x*", "[cd]x*", "[ef]x*", "[gh]x*")
    yield made
    made.open(*range(len(made.rows)))
    made.filler.close()


def test_what_is_late_comes_later_and_is_the_same(rows: Rows) -> None:
    rows.compiled[1].took(1.0, 1)
    rows.open(0, 2)
    begun = rows.filler.begin(rows.wanted(0, 1, 2))
    assert begun.wait(DEADLINE_S)
    filled = begun.take(is_alone=False)
    assert rows.texts(filled.words) == ["ab", "*", "ef"]
    assert list(filled.late) == [1]
    assert rows.filler.late_rows() == (1,)
    again = rows.filler.begin(rows.wanted(1, position=2)).take(is_alone=False)
    assert list(again.late) == [0]  # there is no such position yet
    rows.open(1)
    rows.filler.wait_for_late()
    assert rows.filler.late_rows() == ()
    begun = rows.filler.begin(rows.wanted(1))
    assert begun.wait(0.0)
    assert rows.texts(begun.take(is_alone=False).words) == ["cd"]
    assert [row.was_late for row in rows.rows] == [False, True, False, False]


def test_masks_come_where_a_sandbox_forbids_priorities(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that they came from ended at once, and their rows waited without end."""

    def forbidden(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(module.os, "setpriority", forbidden)
    rows.compiled[0].took(1.0, 1)
    rows.open(0)
    rows.filler.begin(rows.wanted(0)).take(is_alone=False)
    rows.filler.wait(lambda: not rows.filler.late_rows(), DEADLINE_S)
    assert rows.filler.late_rows() == ()
    assert rows.texts(rows.filler.begin(rows.wanted(0)).take(is_alone=False).words) == ["ab"]


def test_a_mask_that_nothing_was_known_of_is_waited_for_only_so_long(rows: Rows) -> None:
    rows.open(0)
    begun = rows.filler.begin(rows.wanted(0, 1, 2))
    rows.filler.wait(lambda: begun.are_there()[0] == 1, DEADLINE_S)
    assert not begun.wait(0.0)
    assert list(begun.take(is_alone=False).late) == [1, 2]
    rows.open(1, 2)
    rows.filler.wait(lambda: not rows.filler.late_rows(), DEADLINE_S)
    begun = rows.filler.begin(rows.wanted(1, 2))
    assert rows.texts(begun.take(is_alone=False).words) == ["cd", "ef"]


def test_of_a_late_run_the_first_mask_comes(rows: Rows) -> None:
    rows.compiled[0].took(1.0, 1)
    run = [Wanted(rows.rows[0], 1, [ord("a"), ord("x")])]
    filled = rows.filler.begin(run).take(is_alone=False)
    assert rows.texts(filled.words) == ["*"] * 3
    assert list(filled.late) == [0, 1, 2]
    rows.open(0)
    rows.filler.wait(lambda: not rows.filler.late_rows(), DEADLINE_S)
    run = [Wanted(rows.rows[0], 1, [ord("a")])]
    assert list(rows.filler.begin(run).take(is_alone=False).late) == [0, 1]
    assert rows.texts(rows.filler.begin(rows.wanted(0)).take(is_alone=False).words) == ["ab"]


def test_alone_a_step_waits(rows: Rows) -> None:
    rows.compiled[0].took(1.0, 1)
    begun = rows.filler.begin(rows.wanted(0))
    assert begun.wait(0.0)
    opens = threading.Thread(
        target=lambda: rows.rows[0].begun.wait(DEADLINE_S) and rows.open(0), daemon=True
    )
    opens.start()
    assert rows.texts(begun.take(is_alone=True).words) == ["ab"]
    opens.join(DEADLINE_S)


def test_a_row_that_has_its_mask_and_can_not_draw_ends_no_wait_for_another(rows: Rows) -> None:
    """While it waits for a block, say, plans of nothing followed each other without a pause."""
    for compiled in rows.compiled[:2]:
        compiled.took(1.0, 1)
    rows.filler.begin(rows.wanted(0, 1)).take(is_alone=False)
    assert rows.filler.late_rows() == (0, 1)
    rows.open(0)
    began_s = time.monotonic()
    rows.filler.wait_for_late()
    rows.filler.wait_for_late()  # as where row 0 has its mask after a plan without it, before this
    assert time.monotonic() - began_s < DEADLINE_S
    assert rows.filler.late_rows() == (1,)
    waits = threading.Thread(target=rows.filler.wait_for_late, daemon=True)
    waits.start()
    waits.join(0.05)
    assert waits.is_alive()
    rows.open(1)
    waits.join(DEADLINE_S)
    assert rows.filler.late_rows() == ()
    rows.filler.wait_for_late()  # none is late: at once


def test_ranks_take_what_all_of_them_have(rows: Rows) -> None:
    rows.open(0, 1)
    others = [[1, 0], [1]]
    rows.filler.agree = lambda mine: [min(pair) for pair in zip(mine, others.pop(0), strict=True)]
    begun = rows.filler.begin(rows.wanted(0, 1))
    begun.wait(DEADLINE_S)
    assert list(begun.take(is_alone=False).late) == [1]
    assert rows.filler.late_rows() == ()
    begun = rows.filler.begin(rows.wanted(1))
    assert rows.texts(begun.take(is_alone=False).words) == ["cd"]


class Panic(BaseException):
    """As pyo3's: no Exception."""


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize("error", [MemoryError("no masks"), Panic("no masks")])
def test_what_fails_in_a_thread_fails_the_step(
    rows: Rows, is_slow: bool, error: BaseException
) -> None:
    rows.rows[0].fails = error
    if is_slow:
        rows.compiled[0].took(1.0, 1)
    begun = rows.filler.begin(rows.wanted(0, 1))
    rows.open(0, 1)
    rows.filler.wait(lambda: all(begun.are_there()), DEADLINE_S)
    with pytest.raises((MemoryError, RuntimeError), match="no masks"):
        begun.take(is_alone=False)


def test_an_empty_row_waits_for_nothing(rows: Rows) -> None:
    for compiled in rows.compiled:
        compiled.took(1.0, 1)
    rows.filler.begin(rows.wanted(0, 1)).take(is_alone=False)
    assert rows.rows[0].begun.wait(DEADLINE_S)
    rows.filler.drop(1)
    assert rows.filler.late_rows() == (0,)
    rows.open(0)
    rows.filler.wait_for_late()
    rows.filler.begin(rows.wanted(2)).take(is_alone=False)
    assert rows.rows[2].begun.wait(DEADLINE_S)
    assert not rows.rows[1].begun.is_set()


def test_the_row_that_used_the_thread_least_is_next(rows: Rows) -> None:
    order: list[int] = []
    done = threading.Event()

    def fill(wanted: Any) -> None:
        (each,) = wanted
        each.constraint.advance()
        order.append(each.constraint.row)
        if len(order) == 9:
            done.set()

    behind = Behind(fill)
    behind.put(*rows.wanted(3))
    assert rows.rows[3].begun.wait(DEADLINE_S)
    for _ in range(4):
        behind.put(*rows.wanted(0))
        rows.rows[0].used_s += 5.0
        behind.put(*rows.wanted(1))
    rows.open(0, 1, 3)
    assert done.wait(DEADLINE_S)
    behind.close()
    assert order[:6] == [3, 0, 1, 1, 1, 1]


def test_a_grammar_is_tried_longer_each_time_that_it_is_slow(grammars: Grammars) -> None:
    compiled: Compiled = grammars.compile(Grammar("regex", "a+"))
    assert not compiled.is_quick
    assert not compiled.is_slow
    compiled.took(SLOW_S, TRIAL)
    assert compiled.is_quick
    for more in (2, 4, 8):
        compiled.took(2 * SLOW_S, 1)
        assert compiled.is_slow
        compiled.took(SLOW_S, more * TRIAL - 1)
        assert not compiled.is_quick
        compiled.took(SLOW_S, 1)
        assert compiled.is_quick


def test_a_long_answer_that_comes_back_is_followed_behind_the_step(grammars: Grammars) -> None:
    compiled = grammars.compile(Grammar("regex", "a+"))
    compiled.took(SLOW_S, TRIAL)
    long = (ord("a"),) * (MAX_BEHIND + 1)
    row = Constraint(compiled, join(0, long), grammars.vocabulary, SIZE)
    assert row.is_slow
    MaskFiller(SIZE).fill([Wanted(row, len(long) + 1)])
    assert row.is_quick
