"""Greedy tokens equal transformers' `generate`, whatever the scheduler does on the way.

tests/model/greedy_oracle.py says where they may differ; the run's last lines say how often they do.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from streamer.core.sampling import SamplingParams
from tests.model.greedy_oracle import VOCAB, GreedyOracle, mixed_asks
from tests.model.sync_engine import GREEDY, SyncEngine

SWAP = {"prefill_s": 1.0, "swap_bytes_per_s": 1e12, "swap_fixed_s": 0.0}
RECOMPUTE = {"prefill_s": 1e-12, "swap_bytes_per_s": 1.0, "swap_fixed_s": 1.0}
# Blocks of 8 tokens have 6 or 12 KiB here: a victim of four or five blocks is worth a swap.
MIXED = {"prefill_s": 1e-5, "swap_bytes_per_s": 1e9, "swap_fixed_s": 1.3e-4}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "mistral": {"sliding_window": 40},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "gpt2": {},
    "gemma3_text": {},
}
# Other seeds are other schedules, which a family has no part in.
CASES = [*((family, 0) for family in FAMILIES), ("llama", 1), ("gemma3_text", 2)]


@pytest.fixture(scope="module")
def oracle(reference: Any) -> Callable[[Path], GreedyOracle]:
    """transformers' answers for a checkpoint, shared by all tests that ask the same."""
    return functools.cache(lambda folder: GreedyOracle(reference(folder)))


@pytest.mark.parametrize(("family", "seed"), CASES)
def test_16_requests_in_one_batch_with_chunked_prefill(
    checkpoint: Any, oracle: Any, record_property: Any, family: str, seed: int
) -> None:
    folder = checkpoint(family, seed, **FAMILIES[family])
    asks = mixed_asks(seed, 16, longest=300, output=(60, 70), twins=2)
    engine = SyncEngine(folder, max_num_seqs=16, max_num_batched_tokens=64)
    for i, (prompt, count) in enumerate(asks):
        engine.add(f"r{i}", prompt, count)
    engine.run()
    assert engine.widest == 16
    got = [engine.tokens[f"r{i}", 0] for i in range(len(asks))]
    oracle(folder).compare(got, asks, record_property)


@pytest.mark.parametrize("policy", ["swap", "recompute", "mixed"])
@pytest.mark.parametrize(("family", "seed"), CASES)
def test_64_requests_in_a_pool_that_preempts_at_least_50_times(
    checkpoint: Any, oracle: Any, record_property: Any, family: str, policy: str, seed: int
) -> None:
    folder = checkpoint(family, seed, **FAMILIES[family])
    asks = mixed_asks(5 + seed, 64, longest=40, output=(25, 60), twins=8)
    costs = {"swap": SWAP, "recompute": RECOMPUTE, "mixed": MIXED}[policy]
    engine = SyncEngine(
        folder,
        costs=costs,
        num_gpu_blocks_override=64,
        max_num_seqs=24,
        max_num_batched_tokens=64,
        block_size=8,
        max_model_len=128,
    )
    for i, (prompt, count) in enumerate(asks):
        engine.add(f"r{i}", prompt, count)
    engine.run()
    swaps, recomputes = engine.preemptions
    print(f"{swaps} preemptions by swap, {recomputes} by recompute, {engine.steps} steps")
    assert swaps + recomputes >= 50
    assert engine.widest >= 16
    assert (swaps > 0) == (policy != "recompute")
    assert (recomputes > 0) == (policy != "swap")
    oracle(folder).compare([engine.tokens[f"r{i}", 0] for i in range(64)], asks, record_property)


@pytest.mark.parametrize(("family", "seed"), CASES)
def test_prefix_hits_change_no_token(
    checkpoint: Any, oracle: Any, record_property: Any, family: str, seed: int
) -> None:
    folder = checkpoint(family, seed, **FAMILIES[family])
    rng = random.Random(8 + seed)
    system = [rng.randrange(3, VOCAB) for _ in range(90)]
    asks = [(system + [rng.randrange(3, VOCAB) for _ in range(1 + i // 3)], 16) for i in range(12)]
    engine = SyncEngine(folder, max_num_seqs=4, max_num_batched_tokens=64)
    for i, (prompt, count) in enumerate(asks):
        engine.add(f"r{i}", prompt, count)
    engine.run()
    assert engine.stats.prefix_hit_tokens >= 9 * 80
    got = [engine.tokens[f"r{i}", 0] for i in range(len(asks))]
    oracle(folder).compare(got, asks, record_property)


@torch.inference_mode()
def logprobs_of(model: Any, prompt: list[int], outputs: list[list[int]]) -> torch.Tensor:
    """[choices, tokens] log probabilities of these outputs of one length, by transformers."""
    ids = torch.tensor([prompt + output for output in outputs])
    logits = model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    logs = torch.log_softmax(logits[:, len(prompt) - 1 : -1], -1)
    return logs.gather(2, ids[:, len(prompt) :, None])[:, :, 0]


@pytest.mark.parametrize("costs", [SWAP, RECOMPUTE], ids=["swap", "recompute"])
@pytest.mark.parametrize(("family", "seed"), CASES)
def test_four_forks_of_a_prefill_through_preemption(
    checkpoint: Any, reference: Any, oracle: Any, record_property: Any, family: str,
    seed: int, costs: dict[str, float],
) -> None:  # fmt: skip
    """Greedy choices equal transformers'; sampled ones go four ways, each with its own KV.

    (Greedy siblings write the same KV: only sampled ones would show a mixed-up block.)
    """
    folder = checkpoint(family, seed, **FAMILIES[family])
    asks = mixed_asks(7 + seed, 8, longest=50, output=(20, 30), twins=2)
    engine = SyncEngine(
        folder,
        costs=costs,
        num_gpu_blocks_override=48,
        max_num_seqs=16,
        max_num_batched_tokens=48,
        block_size=8,
        max_model_len=96,
    )
    sampled = SamplingParams(temperature=1.0, n=4, logprobs=0)
    greedy = msgspec.structs.replace(GREEDY, n=4)
    for i, (prompt, count) in enumerate(asks):
        engine.add(f"r{i}", prompt, count, sampled if i % 2 else greedy)
    engine.run()
    assert sum(engine.preemptions) > 0
    assert engine.stats.copied_blocks > 0
    model = reference(folder)
    for i, (prompt, count) in list(enumerate(asks))[1::2]:
        outputs = [engine.tokens[f"r{i}", choice] for choice in range(4)]
        assert len({tuple(output) for output in outputs}) == 4
        got = torch.tensor([engine.logprobs[f"r{i}", choice] for choice in range(4)])
        assert got.shape == (4, count)
        assert (got - logprobs_of(model, prompt, outputs)).abs().max() < 1e-3
    got_greedy = [engine.tokens[f"r{i}", c] for i in range(0, len(asks), 2) for c in range(4)]
    oracle(folder).compare(
        got_greedy, [ask for ask in asks[::2] for _ in range(4)], record_property
    )
