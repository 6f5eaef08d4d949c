"""Load: how long a new request would wait, on a clock that the test moves."""

from __future__ import annotations

import pytest

from streamer.engine.load import Load


class Desk:
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
    desk = Desk(4)
    assert desk.wait_s() == 0.0
    desk.fill()
    assert desk.wait_s() == pytest.approx(0.5)  # 4 rows of 2 s: one is free every 0.5 s
    for _ in range(7):
        desk.ask()
    assert desk.wait_s() == pytest.approx(4.0)
    assert desk.wait_s(n=3) == pytest.approx(5.0)


def test_idle_rows_are_no_wait_and_nothing_is_known_before_anything_ran() -> None:
    desk = Desk(4)
    desk.fill()
    desk.num_rows = 6
    desk.ask()
    assert desk.wait_s() == 0.0
    desk.ask()
    assert desk.wait_s() == pytest.approx(0.5)
    desk.num_rows = 100
    assert desk.wait_s() == 0.0
    desk.step(11, seconds=0.1)  # requests wait for blocks: only the rows that run count
    assert desk.wait_s() == pytest.approx(3 * 0.5)
    new = Desk(1)
    new.move(new.ask())
    new.ask()
    assert new.wait_s() == 0.0
    new.now += 3.0  # an answer that still runs has taken at least 3 s
    assert new.wait_s() == pytest.approx(6.0)


def test_answers_that_became_longer_show_before_the_first_has_ended() -> None:
    desk = Desk(2)
    desk.fill()
    desk.ask()
    assert desk.wait_s() == pytest.approx(2.0)
    desk.now += 30.0
    assert desk.wait_s() == pytest.approx(30.0)


def test_a_slow_step_beside_idle_rows_is_no_queue() -> None:
    desk = Desk(4)
    desk.fill()
    desk.num_rows = 8
    desk.ask()
    desk.step(seconds=60.0)  # a long prompt was being computed when it came
    assert desk.wait_s() == 0.0
    desk.step(3, seconds=60.0)
    assert desk.wait_s() == 0.0


def test_prompts_one_after_the_other_beside_idle_rows_are_waited_for_at_their_own_rate() -> None:
    desk = Desk(4)
    desk.fill()
    desk.num_rows = 64
    waiting = [desk.ask() for _ in range(10)]
    desk.step(5, seconds=0.1)
    for name in waiting[:6]:  # one begins every 0.1 s, though rows come free every 0.5 s only
        desk.move(name)
        desk.step(seconds=0.1)
    assert desk.wait_s() == pytest.approx(5 * 0.1, rel=0.3)


def test_a_request_paused_before_it_ran_delays_no_other() -> None:
    desk = Desk(1)
    desk.fill()
    held = desk.ask("a", n=3)
    desk.load.hold(held, True)
    desk.step(10, seconds=1.0)
    assert desk.wait_s("a", n=1) == pytest.approx(10.0)
    assert (desk.load.num_waiting_rows, desk.load.waiting_rows("a")) == (3, 3)  # it holds a place
    desk.load.hold(held, False)
    assert desk.wait_s("a", n=1) == pytest.approx(40.0)
    desk.load.hold(held, True)
    desk.move(held, False)  # it began just then
    assert (desk.load.num_waiting, desk.load.waiting_rows("a"), desk.load.num_rows) == (0, 0, 1)
    desk.load.hold(held, False)
    desk.end(held)
    assert desk.wait_s("a") == pytest.approx(10.0)


def test_rows_of_lower_priorities_are_no_wait() -> None:
    """Lower priorities give way; what was preempted needs its rows back later."""
    desk = Desk(2)
    desk.fill()
    for _ in range(2):
        desk.move(desk.ask(priority=5))
        desk.ask(priority=5)
    desk.step(20, seconds=1.0)
    assert desk.wait_s(priority=5) == pytest.approx(3 * 20.0 / 4)
    assert desk.wait_s() == pytest.approx(20.0 / 4)  # both rows are taken by its own priority
    assert desk.wait_s(priority=-1) == desk.wait_s(priority=-1, n=2) == 0.0
    assert desk.wait_s(priority=-1, n=3) > 0.0


def test_tenants_take_turns_and_priorities_go_first() -> None:
    desk = Desk(1)
    desk.fill()
    for _ in range(50):
        desk.ask("many")
    desk.ask("late", priority=1)
    assert desk.wait_s("many") == pytest.approx(2.0 * 51)
    assert desk.wait_s("few") == pytest.approx(2.0 * 2)  # one of the many, and itself
    assert desk.wait_s("few", priority=-1) == 0.0  # what runs gives way
    assert desk.wait_s("few", priority=1) == pytest.approx(2.0 * 52)
    assert desk.load.waiting_rows("many") == 50
    assert desk.load.waiting_rows("few") == 0


def test_a_paused_request_holds_no_row_and_what_left_the_queue_is_not_before() -> None:
    desk = Desk(1)
    first = desk.ask()
    desk.move(first)
    desk.now += 1.0
    desk.move(first, False)
    desk.now += 60.0
    assert desk.load.num_rows == 0
    desk.move(first)
    desk.now += 1.0
    desk.end(first)
    assert desk.load.mean_s(desk.now) == pytest.approx(2.0)
    left = desk.ask(n=3)
    assert (desk.load.num_waiting, desk.load.num_waiting_rows) == (1, 3)
    desk.end(left)
    assert (desk.load.num_waiting, desk.load.num_waiting_rows) == (0, 0)
    assert desk.load.mean_s(desk.now) == pytest.approx(2.0)  # it held no row, so it does not count
