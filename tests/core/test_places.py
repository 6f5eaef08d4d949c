"""Places in the queue: who is told, when, and in what order; nobody else costs anything."""

from __future__ import annotations

import pytest

from streamer.core import places
from streamer.core.plan import Add, NoticeKind
from streamer.core.sampling import SamplingParams
from tests.core.driver import Driver, make_config


def one_at_a_time() -> Driver:
    return Driver(make_config(max_num_seqs=1))


def add(driver: Driver, place: int | None, priority: int = 0) -> str:
    """A request of two tokens whose reader was told this place."""
    name = f"r{len(driver.adds)}"
    params = SamplingParams(max_tokens=2, seed=1)
    made = Add(name, (len(driver.adds), 1), params, priority=priority, place=place)
    driver.command(made)
    driver.adds[name], driver.tokens[name, 0] = made, []
    return name


def news(driver: Driver) -> dict[str, int]:
    found = driver.scheduler.news_of_places()
    assert all(n.kind is NoticeKind.WAITING for n in found)
    return {n.request_id: n.position for n in found}


def test_places_fall_as_the_queue_moves_and_are_told_once() -> None:
    driver = one_at_a_time()
    for i in range(4):
        add(driver, i)
    assert news(driver) == {}  # they were told
    driver.step()
    assert news(driver) == {"r1": 0, "r2": 1, "r3": 2}
    assert news(driver) == {}
    driver.step()
    driver.cancel("r2")
    assert news(driver) == {"r3": 1}
    driver.drain()
    assert not driver.scheduler.has_told
    assert news(driver) == {}


def test_who_is_not_told_counts_for_the_others() -> None:
    driver = one_at_a_time()
    for place in (None, None, 2):
        add(driver, place)
    driver.step()
    assert news(driver) == {"r2": 1}
    driver.drain()
    for _ in range(3):
        add(driver, None)
    assert not driver.scheduler.has_told
    driver.drain()


def test_who_comes_before_pushes_back() -> None:
    driver = one_at_a_time()
    for i in range(3):
        add(driver, i, priority=1)
    driver.step()
    assert news(driver) == {"r1": 0, "r2": 1}
    add(driver, None, priority=0)
    assert news(driver) == {"r1": 1, "r2": 2}
    driver.drain()


def test_who_is_held_waits_nowhere_and_is_told_when_it_is_back() -> None:
    driver = one_at_a_time()
    for i in range(3):
        add(driver, i)
    driver.pause("r1")
    driver.step()
    assert news(driver) == {"r2": 0}
    driver.resume("r1")
    assert news(driver) == {"r1": 0, "r2": 1}
    driver.drain()


def test_a_round_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = one_at_a_time()
    for _ in range(6):
        add(driver, 99)
    monkeypatch.setattr(places, "MAX_TOLD", 3)
    assert news(driver) == {"r0": 0, "r1": 1, "r2": 2}
    monkeypatch.setattr(places, "MAX_TOLD", 512)
    monkeypatch.setattr(places, "MAX_WALKED", 5)
    assert news(driver) == {}
    driver.step()
    assert news(driver) == {"r1": 0, "r2": 1, "r3": 2, "r4": 3, "r5": 4}
    driver.drain()
