"""With the native kernels a request's tokens do not depend on what else happens, bit for bit.

That is: not on the other rows of a step, on where its prompt was cut, on what of it was cached, nor
on a preemption; in bfloat16 as in float32, with quantized weights and caches, log probabilities to
the last bit. transformers is no oracle for this; the oracle is the request run alone.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from streamer.core.sampling import SamplingParams
from streamer.kernels import ops
from streamer.model.memory import GIB
from streamer.model.quantization.write import quantize_checkpoint
from streamer.model.runner.cpu import CpuRunner
from tests.model.gguf.test_models import all_formats
from tests.model.gguf_files import write_gguf
from tests.model.greedy_oracle import mixed_asks
from tests.model.sync_engine import SyncEngine
from tests.model.test_parity import RECOMPUTE, SWAP

DRAWN = SamplingParams(temperature=0.8, top_p=0.95, logprobs=0)
Answer = tuple[list[int], list[float]]

WINDOW: dict[str, Any] = {"sliding_window": 40}
# A K-quant's block has 256 columns.
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "initializer_range": 0.05}
# In heads of 64 an INT8 cache is multiplied as integers; 192 is one group of 128 and a half.
INTEGER: dict[str, Any] = {
    "head_dim": 64,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "initializer_range": 0.08,
}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "llama-float32": ("llama", {}, {"dtype": "float32"}),
    "llama-bfloat16": ("llama", {}, {"dtype": "bfloat16"}),
    "mistral-float32": ("mistral", WINDOW, {"dtype": "float32"}),
    "mistral-bfloat16": ("mistral", WINDOW, {"dtype": "bfloat16"}),
    "qwen3-float32": ("qwen3", {}, {"dtype": "float32"}),
    "qwen3-bfloat16": ("qwen3", {}, {"dtype": "bfloat16"}),
    "int4-32": ("qwen2", {}, {"dtype": "bfloat16", "quantization": "int4"}),
    "int4-64": ("qwen3", INTEGER, {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
    "int4-128": ("llama", INTEGER, {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
    "int8": ("llama", {}, {"dtype": "float32", "quantization": "int8", "kv_cache_dtype": "fp8"}),
    "fp8": ("llama", {}, {"dtype": "bfloat16", "quantization": "fp8"}),
    "gguf": ("qwen3", WIDE, {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
}


def answers(engine: SyncEngine, asks: list[tuple[list[int], int]], name: str = "r") -> list[Answer]:
    """Tokens and log probabilities; every other request is greedy."""
    for i, (prompt, count) in enumerate(asks):
        params = SamplingParams(temperature=0.0, logprobs=0) if i % 2 else DRAWN
        engine.add(f"{name}{i}", prompt, count, params)
    engine.run()
    keys = [(f"{name}{i}", 0) for i in range(len(asks))]
    return [(engine.tokens[key], engine.logprobs[key]) for key in keys]


def case_engine(checkpoint: Any, tmp_path: Path, case: str) -> tuple[Path, dict[str, str]]:
    """The case's model and settings."""
    family, sizes, settings = CASES[case]
    model = checkpoint(family, 1, **sizes)
    if case == "gguf":  # every format somewhere, and tied embeddings in one
        copy = Path(shutil.copytree(model, tmp_path / "m"))
        model = write_gguf(copy, tmp_path / "m.gguf", all_formats, architecture=family)
    if case in ("int4-64", "int4-128"):  # with zero points
        out, group = tmp_path / "q", int(case.removeprefix("int4-"))
        quantize_checkpoint(model, out, "int4", None, group, show_progress=False)
        model = out
    return model, settings


class Paged:
    """Logits of tokens of rows of a runner's model, row r in blocks r * WIDTH and on."""

    WIDTH = 4  # blocks

    def __init__(self, engine: SyncEngine) -> None:
        self.runner, self.size = engine.runner, engine.info.block_size

    def logits(self, *chunks: tuple[int, int, list[int]]) -> torch.Tensor:
        """[T, V]: one step of chunks (row, start, tokens), every token's logits."""
        tables = torch.tensor([[r * self.WIDTH + n for n in range(self.WIDTH)] for r, *_ in chunks])
        owner = [n for n, (_, _, tokens) in enumerate(chunks) for _ in tokens]
        at = torch.tensor([start + n for _, start, t in chunks for n in range(len(t))])
        batch = ops.AttentionBatch(
            query_lens=[len(tokens) for *_, tokens in chunks],
            context_lens=[start + len(tokens) for _, start, tokens in chunks],
            block_tables=tables,
            slots=tables[owner, at // self.size] * self.size + at % self.size,
            block_size=self.size,
        )
        tokens = torch.tensor([t for *_, tokens in chunks for t in tokens])
        assert isinstance(self.runner, CpuRunner)
        with torch.inference_mode():
            last = torch.arange(len(tokens))
            return self.runner.model.forward(tokens, at, batch, self.runner._pool, last).clone()


@pytest.mark.skipif(ops.why_not_native() != "", reason="torch's sums depend on shapes")
@pytest.mark.parametrize("case", CASES)
def test_verified_tokens_have_the_logits_of_tokens_decoded_one_by_one(
    checkpoint: Any, tmp_path: Path, case: str
) -> None:
    """Chunks of two to nine tokens over blocks that still hold what others were provisional, alone
    and beside rows that decode and one that computes its prompt; the promise of speculation."""
    model, settings = case_engine(checkpoint, tmp_path, case)
    paged = Paged(SyncEngine(model, max_num_batched_tokens=512, **settings))
    rng = random.Random(5)
    tokens = [rng.randrange(100) for _ in range(60)]
    start, end = 23, 50  # beyond the sliding window
    paged.logits((0, 0, tokens[:start]))
    alone = [paged.logits((0, n, [tokens[n]])) for n in range(start, end)]
    for is_alone in (True, False):
        paged.logits((1, 0, tokens[:start]))
        for row in range(2, 10):
            paged.logits((row, 0, tokens[row:start]))
        at = start
        for width in (5, 2, 9, 3, 8):
            wrong = [tokens[at], *([7] * width)]
            for chunk in (wrong, tokens[at : at + width]):
                others = [] if is_alone else [(row, start - row, [row]) for row in range(2, 10)]
                if not is_alone and width == 9:
                    others[-1] = (9, 0, tokens[:40])
                found = paged.logits(*others[:3], (1, at, chunk), *others[3:])[len(others[:3]) :]
                for n in range(1 if chunk is wrong else width):
                    assert torch.equal(found[n : n + 1], alone[at - start + n])
            at += width
        assert at == end


@pytest.mark.skipif(ops.why_not_native() != "", reason="torch's sums depend on shapes")
@pytest.mark.parametrize("case", CASES)
def test_a_request_is_bit_equal_alone_together_in_chunks_cached_and_recomputed(
    checkpoint: Any, tmp_path: Path, case: str
) -> None:
    model, settings = case_engine(checkpoint, tmp_path, case)
    asks = mixed_asks(3, 20, longest=60, output=(25, 40), twins=2)
    alone = SyncEngine(model, max_num_seqs=1, max_num_batched_tokens=512, **settings)
    expected = answers(alone, asks)
    together = SyncEngine(model, max_num_seqs=20, max_num_batched_tokens=512, **settings)
    assert answers(together, asks) == expected
    assert together.widest == 20
    assert answers(together, asks, "again") == expected
    assert together.stats.prefix_hit_tokens >= 200
    for costs in (RECOMPUTE, SWAP):
        tight = SyncEngine(
            model,
            costs=costs,
            num_gpu_blocks_override=40,
            max_num_seqs=16,
            max_num_batched_tokens=37,
            block_size=8,
            max_model_len=128,
            **settings,
        )
        assert answers(tight, asks) == expected
        swapped, recomputed = tight.preemptions
        assert (swapped if costs is SWAP else recomputed) >= 10


@pytest.mark.skipif(ops.why_not_native() != "", reason="torch's sums depend on shapes")
@pytest.mark.parametrize("case", ["llama-float32", "llama-bfloat16", "int4-32", "int4-64"])
def test_a_row_alone_is_bit_equal_to_the_same_one_among_256(
    checkpoint: Any, tmp_path: Path, case: str
) -> None:
    """At the ends of the batch and within it, greedy and drawn."""
    model, settings = case_engine(checkpoint, tmp_path, case)
    asks = mixed_asks(11, 256, longest=14, output=(12, 16))
    picked = (0, 1, 6, 37, 128, 201, 254, 255)  # every other one greedy, in both engines
    alone = SyncEngine(model, max_num_seqs=1, max_num_batched_tokens=512, **settings)
    expected = answers(alone, [asks[i] for i in picked])
    wide: dict[str, Any] = {"max_num_batched_tokens": 4096, "num_gpu_blocks_override": 1024}
    together = SyncEngine(model, max_num_seqs=256, **wide, **settings)
    found = answers(together, asks)
    assert (alone.widest, together.widest) == (1, 256)
    assert together.steps < 20  # all of them side by side
    assert [found[i] for i in picked] == expected


@pytest.mark.skipif(ops.why_not_native() != "", reason="torch's sums depend on shapes")
def test_where_the_host_pool_is_full_tokens_are_the_same(checkpoint: Any, tmp_path: Path) -> None:
    """Every victim would be swapped; one that finds no room there is computed again."""
    model, settings = case_engine(checkpoint, tmp_path, "llama-bfloat16")
    asks = mixed_asks(7, 12, longest=50, output=(25, 40))
    sizes: dict[str, Any] = {"block_size": 8, "max_model_len": 128, **settings}
    alone = SyncEngine(model, max_num_seqs=1, max_num_batched_tokens=512, **sizes)
    expected = answers(alone, asks)
    tight = SyncEngine(
        model,
        costs=SWAP,
        swap_space=5 * alone.info.block_bytes / GIB,
        num_gpu_blocks_override=30,
        max_num_seqs=16,
        max_num_batched_tokens=37,
        **sizes,
    )
    assert tight.info.num_host_blocks == 5
    assert answers(tight, asks) == expected
    swapped, recomputed = tight.preemptions
    assert swapped > 1
    assert recomputed > 1
    kv = tight.scheduler.state.kv
    assert (kv.device.num_free, kv.host.num_free) == (30, 5)
