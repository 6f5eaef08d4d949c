"""Beam searches of the engine equal transformers' `generate(num_beams=...)`: tokens and scores."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from streamer.core.sampling import SamplingParams
from tests.model.sync_engine import GREEDY, SyncEngine
from tests.model.test_parity import RECOMPUTE, SWAP

NUM_TOKENS = 20
SEARCHES = ((2, 1.0, False), (4, 0.6, True), (8, 0.0, "never"), (4, 2.0, False))


class Ask(NamedTuple):
    """One search, and what transformers finds."""

    prompt: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    expected: list[tuple[list[int], float]]


def asks(model: Any) -> list[Ask]:
    """Each search without an end token, and with one that its best answer comes to."""
    made = []
    for seed, (width, penalty, early) in enumerate(SEARCHES):
        rng = random.Random(seed)
        prompt = [rng.randrange(3, 256) for _ in range(5 + 5 * seed)]
        params = SamplingParams(
            use_beam_search=True, beam_width=width, n=2, length_penalty=penalty,
            early_stopping=early,
        )  # fmt: skip
        free = Ask(prompt, params, frozenset(), search(model, prompt, params, None))
        end = free.expected[0][0][6]
        ended = search(model, prompt, params, end)
        made += [free, Ask(prompt, params, frozenset({end}), ended)]
    return made


def search(
    model: Any, prompt: list[int], params: SamplingParams, end: int | None
) -> list[tuple[list[int], float]]:
    ids = torch.tensor([prompt])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=params.num_beams,
        num_return_sequences=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_new_tokens=NUM_TOKENS,
        eos_token_id=end,
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows = found.sequences[:, len(prompt) :].tolist()
    cut = [row[: row.index(end) + 1] if end in row else row for row in rows]
    return list(zip(cut, found.sequences_scores.tolist(), strict=True))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_searches_equal_those_of_transformers(checkpoint: Any, reference: Any, family: str) -> None:
    """Alone in a pool that is large, and preempted by swap and by recompute in one that is not."""
    folder = checkpoint(family, 1)
    given = asks(reference(folder))
    for costs, num_blocks in (({}, 512), (SWAP, 72), (RECOMPUTE, 72)):
        engine = check(folder, given, costs=costs, num_gpu_blocks_override=num_blocks)
        assert bool(engine.preemptions[costs is RECOMPUTE]) == bool(costs)


def test_a_search_in_another_engine_goes_on_after_what_it_reported(
    checkpoint: Any, reference: Any
) -> None:
    folder = checkpoint("llama", 1)
    given = asks(reference(folder))
    num_reported = 0
    for num_steps in (1, 7, 13, 17):
        lost = SyncEngine(folder, **SIZES)
        add_all(lost, given)
        for _ in range(num_steps):
            lost.step()
        check(folder, given, lost)
        num_reported += sum(map(len, lost.tokens.values()))
    assert num_reported > 100


SIZES: dict[str, Any] = {"max_num_seqs": 40, "block_size": 4, "max_num_batched_tokens": 48}


def add_all(engine: SyncEngine, given: list[Ask], lost: SyncEngine | None = None) -> None:
    """All searches, beside rows that draw, as far as a lost engine had come."""
    for i, ask in enumerate(given):
        for name, params in ((f"r{i}", ask.params), (f"greedy{i}", GREEDY)):
            stop_ids = ask.stop_ids if params is ask.params else frozenset()
            outputs = () if lost is None else lost.drawn(name)
            if not outputs or any(each.finish is None for each in outputs):
                engine.add(name, ask.prompt, NUM_TOKENS, params, stop_ids=stop_ids, outputs=outputs)
            else:
                engine.tokens |= {k: t for k, t in lost.tokens.items() if k[0] == name}
                engine.finishes |= {k: f for k, f in lost.finishes.items() if k[0] == name}


def check(
    folder: Path, given: list[Ask], lost: SyncEngine | None = None, **settings: Any
) -> SyncEngine:
    """Run all searches at once and compare their answers."""
    engine = SyncEngine(folder, **SIZES, **settings)
    add_all(engine, given, lost)
    engine.run()
    for i, ask in enumerate(given):
        for choice, (tokens, score) in enumerate(ask.expected):
            assert engine.tokens[f"r{i}", choice] == tokens
            assert engine.finishes[f"r{i}", choice].score == pytest.approx(score, rel=1e-5)
    return engine
