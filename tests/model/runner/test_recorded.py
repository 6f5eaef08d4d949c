"""Recorded steps: their sizes, what a budget of memory leaves of them, and what they draw from."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from streamer.config import Config
from streamer.core.sampling import SamplingParams
from streamer.core.sizes import batched_tokens
from streamer.model.runner import load, recorded
from streamer.model.runner.cuda import CudaRunner
from streamer.model.runner.recorded import decode_sizes, mixed_sizes
from streamer.model.sampling.device import DeviceSampler
from tests.model.greedy_oracle import mixed_asks
from tests.model.runner.test_cuda import (
    KINDS,
    TIGHT,
    TINY,
    Late,
    late,
    oracle,
    serve,
    tokens_of,
)
from tests.model.sync_engine import GREEDY, SyncEngine
from tests.model.test_speculation import TOKEN_BYTES

pytestmark = pytest.mark.usefixtures("late")
__all__ = ["late", "oracle"]


@pytest.mark.parametrize(
    ("max_rows", "sizes"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20])],
)
def test_the_sizes_of_decodes_end_with_the_most_rows(max_rows: int, sizes: list[int]) -> None:
    """1, 2, 4, then every eighth."""
    assert decode_sizes(max_rows) == sizes


def test_steps_beyond_the_memory_for_graphs_run_op_by_op(
    checkpoint: Any, oracle: Any, record_property: Any, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, late: Late,
) -> None:  # fmt: skip
    """Recording ends with the memory budget, largest first, and is logged; answers are the same."""
    folder = checkpoint("llama", 1, **TINY)
    device = late()
    record = device.record

    def costly(work: Callable[[], None]) -> Callable[[], None]:
        device.free -= 100 << 20
        return record(work)

    monkeypatch.setattr(device, "record", costly)
    asks = mixed_asks(2, 4, longest=9, output=(4, 6))
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 48}
    engine = serve(folder, asks, [GREEDY], **sizes)
    assert device.num_recorded == 2 * 3  # of them the third was one too many
    assert "2 of 4 step sizes recorded" in caplog.text
    oracle(folder).compare(tokens_of(engine, asks), asks, record_property)


def test_tokens_are_drawn_from_the_heads_own_logits(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch, late: Late
) -> None:
    """Recorded and op by op, of rows without bias, mask or penalties, with forks among them:
    nothing copies them."""
    made: list[torch.Tensor] = []
    is_own: list[bool] = []
    draw_plain = DeviceSampler.draw_plain

    def draw(self: DeviceSampler, logits: torch.Tensor, *args: Any, **more: Any) -> Any:
        is_own.append(any(logits.data_ptr() == own.data_ptr() for own in made))
        return draw_plain(self, logits, *args, **more)

    device = late()
    engine = SyncEngine(checkpoint("llama", 1, **TINY), max_num_seqs=4, max_model_len=48)
    model: Any = engine.runner._model  # type: ignore[attr-defined]
    head = model._head

    def remembered(x: torch.Tensor) -> torch.Tensor:
        made.append(head(x))
        return made[-1]

    monkeypatch.setattr(model, "_head", remembered)
    monkeypatch.setattr(DeviceSampler, "draw_plain", draw)
    kinds = [SamplingParams(logprobs=2), GREEDY, SamplingParams(temperature=0.8, n=2)]
    for i, params in enumerate(kinds):
        engine.add(f"r{i}", [5, 6, 7 + i], 4 * (i + 1), params)
    engine.run()
    assert device.num_replays > 0
    assert is_own
    assert all(is_own)


@pytest.mark.parametrize(
    ("max_tokens", "sizes"),
    [
        (8, [8]),
        (33, [32, 33]),
        (200, [32, 64, 96, 128, 160, 192, 200]),
        (8192, list(recorded.MIXED_SIZES)),
    ],
)
def test_the_sizes_of_steps_with_chunks(max_tokens: int, sizes: list[int]) -> None:
    """Up to the most tokens of a step; beyond 128 at most a fifth of a step is padding, beyond
    1,024 a ninth."""
    assert mixed_sizes(max_tokens) == sizes
    assert all(before >= 0.8 * after for before, after in pairwise(sizes) if after > 128)
    assert all(9 * before >= 8 * after for before, after in pairwise(sizes) if after > 1024)


def test_a_full_step_of_a_gpus_default_budget_is_recorded() -> None:
    """It would run op by op, and be the host's rather than the device's for a small model."""
    budget = batched_tokens(Config(model="m"), "cuda")
    assert mixed_sizes(budget)[-1] == budget


def test_recorded_steps_have_the_tokens_of_those_op_by_op(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch, late: Late
) -> None:
    """Chunks, forks, a scored prompt and rows of all kinds, with steps of up to 20 tokens recorded
    and larger ones not, and with none recorded."""
    folder = checkpoint("llama", 1, **TINY)
    asks = mixed_asks(4, 6, longest=30, output=(3, 6))
    kinds = [SamplingParams(temperature=0.7, prompt_logprobs=1), *KINDS[1:6]]
    counts: list[tuple[int, int]] = []

    def answers() -> SyncEngine:
        """Of requests that arrive one step after the other."""
        engine = SyncEngine(folder, token_bytes=TOKEN_BYTES, **TIGHT)
        for i, (prompt, count) in enumerate(asks):
            engine.add(f"r{i}", prompt, count, kinds[i])
            engine.step()
        engine.run()
        return engine

    pack = recorded.RecordedMixed.pack

    def seen(self: Any, tokens: Any, *more: Any) -> Any:
        counts.append((len(tokens), len(self._step.tokens)))
        return pack(self, tokens, *more)

    monkeypatch.setattr(recorded.RecordedMixed, "pack", seen)
    monkeypatch.setattr(recorded, "MIXED_SIZES", (8, 20))
    late(3)
    got = answers()
    assert {size for _, size in counts} == {8, 20}
    assert any(count < size for count, size in counts)
    monkeypatch.setattr(CudaRunner, "record", lambda *_: None)
    counts.clear()
    device = late(3)
    expected = answers()
    assert (device.num_replays, counts) == (0, [])
    assert got.tokens == expected.tokens
    found = [s.logprob for s in got.scores["r0"]]
    assert found == pytest.approx([s.logprob for s in expected.scores["r0"]], abs=1e-4)


def test_memory_of_recorded_steps_is_kept_from_the_pool(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch, late: Late
) -> None:
    """Both kinds' peaks and what all of them leave, beside the largest step's; none where none can
    be."""
    free: list[int] = []
    plan_pools = load.memory.plan_pools

    def planned(*args: Any, **given: Any) -> Any:
        free.append(given["free"])
        return plan_pools(*args, **given)

    device = late()

    def peak_bytes(work: Callable[[], None]) -> int:
        work()
        return 1 << 20

    monkeypatch.setattr(device, "peak_bytes", peak_bytes)
    monkeypatch.setattr(load.memory, "plan_pools", planned)
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 40, "max_model_len": 48}
    SyncEngine(checkpoint("llama", 1, **TINY), **sizes)
    states = (1 + 2 + 4 + 32 + 40) * TINY["hidden_size"] * 4
    assert device.free - free[-1] == (3 << 20) + states
    small = {"n_layer": 1, "n_embd": 32, "n_head": 2}
    SyncEngine(checkpoint("gpt2", 0, **small), **sizes)
    assert device.free - free[-1] == 1 << 20
