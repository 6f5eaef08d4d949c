"""Log probabilities of prompts are transformers' own: whole, chunked, preempted and batched.

Other requests in the same batch ask for none; their tokens must be transformers' too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from streamer.core.plan import TokenLogprob
from streamer.core.sampling import SamplingParams
from streamer.model.runner import scoring
from streamer.model.runner.scoring import Scored
from tests.model.greedy_oracle import Ask, GreedyOracle, mixed_asks
from tests.model.sync_engine import SyncEngine
from tests.model.test_parity import FAMILIES, RECOMPUTE, SWAP

TOLERANCE = 2e-4  # of a log probability; the largest error seen was 3e-5, where logits reach 30
# Number of best tokens asked for beside the prompt's own, in turns; None: no scores.
NUM_TOP = [1, None, 0, 20, None]
VOCAB = 256


def params(i: int) -> SamplingParams:
    """Parameters of the i-th request; every third one has two choices from one prompt."""
    num_top = NUM_TOP[i % len(NUM_TOP)]
    return SamplingParams(temperature=0.0, prompt_logprobs=num_top, n=1 + (i % 3 == 0))


def compare(found: Sequence[TokenLogprob], prompt: list[int], num_top: int, model: Any) -> None:
    """Check that `found` are the log probabilities that transformers gives for the prompt."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        logits = model(ids, attention_mask=torch.ones_like(ids)).logits[0]
    logs = logits.float().log_softmax(-1)
    assert [lp.token_id for lp in found] == prompt[1:]
    for theirs, lp in zip(logs, found, strict=False):
        assert abs(theirs[lp.token_id].item() - lp.logprob) < TOLERANCE
        best = theirs.topk(num_top).values.tolist()
        assert len(lp.top) == num_top
        for (token, value), other in zip(lp.top, best, strict=True):
            assert abs(value - other) < TOLERANCE
            assert abs(value - theirs[token].item()) < TOLERANCE
        # lm-eval asks whether the token was the best one by comparing these two
        if num_top and lp.top[0][0] == lp.token_id:
            assert lp.top[0][1] == lp.logprob


def check(engine: SyncEngine, asks: list[Ask], model: Any, record_property: Any) -> None:
    """Run all requests on an engine that has none yet."""
    for i, (prompt, count) in enumerate(asks):
        engine.add(f"r{i}", prompt, count, params(i))
    engine.run()
    for i, (prompt, _) in enumerate(asks):
        found = engine.scores.get(f"r{i}", [])
        num_top = NUM_TOP[i % len(NUM_TOP)]
        if num_top is None:
            assert not found
        else:
            compare(found, prompt, num_top, model)
    got = [engine.tokens[f"r{i}", 0] for i in range(len(asks))]
    GreedyOracle(model).compare(got, asks, record_property)


@pytest.mark.parametrize("chunk", [64, 13], ids=["64", "13"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gpt2", "gemma3_text"])
def test_they_are_those_of_transformers(
    checkpoint: Any, reference: Any, record_property: Any, family: str, chunk: int
) -> None:
    """With a window, tied weights, and through transformers' own code; a step scores `chunk`."""
    folder = checkpoint(family, 0, **FAMILIES[family])
    engine = SyncEngine(folder, max_scored_tokens=chunk, max_num_seqs=8, max_num_batched_tokens=64)
    check(engine, mixed_asks(2, 10, longest=90, output=(2, 6)), reference(folder), record_property)


@pytest.mark.parametrize("costs", [SWAP, RECOMPUTE], ids=["swap", "recompute"])
def test_preempted_they_are_neither_lost_nor_twice_there(
    checkpoint: Any, reference: Any, record_property: Any, costs: dict[str, float]
) -> None:
    folder = checkpoint("llama", 0, **FAMILIES["llama"])
    engine = SyncEngine(
        folder, costs=costs, max_scored_tokens=7, max_num_seqs=12, max_num_batched_tokens=24,
        num_gpu_blocks_override=24, block_size=8, max_model_len=96,
    )  # fmt: skip
    asks = mixed_asks(3, 16, longest=40, output=(15, 40))
    check(engine, asks, reference(folder), record_property)
    assert sum(engine.preemptions) >= 10


def test_by_torch_alone(
    checkpoint: Any, reference: Any, record_property: Any, backend: str
) -> None:
    """torch alone, which serves without a compiler, and the native kernels."""
    folder = checkpoint("llama", 0, **FAMILIES["llama"])
    engine = SyncEngine(folder, max_scored_tokens=20, max_num_batched_tokens=64, max_num_seqs=4)
    check(engine, mixed_asks(4, 5, longest=40, output=(2, 3)), reference(folder), record_property)


def test_a_large_vocabulary_is_looked_at_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result does not depend on the size of the pieces; the logits are bfloat16."""
    monkeypatch.setattr(scoring, "PIECE", 3)
    noise = torch.Generator().manual_seed(0)  # no two logits of a row are equal
    logits = torch.stack([torch.randperm(VOCAB, generator=noise) for _ in range(7)]) / 16
    logits = logits.bfloat16()
    targets = torch.arange(7) * 11
    scored = Scored(((4, 5), (2, 2)), (2, 0), targets.numpy())
    result = scored.compute(logits, targets)
    assert result.shape == (7, 1 + 2 * 2)
    found = scored.by_row(result)
    assert [len(found[4]), len(found[2])] == [5, 2]
    logs = logits.float().log_softmax(-1)
    for i, lp in enumerate([*found[4], *found[2]]):
        assert (lp.token_id, lp.logprob) == (int(targets[i]), logs[i, targets[i]].item())
        values, ids = logs[i].topk(2)
        best = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        assert lp.top == (best if i < 5 else ())


def test_more_is_asked_for_than_there_are_tokens_and_some_are_impossible() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0], [torch.nan, 0.0, 0.0]])
    scored = Scored(((0, 2),), (20,), np.array([1, 1]))
    banned, sick = scored.by_row(scored.compute(logits, torch.tensor([1, 1])))[0]
    assert banned.logprob == -torch.inf
    assert len(banned.top) == 3
    assert sick.logprob != sick.logprob
