"""Load: how long a new request would wait, on a clock that the test moves."""

from __future__ import annotations

import pytest

from streamer.engine.load import Load


class LoadAndClock:
    """A Load of `num_rows` rows, and its clock."""

    def __init__(self, num_rows: int) -> None:
        self.load = Load()
        self.now = 100.0
        self.num_rows = num_rows
        self._count = 0

    def ask(self, tenant: str = "", priority: int = 0, n: int = 1) -> str:
        self._count += 1
        name = f"r{self._count}"
        self.load.arrived(name, priority=priority, tenant=tenant, n=n)
        return name

    def move(self, name: str, is_scheduled: bool = True) -> None:
        self.load.moved(name, is_scheduled=is_scheduled, now=self.now)

    def step(self, count: int = 1, seconds: float = 0.0) -> None:
        """`count` steps of `seconds` each, in which no request begins."""
        for _ in range(count):
            self.now += seconds
            self.load.stepped(self.now)

    def end(self, name: str) -> None:
        self.load.ended(name, self.now)

    def run(self, *names: str, seconds: float) -> None:
        for name in names:
            self.move(name)
        self.now += seconds
        for name in names:
            self.end(name)

    def wait_s(self, tenant: str = "", priority: int = 0, n: int = 1) -> float:
        idle = self.load.num_idle(priority, self.num_rows)
        return self.load.wait_s(priority, tenant, n, idle, self.now)

    def fill(self) -> None:
        """All rows taken by requests of 2 s, after as many that have ended."""
        for _ in range(2):
            names = [self.ask() for _ in range(self.num_rows)]
            self.run(*names, seconds=2.0)
        for _ in range(self.num_rows):
            self.move(self.ask())


def test_the_wait_is_the_rows_before_over_the_rate_at_which_rows_come_free() -> None:
    waiting_load = LoadAndClock(4)
    assert waiting_load.wait_s() == 0.0
    waiting_load.fill()
    assert waiting_load.wait_s() == pytest.approx(0.5)  # 4 rows of 2 s: one is free every 0.5 s
    for _ in range(7):
        waiting_load.ask()
    assert waiting_load.wait_s() == pytest.approx(4.0)
    assert waiting_load.wait_s(n=3) == pytest.approx(5.0)


def test_idle_rows_are_no_wait_and_nothing_is_known_before_anything_ran() -> None:
    waiting_load = LoadAndClock(4)
    waiting_load.fill()
    waiting_load.num_rows = 6
    waiting_load.ask()
    assert waiting_load.wait_s() == 0.0
    waiting_load.ask()
    assert waiting_load.wait_s() == pytest.approx(0.5)
    waiting_load.num_rows = 100
    assert waiting_load.wait_s() == 0.0
    waiting_load.step(11, seconds=0.1)  # requests wait for blocks: only the rows that run count
    assert waiting_load.wait_s() == pytest.approx(3 * 0.5)
    new = LoadAndClock(1)
    new.move(new.ask())
    new.ask()
    assert new.wait_s() == 0.0
    new.now += 3.0  # an answer that still runs has taken at least 3 s
    assert new.wait_s() == pytest.approx(6.0)


def test_answers_that_became_longer_show_before_the_first_has_ended() -> None:
    waiting_load = LoadAndClock(2)
    waiting_load.fill()
    waiting_load.ask()
    assert waiting_load.wait_s() == pytest.approx(2.0)
    waiting_load.now += 30.0
    assert waiting_load.wait_s() == pytest.approx(30.0)


def test_a_slow_step_beside_idle_rows_is_no_queue() -> None:
    waiting_load = LoadAndClock(4)
    waiting_load.fill()
    waiting_load.num_rows = 8
    waiting_load.ask()
    waiting_load.step(seconds=60.0)  # a long prompt was being computed when it came
    assert waiting_load.wait_s() == 0.0
    waiting_load.step(3, seconds=60.0)
    assert waiting_load.wait_s() == 0.0


def test_prompts_one_after_the_other_beside_idle_rows_are_waited_for_at_their_own_rate() -> None:
    waiting_load = LoadAndClock(4)
    waiting_load.fill()
    waiting_load.num_rows = 64
    waiting = [waiting_load.ask() for _ in range(10)]
    waiting_load.step(5, seconds=0.1)
    for name in waiting[:6]:  # one begins every 0.1 s, though rows come free every 0.5 s only
        waiting_load.move(name)
        waiting_load.step(seconds=0.1)
    assert waiting_load.wait_s() == pytest.approx(5 * 0.1, rel=0.3)


def test_a_request_paused_before_it_ran_delays_no_other() -> None:
    waiting_load = LoadAndClock(1)
    waiting_load.fill()
    held = waiting_load.ask("a", n=3)
    waiting_load.load.hold(held, True)
    waiting_load.step(10, seconds=1.0)
    assert waiting_load.wait_s("a", n=1) == pytest.approx(10.0)
    assert (waiting_load.load.num_waiting_rows, waiting_load.load.waiting_rows("a")) == (
        3,
        3,
    )  # it holds a place
    waiting_load.load.hold(held, False)
    assert waiting_load.wait_s("a", n=1) == pytest.approx(40.0)
    waiting_load.load.hold(held, True)
    waiting_load.move(held, False)  # it began just then
    assert (
        waiting_load.load.num_waiting,
        waiting_load.load.waiting_rows("a"),
        waiting_load.load.num_rows,
    ) == (0, 0, 1)
    waiting_load.load.hold(held, False)
    waiting_load.end(held)
    assert waiting_load.wait_s("a") == pytest.approx(10.0)


def test_rows_of_lower_priorities_are_no_wait() -> None:
    """Lower priorities give way; what was preempted needs its rows back later."""
    waiting_load = LoadAndClock(2)
    waiting_load.fill()
    for _ in range(2):
        waiting_load.move(waiting_load.ask(priority=5))
        waiting_load.ask(priority=5)
    waiting_load.step(20, seconds=1.0)
    assert waiting_load.wait_s(priority=5) == pytest.approx(3 * 20.0 / 4)
    assert waiting_load.wait_s() == pytest.approx(
        20.0 / 4
    )  # both rows are taken by its own priority
    assert waiting_load.wait_s(priority=-1) == waiting_load.wait_s(priority=-1, n=2) == 0.0
    assert waiting_load.wait_s(priority=-1, n=3) > 0.0


def test_tenants_take_turns_and_priorities_go_first() -> None:
    waiting_load = LoadAndClock(1)
    waiting_load.fill()
    for _ in range(50):
        waiting_load.ask("many")
    waiting_load.ask("late", priority=1)
    assert waiting_load.wait_s("many") == pytest.approx(2.0 * 51)
    assert waiting_load.wait_s("few") == pytest.approx(2.0 * 2)  # one of the many, and itself
    assert waiting_load.wait_s("few", priority=-1) == 0.0  # what runs gives way
    assert waiting_load.wait_s("few", priority=1) == pytest.approx(2.0 * 52)
    assert waiting_load.load.waiting_rows("many") == 50
    assert waiting_load.load.waiting_rows("few") == 0


def test_a_paused_request_holds_no_row_and_a_departed_one_delays_no_other() -> None:
    waiting_load = LoadAndClock(1)
    first = waiting_load.ask()
    waiting_load.move(first)
    waiting_load.now += 1.0
    waiting_load.move(first, False)
    waiting_load.now += 60.0
    assert waiting_load.load.num_rows == 0
    waiting_load.move(first)
    waiting_load.now += 1.0
    waiting_load.end(first)
    assert waiting_load.load.mean_s(waiting_load.now) == pytest.approx(2.0)
    left = waiting_load.ask(n=3)
    assert (waiting_load.load.num_waiting, waiting_load.load.num_waiting_rows) == (1, 3)
    waiting_load.end(left)
    assert (waiting_load.load.num_waiting, waiting_load.load.num_waiting_rows) == (0, 0)
    assert waiting_load.load.mean_s(waiting_load.now) == pytest.approx(
        2.0
    )  # it held no row, so it does not count
