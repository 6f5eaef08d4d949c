"""Pause, and cancel in every state: the request is in no later plan, all its blocks are freed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from streamer.core.plan import FinishReason
from streamer.core.request import Status
from tests.core.driver import RECOMPUTE, SWAP, Driver, make_config


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + i) % 97 for i in range(length)]


def test_a_paused_request_gives_up_its_row_and_goes_on_where_it_was() -> None:
    driver = Driver(make_config())
    driver.add(prompt(5), max_tokens=10)
    for _ in range(3):
        driver.step()
    driver.pause("r0")
    driver.step()
    assert driver.plans[-1].num_rows == 0
    assert driver.status("r0") is Status.PAUSED
    assert not driver.step()  # nothing to do: an idle engine
    driver.resume("r0")
    driver.step()
    assert driver.plans[-1].num_tokens == 1  # its blocks were still there
    driver.drain()


def test_under_pressure_a_paused_reader_loses_its_blocks_first() -> None:
    driver = Driver(make_config(num_blocks=20), costs=RECOMPUTE)
    driver.add(prompt(24), max_tokens=12)
    driver.step()
    driver.step()
    driver.pause("r0")
    driver.add(prompt(30, start=50), max_tokens=30)
    while driver.status("r0") is Status.PAUSED:
        assert driver.step()
    assert driver.status("r0") is Status.PREEMPTED
    assert driver.status("r1") is Status.RUNNING
    driver.drain()


def waiting(driver: Driver) -> None:
    """r0 waits: requests of a higher priority take the rows."""
    for start in range(6):
        driver.add([start], max_tokens=20, priority=-1)
    driver.step()


def prefilling(driver: Driver) -> None:
    driver.step()


def decoding(driver: Driver) -> None:
    for _ in range(4):
        driver.step()


def paused(driver: Driver) -> None:
    decoding(driver)
    driver.pause("r0")


def crowded_out(driver: Driver) -> None:
    """r0 is paused, and another request needs its blocks."""
    paused(driver)
    driver.add(prompt(40, start=50), max_tokens=20)
    driver.step()


def swapping(driver: Driver) -> None:
    paused(driver)
    driver.flush_copies = False
    driver.add(prompt(40, start=50), max_tokens=20)
    driver.step()


def swapped(driver: Driver) -> None:
    crowded_out(driver)
    while driver.status("r0") is Status.SWAPPING_OUT:
        assert driver.step()


def swapping_in(driver: Driver) -> None:
    swapped(driver)
    driver.cancel("r1")
    driver.step()
    driver.flush_copies = False
    driver.resume("r0")
    driver.step()


STATES: list[tuple[Callable[[Driver], None], Status, dict[str, float]]] = [
    (waiting, Status.WAITING, SWAP),
    (prefilling, Status.RUNNING, SWAP),
    (decoding, Status.RUNNING, SWAP),
    (paused, Status.PAUSED, SWAP),
    (swapping, Status.SWAPPING_OUT, SWAP),
    (swapped, Status.SWAPPED, SWAP),
    (swapping_in, Status.SWAPPING_IN, SWAP),
    (crowded_out, Status.PREEMPTED, RECOMPUTE),
]


@pytest.mark.parametrize(
    ("reach", "status", "costs"), STATES, ids=[reach.__name__ for reach, _, _ in STATES]
)
@pytest.mark.parametrize("depth", [0, 1])
def test_cancel_in_every_state_ends_in_no_later_plan_with_every_block_back(
    reach: Callable[[Driver], None], status: Status, costs: dict[str, float], depth: int
) -> None:
    driver = Driver(make_config(num_blocks=16), costs=costs, depth=depth)
    driver.add(prompt(30), max_tokens=20)
    reach(driver)
    assert driver.status("r0") is status
    driver.cancel("r0")
    last = driver.plans[-1].number if driver.plans else 0
    driver.drain()  # checks that every block of both pools is free again
    assert driver.finishes["r0", 0].reason is FinishReason.CANCELLED
    later = driver.plans[last:]
    assert later
    assert all("r0" not in driver.resident[plan.number] for plan in later)


def test_a_cancel_while_its_plan_is_under_way_drops_what_the_plan_draws() -> None:
    driver = Driver(make_config())
    driver.add(prompt(5), max_tokens=10)
    driver.step()
    driver.launch()
    driver.cancel("r0")
    output = driver.collect()
    assert output.tokens == ()
    assert [f.num_tokens for f in output.finishes] == [1]
    driver.drain()
