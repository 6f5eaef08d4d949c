"""Load: how long a newcomer would wait, on a clock that the test moves."""

from __future__ import annotations

import pytest

from streamer.engine.load import Load


class Desk:
    """A Load with so many rows, and its clock."""

    def __init__(self, num_rows: int) -> None:
        self.load = Load()
        self.now = 100.0
        self.num_rows = num_rows
        self._count = 0

    def ask(self, tenant: str = "", priority: int = 0, n: int = 1) -> str:
        self._count += 1
        name = f"r{self._count}"
        self.load.arrived(name, priority=priority, tenant=tenant, n=n, now=self.now)
        return name

    def move(self, name: str, is_scheduled: bool = True) -> None:
        self.load.moved(name, is_scheduled=is_scheduled, now=self.now)

    def end(self, name: str) -> None:
        self.load.ended(name, self.now)

    def run(self, *names: str, seconds: float) -> None:
        for name in names:
            self.move(name)
        self.now += seconds
        for name in names:
            self.end(name)

    def wait_s(self, tenant: str = "", priority: int = 0, n: int = 1) -> float:
        idle = self.num_rows - self.load.num_rows
        return self.load.wait_s(priority, tenant, n, idle, self.now)

    def fill(self) -> None:
        """All rows taken by requests of 2 s, after as many that are over."""
        for _ in range(2):
            names = [self.ask() for _ in range(self.num_rows)]
            self.run(*names, seconds=2.0)
        for _ in range(self.num_rows):
            self.move(self.ask())


def test_a_wait_is_what_is_before_at_the_rate_at_which_rows_come_free() -> None:
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
    desk.now += 0.6  # blocks are what they wait for: the rows that run are all there are
    assert desk.wait_s() == pytest.approx(3 * 0.5)
    new = Desk(1)
    new.move(new.ask())
    new.ask()
    assert new.wait_s() == 0.0
    new.now += 3.0  # longer than nothing: what runs tells that
    assert new.wait_s() == pytest.approx(6.0)


def test_answers_that_became_longer_show_before_the_first_has_ended() -> None:
    desk = Desk(2)
    desk.fill()
    desk.ask()
    assert desk.wait_s() == pytest.approx(2.0)
    desk.now += 30.0
    assert desk.wait_s() == pytest.approx(30.0)


def test_tenants_take_turns_and_priorities_go_first() -> None:
    desk = Desk(1)
    desk.fill()
    for _ in range(50):
        desk.ask("many")
    desk.ask("late", priority=1)
    assert desk.wait_s("many") == pytest.approx(2.0 * 51)
    assert desk.wait_s("few") == pytest.approx(2.0 * 2)  # one of the many, and itself
    assert desk.wait_s("few", priority=-1) == pytest.approx(2.0)
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
    assert desk.load.mean_s(desk.now) == pytest.approx(2.0)  # it held nothing, so says nothing
