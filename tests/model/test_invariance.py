"""With the native kernels a request's tokens do not depend on what else happens, bit for bit.

That is: not on the other rows of a step, on where its prompt was cut, nor on a preemption; in
bfloat16 as in float32, log probabilities to the last bit. transformers is no oracle for this; the
oracle is the request run alone.
"""

from __future__ import annotations

from typing import Any

import pytest

from streamer.core.sampling import SamplingParams
from streamer.kernels import ops
from tests.model.greedy_oracle import mixed_asks
from tests.model.sync_engine import SyncEngine
from tests.model.test_parity import MIXED, RECOMPUTE

DRAWN = SamplingParams(temperature=0.8, top_p=0.95, logprobs=0)
Answer = tuple[list[int], list[float]]


def answers(engine: SyncEngine, asks: list[tuple[list[int], int]]) -> list[Answer]:
    """Tokens and log probabilities; every other request is greedy."""
    for i, (prompt, count) in enumerate(asks):
        params = SamplingParams(temperature=0.0, logprobs=0) if i % 2 else DRAWN
        engine.add(f"r{i}", prompt, count, params)
    engine.run()
    return [(engine.tokens[f"r{i}", 0], engine.logprobs[f"r{i}", 0]) for i in range(len(asks))]


@pytest.mark.skipif(ops.why_not_native() != "", reason="torch's sums depend on shapes")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_a_request_is_bit_equal_alone_together_in_chunks_and_recomputed(
    checkpoint: Any, family: str, dtype: str
) -> None:
    folder = checkpoint(family, 1, **({"sliding_window": 40} if family == "mistral" else {}))
    asks = mixed_asks(3, 20, longest=60, output=(25, 40), twins=2)
    alone = SyncEngine(folder, dtype=dtype, max_num_seqs=1, max_num_batched_tokens=512)
    expected = answers(alone, asks)
    together = SyncEngine(folder, dtype=dtype, max_num_seqs=20, max_num_batched_tokens=512)
    assert answers(together, asks) == expected
    assert together.widest == 20
    for costs in (RECOMPUTE, MIXED):
        tight = SyncEngine(
            folder,
            costs=costs,
            dtype=dtype,
            num_gpu_blocks_override=40,
            max_num_seqs=16,
            max_num_batched_tokens=37,
            block_size=8,
            max_model_len=128,
        )
        assert answers(tight, asks) == expected
        assert sum(tight.preemptions) >= 10
