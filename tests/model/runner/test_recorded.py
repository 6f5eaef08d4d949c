"""Recorded steps: their sizes, what a budget of memory leaves of them, and what they draw from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from streamer.core.sampling import SamplingParams
from streamer.model.runner.recorded import decode_sizes
from streamer.model.sampling.device import DeviceSampler
from tests.model.greedy_oracle import mixed_asks
from tests.model.runner.test_cuda import TINY, Late, late, oracle, serve, tokens_of
from tests.model.sync_engine import GREEDY, SyncEngine

pytestmark = pytest.mark.usefixtures("late")
__all__ = ["late", "oracle"]


@pytest.mark.parametrize(
    ("max_rows", "sizes"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20])],
)
def test_the_sizes_of_decodes_end_with_the_most_rows(max_rows: int, sizes: list[int]) -> None:
    """1, 2, 4, then every eighth."""
    assert decode_sizes(max_rows) == sizes


def test_decodes_beyond_the_memory_for_graphs_run_op_by_op(
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
    engine = serve(folder, asks, [GREEDY], max_num_seqs=4, max_model_len=48)
    assert device.num_recorded == 2 * 3  # of them the third was one too many
    assert "2 of 3 decode sizes recorded" in caplog.text
    oracle(folder).compare(tokens_of(engine, asks), asks, record_property)


def test_tokens_are_drawn_from_the_heads_own_logits(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch, late: Late
) -> None:
    """Recorded and op by op, of rows without bias, mask or penalties: nothing copies them."""
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
    kinds = [GREEDY, SamplingParams(temperature=0.8), SamplingParams(logprobs=2)]
    for i, params in enumerate(kinds):
        engine.add(f"r{i}", [5, 6, 7 + i], 4 * (i + 1), params)
    engine.run()
    assert device.num_replays > 0
    assert is_own
    assert all(is_own)
