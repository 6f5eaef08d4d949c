"""Beam searches in the scheduler find what the device finds alone, whatever happens meanwhile.

tests/core/driver.py compares every answer and its score.
"""

from __future__ import annotations

from typing import Any

import pytest

from streamer.core.plan import FinishReason
from streamer.core.request import Status
from streamer.core.view import ViewQuery
from tests.core.device import VOCAB
from tests.core.driver import RECOMPUTE, SWAP, Driver, make_config

STOPS = frozenset({3, 40, 41, 77})
LETTERS = tuple(b"abcdefghij"[token % 10 : token % 10 + 1] for token in range(VOCAB))
PROMPT = list(range(7, 20))


def search(driver: Driver, prompt: list[int] = PROMPT, width: int = 4, **more: Any) -> str:
    settings = {"n": 2, "max_tokens": 14, "stop_ids": STOPS, **more}
    return driver.add(prompt, use_beam_search=True, beam_width=width, **settings)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_a_search_finds_what_it_finds_alone(width: int, depth: int, early_stopping: Any) -> None:
    driver = Driver(make_config(num_blocks=80, max_num_seqs=10), depth=depth)
    for length in (1, 8, 13):  # a prompt of whole blocks among them
        search(driver, PROMPT[:length], width, n=min(2, width), early_stopping=early_stopping)
    driver.add(PROMPT, n=2)  # draws beside it
    driver.drain()
    assert {f.reason for f in driver.finishes.values()} <= {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("costs", [SWAP, RECOMPUTE])
def test_stop_strings_and_log_probabilities_whatever_happens(
    depth: int, costs: dict[str, float]
) -> None:
    """Also where the rows of some hypotheses are left without one for a step."""
    sizes = {"num_blocks": 30, "num_host_blocks": 60, "max_num_seqs": 13}
    stopped = preempted = 0
    for before in range(3, 12):
        driver = Driver(make_config(**sizes, token_bytes=LETTERS), depth=depth, costs=costs)
        for stop in (("ab",), ("c", "dd"), tuple("aceg")):
            search(driver, width=4, stop=stop, logprobs=3)
        for _ in range(before):
            driver.step()
        driver.add([90, 91] * 20, max_tokens=8, priority=-1)
        driver.drain()
        stats = driver.scheduler.stats()
        preempted += stats.preemptions_swap + stats.preemptions_recompute
        stopped += sum(isinstance(finish.stop, str) for finish in driver.finishes.values())
    assert preempted > 5
    assert stopped > 20


def test_rows_are_reshuffled_without_sending_tokens_again() -> None:
    """A row joins once; later it takes another's table from the first block that differs."""
    driver = Driver(make_config(num_blocks=80), depth=1)
    search(driver, stop_ids=frozenset(), max_tokens=30)
    driver.drain()
    assert sum(len(plan.joins) for plan in driver.plans) == 4
    updates = [update for plan in driver.plans[6:] for update in plan.tables]
    assert any(len(update.blocks) > 1 for update in updates) or len(updates) > 30
    assert all(update.start >= 3 for update in updates)  # the prompt's whole blocks stay
    assert sum(len(plan.copies) for plan in driver.plans) > 0


def test_what_is_settled_streams_before_the_end() -> None:
    driver = Driver(make_config(num_blocks=80))
    name = search(driver, max_tokens=40, stop_ids=frozenset(), width=2)
    driver.run()
    parts = [len(output.tokens) for output in driver.outputs]
    assert sum(parts) == 80
    assert sum(parts[:-1]) > 20
    for output in driver.outputs[:-1]:  # both choices get what is settled
        first = [t for c, t in zip(output.choices, output.tokens, strict=True) if c == 0]
        second = [t for c, t in zip(output.choices, output.tokens, strict=True) if c == 1]
        assert first == second
    assert (name, 1) in driver.finishes


def test_hypotheses_show_in_the_engine_view() -> None:
    driver = Driver(make_config(num_blocks=80))
    search(driver, stop_ids=frozenset(), max_tokens=30)
    query = ViewQuery((b"",), num_steps=9)
    driver.step()
    driver.scheduler.snapshot(query)
    for _ in range(9):
        driver.step()
    view = driver.scheduler.snapshot(query)
    (request,) = view.requests
    assert [seq.choice for seq in request.sequences] == [0, 1, 2, 3]
    assert all(len(step.decoded) == 4 and not step.prefilled for step in view.steps[1:])


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("costs", [SWAP, RECOMPUTE])
def test_the_whole_group_is_preempted_in_any_step_and_comes_back(
    costs: dict[str, float], depth: int
) -> None:
    preempted = 0
    for before in range(16):
        driver = Driver(make_config(num_blocks=22, num_host_blocks=60), depth=depth, costs=costs)
        search(driver, width=3)
        for _ in range(before):
            driver.step()
        driver.add([90, 91] * 26, max_tokens=8, priority=-1)
        driver.drain()
        stats = driver.scheduler.stats()
        preempted += stats.preemptions_swap + stats.preemptions_recompute
    assert preempted > 8


@pytest.mark.parametrize("depth", [0, 1])
def test_a_pause_in_any_step_keeps_the_group_s_blocks(depth: int) -> None:
    for before in range(18):
        driver = Driver(make_config(num_blocks=40), depth=depth)
        name = search(driver)
        for _ in range(before):
            driver.step()
        driver.pause(name)
        driver.run()
        assert driver.status(name) is not Status.RUNNING
        driver.resume(name)
        driver.drain()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_cancel_in_any_step_frees_the_group(depth: int) -> None:
    for before in range(18):
        driver = Driver(make_config(num_blocks=40), depth=depth)
        name = search(driver)
        for _ in range(before):
            driver.step()
        driver.cancel(name)
        driver.drain()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("costs", [SWAP, RECOMPUTE])
def test_a_group_that_gave_way_is_cancelled_or_held_in_any_state(
    costs: dict[str, float], depth: int
) -> None:
    """While it is copied out or back, waits, or is computed again."""
    met: set[Status | None] = set()
    for after in range(16):
        for is_cancelled in (True, False):
            driver = Driver(
                make_config(num_blocks=22, num_host_blocks=60), depth=depth, costs=costs
            )
            name = search(driver, width=3)
            for _ in range(6):
                driver.step()
            driver.add([90, 91] * 26, max_tokens=8, priority=-1)
            for _ in range(after):
                driver.step()
            met.add(driver.status(name))
            if is_cancelled:
                driver.cancel(name)
            else:
                driver.pause(name)
                driver.run()
                driver.resume(name)
            driver.drain()
    gave_way = {Status.SWAPPED, Status.SWAPPING_IN} if costs is SWAP else {Status.PREEMPTED}
    assert gave_way | {Status.RUNNING} <= met


def test_a_row_that_fails_ends_the_search() -> None:
    driver = Driver(make_config(num_blocks=40))
    name = search(driver)
    for _ in range(5):
        driver.step()
    plan = driver.launch()
    assert plan is not None
    result = driver.device.run(plan.number)
    row = next(iter(result.candidates))
    found = {r: c for r, c in result.candidates.items() if r != row}
    driver.inflight.clear()
    driver._take(
        driver.scheduler.apply(
            plan, type(result)(plan.number, failed={row: "not finite"}, candidates=found)
        )
    )
    assert {f.reason for f in driver.finishes.values()} == {FinishReason.FAILED}
    assert driver.status(name) is Status.FINISHED
    driver.scheduler.check()


def test_a_prompt_may_be_computed_a_single_token_at_a_time() -> None:
    """A step may have room for one of its tokens, beside another prompt: the row knows them all."""
    driver = Driver(make_config(num_blocks=80, max_num_batched_tokens=9, max_num_seqs=9))
    driver.add(list(range(50, 58)), max_tokens=2)
    search(driver, width=2)
    driver.drain()
    assert [chunk.count for chunk in driver.plans[0].chunks] == [8, 1]
