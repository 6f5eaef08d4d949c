"""Which request is preempted, and how: the order of victims and the two costs."""

from __future__ import annotations

from streamer.core.plan import Add, Facts
from streamer.core.preemption import MAX_PREEMPTIONS, choose_victim, is_swap_cheaper
from streamer.core.request import Event, Request, Status
from streamer.core.sampling import SamplingParams
from tests.core.driver import SWAP, Driver, make_config


def request(
    arrival: int, *, priority: int = 0, computed: int = 10, evictions: int = 0,
    paused: bool = False, held: bool = False,
) -> Request:  # fmt: skip
    made = Request(Add(f"r{arrival}", (1,), SamplingParams(), priority=priority), arrival, 8)
    made.move(Event.ADMIT)
    if paused:
        made.move(Event.PAUSE)
    made.is_held = held
    made.evictions = evictions
    made.sequences[0].num_computed = computed
    return made


def test_paused_readers_give_way_first_even_after_many_times() -> None:
    slow = request(1, paused=True, held=True, computed=500, evictions=9)
    assert choose_victim([slow, request(2, computed=1), request(3, priority=5)]) is slow


def test_then_the_lowest_priority_then_least_work_then_the_last() -> None:
    low = request(1, priority=3, computed=900)
    assert choose_victim([low, request(2), request(3)]) is low
    little = request(2, computed=5)
    assert choose_victim([request(1), little, request(3)]) is little
    last = request(3)
    assert choose_victim([request(1), request(2), last]) is last


def test_a_request_preempted_twice_is_exempt_while_another_can_run() -> None:
    often = request(3, computed=1, evictions=MAX_PREEMPTIONS)
    other = request(1)
    assert choose_victim([often, other]) is other


def test_if_all_are_exempt_the_last_to_arrive_gives_way() -> None:
    last = request(9, computed=500, evictions=2)
    assert choose_victim([request(1, evictions=2, computed=1), last]) is last


def test_the_last_running_request_is_never_evicted() -> None:
    assert choose_victim([request(1)]) is None
    assert choose_victim([]) is None


def test_to_a_request_of_better_priority_the_last_that_runs_gives_way_in_the_same_order() -> None:
    assert choose_victim([only := request(1)], may_be_last=True) is only
    long, short = request(3, computed=900), request(1, computed=5)
    assert choose_victim([short, long], may_be_last=True) is short
    lowest = request(2, priority=1)
    assert choose_victim([short, lowest], may_be_last=True) is lowest
    paused = request(1, paused=True, held=True)
    assert choose_victim([short, paused], may_be_last=True) is paused
    assert choose_victim([], may_be_last=True) is None


def test_swap_and_recompute_are_compared_in_seconds() -> None:
    facts = Facts(prefill_s=1e-3, swap_bytes_per_s=1e6, swap_fixed_s=2e-3)
    # 8 blocks each way of 1,000 bytes: 16 ms + 4 ms of fixed cost = 20 ms.
    size = {"blocks_out": 8, "blocks_in": 8, "block_bytes": 1000, "facts": facts}
    assert is_swap_cheaper(num_tokens=21, **size)  # type: ignore[arg-type]
    assert not is_swap_cheaper(num_tokens=19, **size)  # type: ignore[arg-type]


def test_a_prompt_that_was_swapped_out_comes_back_with_room_for_all_of_it() -> None:
    """Else a request that follows it takes that room, is preempted for it, and so on in turns."""
    driver = Driver(make_config(num_blocks=12, max_num_batched_tokens=8), costs=SWAP)
    long = driver.add(list(range(40)), max_tokens=4)
    driver.step()
    driver.add([90] * 20, max_tokens=4, priority=-1)
    driver.step()
    assert driver.status(long) in (Status.SWAPPING_OUT, Status.SWAPPED)
    driver.add([80] * 20, max_tokens=4)
    for _ in range(40):
        driver.launch()
        if driver.status(long) is Status.SWAPPING_IN:
            break
        driver.collect()
    (seq,) = driver.scheduler.state.requests.by_id[long].sequences
    assert seq.num_computed < 40 <= 4 * len(seq.blocks)
    driver.drain()
    assert sum(driver.scheduler.state.requests.counts.values()) == 3
