"""bench paper chunks: gaps and first tokens of hand-made steps, and what the table says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamer.core.plan import StepOutput, StepStats
from streamer.loadtest.paper import chunks as paper_chunks
from streamer.loadtest.paper.chunks import NONE, WHOLE, Case, Run, Work, compare, share, summary


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
    work = Work((), num_streams=2, output=9, num_long=2, long=100, first=3, every=3)
    steps = FakeSteps(budget)
    monkeypatch.setattr(paper_chunks, "Steps", lambda *_: steps)
    monkeypatch.setattr(paper_chunks.time, "perf_counter", lambda: steps.now)
    run = paper_chunks.run_budget(Path(), work, budget, num_long=work.num_long)
    assert run.gaps_ms == pytest.approx(gaps_ms)
    assert run.first_ms == pytest.approx(first_ms)
    assert run.speed == pytest.approx(1000)


def test_shares_are_by_nearest_rank() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert [share(values, part) for part in (0.5, 0.99, 1.0)] == [50, 99, 100]
    assert share([7.0], 0.5) == 7


def test_a_case_is_the_median_of_its_rounds() -> None:
    runs = [Run([1, 2, worst], [first], speed) for worst, first, speed in
            ((30, 7, 10), (10, 9, 30), (20, 8, 20))]  # fmt: skip
    assert summary(runs) == Case(2, 20, 20, 8, 20)
    assert summary([Run([1.0], [], 5.0)]).first_ms == 0


def test_the_table_has_every_budget_beside_whole_prompts() -> None:
    cases = {
        NONE: Case(4, 5, 6, 0, 100),
        WHOLE: Case(5, 500, 510, 400, 1000),
        "budget 512": Case(5, 100, 110, 440, 1010),
        "budget 64": Case(9, 25, 26, 600, 950),
    }
    found = compare(Work((64, 512)), cases)
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
