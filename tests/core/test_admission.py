"""Who enters, with exact counts: watermark, headroom, swaps ahead, and what needs no copy."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from streamer.core.plan import Add, Facts, NoticeKind
from streamer.core.request import Status
from streamer.core.sampling import SamplingParams
from tests.core.driver import RECOMPUTE, SWAP, Driver, make_config


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + i) % 97 for i in range(length)]


def test_a_fork_shares_nothing_across_tenants() -> None:
    driver = Driver(make_config())
    parent = driver.add(prompt(6), max_tokens=12, salt=b"one")
    for _ in range(5):
        driver.step()
    known = [*driver.adds[parent].prompt, *driver.tokens[parent, 0]]
    driver.add(known[:10], max_tokens=6, share_with=parent, salt=b"two")
    driver.step()
    notice = next(n for n in driver.outputs[-1].notices if n.kind is NoticeKind.RUNNING)
    assert (notice.shared_tokens, notice.cached_tokens) == (0, 0)
    driver.drain()


def test_a_waiting_request_compares_its_cached_prefix_once() -> None:
    """12 blocks are found at the first look; later looks only check that they are still there."""
    driver = Driver(make_config(num_blocks=18, enable_prefix_caching=True))
    driver.add(prompt(48), max_tokens=1)
    driver.run()
    driver.add(prompt(20, start=60), max_tokens=8)
    driver.step()
    driver.step()
    driver.scheduler.command(Add("r2", tuple(prompt(49)), SamplingParams(max_tokens=1)))
    scheduler, looks = driver.scheduler, []
    honest = scheduler.state.kv.device.find

    def find(block_hash: bytes, tokens: Sequence[int]) -> int | None:
        looks.append(block_hash)
        return honest(block_hash, tokens)

    scheduler.state.kv.device.find = find  # type: ignore[method-assign]
    counts = []
    for _ in range(3):
        looks.clear()
        scheduler.schedule(Facts())
        counts.append(len(looks))
    assert scheduler.state.requests.by_id["r2"].status is Status.WAITING
    assert counts == [12, 0, 0]


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


def test_a_request_alone_needs_no_watermark() -> None:
    driver = Driver(make_config(num_blocks=8, max_num_batched_tokens=64))
    driver.add(prompt(30), max_tokens=2)
    driver.step()
    assert driver.status("r0") is Status.RUNNING
    driver.drain()


@pytest.mark.parametrize(("length", "status"), [(38, Status.RUNNING), (39, Status.PREEMPTED)])
def test_a_preempted_request_comes_back_with_headroom(length: int, status: Status) -> None:
    """It needs its 4 blocks, the watermark and one to grow into: 6 are enough, 5 are not."""
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
    """Two rows will need a block in plan 4, one is free: plan 3 begins the swap."""

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
    assert preempted_in(RECOMPUTE) == [4]  # freeing blocks early gains nothing


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


def test_a_block_that_victims_share_is_counted_once() -> None:
    """Two requests share 6 blocks: both together free 8; where 9 are missing they keep them."""
    driver = Driver(make_config(num_blocks=16, max_num_batched_tokens=64), costs=RECOMPUTE)
    driver.add(prompt(17, start=50), max_tokens=9)
    for _ in range(2):
        driver.add(prompt(25), max_tokens=9, priority=5)
        driver.step()
    device = driver.scheduler.state.kv.device
    assert (device.num_free, device.ref_count(driver.plans[1].joins[0].blocks[0])) == (3, 2)
    driver.add(prompt(4 * (device.num_free + 8) + 1, start=30), max_tokens=1)
    driver.step()
    names = ("r0", "r1", "r2", "r3")
    assert [driver.status(name) for name in names] == [Status.RUNNING] * 3 + [Status.WAITING]
    driver.drain()


def test_paused_readers_keep_their_blocks_where_those_are_not_enough() -> None:
    driver = Driver(make_config(num_blocks=16, max_num_batched_tokens=64), costs=RECOMPUTE)
    for start in (0, 50):
        driver.add(prompt(25, start=start), max_tokens=9)
        driver.step()
    driver.pause("r0")
    driver.add(prompt(40, start=30), max_tokens=3)  # needs 10 blocks; 9 are free without r0's
    driver.step()
    assert driver.status("r0") is Status.PAUSED
    assert driver.status("r2") is Status.WAITING
    driver.drain()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_resumed_request_of_low_priority_gives_its_blocks_to_a_higher_one(depth: int) -> None:
    """r0 waits for a row behind r3, which needs r0's blocks: r3 need not wait for r1 to end."""
    config = make_config(num_blocks=16, max_num_batched_tokens=64, max_num_seqs=2)
    driver = Driver(config, depth=depth, costs=RECOMPUTE)
    driver.add(prompt(30), max_tokens=9, priority=5)
    driver.step()
    driver.pause("r0")
    driver.add(prompt(3, start=50), max_tokens=40)
    driver.add(prompt(2, start=80), max_tokens=4)
    driver.step()
    driver.resume("r0")
    driver.add(prompt(30, start=40), max_tokens=2, priority=-1)
    steps = 0
    while ("r3", 0) not in driver.finishes:
        driver.step()
        steps += 1
    assert steps < 10
    assert ("r1", 0) not in driver.finishes
    driver.drain()
