"""Seeded sampling gives the same tokens alone, in a batch of 16, and through preemption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamer.core.sampling import SamplingParams
from tests.model.greedy_oracle import mixed_asks
from tests.model.sync_engine import SyncEngine
from tests.model.test_parity import RECOMPUTE, SWAP

MIXES = [
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.2, top_k=20),
    SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.2),
    SamplingParams(temperature=0.9, min_p=0.05, presence_penalty=0.5, frequency_penalty=0.3),
]


def sample(folder: Path, only: list[int], **settings: Any) -> dict[tuple[str, int], list[int]]:
    """The tokens of the given ones of 16 requests, each with its own seed and settings."""
    engine = SyncEngine(folder, **settings)
    for i, (prompt, count) in enumerate(mixed_asks(3, 16, longest=70, output=(16, 30))):
        if i in only:
            params = msgspec.structs.replace(MIXES[i % 4], seed=1000 + i, n=1 + (i % 5 == 0))
            engine.add(f"r{i}", prompt, count, params)
    engine.run()
    if "num_gpu_blocks_override" in settings:
        assert sum(engine.preemptions) >= 5
    return engine.tokens


@pytest.mark.parametrize("costs", [SWAP, RECOMPUTE], ids=["swap", "recompute"])
def test_same_tokens_alone_in_a_batch_and_through_preemption(
    checkpoint: Any, costs: dict[str, float]
) -> None:
    folder = checkpoint("llama", 0)
    together = sample(folder, list(range(16)), max_num_seqs=20)
    pressed = sample(
        folder, list(range(16)), costs=costs, max_num_seqs=20, num_gpu_blocks_override=22,
        block_size=8, max_num_batched_tokens=40, max_model_len=110,
    )  # fmt: skip
    alone: dict[tuple[str, int], list[int]] = {}
    for i in range(16):
        alone |= sample(folder, [i], max_num_seqs=2)
    assert together == alone
    assert pressed == alone
    assert len({tuple(tokens) for tokens in alone.values()}) == len(alone)


def test_another_seed_gives_other_tokens(checkpoint: Any) -> None:
    folder = checkpoint("llama", 0)
    outputs = []
    for seed in (1, 2):
        engine = SyncEngine(folder)
        engine.add("r", [5, 6, 7], 20, SamplingParams(temperature=1.0, seed=seed))
        engine.run()
        outputs.append(engine.tokens["r", 0])
    assert outputs[0] != outputs[1]
