"""When blocks run out: who gives way, how, and what comes back, on the simulated device."""

from __future__ import annotations

import pytest

from streamer.core.plan import NoticeKind
from streamer.core.request import Status
from tests.core.driver import RECOMPUTE, SWAP, Driver, make_config, prompt


def pressed(costs: dict[str, float], *, depth: int = 0) -> Driver:
    """Four requests that need 28 blocks of 20, all admitted while they are small."""
    config = make_config(num_blocks=20, max_num_batched_tokens=32)
    driver = Driver(config, costs=costs, depth=depth)
    for i in range(4):
        driver.add(prompt(8, start=20 * i), max_tokens=20)
    return driver


@pytest.mark.parametrize("depth", [0, 1])
def test_costs_decide_between_swap_and_recompute(depth: int) -> None:
    driver = pressed(SWAP, depth=depth)
    driver.drain()
    stats = driver.outputs[-1].stats
    assert stats.preemptions_swap > 0
    assert stats.preemptions_recompute == 0
    assert stats.swapped_in_blocks > 0
    driver = pressed(RECOMPUTE, depth=depth)
    driver.drain()
    stats = driver.outputs[-1].stats
    assert stats.preemptions_recompute > 0
    assert stats.preemptions_swap == stats.swapped_out_blocks == 0


def test_a_full_host_pool_falls_back_to_recompute() -> None:
    driver = Driver(make_config(num_blocks=20, num_host_blocks=1), costs=SWAP)
    for i in range(4):
        driver.add(prompt(8, start=20 * i), max_tokens=20)
    driver.drain()
    assert driver.outputs[-1].stats.preemptions_recompute > 0


def test_a_clean_host_copy_is_not_copied_twice() -> None:
    driver = Driver(make_config(num_blocks=17), costs=SWAP)
    victim = driver.add(prompt(16), max_tokens=20)
    for _ in range(3):
        driver.step()
    other = driver.add(prompt(30, start=50), max_tokens=30)
    driver.pause(victim)
    moved = []
    for _ in range(2):
        for _ in range(300):
            driver.step()
            if driver.status(victim) is Status.SWAPPED:
                break
        moved.append(driver.outputs[-1].stats.swapped_out_blocks)
        driver.cancel(other)
        driver.resume(victim)
        while driver.status(victim) is not Status.RUNNING:
            driver.step()
        driver.pause(victim)
        other = driver.add(prompt(40, start=13), max_tokens=24)
    driver.drain()
    assert moved[0] >= 4
    assert moved[1] - moved[0] <= 1  # only what was not a full block then


def test_a_preempted_request_comes_back_before_new_ones_of_its_priority() -> None:
    driver = pressed(RECOMPUTE)
    while not any(driver.status(f"r{i}") is Status.PREEMPTED for i in range(4)):
        driver.step()
    preempted = next(f"r{i}" for i in range(4) if driver.status(f"r{i}") is Status.PREEMPTED)
    late = driver.add(prompt(2, start=90), max_tokens=2)
    while driver.status(preempted) is Status.PREEMPTED:
        assert driver.status(late) is Status.WAITING
        driver.step()
    driver.drain()


@pytest.mark.parametrize(("length", "status"), [(28, Status.RUNNING), (29, Status.WAITING)])
def test_admission_keeps_a_watermark_of_free_blocks_beside_others(
    length: int, status: Status
) -> None:
    """8 of 16 blocks are free and one must stay so: 7 blocks enter, 8 wait."""
    driver = Driver(make_config(num_blocks=16, max_num_batched_tokens=64))
    driver.add(prompt(30), max_tokens=4)
    driver.step()
    driver.add(prompt(length, start=40), max_tokens=3)
    driver.step()
    assert driver.scheduler.state.watermark == 1
    assert driver.status("r1") is status
    driver.drain()


def test_alone_it_needs_no_watermark() -> None:
    driver = Driver(make_config(num_blocks=8, max_num_batched_tokens=64))
    driver.add(prompt(30), max_tokens=2)
    driver.step()
    assert driver.status("r0") is Status.RUNNING
    driver.drain()


@pytest.mark.parametrize(("length", "status"), [(38, Status.RUNNING), (39, Status.PREEMPTED)])
def test_a_preempted_request_comes_back_with_headroom(length: int, status: Status) -> None:
    """It wants its 4 blocks, the watermark and one to grow into: 6 are enough, 5 are not."""
    config = make_config(num_blocks=16, max_num_batched_tokens=64, max_num_seqs=2)
    driver = Driver(config, costs=RECOMPUTE)
    driver.add(prompt(14), max_tokens=9, priority=5)
    driver.add(prompt(length, start=40), max_tokens=9)
    driver.step()
    driver.add(prompt(1, start=90), max_tokens=1)  # takes the first one's row for one step
    driver.step()
    assert driver.status("r0") is Status.PREEMPTED
    driver.step()
    assert driver.status("r0") is status
    driver.drain()


def test_a_swap_starts_one_step_before_the_pool_runs_dry() -> None:
    """Two rows will want a block in plan 4, one is free: plan 3 begins the swap."""

    def preempted_in(costs: dict[str, float]) -> list[int]:
        driver = Driver(make_config(num_blocks=5), costs=costs)
        for start in (0, 50):
            driver.add(prompt(6, start=start), max_tokens=8)
        for _ in range(4):
            driver.step()
        named = [
            out.number
            for out in driver.outputs
            for notice in out.notices
            if notice.kind is NoticeKind.PREEMPTED
        ]
        driver.drain()
        return named

    assert preempted_in(SWAP) == [3]
    assert preempted_in(RECOMPUTE) == [4]  # nothing to win by giving blocks up early


def test_a_swap_in_takes_the_device_copy_where_the_hash_is_found() -> None:
    """7 full blocks are still there, only the partial eighth is copied back."""
    driver = Driver(make_config(num_blocks=12), costs=SWAP)
    driver.add(prompt(29), max_tokens=9)
    while len(driver.tokens["r0", 0]) < 2:
        driver.step()
    driver.pause("r0")
    driver.add(prompt(20, start=50), max_tokens=1)  # 5 blocks where 4 are free
    while ("r1", 0) not in driver.finishes:
        driver.step()
    assert driver.status("r0") is Status.SWAPPED
    driver.resume("r0")
    driver.drain()
    stats = driver.outputs[-1].stats
    assert (stats.swapped_out_blocks, stats.swapped_in_blocks) == (8, 1)
