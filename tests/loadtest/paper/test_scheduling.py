"""Gaps, first tokens and preemptions of hand-made steps, and the tables of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamer.core.plan import Plan, StepOutput, StepResult, StepStats
from streamer.demo import CHECKPOINT
from streamer.loadtest.paper import scheduling as paper_scheduling
from streamer.loadtest.paper.scheduling import (
    NONE,
    WAYS,
    WHOLE,
    Alone,
    Case,
    ChunkRun,
    ChunkWork,
    SwapRun,
    SwapWork,
    compare_chunks,
    compare_swaps,
    medians,
    num_changed,
    share,
    summary,
)


class FakeSteps:
    """A step takes 1 ms a token computed, on a clock of its own; prompts in chunks of `budget`."""

    def __init__(self, budget: int) -> None:
        self.now = 0.0
        self.stats = StepStats()
        self.answers: dict[str, list[int]] = {}
        self._budget = budget
        self._left: dict[str, list[int]] = {}  # prompt and output tokens still to come

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        self.answers[name] = []
        self._left[name] = [len(prompt), max_tokens]

    def step(self) -> StepOutput | None:
        if not self._left:
            return None
        drew, num_tokens = [], 0
        for name, left in list(self._left.items()):
            count = min(left[0] or 1, self._budget - num_tokens)
            num_tokens += count
            left[0] = max(0, left[0] - count)
            if not left[0]:
                drew.append(name)
                self.answers[name].append(0)
                left[1] -= 1
                if not left[1]:
                    del self._left[name]
        self.now += num_tokens / 1e3
        computed = self.stats.computed_tokens + num_tokens
        self.stats = StepStats(computed_tokens=computed)
        return StepOutput(1, tuple(drew), (0,) * len(drew), (0,) * len(drew), stats=self.stats)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("budget", "gaps_ms", "first_ms"),
    [
        (102, [2, 2, 102, 2, 2, 102, 2, 2], [102, 102]),  # whole prompts
        (52, [2, 2, 52, 52, 2, 52, 52, 2], [104, 104]),  # 50 tokens of them beside 2 decodes
    ],
)
def test_gaps_and_first_tokens_are_those_of_the_steps(
    monkeypatch: pytest.MonkeyPatch, budget: int, gaps_ms: list[float], first_ms: list[float]
) -> None:
    work = ChunkWork((), num_streams=2, output=9, num_long=2, long=100, first=3, every=3)
    steps = FakeSteps(budget)
    monkeypatch.setattr(paper_scheduling, "Steps", lambda *_: steps)
    monkeypatch.setattr(paper_scheduling.time, "perf_counter", lambda: steps.now)
    run = paper_scheduling.run_budget(Path(), work, budget, num_long=work.num_long)
    assert run.gaps_ms == pytest.approx(gaps_ms)
    assert run.first_ms == pytest.approx(first_ms)
    assert run.speed == pytest.approx(1000)


def test_shares_are_by_nearest_rank() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert [share(values, part) for part in (0.5, 0.99, 1.0)] == [50, 99, 100]
    assert share([7.0], 0.5) == 7


def test_a_case_is_the_median_of_its_rounds() -> None:
    runs = [ChunkRun([1, 2, worst], [first], speed) for worst, first, speed in
            ((30, 7, 10), (10, 9, 30), (20, 8, 20))]  # fmt: skip
    assert summary(runs) == Case(2, 20, 20, 8, 20)
    assert summary([ChunkRun([1.0], [], 5.0)]).first_ms == 0


def test_the_table_has_every_budget_beside_whole_prompts() -> None:
    cases = {
        NONE: Case(4, 5, 6, 0, 100),
        WHOLE: Case(5, 500, 510, 400, 1000),
        "budget 512": Case(5, 100, 110, 440, 1010),
        "budget 64": Case(9, 25, 26, 600, 950),
    }
    found = compare_chunks(ChunkWork((64, 512)), cases)
    rows: Any = found.rows
    assert rows[0] == (NONE, 4, 5, 6, "", "", "", 100)
    assert rows[2] == ("budget 512", 5, 100, 110, 5.0, 440, 1.1, 1010)
    assert {len(row) for row in rows} == {len(found.columns)}
    assert "waits 500 ms (p99)" in found.finding
    assert "512 to 64 make that 5.0 to 20.0 times shorter" in found.finding
    assert "1.10 to 1.50 times as late" in found.finding
    assert "-5% to +1%" in found.finding
    assert found.plot.ticks == ("64", "512", WHOLE)
    assert found.plot.series[0].points == ((0, 25), (1, 100), (2, 500))


SMALL = SwapWork((8,), 32, 1, 3, 16, 32, 0.5, 1)


class FakeRunner:
    """Takes a second a block copied and two a token computed, on a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.plans: list[Plan] = []

    def launch(self, plan: Plan) -> FakeRunner:
        self.plans.append(plan)
        self.now += len(plan.swap_out) + 0.5 * len(plan.swap_in) + 2 * plan.num_tokens
        return self

    def collect(self) -> StepResult:
        return StepResult(len(self.plans))

    def close(self) -> None:
        pass


class Info:
    num_blocks, num_host_blocks = 100, 50


def test_one_sequence_goes_out_and_comes_back_to_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = FakeRunner()
    monkeypatch.setattr(paper_scheduling, "load", lambda *_: (runner, Info))
    monkeypatch.setattr(paper_scheduling.time, "perf_counter", lambda: runner.now)
    alone = paper_scheduling.measure_alone(CHECKPOINT, SwapWork(length=30, tries=2), 4)
    assert alone == Alone(8e3, 4e3, 60e3)  # 8 blocks of 4 for 30 tokens
    out, back = (next(p for p in runner.plans if getattr(p, n)) for n in ("swap_out", "swap_in"))
    assert sorted((host, device) for device, host in out.swap_out) == sorted(back.swap_in)
    assert set(runner.plans[0].joins[0].blocks) == {device for device, _ in out.swap_out}
    assert [plan.number for plan in runner.plans] == list(range(1, 10))


@pytest.mark.parametrize("way", ["swap", "recompute"])
def test_every_preemption_goes_the_forced_way_and_changes_no_answer(way: str) -> None:
    roomy = paper_scheduling.run_all(CHECKPOINT, SMALL, 8, {}, share=1.5)
    forced = paper_scheduling.run_all(CHECKPOINT, SMALL, 8, WAYS[way])
    counts = (forced.num_swaps, forced.num_recomputes)
    assert (roomy.num_swaps, roomy.num_recomputes) == (0, 0)
    assert counts[way != "swap"] > 0
    assert counts[way == "swap"] == 0
    assert forced.speed > 0
    assert {len(tokens) for tokens in forced.answers.values()} == {SMALL.output}
    assert num_changed(roomy.answers, [forced]) == 0


def run(speed: float, answer: int = 1, swaps: int = 2) -> SwapRun:
    return SwapRun(speed, swaps, 0, {"0": [answer]})


def test_the_table_has_medians_ratios_and_gains() -> None:
    work = SwapWork((8, 16), rounds=3)
    alone = [Alone(n, n, 20.0) for n in (1.0, 2.0, 3.0, 4.0, 2.0, 100.0)]  # 8, 16, 8, 16, ...
    assert medians(work, alone) == {8: Alone(2.0, 2.0, 20.0), 16: Alone(4.0, 4.0, 20.0)}
    speeds = {"swap": (90.0, 110.0, 200.0), "recompute": (100.0,) * 3, "own choice": (121.0,) * 3}
    runs = {(size, way): [run(s) for s in speeds[way]] for size in (8, 16) for way in WAYS}
    found = compare_swaps(work, medians(work, alone), [run(150.0)], runs)
    first: Any = found.rows[0]
    assert first == (8, 2.0, 2.0, 4.0, 20.0, 5.0, 110.0, 100.0, 121.0, "6, 0")
    assert len(first) == len(found.columns)
    assert "2 to 5 times" in found.finding  # 20 / 8 = 2.5, rounded to even
    assert "+10% to +10% of recompute's" in found.finding
    assert "+10% to +10% beside the forced" in found.finding
    assert "swap every time" in found.finding
    assert "All answers are equal" in found.finding


def test_changed_answers_are_counted_and_reported() -> None:
    assert num_changed({"0": [1]}, [run(1.0), run(1.0, answer=2), SwapRun(1.0, 0, 0, {})]) == 2
    work = SwapWork((8,))
    runs = {(8, way): [run(1.0, answer=2)] for way in WAYS}
    found = compare_swaps(work, {8: Alone(1.0, 1.0, 1.0)}, [run(1.0)], runs)
    assert "3 of 3 answers differ" in found.finding
