"""Lineup: a plan looks at the sequences that need a decision, and at no others."""

from __future__ import annotations

from typing import Any

import pytest

from streamer.core.plan import Facts, StepResult
from streamer.core.request import Sequence
from tests.core.driver import RECOMPUTE, Driver, make_config


def steady(driver: Driver) -> list[str]:
    running = driver.scheduler.state.requests.open_running()
    return [seq.request.request_id for seq in running if seq.steady_until]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_row_is_looked_at_once_a_block_and_at_its_end(depth: int) -> None:
    driver = Driver(make_config(num_blocks=40), depth=depth)
    driver.add([1, 2, 3, 4, 5], max_tokens=14)
    looked: list[int] = []
    while driver.status("r0").value != "finished":
        driver.step()
        looked += [driver.steps] if not steady(driver) else []
    assert len(driver.tokens["r0", 0]) == 14
    assert len(looked) <= 3 + 2 * depth  # its prefill, its first decode and its end


@pytest.mark.parametrize("event", ["pause", "cancel", "fork", "lack of blocks"])
def test_what_needs_a_decision_is_not_steady(event: str) -> None:
    num_blocks = 8 if event == "lack of blocks" else 24
    driver = Driver(make_config(num_blocks=num_blocks), costs=RECOMPUTE)
    driver.add([1, 2, 3, 4, 5, 6], max_tokens=20)
    for _ in range(4):
        driver.step()
    assert steady(driver) == ["r0"]
    if event == "pause":
        driver.pause("r0")
    elif event == "cancel":
        driver.cancel("r0")
    elif event == "fork":
        known = [*driver.adds["r0"].prompt, *driver.tokens["r0", 0]]
        driver.add(known[:7], share_with="r0", max_tokens=3)
        driver.step()
    else:
        driver.add([40, 41, 42, 43, 44], max_tokens=20)
        for _ in range(40):
            if not driver.scheduler.stats().preemptions_recompute:
                driver.step()
    assert len(steady(driver)) < 1 + (event == "lack of blocks")
    driver.resume("r0")
    driver.drain()


def test_a_plan_of_steady_rows_reads_the_counters_of_none(monkeypatch: Any) -> None:
    driver = Driver(make_config(max_num_seqs=4, num_blocks=64))
    for start in range(4):
        driver.add([start * 20, 1, 2], max_tokens=40)
    scheduler = driver.scheduler
    while len(steady(driver)) < 4:
        driver.step()

    def unread(seq: Sequence) -> int:
        raise AssertionError("looked at a steady row")

    for name in ("num_computed", "num_tokens"):
        monkeypatch.setattr(Sequence, name, property(unread))
    plan = scheduler.schedule(Facts())
    assert plan is not None
    assert plan.num_samples == 4
    scheduler.apply(plan, StepResult(plan.number, rows=(0, 1, 2, 3), tokens=(1,) * 4))
