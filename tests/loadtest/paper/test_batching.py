"""The servers that bench paper compares: ends, slots and the same tokens; a run on tiny shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from streamer.core.plan import Finish, FinishReason, StepOutput
from streamer.demo import CHECKPOINT
from streamer.loadtest.paper import batching as paper_batching
from streamer.loadtest.paper.batching import SYSTEMS, Engine, Generate, Run
from streamer.loadtest.paper.comparison import Ask, Steps, asks, settings

ASKS = [Ask((5,), 1), Ask((5,), 3), Ask((5,), 2)]


class Clock:
    """A clock that the servers' work moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(paper_batching.time, "perf_counter", lambda: self.now)


class PlainSteps:
    """Two rows, a token per row and step, a second per step."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._left: dict[str, int] = {}
        self.answers: dict[str, list[int]] = {}

    def add(self, name: str, prompt: Sequence[int], num_output: int) -> None:
        self._left[name] = num_output
        self.answers[name] = []

    def step(self) -> StepOutput | None:
        rows = list(self._left)[:2]
        if not rows:
            return None
        self._clock.now += 1
        for row in rows:
            self._left[row] -= 1
            self.answers[row].append(9)
        ended = [row for row in rows if not self._left[row]]
        for row in ended:
            del self._left[row]
        return StepOutput(
            0,
            tuple(rows),
            (0,) * len(rows),
            (9,) * len(rows),
            finishes=tuple(Finish(row, 0, FinishReason.LENGTH, 0) for row in ended),
        )

    def run(self) -> None:
        assert not self._left


def served(clock: Clock, *, is_static: bool) -> Run:
    steps: Any = PlainSteps(clock)
    return Engine(steps, 2, is_static=is_static)(ASKS)


def test_continuous(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third takes the first one's place after a step."""
    run = served(Clock(monkeypatch), is_static=False)
    assert (run.ends, run.seconds, run.slots) == ((1, 3, 3), 3, 6)
    assert (run.num_tokens, run.slot_efficiency, run.tokens_per_s) == (6, 1, 2)
    assert run.latency_s == pytest.approx((1 / 1 + 3 / 3 + 3 / 2) / 3)


def test_static(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third waits for both before it."""
    run = served(Clock(monkeypatch), is_static=True)
    assert (run.ends, run.slots, run.slot_efficiency) == ((1, 3, 5), 10, 0.6)


def test_transformers_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of a batch end with its longest; slots count to there."""
    clock = Clock(monkeypatch)
    server = Generate.__new__(Generate)
    server._size = 2

    def answer(batch: Sequence[Ask]) -> list[tuple[int, ...]]:
        clock.now += max(ask.num_output for ask in batch)
        return [(9,) * ask.num_output for ask in batch]

    monkeypatch.setattr(server, "_answer", answer)
    run = server(ASKS)
    assert (run.ends, run.slots, run.slot_efficiency) == ((3, 3, 5), 10, 0.6)


def test_the_same_tokens_from_all() -> None:
    """Greedy, float32: the padded batches of transformers are the oracle."""
    requests = asks("ShareGPT", 5, scale=32)
    oracle = Generate(CHECKPOINT, 2, torch.float32, 1)(requests)
    assert [len(a) for a in oracle.answers] == [ask.num_output for ask in requests]
    config = settings(dtype="float32", max_num_seqs=2, num_gpu_blocks_override=256)
    with Steps(CHECKPOINT, config) as steps:
        for is_static in (True, False):
            server = Engine(steps, 2, is_static=is_static)
            run = server(requests)
            steps.answers.clear()
            assert run.answers == oracle.answers
            assert run.slots >= run.num_tokens


def test_it_runs() -> None:
    progress: list[str] = []
    found = paper_batching.measure(progress.append, tiny=True)
    assert found.columns[1:4] == SYSTEMS
    assert [str(row[0]).split(":")[1] for row in found.rows] == [
        *(" tokens/s", " slots used", " latency, ms a token") * 2,
    ]
    assert "ShareGPT, batches of 2: transformers, static" in progress
    assert len(found.plot.series) == 3
