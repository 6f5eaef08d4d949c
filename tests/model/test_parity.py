"""Greedy tokens equal transformers' `generate`, whatever the scheduler does on the way.

Tokens must be equal; where they first differ, the oracle's two best logits must be within ROUNDING
of each other (another batch shape rounds differently), and the test reports how often that was.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from streamer.core.sampling import SamplingParams
from tests.model.sync_engine import GREEDY, SyncEngine

ROUNDING = 1e-4
VOCAB = 256
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
Ask = tuple[list[int], int]  # prompt, output tokens


@torch.inference_mode()
def generate(model: Any, asks: list[Ask]) -> list[tuple[list[int], list[float]]]:
    """transformers' greedy tokens, and how far ahead the best token was at each."""
    answers = []
    for prompt, count in asks:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=None,
            eos_token_id=None,
            pad_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = [logits[0].topk(2).values for logits in out.logits]
        margins = [float(top[0] - top[1]) for top in best]
        answers.append((out.sequences[0, len(prompt) :].tolist(), margins))
    return answers


def compare(
    got: list[list[int]], want: list[tuple[list[int], list[float]]], record: Callable[..., None]
) -> None:
    """Equal, but for ties within rounding; says how many."""
    ties = 0
    for tokens, (expected, margins) in zip(got, want, strict=True):
        assert len(tokens) == len(expected)
        differs = [i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b]
        if differs:
            first = differs[0]
            assert margins[first] < ROUNDING, (
                f"token {first}: {tokens[first]} for {expected[first]}, "
                f"which was ahead by {margins[first]}"
            )
            ties += 1
    record("ties_within_rounding", ties)
    print(f"{ties} of {len(got)} sequences differ where two tokens are within {ROUNDING}")
    assert ties <= len(got) // 16


def mixed_asks(seed: int, count: int, *, longest: int, output: tuple[int, int]) -> list[Ask]:
    """Prompts of 1 to `longest` tokens, both ends included."""
    rng = random.Random(seed)
    lengths = [1, longest, *(rng.randint(1, longest) for _ in range(count - 2))]
    rng.shuffle(lengths)
    return [
        ([rng.randrange(3, VOCAB) for _ in range(length)], rng.randint(*output))
        for length in lengths
    ]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_16_requests_in_one_batch_with_chunked_prefill(
    checkpoint: Any, reference: Any, record_property: Any, family: str, seed: int
) -> None:
    folder = checkpoint(family, seed, **FAMILIES[family])
    asks = mixed_asks(seed, 16, longest=300, output=(60, 70))
    engine = SyncEngine(folder, max_num_seqs=16, max_num_batched_tokens=64)
    for i, (prompt, count) in enumerate(asks):
        engine.add(f"r{i}", prompt, count)
    engine.run()
    assert engine.widest == 16
    got = [engine.tokens[f"r{i}", 0] for i in range(len(asks))]
    compare(got, generate(reference(folder), asks), record_property)


@pytest.fixture(scope="module")
def crowd(
    checkpoint: Any, reference: Any
) -> Callable[[str, int], tuple[Path, list[Ask], list[Any]]]:
    """64 requests of a family with transformers' answers, made once."""
    made: dict[tuple[str, int], tuple[Path, list[Ask], list[Any]]] = {}

    def get(family: str, seed: int) -> tuple[Path, list[Ask], list[Any]]:
        if (family, seed) not in made:
            folder = checkpoint(family, seed, **FAMILIES[family])
            asks = mixed_asks(5 + seed, 64, longest=40, output=(25, 60))
            made[family, seed] = folder, asks, generate(reference(folder), asks)
        return made[family, seed]

    return get


@pytest.mark.parametrize(("policy", "seed"), [("swap", 0), ("recompute", 1), ("mixed", 2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_64_requests_in_a_pool_that_preempts_at_least_50_times(
    crowd: Any, record_property: Any, family: str, policy: str, seed: int
) -> None:
    folder, asks, want = crowd(family, seed)
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
    compare([engine.tokens[f"r{i}", 0] for i in range(64)], want, record_property)


@pytest.mark.parametrize("family", FAMILIES)
def test_prefix_hits_change_no_token(
    checkpoint: Any, reference: Any, record_property: Any, family: str
) -> None:
    folder = checkpoint(family, 1, **FAMILIES[family])
    rng = random.Random(8)
    system = [rng.randrange(3, VOCAB) for _ in range(90)]
    asks = [(system + [rng.randrange(3, VOCAB) for _ in range(1 + i)], 16) for i in range(12)]
    engine = SyncEngine(folder, max_num_seqs=4, max_num_batched_tokens=64)
    for i, (prompt, count) in enumerate(asks):
        engine.add(f"r{i}", prompt, count)
    engine.run()
    assert engine.stats.prefix_hit_tokens >= 9 * 80
    got = [engine.tokens[f"r{i}", 0] for i in range(len(asks))]
    compare(got, generate(reference(folder), asks), record_property)


@torch.inference_mode()
def logprobs_of(model: Any, prompt: list[int], outputs: list[list[int]]) -> torch.Tensor:
    """[choices, tokens] log probabilities of these outputs of one length, by transformers."""
    ids = torch.tensor([prompt + output for output in outputs])
    logits = model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    logs = torch.log_softmax(logits[:, len(prompt) - 1 : -1], -1)
    return logs.gather(2, ids[:, len(prompt) :, None])[:, :, 0]


@pytest.mark.parametrize("costs", [SWAP, RECOMPUTE], ids=["swap", "recompute"])
@pytest.mark.parametrize("family", FAMILIES)
def test_four_forks_of_a_prefill_through_preemption(
    checkpoint: Any, reference: Any, record_property: Any, family: str, costs: dict[str, float]
) -> None:
    """Greedy ones say what transformers says; sampled ones go four ways, each with its own KV.

    (Greedy siblings write the same KV: only among sampled ones would a leak show.)
    """
    folder = checkpoint(family, 2, **FAMILIES[family])
    asks = mixed_asks(9, 8, longest=50, output=(20, 30))
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
    want = [answer for answer in generate(model, asks[::2]) for _ in range(4)]
    compare(got_greedy, want, record_property)
