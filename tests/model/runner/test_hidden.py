"""Hidden states of drawn tokens are transformers' own: chunked, batched, preempted and forked.

Every other request asks for none; the tokens of all are those of transformers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from streamer.core.sampling import SamplingParams
from tests.model.greedy_oracle import Ask, GreedyOracle, mixed_asks
from tests.model.sync_engine import SyncEngine
from tests.model.test_parity import FAMILIES, RECOMPUTE

TOLERANCE = 5e-5


def params(i: int) -> SamplingParams:
    """Parameters of the i-th request."""
    if i % 2:
        return SamplingParams(temperature=0.0)
    scores = 1 if i % 4 else None
    return SamplingParams(
        temperature=0.0, logprobs=0, hidden_states=True, n=1 + (i % 3 == 0), prompt_logprobs=scores
    )


def check_hidden(engine: SyncEngine, asks: list[Ask], model: Any, record_property: Any) -> None:
    """Run all requests on an engine that has none yet."""
    for i, (prompt, count) in enumerate(asks):
        engine.add(f"r{i}", prompt, count, params(i))
    engine.run()
    for (request_id, choice), found in engine.details.items():
        i = int(request_id[1:])
        if i % 2:
            assert not found
            continue
        known = [*asks[i][0], *engine.tokens[request_id, choice]]
        with torch.inference_mode():
            out = model(torch.tensor([known]), output_hidden_states=True)
        wanted = out.hidden_states[-1][0, len(asks[i][0]) - 1 : -1].float().numpy()
        got = [np.frombuffer(lp.hidden, np.float32) for lp in found]
        np.testing.assert_allclose(got, wanted, atol=TOLERANCE)
    got_tokens = [engine.tokens[f"r{i}", 0] for i in range(len(asks))]
    GreedyOracle(model).compare(got_tokens, asks, record_property)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_they_are_those_of_transformers(
    checkpoint: Any, reference: Any, record_property: Any, family: str
) -> None:
    """By the engine's own decoder, and through transformers' code."""
    folder = checkpoint(family, 0, **FAMILIES[family])
    engine = SyncEngine(
        folder, costs=RECOMPUTE, max_scored_tokens=7, max_num_seqs=8, max_num_batched_tokens=24,
        num_gpu_blocks_override=14, block_size=8, max_model_len=96,
    )  # fmt: skip
    asks = mixed_asks(3, 8, longest=40, output=(4, 24))
    check_hidden(engine, asks, reference(folder), record_property)
    assert sum(engine.preemptions) > 0
