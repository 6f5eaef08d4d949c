"""A GPU compiles nothing for a plan: Triton's own key of every launch was seen before `ready`.

Kernels are not computed here: memory that they would write is zeros, so that token 0 is drawn. What
is tested is which arguments, dtypes, alignments and constants they are launched with.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from streamer.core.sampling import SamplingParams
from streamer.kernels import ops
from streamer.model import fallback
from streamer.model.runner.cuda import CudaRunner
from tests.kernels.conftest import skip_without_interpreter
from tests.model.late_device import LateDevice
from tests.model.proposers import Answer, Oracle
from tests.model.runner.test_cuda import TINY
from tests.model.sync_engine import SyncEngine
from tests.model.test_parity import MIXED
from tests.model.test_speculation import TOKEN_BYTES
from tests.model.where import Where

SIZES: dict[str, Any] = {
    "max_num_seqs": 9, "max_num_batched_tokens": 150, "max_model_len": 400, "block_size": 16,
    "num_gpu_blocks_override": 46, "dtype": "bfloat16",
}  # fmt: skip
KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=1.2, top_k=20, n=2),
    SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.3),
    SamplingParams(temperature=0.9, logit_bias={5: 4.0}, hidden_states=True, logprobs=0),
    SamplingParams(temperature=0.0, min_tokens=3, prompt_logprobs=0),
    SamplingParams(min_p=0.1, frequency_penalty=0.5, presence_penalty=0.2, logprobs=3),
    SamplingParams(structured_outputs={"regex": "(aa)*"}, top_k=5, n=2, logprobs=1),
    SamplingParams(use_beam_search=True, beam_width=3, n=2),
]
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "bfloat16": ("qwen3", {"vocab_size": 301}, {}),
    "float32": ("llama", {"tie_word_embeddings": True}, {"dtype": "float32"}),
    "transformers' code": ("gemma3_text", {"sliding_window": 40, "num_hidden_layers": 3}, {}),
    "windows": ("mistral", {"sliding_window": 40}, {"kv_cache_dtype": "fp8"}),
    "int4": ("llama", {}, {"quantization": "int4", "kv_cache_dtype": "int8"}),
    "int8": ("qwen2", {"tie_word_embeddings": True}, {"quantization": "int8"}),
    "fp8": ("qwen3", {}, {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    "odd heads": (
        "gemma3_text", {"head_dim": 20, "query_pre_attn_scalar": 20, "num_hidden_layers": 3}, {},
    ),
}  # fmt: skip


class Launches:
    """What the launched kernels would be compiled by: see JITFunction.run; `tables`: the dtypes of
    block tables among it."""

    def __init__(self) -> None:
        self.keys: dict[str, set[str]] = {}
        self.tables: set[torch.dtype] = set()
        self._binders: dict[Any, Callable[..., Any]] = {}

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        """InterpretedFunction.run, without computing."""
        _, specialization, options = self._binder(kernel)(*args, **given)
        key = str((specialization, sorted(options.items())))
        self.keys.setdefault(kernel.__name__, set()).add(key)
        if "tables_ptr" in given:
            self.tables.add(given["tables_ptr"].dtype)

    def _binder(self, kernel: Any) -> Callable[..., Any]:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend
        from triton.runtime.jit import JITFunction, create_function_from_signature

        if kernel not in self._binders:
            made = JITFunction(kernel.fn, **kernel.kwargs)
            target = make_backend(GPUTarget("cuda", 90, 32))
            self._binders[kernel] = create_function_from_signature(
                made.signature, made.params, target
            )
        return self._binders[kernel]


class Zeroed:
    """torch, whose new memory holds zeros."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, {"empty": "zeros", "empty_like": "zeros_like"}.get(name, name))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Of the GPU's own kernels on a late device."""
    skip_without_interpreter()
    from triton.runtime.interpreter import InterpretedFunction

    from streamer.kernels.gpu import backend, decode_step, mixed_step
    from streamer.kernels.gpu.attention import items
    from streamer.kernels.gpu.linear import fp8, multiply
    from streamer.kernels.gpu.sampling import sample

    seen = Launches()
    monkeypatch.setattr(Where, "make", LateDevice)
    monkeypatch.setattr(ops, "choose", lambda device: backend)
    monkeypatch.setattr(fallback, "_compare", lambda *_: None)  # with what was not computed
    monkeypatch.setattr(items, "MIN_SPLIT", 128)
    monkeypatch.setattr(multiply, "MIN_TILES", 1)  # so that small weights are split too, but
    monkeypatch.setattr(multiply, "ENOUGH", 16)  # not beyond 128 rows
    monkeypatch.setattr(fp8, "has_products", lambda device: True)
    assert {m.__name__ for m in (decode_step, mixed_step, sample)} < sys.modules.keys()
    for kernels in [m for name, m in sys.modules.items() if name.startswith(backend.__package__)]:
        monkeypatch.setattr(kernels, "torch", Zeroed(), raising=False)
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    monkeypatch.setattr(
        InterpretedFunction, "run", lambda self, *args, **given: seen.run(self, *args, **given)
    )
    return seen


@pytest.mark.parametrize("is_recorded", [True, False], ids=["recorded", "op by op"])
@pytest.mark.parametrize("name", MODELS)
def test_plans_launch_what_was_compiled_before_the_first(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch, launches: Launches, name: str,
    is_recorded: bool,
) -> None:  # fmt: skip
    """Prompts of all sizes, scores, forks, draws of all kinds, grammars, beams, verified runs,
    swaps and recomputation: where steps are recorded, and where there is no memory for it."""
    family, changes, settings = MODELS[name]
    folder = checkpoint(family, 0, **{**TINY, "hidden_size": 256, **changes})
    if not is_recorded:
        monkeypatch.setattr(CudaRunner, "record", lambda *_: None)
    known = {(i, choice): Answer([0] * 60, [], None) for i in range(40) for choice in range(2)}
    engine = SyncEngine(
        folder, costs=MIXED, token_bytes=(TOKEN_BYTES * 2)[: changes.get("vocab_size", 256)],
        speculation=Oracle(known, 0, errors=0.0), **{**SIZES, **settings},
    )  # fmt: skip
    ready, launches.keys, launches.tables = launches.keys, {}, set()
    rng = random.Random(0)
    for i in range(40):
        prompt = rng.choices(range(256), k=rng.choice((1, 3, 20, 90, 300)))
        params = KINDS[i % len(KINDS)]
        if params.use_beam_search:  # in a pool that has room for it, and with nothing proposed
            engine.add(f"b{i}", prompt[:90], rng.randint(3, 60), params)
        else:
            engine.add(f"r{i}", prompt, rng.randint(3, 60), params)
        for _ in range(rng.randint(0, 4)):
            engine.step()
    engine.run()
    assert sum(engine.preemptions) > 0
    assert {"_copy_kernel", "_cut_kernel", "_merge_kernel", "_wide_kernel"} <= launches.keys.keys()
    assert launches.tables == {torch.int32}
    late = {kernel: keys - ready.get(kernel, set()) for kernel, keys in launches.keys.items()}
    assert not {kernel: keys for kernel, keys in late.items() if keys}
