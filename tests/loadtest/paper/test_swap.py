"""bench paper swap: the two plans by themselves, forced ways, medians and what the table says."""

from __future__ import annotations

from typing import Any

import pytest

from streamer.core.plan import Plan, StepResult
from streamer.demo import CHECKPOINT
from streamer.loadtest.paper import swap as paper_swap
from streamer.loadtest.paper.swap import WAYS, Alone, Run, Work, compare, medians, num_changed

SMALL = Work((8,), 32, 1, 3, 16, 32, 0.5, 1)


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
    monkeypatch.setattr(paper_swap, "load", lambda *_: (runner, Info))
    monkeypatch.setattr(paper_swap.time, "perf_counter", lambda: runner.now)
    alone = paper_swap.measure_alone(CHECKPOINT, Work(length=30, tries=2), 4)
    assert alone == Alone(8e3, 4e3, 60e3)  # 8 blocks of 4 for 30 tokens
    out, back = (next(p for p in runner.plans if getattr(p, n)) for n in ("swap_out", "swap_in"))
    assert sorted((host, device) for device, host in out.swap_out) == sorted(back.swap_in)
    assert set(runner.plans[0].joins[0].blocks) == {device for device, _ in out.swap_out}
    assert [plan.number for plan in runner.plans] == list(range(1, 10))


@pytest.mark.parametrize("way", ["swap", "recompute"])
def test_every_preemption_goes_the_forced_way_and_changes_no_answer(way: str) -> None:
    roomy = paper_swap.run_all(CHECKPOINT, SMALL, 8, {}, share=1.5)
    forced = paper_swap.run_all(CHECKPOINT, SMALL, 8, WAYS[way])
    counts = (forced.num_swaps, forced.num_recomputes)
    assert (roomy.num_swaps, roomy.num_recomputes) == (0, 0)
    assert counts[way != "swap"] > 0
    assert counts[way == "swap"] == 0
    assert forced.speed > 0
    assert {len(tokens) for tokens in forced.answers.values()} == {SMALL.output}
    assert num_changed(roomy.answers, [forced]) == 0


def run(speed: float, answer: int = 1, swaps: int = 2) -> Run:
    return Run(speed, swaps, 0, {"0": [answer]})


def test_the_table_has_medians_ratios_and_gains() -> None:
    work = Work((8, 16), rounds=3)
    alone = [Alone(n, n, 20.0) for n in (1.0, 2.0, 3.0, 4.0, 2.0, 100.0)]  # 8, 16, 8, 16, ...
    assert medians(work, alone) == {8: Alone(2.0, 2.0, 20.0), 16: Alone(4.0, 4.0, 20.0)}
    speeds = {"swap": (90.0, 110.0, 200.0), "recompute": (100.0,) * 3, "own choice": (121.0,) * 3}
    runs = {(size, way): [run(s) for s in speeds[way]] for size in (8, 16) for way in WAYS}
    found = compare(work, medians(work, alone), [run(150.0)], runs)
    first: Any = found.rows[0]
    assert first == (8, 2.0, 2.0, 4.0, 20.0, 5.0, 110.0, 100.0, 121.0, "6, 0")
    assert len(first) == len(found.columns)
    assert "2 to 5 times" in found.finding  # 20 / 8 = 2.5, rounded to even
    assert "+10% to +10% of recompute's" in found.finding
    assert "+10% to +10% beside the forced" in found.finding
    assert "swap every time" in found.finding
    assert "All answers are equal" in found.finding


def test_changed_answers_are_counted_and_said() -> None:
    assert num_changed({"0": [1]}, [run(1.0), run(1.0, answer=2), Run(1.0, 0, 0, {})]) == 2
    work = Work((8,))
    runs = {(8, way): [run(1.0, answer=2)] for way in WAYS}
    found = compare(work, {8: Alone(1.0, 1.0, 1.0)}, [run(1.0)], runs)
    assert "3 of 3 answers differ" in found.finding
