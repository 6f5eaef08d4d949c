"""Two and four ranks have the tokens of one: every family and kind of weights, every request.

Ranks are threads here; test_leader.py has them as processes. Matrices of codes are computed by
torch where they are divided by columns: in the native kernels the last bits of a sum decide which
activations are rounded up.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamer.core.sampling import SamplingParams
from streamer.core.speculation.speculator import Speculator
from streamer.core.speculation.values import SpeculationSizes
from streamer.kernels import ops
from tests.model import sync_engine
from tests.model.gguf.test_models import SIZES as LARGE
from tests.model.gguf.test_models import all_formats, mixed
from tests.model.gguf_files import write_gguf
from tests.model.quantization.test_loading import quantize_folder
from tests.model.ranks.threads import load_ranked
from tests.model.sync_engine import SyncEngine
from tests.model.test_decoder import random_tokens
from tests.model.test_parity import MIXED
from tests.model.test_speculation import LETTERS, ROOMY, SHORT, TIGHT, TOKEN_BYTES, Answer, Oracle

pytestmark = pytest.mark.skipif(ops.why_not_native() != "", reason="torch's sums depend on shapes")

P = SamplingParams
ASKS = [
    (random_tokens(40), P(temperature=0.0, logprobs=2)),
    (random_tokens(33, 1), P(seed=3, temperature=1.1, top_p=0.9)),
    (random_tokens(9, 2), P(seed=5, repetition_penalty=1.3, frequency_penalty=0.4)),
    (random_tokens(21, 3), P(seed=12, n=2, structured_outputs=LETTERS)),
    (random_tokens(12, 4), P(temperature=0.0, structured_outputs=SHORT)),
    (random_tokens(17, 5), P(use_beam_search=True, beam_width=3, n=2, length_penalty=0.5)),
]
TOLERANCE, KV_TOLERANCE = 2e-4, 5e-3  # the last bits decide which KV codes are rounded up
WHOLE: dict[str, Any] = {"intermediate_size": 512, "head_dim": 128, "num_hidden_layers": 2}


def serve(folder: Path, settings: dict[str, Any], **more: Any) -> SyncEngine:
    """An engine that has answered everything, and is closed."""
    given = {"dtype": "float32", "token_bytes": TOKEN_BYTES, **settings, **more}
    engine = SyncEngine(folder, **given)
    try:
        for name, (prompt, params) in enumerate(ASKS):
            engine.add(f"r{name}", prompt, 24, params, stop_ids=frozenset([255]))
        engine.run()
    finally:
        engine.runner.close()
    return engine


def dense(family: str, **sizes: Any) -> Callable[[Any, Path], Path]:
    return lambda checkpoint, _: checkpoint(family, 1, **sizes)


def stored(family: str, kind: str, **sizes: Any) -> Callable[[Any, Path], Path]:
    given = {"intermediate_size": 128, "num_hidden_layers": 2, **sizes}
    return lambda checkpoint, to: quantize_folder(checkpoint(family, 1, **given), to / "q", kind)


def gguf_file(family: str, kind_of: Any, **sizes: Any) -> Callable[[Any, Path], Path]:
    def make(checkpoint: Any, to: Path) -> Path:
        folder = Path(shutil.copytree(checkpoint(family, 1, **{**LARGE, **sizes}), to / "m"))
        return write_gguf(folder, to / "m.gguf", kind_of, architecture=family)

    return make


TIED: dict[str, Any] = {"tie_word_embeddings": True}
CASES: dict[str, tuple[Callable[[Any, Path], Path], dict[str, Any], int]] = {
    "llama, tied, 4": (dense("llama", attention_bias=True, mlp_bias=True, **TIED), {}, 4),
    "mistral, window, 2": (dense("mistral", sliding_window=24), {}, 2),
    "qwen2, odd sizes, 2": (dense("qwen2", vocab_size=255, intermediate_size=80), {}, 2),
    "qwen3, one KV head, 4": (dense("qwen3", num_key_value_heads=1), {}, 4),
    "int8, 2": (dense("llama", intermediate_size=128), {"quantization": "int8"}, 2),
    "int4, 4": (dense("qwen3", **WHOLE), {"quantization": "int4"}, 4),
    "fp8, 2": (dense("llama", intermediate_size=128), {"quantization": "fp8"}, 2),
    "GPTQ in the order of activations, 2": (stored("llama", "gptq"), {}, 2),
    "GPTQ in the order of activations, 4": (stored("qwen3", "gptq"), {}, 4),
    "AWQ, 4": (stored("llama", "awq", **WHOLE), {}, 4),
    "FP8 in blocks, 2": (stored("llama", "fp8"), {}, 2),
    "GGUF, 2": (gguf_file("llama", mixed), {}, 2),
    "GGUF of every format, tied, 4": (gguf_file("llama", all_formats, **WHOLE, **TIED), {}, 4),
    "KV in int8, 2": (dense("llama"), {"kv_cache_dtype": "int8"}, 2),
}
BY_TORCH = [name for name in CASES if name.startswith(("int", "fp8", "AWQ", "FP8", "GGUF"))]


@pytest.mark.parametrize("case", CASES)
def test_ranks_have_the_tokens_of_one(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """In too little memory and with verifications, against one rank with enough."""
    make, settings, count = CASES[case]
    monkeypatch.setattr(sync_engine, "load_ranked", load_ranked)
    if case in BY_TORCH:
        monkeypatch.setenv("STREAMER_KERNELS", "torch")
    folder = make(checkpoint, tmp_path)
    one = serve(folder, settings, **ROOMY)
    answers = {
        (int(key[0][1:]), key[1]): Answer(tokens, one.details[key], one.finishes[key])
        for key, tokens in one.tokens.items()
    }
    tight = {**TIGHT, "num_gpu_blocks_override": 24}
    ranks = serve(
        folder, settings, tensor_parallel_size=count,
        speculation=Oracle(answers, 3), costs=MIXED, **tight,
    )  # fmt: skip
    assert ranks.tokens == one.tokens
    tolerance = KV_TOLERANCE if settings.get("kv_cache_dtype") else TOLERANCE
    for key, details in one.details.items():
        for found, expected in zip(ranks.details[key], details, strict=True):
            assert abs(found.logprob - expected.logprob) < tolerance
    assert sum(ranks.preemptions) > 0
    assert ranks.stats.proposed_tokens > 0


@pytest.mark.parametrize("count", [2, 4])
def test_with_a_draft_model(checkpoint: Any, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Which every rank has whole: the model as its own, which is always right."""
    monkeypatch.setattr(sync_engine, "load_ranked", load_ranked)
    folder = checkpoint("llama")
    one = serve(folder, {}, **ROOMY)
    sizes = SpeculationSizes(
        max_proposed=5, has_texts=False, has_recent=False, has_draft=True,
        min_match=0, max_match=0, max_indexed=0,
    )  # fmt: skip
    costs = MIXED | {"step_s": ((1, 1.0), (64, 1.1)), "draft_s": 0.01}
    ranks = serve(
        folder, {"speculative_model": str(folder)}, tensor_parallel_size=count,
        speculation=Speculator(sizes), costs=costs, **TIGHT,
    )  # fmt: skip
    assert ranks.tokens == one.tokens
    assert ranks.stats.accepted_tokens > 20
