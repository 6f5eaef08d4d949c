"""Decodes that begin before their plan is there: the same tokens, whatever the plan then asks for.

Here they begin with any number of rows, on two threads or three.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from streamer.core.sampling import SamplingParams
from streamer.kernels import ops
from streamer.kernels.cpu import native
from streamer.kernels.cpu.program import Program, team
from streamer.model.runner import cpu
from tests.model.greedy_oracle import mixed_asks
from tests.model.hand import Hand, make_runner
from tests.model.runner.test_cpu import (
    test_a_nan_row_fails_alone,
    test_forks_of_one_prefill,
    test_greedy_equals_transformers,
    test_recompute,
    test_swap_out_and_in,
    test_verified_runs_equal_transformers,
)
from tests.model.sync_engine import SyncEngine
from tests.model.test_parity import MIXED, RECOMPUTE, SWAP

pytestmark = [
    pytest.mark.skipif(ops.why_not_native() != "", reason="of the native kernels"),
    pytest.mark.usefixtures("joins"),
]
__all__ = [
    "test_a_nan_row_fails_alone",
    "test_forks_of_one_prefill",
    "test_greedy_equals_transformers",
    "test_recompute",
    "test_swap_out_and_in",
    "test_verified_runs_equal_transformers",
]

TIGHT = {"num_gpu_blocks_override": 14, "max_num_seqs": 6, "max_num_batched_tokens": 24}
TIGHT |= {"block_size": 8, "max_model_len": 48}
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, seed=3)


class Joins(NamedTuple):
    """What became of decodes that were begun."""

    used: list[object]
    ended: list[object]


@pytest.fixture
def joins(monkeypatch: pytest.MonkeyPatch) -> Iterator[Joins]:
    seen = Joins([], [])
    join, stop = team.join, team._stop

    def counted(owner: object) -> bool:
        is_used = join(owner)
        (seen.used if is_used else seen.ended).append(owner)
        return is_used

    def stopped() -> None:
        if team._begun is not None:
            seen.ended.append(None)
        stop()

    monkeypatch.setattr(team, "join", counted)
    monkeypatch.setattr(team, "_stop", stopped)
    monkeypatch.setattr(cpu, "BEGUN_ROWS", 64)
    monkeypatch.setattr(native, "set_threads", lambda count: None)
    before = team._threads
    team.set_threads(2)
    yield seen
    seen.used.clear()
    seen.ended.clear()
    team.set_threads(before)


def serve(folder: Path, seed: int, costs: dict[str, float], **settings: Any) -> SyncEngine:
    """Greedy and drawn answers in a pool that is too small for them, one alone at the end."""
    engine = SyncEngine(folder, costs=costs, **settings, **TIGHT)
    for i, (prompt, count) in enumerate(mixed_asks(seed, 14, longest=20, output=(3, 24))):
        engine.add(f"r{i}", prompt, count, DRAWN if i % 3 else SamplingParams(temperature=0.0))
    engine.run()
    return engine


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("costs", [SWAP, RECOMPUTE, MIXED], ids=["swap", "recompute", "mixed"])
def test_no_token_differs(
    checkpoint: Any, joins: Joins, monkeypatch: pytest.MonkeyPatch, costs: dict[str, float],
    seed: int,
) -> None:  # fmt: skip
    """Through joins, ends, preemption and blocks that others get meanwhile."""
    folder = checkpoint("qwen3", 0)
    found = serve(folder, seed, costs)
    assert len(joins.used) > 5
    assert joins.ended
    monkeypatch.setattr(cpu, "BEGUN_ROWS", 0)
    num_used = len(joins.used)
    assert serve(folder, seed, costs).tokens == found.tokens
    assert len(joins.used) == num_used


def test_a_step_of_another_engine_ends_it(checkpoint: Any, joins: Joins) -> None:
    """What it had computed is computed again."""
    folder = checkpoint("llama", 1)
    alone, one, two = (Hand(make_runner(folder), num_blocks=8) for _ in range(3))
    for hand in (alone, one, two):
        hand.join(0, list(range(3, 20)))
        hand.step({0: 17})
    alone.run(12)
    joins.used.clear()
    for _ in range(12):
        one.step()
        two.step()
    assert alone.rows[0].output == one.rows[0].output == two.rows[0].output
    assert len(joins.used) <= 1
    assert len(joins.ended) >= 20


def test_a_row_that_waits_goes_on(checkpoint: Any, joins: Joins) -> None:
    """Its decode had begun."""
    folder = checkpoint("llama", 1)
    alone, hand = (Hand(make_runner(folder), num_blocks=8) for _ in range(2))
    for each in (alone, hand):
        each.join(0, list(range(3, 10)))
        each.step({0: 7})
        each.step()
    joins.ended.clear()
    hand.join(1, list(range(5, 30)))
    hand.step({0: 0, 1: 10})
    hand.step({0: 0, 1: 15})
    assert joins.ended
    hand.leave(1)
    hand.run(9)
    alone.run(9)
    assert hand.rows[0].output == alone.rows[0].output


def test_a_row_at_the_last_position_begins_nothing_beyond(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rotary tables would grow, and all be recorded anew."""
    folder = checkpoint("llama", 1)
    runner = make_runner(folder)
    hand = Hand(runner, num_blocks=8)
    hand.join(0, list(range(3, 20)))
    hand.step({0: 17})
    model: Any = runner.model
    graph = model._graph
    monkeypatch.setattr(model._rope, "length", 18)
    model._graph_of = (model._graph_of[0], 18, model._graph_of[2])
    began: list[object] = []
    monkeypatch.setattr(Program, "begin", lambda self, counts, owner: began.append(owner))
    hand.step()
    assert not began
    assert model._graph is graph


def test_a_wait_is_no_part_of_what_a_decode_takes(checkpoint: Any) -> None:
    """For a reader that was slow, say."""
    hand = Hand(make_runner(checkpoint("llama", 1)), num_blocks=8)
    hand.join(0, list(range(3, 10)))
    hand.step({0: 7})
    hand.run(4)
    before_s = hand.runner.facts().decode_s
    time.sleep(1.0)
    hand.step()
    assert hand.runner.facts().decode_s < before_s + 0.1


def test_closing_ends_it_and_frees_the_model(checkpoint: Any) -> None:
    """The threads' memory is held while they run, and no longer."""
    runner = make_runner(checkpoint("llama", 1))
    hand = Hand(runner, num_blocks=8)
    hand.join(0, list(range(3, 20)))
    hand.step({0: 17})
    hand.step()
    assert team._begun is not None
    model = weakref.ref(runner.model)
    runner.close()
    del runner, hand
    gc.collect()
    assert team._begun is None
    assert model() is None


def test_a_model_that_is_dropped_is_held_until_its_decode_has_ended(checkpoint: Any) -> None:
    """Without a call to close."""
    hand = Hand(make_runner(checkpoint("llama", 1)), num_blocks=8)
    hand.join(0, list(range(3, 20)))
    hand.step({0: 17})
    hand.step()
    model = weakref.ref(hand.runner.model)
    del hand
    gc.collect()
    assert model() is not None
    native.best(torch.zeros(1, 4))
    gc.collect()
    assert model() is None


def test_a_process_ends_beside_it(checkpoint: Any) -> None:
    """Its threads are in memory that Python frees then."""
    script = f"""
from tests.model.hand import Hand, make_runner
hand = Hand(make_runner({str(checkpoint("llama", 1))!r}), num_blocks=8)
hand.join(0, list(range(3, 20)))
hand.step({{0: 17}})
hand.step()
"""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
