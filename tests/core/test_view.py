"""Looks at the scheduler equal plans and tables, are bounded, and cost nothing when unused."""

from __future__ import annotations

import struct
import tracemalloc
from collections import Counter

import msgspec
import pytest

from streamer.core import view as views
from streamer.core.blocks import COOLING, FREE, PRIVATE, SHARED, BlockHasher, BlockPool
from streamer.core.plan import Add, Pause
from streamer.core.sampling import SamplingParams
from streamer.core.scheduler import Scheduler
from streamer.core.view import SchedulerView, StepView, ViewQuery, pool_view, seen_by
from tests.core.driver import RECOMPUTE, SWAP, Driver, make_config

ALL = ViewQuery((b"",), views.MAX_STEPS)
MIB = 1 << 20


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + i) % 97 for i in range(length)]


def table(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 4}I", packed))


def crowded(depth: int = 0) -> Driver:
    """More requests than blocks: prefills in chunks, forks, preemptions by swap."""
    driver = Driver(make_config(num_blocks=20), depth=depth, costs=SWAP)
    for i in range(5):
        driver.add(prompt(14, start=i * 3), max_tokens=16, n=1 + i % 2)
    return driver


def run(driver: Driver, query: ViewQuery = ALL) -> list[StepView]:
    """Run to the end, looking after every third step."""
    steps: list[StepView] = []
    driver.scheduler.snapshot(query)
    while driver.step():
        if driver.steps % 3 == 0:
            steps += driver.scheduler.snapshot(query).steps
    return steps + list(driver.scheduler.snapshot(query).steps)


@pytest.mark.parametrize("depth", [0, 1])
def test_the_steps_say_what_the_plans_did(depth: int) -> None:
    driver = crowded(depth)
    steps = run(driver)
    assert [s.number for s in steps] == [p.number for p in driver.plans]
    for step, plan in zip(steps, driver.plans, strict=True):
        assert sum(n for _, n in step.prefilled) + len(step.decoded) == plan.num_tokens
        assert step.tokens == plan.num_tokens
        assert Counter(n for _, n in step.prefilled) == Counter(c.count for c in plan.chunks)
        moves = (len(plan.swap_out), len(plan.swap_in), len(plan.copies))
        assert (step.swapped_out, step.swapped_in, step.copied) == moves
    stats = driver.outputs[-1].stats
    hows = Counter(how for s in steps for _, how in s.preempted)
    assert hows == {"swap": stats.preemptions_swap}
    assert stats.preemptions_swap > 0
    ends = Counter(n for s in steps for n, reason in s.finished if reason == "length")
    assert ends == {1: 1, 2: 2, 3: 1, 4: 2, 5: 1}
    admitted = Counter(n for s in steps for n in s.admitted)
    assert set(admitted) == {1, 2, 3, 4, 5}
    assert sum(admitted.values()) >= 5 + stats.preemptions_swap
    driver.drain()


def test_a_pause_is_in_the_step_that_reports_it() -> None:
    driver = Driver(make_config())
    driver.add(prompt(3), max_tokens=20)
    driver.scheduler.snapshot(ALL)
    driver.step()
    driver.pause("r0")
    driver.run()
    view = driver.scheduler.snapshot(ALL)
    assert [n for s in view.steps for n in s.paused] == [1]
    assert (view.requests[0].status, view.requests[0].is_held) == ("paused", True)
    assert table(view.requests[0].sequences[0].blocks)
    driver.drain()


def test_the_grid_and_the_tables_agree() -> None:
    driver = crowded()
    seen: Counter[int] = Counter()
    while driver.step():
        view = driver.scheduler.snapshot(ALL)
        sequences = [s for r in view.requests for s in r.sequences]
        for pool, tables in (
            (view.device, [table(s.blocks) for s in sequences]),
            (view.host, [table(s.host_blocks) for s in sequences]),
        ):
            held = Counter(b for t in tables for b in t)
            assert pool.blocks_per_cell == 1
            assert len(pool.cells) == pool.num_blocks
            for block, state in enumerate(pool.cells):
                assert (state == PRIVATE) == (held[block] == 1)
                assert (state == SHARED) == (held[block] > 1)
            seen.update(pool.cells)
        for s in sequences:
            assert s.num_blocks == len(table(s.blocks))
            assert s.num_blocks * view.block_size >= s.computed or s.num_host_blocks
        free = sum(state < PRIVATE for state in view.device.cells)
        assert free == view.stats.blocks_free
    assert len(seen) == 5, "not every state came up"


def test_the_queue_is_shown_in_its_order() -> None:
    driver = Driver(make_config(max_num_seqs=1))
    for i, priority in enumerate((0, 5, 1)):
        driver.add(prompt(4, start=i), priority=priority)
    driver.step()
    view = driver.scheduler.snapshot(ALL)
    positions = {r.request_id: r.queue_position for r in view.requests}
    assert positions == {"r0": None, "r2": 0, "r1": 1}
    driver.drain()


@pytest.mark.parametrize("costs", [SWAP, RECOMPUTE])
def test_a_paused_request_that_loses_its_blocks_shows_it(costs: dict[str, float]) -> None:
    driver = Driver(make_config(num_blocks=8), costs=costs)
    driver.add(prompt(12), max_tokens=20)
    driver.step()
    driver.pause("r0")
    driver.add(prompt(20, start=40), max_tokens=8)
    driver.run()
    (request,) = driver.scheduler.snapshot(ALL).requests
    assert (request.request_id, request.preemptions) == ("r0", 1)
    paused = driver.scheduler.state.requests.by_id["r0"]
    assert paused.evictions == 0  # not counted towards exemption
    driver.drain()


# ------------------------------------------------------------ what it costs


def test_views_change_no_plan() -> None:
    watched, alone = crowded(), crowded()
    run(watched)
    alone.run()
    assert watched.plans == alone.plans
    assert watched.tokens == alone.tokens


def test_without_a_follower_a_step_allocates_nothing() -> None:
    """No allocation in the files of the views; with a follower there are some."""
    files = [tracemalloc.Filter(True, views.__file__)]

    def allocated(driver: Driver) -> int:
        driver.step()
        tracemalloc.start()
        for _ in range(20):
            driver.step()
        found = tracemalloc.take_snapshot().filter_traces(files)
        tracemalloc.stop()
        return sum(s.count for s in found.statistics("filename"))

    driver = crowded()
    assert allocated(driver) == 0
    driver = crowded()
    driver.scheduler.snapshot(ALL)
    assert allocated(driver) > 0
    driver.scheduler.snapshot(ViewQuery())  # the last follower left
    assert allocated(driver) == 0


def test_a_query_without_steps_records_none() -> None:
    driver = crowded()
    driver.scheduler.snapshot(ViewQuery((b"",)))
    driver.run()
    assert driver.scheduler.snapshot(ViewQuery((b"",))).steps == ()


def test_a_recorder_that_is_never_read_is_bounded() -> None:
    driver = Driver(make_config(num_blocks=40, max_model_len=160))
    driver.add(prompt(4), max_tokens=120)
    driver.scheduler.snapshot(ViewQuery((b"",), 7))
    driver.run()
    view = driver.scheduler.snapshot(ViewQuery((b"",), 7))
    assert [s.number for s in view.steps] == list(range(1, 8))


def test_entries_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "MAX_ENTRIES", 10)
    driver = crowded()
    driver.scheduler.snapshot(ALL)
    driver.run()
    steps = driver.scheduler.snapshot(ALL).steps
    assert 0 < len(steps) < len(driver.plans) / 2


# ------------------------------------------------------------ big pools


def test_big_pools_have_cells_of_several_blocks() -> None:
    states = bytearray(10)
    states[4] = SHARED
    states[5] = states[9] = COOLING
    pool = pool_view(bytes(states), max_cells=4)
    assert (pool.num_blocks, pool.blocks_per_cell) == (10, 3)
    assert list(pool.cells) == [FREE, SHARED | COOLING, FREE, COOLING]
    assert pool_view(b"", max_cells=4).cells == b""


def test_the_json_is_bounded_whatever_the_pool_and_the_queue() -> None:
    config = make_config(
        num_blocks=200_000,
        num_host_blocks=100_000,
        max_num_seqs=400,
        max_num_batched_tokens=1 << 20,
        max_model_len=4096,
    )
    scheduler = Scheduler(config, BlockHasher(4, b"s" * 32))
    facts = scheduler.state.facts
    for i in range(2000):
        tokens = tuple(prompt(1200, start=i))
        scheduler.command(Add(f"chatcmpl-{i:024d}", tokens, SamplingParams(max_tokens=9)))
    scheduler.snapshot(ALL)
    assert scheduler.schedule(facts) is not None
    view = scheduler.snapshot(ALL)
    assert len(view.requests) == views.MAX_LISTED
    assert sum(view.unlisted.values()) == 2000 - views.MAX_LISTED
    shown = sum(len(s.blocks) // 4 for r in view.requests for s in r.sequences)
    assert shown == views.MAX_TABLE_BLOCKS
    assert view.requests[-1].sequences[0].num_blocks == 300
    assert len(msgspec.json.encode(seen_by(view, b""))) < MIB


def test_states_of_a_block_in_more_tables_than_a_byte_counts() -> None:
    pool = BlockPool(2, "device")
    block = pool.take(1)
    assert block is not None
    for _ in range(300):
        pool.share(block)
    assert list(pool.states()) == [SHARED, FREE]


# ------------------------------------------------------------ other keys


def two_owners() -> tuple[Scheduler, SchedulerView]:
    """Two requests of one key, one of another; the steps of all."""
    scheduler = Scheduler(make_config(), BlockHasher(4, b"s" * 32))
    query = ViewQuery((b"one:", b"two:"), 9)
    scheduler.snapshot(query)
    for name, salt in (("a", b"one:"), ("b", b"two:"), ("c", b"one:x")):
        scheduler.command(
            Add(name, tuple(prompt(5, ord(name))), SamplingParams(max_tokens=3), salt=salt)
        )
    scheduler.command(Pause("b"))
    driver = Driver(make_config())
    driver.scheduler = scheduler
    driver.launch()
    plan = driver.inflight.popleft()
    scheduler.apply(plan, driver.device.run(plan.number))
    return scheduler, scheduler.snapshot(query)


def test_requests_of_others_become_counts() -> None:
    _, view = two_owners()
    mine = seen_by(view, b"one:")
    assert [r.request_id for r in mine.requests] == ["a", "c"]
    assert mine.unlisted == {"waiting": 1}
    assert mine.steps[0].others == 0
    theirs = seen_by(view, b"two:")
    assert [r.request_id for r in theirs.requests] == ["b"]
    assert theirs.unlisted == {"running": 2}
    (step,) = theirs.steps
    assert (step.prefilled, step.admitted, step.tokens) == ((), (), 10)
    assert step.others == len(mine.steps[0].prefilled) + len(mine.steps[0].admitted) == 4
    for part in (mine, theirs):
        assert b"owner_of" not in msgspec.json.encode(part)
        assert part.device == view.device


def test_requests_of_other_owners_are_only_counted_by_status() -> None:
    scheduler, _ = two_owners()
    view = scheduler.snapshot(ViewQuery((b"two:",), 9))
    assert [r.request_id for r in view.requests] == ["b"]
    assert view.unlisted == {"running": 2}
