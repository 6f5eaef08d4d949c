"""A process that compiles every GPU kernel for sm_90 (H100, H200), on a machine without one.

Triton needs no device to compile, only its description. The launchers run on CPU tensors, and stop
before the launch. Prints one JSON object a kernel, see Made. Called by test_compile.py.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from streamer.kernels import ops
from streamer.kernels.weights import QuantizedWeight
from tests.kernels.oracle import Case

WAIT = re.compile(r"cp\.async\.wait_group\s+(\w+)")
PRODUCT = re.compile(r"mma\S*\.f32\.(\w+\.\w+)")
FP8 = torch.float8_e4m3fn
MIXED, DECODES = [(1, 600), (70, 80)], [(1, 600), (1, 40)]
NO_OPTIONS = {"sliding_window": None, "softcap": None, "sinks": None}


class Driver:
    """Triton's queries to a driver before it compiles; a device for each compute capability."""

    capability = 90

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int = 0) -> int:
        return device


class Made(NamedTuple):
    """What the compiler made of a kernel.

    stack      bytes a thread keeps outside registers: what did not fit
    registers  of a thread;  shared  bytes of shared memory
    overlap    groups of loads that are still under way, at most, when the code goes on computing
    factors    what the tensor core's products multiply;  is_apart  whether a fused multiply and add
               outside of it takes up their sums
    """

    kernel: str
    label: str
    stack: int
    registers: int
    shared: int
    overlap: int
    factors: list[str]
    is_apart: bool


def usage_of(cubin: bytes) -> tuple[int, int]:
    """Bytes of stack, registers; RuntimeError where Triton neither brings nor finds cuobjdump."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    stack = sum(int(n) for n in re.findall(r"(?:STACK|LOCAL):(\d+)", usage))
    return stack, max(int(n) for n in re.findall(r"REG:(\d+)", usage))


def attention(
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    rows: Any,
    kv_dtype: torch.dtype | None = None,
    **options: Any,
) -> None:
    """Attention of (query heads, KV heads, head_dim)."""
    from streamer.kernels.gpu import backend

    heads, kv_heads, dim = shape
    case = Case(rows, heads=heads, kv_heads=kv_heads, dim=dim, block=16)
    pool = backend.new_pool(4, 3, 16, kv_heads, dim, kv_dtype or dtype, "cpu")
    layer = ops.layer_view(pool, case.layer)
    q = torch.cat(case.q).to(dtype)
    backend.paged_attention(q, layer, case.batch(), 0.1, **{**NO_OPTIONS, **options})


def small_attention(pool_dtype: torch.dtype) -> None:
    """Attention for a GPU with less shared memory, of compute capability 8.9."""
    from streamer.kernels.gpu.attention import paged

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged, "_is_large", lambda device: False)
        patch.setattr(Driver, "capability", 89)
        attention(torch.bfloat16, (32, 8, 128), MIXED, pool_dtype)


def padded_attention(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """Attention of a step that is padded for graphs."""
    from streamer.kernels.gpu import backend, fixed_step, mixed_step
    from streamer.kernels.gpu.attention import paged

    heads, kv_heads, dim = shape
    state = fixed_step.RowState(8, 64, 16, "cpu")
    step = mixed_step.MixedStep(state, 96, paged.tile_tokens(*shape, dtype))
    step.prepare()
    layer = ops.layer_view(backend.new_pool(4, 3, 16, kv_heads, dim, dtype, "cpu"), 1)
    q = torch.zeros(96, heads, dim, dtype=dtype)
    backend.paged_attention(q, layer, step.batch, 0.1, **NO_OPTIONS)  # type: ignore[arg-type]


def small_ops(dtype: torch.dtype) -> None:
    """Everything but attention, once."""
    from streamer.kernels.gpu import backend, decode_step, fixed_step
    from streamer.kernels.gpu.linear import activation
    from streamer.kernels.gpu.sampling import sample

    case = Case(MIXED, heads=4, kv_heads=2, dim=128, block=16)
    layer, batch = ops.layer_view(case.pool.to(dtype), 1), case.batch()
    tokens = batch.num_tokens
    qkv, weight = torch.zeros(tokens, 8 * 128, dtype=dtype), torch.zeros(1024, dtype=dtype)
    tables = backend.rope_tables(torch.zeros(700, 64), dtype)
    positions = torch.zeros(tokens, dtype=torch.int64)
    norms = weight[:128], weight[:128]
    backend.store_kv(case.new_k().to(dtype), case.new_v().to(dtype), layer, batch)
    backend.rope_and_store(qkv, tables, positions, layer, batch)
    backend.rope_and_store(qkv, tables, positions, layer, batch, norms=norms, eps=1e-6)
    backend.rms_norm(qkv, weight, 1e-6, rows=positions)
    for name in activation.ACTIVATIONS:
        activation.gate(qkv, name)
    backend.embedding(positions, qkv)
    backend.copy_blocks(case.pool.to(dtype), positions[:3], positions[:3])
    rows = sample.SamplingRows(8, "cpu")
    logits, slots = torch.zeros(4, 152_000, dtype=dtype), torch.zeros(4, dtype=torch.int64)
    sample.sample(logits, rows, slots, slots, has_filters=False)
    sample.sample(logits, rows, slots, slots, has_filters=True)  # as recorded decodes do
    step = decode_step.DecodeStep(fixed_step.RowState(8, 4, 16, "cpu"), 8)
    step.prepare()
    step.commit(step.tokens)


def few_tokens(dtype: torch.dtype) -> None:
    """Drawing from few tokens; a width of 1 is a constant to Triton."""
    from streamer.kernels.gpu.sampling import sample

    rows, slots = sample.SamplingRows(1, "cpu"), torch.zeros(1, dtype=torch.int64)
    for width in (1, 2, 3):
        sample.sample(torch.zeros(1, width, dtype=dtype), rows, slots, slots, has_filters=True)


def quantized_stores(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """The kernels that write codes and scales."""
    from streamer.kernels.gpu import backend

    case = Case(MIXED, heads=4, kv_heads=2, dim=128, block=16)
    layer, batch = (
        ops.layer_view(backend.new_pool(4, 2, 16, 2, 128, kv_dtype, "cpu"), 1),
        case.batch(),
    )
    qkv = torch.zeros(batch.num_tokens, 8 * 128, dtype=dtype)
    tables = backend.rope_tables(torch.zeros(700, 64), dtype)
    positions = torch.zeros(batch.num_tokens, dtype=torch.int64)
    norms = qkv[0, :128], qkv[0, :128]
    backend.store_kv(case.new_k().to(dtype), case.new_v().to(dtype), layer, batch)
    backend.rope_and_store(qkv, tables, positions, layer, batch, norms=norms, eps=1e-6)


def linears(dtype: torch.dtype, rows: int) -> None:
    """A layer of each form of codes, and rows of a table."""
    from streamer.kernels.gpu import backend
    from streamer.kernels.gpu.linear import fp8

    n, k = 4096, 4096
    x, codes = torch.zeros(rows, k, dtype=dtype), torch.zeros(n, k, dtype=torch.uint8)
    backend.pack_weight([torch.zeros(1024, k, dtype=dtype)])(x)
    e4m3 = codes.view(torch.float8_e4m3fn)
    for code, bits, group, has_offsets in (
        (codes, 4, 32, True), (codes, 4, 128, False), (codes, 8, k, False), (codes, 6, 16, True),
        (e4m3, 8, 128, False), (e4m3, 8, k, False),
    ):  # fmt: skip
        scales = torch.ones(n, k // group)
        weight = QuantizedWeight(
            codes=code, scales=scales, group=group, bits=bits, zero=0 if has_offsets else 8,
            offsets=scales if has_offsets else None,
        )  # fmt: skip
        linear = backend.pack_weight([weight], dtype=dtype)
        linear(x)
        linear.rows(torch.zeros(2, dtype=torch.int64))
    table = torch.arange(16, dtype=torch.uint8)
    weight = QuantizedWeight(
        codes=codes, scales=torch.ones(n, k // 32), group=32, bits=4, table=table
    )
    backend.pack_weight([weight], dtype=dtype)(x)
    fp8.quantize_rows(x)


def main(part: int, num_parts: int) -> None:
    """Compile one part of all; print a line for each."""
    driver.set_active(Driver())
    compile_and_launch, label = JITFunction.run, ""

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = compile_and_launch(kernel, *args, grid=grid, warmup=True, **kwargs)
        ptx = compiled.asm["ptx"]
        made = Made(
            kernel.__name__,
            label,
            *usage_of(compiled.asm["cubin"]),
            compiled.metadata.shared,
            max((int(n, 0) for n in WAIT.findall(ptx)), default=0),
            sorted(set(PRODUCT.findall(ptx))),
            "math.fma" in compiled.asm["ttgir"],
        )
        print(json.dumps(made._asdict()), flush=True)
        return compiled

    JITFunction.run = compile_only
    bf16, fp16 = torch.bfloat16, torch.float16
    sinks = torch.zeros(32)
    tasks: list[tuple[str, Callable[[], None]]] = [
        ("bf16", partial(small_ops, bf16)),
        ("bf16", partial(attention, bf16, (16, 8, 128), MIXED)),
        ("bf16", partial(attention, bf16, (16, 8, 128), DECODES)),
        ("bf16", partial(padded_attention, bf16, (16, 8, 128))),
        ("bf16", partial(attention, bf16, (32, 8, 64), MIXED, sliding_window=128, sinks=sinks)),
        ("bf16", partial(attention, bf16, (8, 4, 256), MIXED, sliding_window=4096, softcap=50.0)),
        ("codes", partial(quantized_stores, bf16, torch.int8)),
        ("codes", partial(quantized_stores, bf16, FP8)),
        ("codes", partial(attention, bf16, (16, 8, 128), MIXED, torch.int8)),
        ("codes", partial(attention, bf16, (32, 8, 128), DECODES, FP8)),
        (
            "codes",
            partial(attention, bf16, (8, 4, 256), MIXED, FP8, sliding_window=4096, softcap=50.0),
        ),
        ("small", partial(small_attention, bf16)),
        ("small codes", partial(small_attention, torch.int8)),
        *((f"{rows} rows", partial(linears, bf16, rows)) for rows in (1, 2, 16, 32, 64, 2048)),
        ("few tokens", partial(few_tokens, torch.float32)),
        ("fp32", partial(attention, torch.float32, (8, 4, 128), MIXED)),
        ("fp32 codes", partial(attention, torch.float32, (8, 4, 128), MIXED, torch.int8)),
        ("fp16", partial(small_ops, fp16)),
        ("fp16", partial(attention, fp16, (16, 8, 128), MIXED)),
        ("fp16 codes", partial(attention, fp16, (16, 8, 128), MIXED, torch.int8)),
        ("fp16 rows", partial(linears, fp16, 48)),
        ("fp16 rows", partial(linears, fp16, 1)),
    ]
    for label, task in tasks[part::num_parts]:  # noqa: B007
        task()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
