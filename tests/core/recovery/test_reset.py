"""Steps that fail: all goes on but for the request at fault, which is found.

The driver checks every token, and that nothing leaks; the state machine fails steps at random.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from streamer.core.plan import OUT_OF_MEMORY, STEP_FAILED, FinishReason, NoticeKind, Plan
from streamer.core.recovery.trials import Fault, Verdict
from streamer.core.request import Status
from tests.core.driver import SWAP, Driver, Faulty, make_config
from tests.core.scripted import Scripted

ROOMY = {"num_blocks": 160, "max_num_seqs": 16, "max_num_batched_tokens": 48}
WAYS = pytest.mark.parametrize(("depth", "is_late"), [(0, False), (0, True), (1, False), (1, True)])


def batch(depth: int, is_late: bool, count: int = 16, **config: int) -> Driver:
    """`count` requests that run, beams, forks and prompts to score among them."""
    driver = Driver(make_config(**(ROOMY | config)), depth=depth)
    driver.fails_late = is_late
    for i in range(count):
        scores = 0 if i % 5 == 4 else None
        driver.add([i, *range(3 + i)], max_tokens=12 + i % 4, prompt_logprobs=scores)
    return driver


def when(condition: Callable[[Plan, set[str]], bool], *, is_memory: bool = False) -> Faulty:
    return lambda plan, names: Fault(plan.num_tokens, is_memory) if condition(plan, names) else None


def reasons(driver: Driver) -> dict[str, str | None]:
    failed = (f for f in driver.finishes.values() if f.reason is FinishReason.FAILED)
    return {f.request_id: f.detail for f in failed}


@WAYS
@pytest.mark.parametrize("poisoned", [{"r0"}, {"r11"}, {"r3", "r12"}, {"r0", "r1", "r2", "r3"}])
def test_requests_whose_steps_always_fail_are_found(
    depth: int, is_late: bool, poisoned: set[str]
) -> None:
    driver = batch(depth, is_late)
    driver.faulty = when(lambda plan, names: bool(names & poisoned))
    driver.drain()
    assert reasons(driver) == dict.fromkeys(poisoned, STEP_FAILED)
    assert driver.verdicts[0] is Verdict.RETRIED
    assert driver.verdicts.count(Verdict.BLAMED) == len(poisoned)
    assert len(driver.verdicts) <= 2 + len(poisoned) * (1 + math.log2(16))


@WAYS
def test_a_request_that_fails_from_a_token_on_is_found(depth: int, is_late: bool) -> None:
    """It runs well until then, and again after it was computed again up to there."""
    driver = batch(depth, is_late)
    drawn = driver.tokens["r7", 0]
    driver.faulty = when(lambda plan, names: "r7" in names and len(drawn) >= 6)
    driver.drain()
    assert reasons(driver) == {"r7": STEP_FAILED}
    assert 6 <= len(drawn) <= 6 + depth


@WAYS
@pytest.mark.parametrize("is_memory", [False, True])
def test_a_step_that_fails_once_ends_no_request(depth: int, is_late: bool, is_memory: bool) -> None:
    for number in range(1, 16, 2):
        driver = batch(depth, is_late, count=6, num_blocks=24)
        driver.costs = SWAP
        driver.add([1, 2, 3], n=3, max_tokens=9)
        driver.add([4, 5, 6], use_beam_search=True, beam_width=3, max_tokens=7)
        driver.faulty = when(lambda plan, names, n=number: plan.number == n, is_memory=is_memory)
        driver.drain()
        assert reasons(driver) == {}
        shrinks = is_memory and driver.plans[number - 1].num_tokens > 1  # it may only copy blocks
        assert driver.verdicts == [Verdict.SHRUNK if shrinks else Verdict.RETRIED]
        notices = [n for o in driver.outputs for n in o.notices if n.kind is NoticeKind.PREEMPTED]
        assert notices
        assert driver.outputs[-1].stats.rebuilds == 1


@WAYS
@pytest.mark.parametrize("most", [1, 4])
def test_without_memory_for_more_rows_fewer_run(depth: int, is_late: bool, most: int) -> None:
    driver = batch(depth, is_late)
    driver.faulty = when(lambda plan, names: len(names) > most, is_memory=True)
    driver.drain()
    assert reasons(driver) == {}
    assert set(driver.verdicts) == {Verdict.SHRUNK}
    assert len(driver.verdicts) <= 12
    widest = max(len(plan.joins) + plan.num_rows for plan in driver.plans[-100:])
    assert widest >= most


def test_steps_grow_again_and_ever_more_slowly_where_there_is_no_memory() -> None:
    driver = Driver(make_config(max_num_batched_tokens=64, max_num_seqs=8, num_blocks=900))
    driver.faulty = when(lambda plan, names: plan.num_tokens > 6, is_memory=True)
    for i in range(60):
        driver.add([i % 97, 1, 2], max_tokens=30)
    driver.drain()
    met = [plan.number for plan in driver.plans if plan.num_tokens > 6]
    first = sum(number < 100 for number in met)
    assert len(met) - first <= 8
    assert reasons(driver) == {}
    driver.faulty = None
    for _ in range(40):
        driver.add([5, 6, 7], max_tokens=40)
    before = driver.steps
    driver.drain()
    assert driver.steps - before < 40 * 40 / 3


@WAYS
def test_a_request_for_whose_smallest_step_there_is_no_memory_fails(
    depth: int, is_late: bool
) -> None:
    driver = batch(depth, is_late, count=5)
    driver.faulty = when(lambda plan, names: "r2" in names, is_memory=True)
    driver.drain()
    assert reasons(driver) == {"r2": OUT_OF_MEMORY}


@WAYS
def test_requests_that_come_or_change_during_a_trial_wait_for_its_end(
    depth: int, is_late: bool
) -> None:
    driver = batch(depth, is_late, count=8)
    driver.faulty = when(lambda plan, names: "r6" in names)
    while Verdict.HALVED not in driver.verdicts:
        driver.step()
    late = driver.add([9, 9, 9], max_tokens=4)
    members = driver.scheduler.state.trials.members
    on_trial = sorted(r.request_id for r in members)
    driver.cancel(on_trial[0])
    driver.pause(on_trial[1])
    assert driver.status(late) is Status.WAITING
    while driver.scheduler.state.trials.members:
        driver.step()
        if driver.scheduler.state.trials.members:
            assert driver.status(late) is Status.WAITING
    assert set(reasons(driver)) <= {"r6"}
    driver.drain()
    assert reasons(driver) == {"r6": STEP_FAILED}


@WAYS
@pytest.mark.parametrize("way", [Driver.cancel, Driver.pause, None])
def test_a_suspect_that_is_not_tried_may_have_been_at_fault(
    depth: int, is_late: bool, way: Callable[[Driver, str], None] | None
) -> None:
    driver = batch(depth, is_late, count=4)
    driver.faulty = when(lambda plan, names: plan.number == 5)
    while not driver.verdicts:
        driver.step()
    assert not driver.scheduler.suspect_escaped
    if way is not None:
        way(driver, "r2")
    while driver.scheduler.state.trials.members:
        driver.step()
    assert driver.scheduler.suspect_escaped is (way is not None)
    driver.drain()
    driver.faulty = when(lambda plan, names: "r9" in names)
    driver.add([1, 2, 3], request_id="r9")
    driver.drain()
    assert not driver.scheduler.suspect_escaped


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_verification_that_fails_is_forgotten(depth: int, is_late: bool) -> None:
    driver = Driver(make_config(), depth=depth, speculation=Scripted(3, share=0.9))
    driver.fails_late = is_late
    for i in range(4):
        driver.add([i, 1, 2], max_tokens=20)
    left = 4

    def verifies(plan: Plan, names: set[str]) -> bool:
        nonlocal left
        left -= any(chunk.tokens for chunk in plan.chunks)
        return left > 0 and any(chunk.tokens for chunk in plan.chunks)

    driver.faulty = when(verifies)
    driver.drain()
    assert driver.verdicts
    assert reasons(driver) == {}


@pytest.mark.parametrize("depth", [0, 1])
def test_what_was_swapped_out_is_computed_again(depth: int) -> None:
    """Swaps under way, and blocks of the host, are lost as well."""
    met = set()
    for number in range(4, 30):
        driver = Driver(make_config(num_blocks=10), depth=depth, costs=SWAP)
        driver.flush_copies = False
        for i in range(4):
            driver.add([i * 20 + j for j in range(9)], max_tokens=12)

        def fails(plan: Plan, names: set[str], n: int = number, d: Driver = driver) -> bool:
            if plan.number == n:
                met.update(r.status for r in d.scheduler.state.requests.by_id.values())
            return plan.number == n

        driver.faulty = when(fails)
        driver.drain()
        assert reasons(driver) == {}
    assert met >= {Status.SWAPPING_OUT, Status.SWAPPED, Status.RUNNING}
