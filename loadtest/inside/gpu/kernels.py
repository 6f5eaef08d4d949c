"""The sections of `streamer bench gpu` below the model: memory's rate, swaps, attention.

Each calls the kernels' entry points on its own tensors. Times are the device's: on CUDA between
events before and after a graph of several calls, without launches; on a CPU by the clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from streamer.loadtest.inside.gpu.models import BLOCK_SIZE, Where, blocks_for
from streamer.loadtest.inside.gpu.report import Report

if TYPE_CHECKING:
    from streamer.kernels.batch import AttentionBatch
    from streamer.kernels.ops import Backend

GB = 1e9
MEMORY_BYTES = 4 << 30
TRIES = 9  # of each timing, of which the median counts
CALLS = 5  # in a recorded graph
SWAP_BLOCKS, SWAP_POOL = 512, 2048
SHARE_OF_COPY, SHARE_OF_SDPA = 0.9, 0.9


class Shape(NamedTuple):
    """Rows of (query, context) tokens each, over heads."""

    name: str
    rows: int
    query: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int

    def kv_bytes(self, item_bytes: float) -> float:
        """K and V that one call reads, each once."""
        return self.rows * self.context * 2 * self.kv_heads * self.head_dim * item_bytes

    @property
    def flops(self) -> float:
        """Operations of both matrix products, without masked positions."""
        seen = self.query * (self.context - (self.query - 1) / 2)
        return 4.0 * self.rows * self.heads * self.head_dim * seen


SHAPES = (
    Shape("decode 8 x 8,192, 32/8 heads of 128", 8, 1, 8192, 32, 8, 128),
    Shape("decode 64 x 2,048, 32/8 heads of 128", 64, 1, 2048, 32, 8, 128),
    Shape("decode 256 x 1,024, 16/8 heads of 128", 256, 1, 1024, 16, 8, 128),
    Shape("decode 64 x 2,048, 32/8 heads of 64", 64, 1, 2048, 32, 8, 64),
    Shape("prefill 1 x 8,192, 32/8 heads of 128", 1, 8192, 8192, 32, 8, 128),
    Shape("prefill 8 x 1,024, 16/8 heads of 128", 8, 1024, 1024, 16, 8, 128),
)
TINY_SHAPES = (
    Shape("decode 3 x 40", 3, 1, 40, 4, 2, 16),
    Shape("prefill 2 x 24", 2, 24, 24, 4, 2, 16),
)


def kernels_of(where: Where) -> Backend:
    """The device's backend: Triton's on a GPU, else the plain torch one."""
    if where.device.type == "cuda":
        from streamer.kernels.gpu import backend

        return backend
    from streamer.kernels import reference

    return reference


def seconds_of(work: Callable[[], object], where: Where, report: Report) -> float:
    """Seconds of one call of `work` on the device, the median of TRIES."""
    if where.device.type != "cuda":
        return _time(work, where)
    work()  # compiles
    new_stream: Any = torch.cuda.Stream  # untyped
    side = new_stream(where.device)
    where.synchronize()
    with torch.cuda.stream(side):
        work()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(CALLS):
            work()
    report.check()
    return _on_device(graph.replay) / CALLS


def _on_device(work: Callable[[], object]) -> float:
    """Seconds between two events around `work`, the median of TRIES."""
    work()
    times: list[float] = []
    new_event: Any = torch.cuda.Event  # untyped
    for _ in range(TRIES):
        first, last = (new_event(enable_timing=True) for _ in range(2))
        first.record()
        work()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 1e3)
    return statistics.median(times)


def memory_rate(where: Where, report: Report) -> float:
    """Bytes a second that a large copy reads and writes, or a sum reads: the greater."""
    size = 1 << 20 if where.is_tiny else MEMORY_BYTES
    source = torch.zeros(size // 4, dtype=torch.float32, device=where.device)
    target = torch.empty_like(source)
    copied = 2 * size / seconds_of(lambda: target.copy_(source), where, report)
    read = size / seconds_of(lambda: source.sum(), where, report)
    return max(copied, read)


def bandwidth(where: Where, report: Report) -> None:
    """The memory's rate, with which memory-bound sections are compared."""
    report.doing("reading and writing memory")
    note = "the greater of a copy, both ways counted, and a sum"
    report.add("memory", "rate", memory_rate(where, report) / GB, "GB/s", note)


def swap(where: Where, report: Report) -> None:
    """Blocks to pinned host memory and back, beside one plain copy of as many bytes."""
    kernels = kernels_of(where)
    shape = (2, BLOCK_SIZE, 2, 16) if where.is_tiny else (32, BLOCK_SIZE, 8, 128)
    count, total = (8, 32) if where.is_tiny else (SWAP_BLOCKS, SWAP_POOL)
    pool = kernels.new_pool(total, *shape, where.dtype, where.device)
    host = kernels.new_pool(count, *shape, where.dtype, "cpu")
    plain = torch.empty(host.shape, dtype=host.dtype, pin_memory=where.device.type == "cuda")
    # Adjacent blocks in pairs: runs are coalesced, and a sequence has few longer runs.
    random = np.random.default_rng(0)
    starts = random.choice(total // 4, count // 2, replace=False) * 4
    places = sorted([*starts.tolist(), *(starts + 1).tolist()])
    cases = {
        "out": (list(zip(places, range(count), strict=True)), pool, host),
        "in": (list(zip(range(count), places, strict=True)), host, pool),
    }
    moved = host.nbytes
    block = f"blocks of {host[0].nbytes / (1 << 20):.3g} MiB"
    for way, (pairs, source, target) in cases.items():
        report.doing(f"swap {way}")
        swapped = _time(partial(kernels.swap_blocks, source, target, pairs), where)
        ends = (plain, pool[:count]) if way == "out" else (pool[:count], plain)
        copied = _time(partial(ends[0].copy_, ends[1], non_blocking=True), where)
        report.add(f"swap {way}", "rate", moved / swapped / GB, "GB/s", f"{count} {block}")
        report.add(f"swap {way}", "plain pinned copy", moved / copied / GB, "GB/s")
        note = "of the plain copy's rate"
        report.add(f"swap {way}", "share", copied / swapped, "x", note, target=SHARE_OF_COPY)


def _time(work: Callable[[], object], where: Where) -> float:
    """Seconds of one call without a recorded graph, since it may use the copy engines."""
    if where.device.type == "cuda":
        return _on_device(work)
    work()
    times = []
    for _ in range(TRIES):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def attention(where: Where, report: Report) -> None:
    """Paged attention with each kind of cache, beside torch's on contiguous K and V."""
    rate = memory_rate(where, report)
    for shape in TINY_SHAPES if where.is_tiny else SHAPES:
        report.doing(f"attention, {shape.name}")
        try:
            sdpa = seconds_of(_contiguous(shape, where), where, report)
        finally:
            _free(where)
        _tell(report, shape, "torch SDPA", sdpa, where.dtype.itemsize, rate)
        for kind in (where.dtype, torch.int8, torch.float8_e4m3fn):
            name = "paged" if kind is where.dtype else f"paged, {_name(kind)} KV"
            report.doing(f"attention, {shape.name}, {name}")
            took = seconds_of(paged(shape, kind, where), where, report)
            _free(where)
            _tell(report, shape, name, took, kind.itemsize, rate)
            target = SHARE_OF_SDPA if kind is where.dtype else None
            report.add(shape.name, f"{name}, speed", sdpa / took, "x", "of SDPA's", target=target)


def _tell(
    report: Report, shape: Shape, name: str, took_s: float, item_bytes: float, rate: float
) -> None:
    """Report one time, as a share of the memory's rate or as arithmetic."""
    if shape.query == 1:
        share = shape.kv_bytes(item_bytes) / took_s / rate
        note = f"reads K and V at {share:.2f} of memory's rate"
    else:
        note = f"{shape.flops / took_s / 1e12:.3g} TFLOP/s"
    report.add(shape.name, name, took_s * 1e6, "us", note)


def _contiguous(shape: Shape, where: Where) -> Callable[[], object]:
    """torch's attention; for a prefill causal."""
    options = {"dtype": where.dtype, "device": where.device}
    q = torch.randn(shape.rows, shape.heads, shape.query, shape.head_dim, **options)  # type: ignore[call-overload]
    kv = (shape.rows, shape.kv_heads, shape.context, shape.head_dim)
    k, v = torch.randn(kv, **options), torch.randn(kv, **options)  # type: ignore[call-overload]
    is_causal = shape.query > 1
    return lambda: torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, enable_gqa=True
    )


def paged(shape: Shape, kind: torch.dtype, where: Where) -> Callable[[], object]:
    """This engine's paged attention, over blocks in random order."""
    from streamer.kernels import ops

    kernels = kernels_of(where)
    per_row = blocks_for(shape.context)
    count = shape.rows * per_row
    sizes = (count, 1, BLOCK_SIZE, shape.kv_heads, shape.head_dim)
    layer = ops.layer_view(kernels.new_pool(*sizes, kind, where.device), 0)
    random = torch.Generator().manual_seed(0)
    tables = torch.randperm(count, generator=random).view(shape.rows, per_row).to(where.device)
    options = {"dtype": where.dtype, "device": where.device}
    heads = (shape.kv_heads, shape.head_dim)
    for row in range(shape.rows):
        k, v = (torch.randn(shape.context, *heads, **options) for _ in range(2))  # type: ignore[call-overload]
        kernels.store_kv(
            k, v, layer, _batch(1, shape.context, shape.context, tables[row : row + 1])
        )
    batch = _batch(shape.rows, shape.query, shape.context, tables)
    q = torch.randn(shape.rows * shape.query, shape.heads, shape.head_dim, **options)  # type: ignore[call-overload]
    scale = shape.head_dim**-0.5
    return lambda: kernels.paged_attention(
        q, layer, batch, scale, sliding_window=None, softcap=None, sinks=None
    )


def _batch(rows: int, query: int, context: int, tables: torch.Tensor) -> AttentionBatch:
    """A batch of equal rows."""
    from streamer.kernels.batch import AttentionBatch

    positions = torch.arange(context - query, context, device=tables.device)
    slots = tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return AttentionBatch(
        query_lens=[query] * rows,
        context_lens=[context] * rows,
        block_tables=tables,
        slots=slots.view(-1),
        block_size=BLOCK_SIZE,
    )


def _free(where: Where) -> None:
    if where.device.type == "cuda":
        torch.cuda.empty_cache()


def _name(kind: torch.dtype) -> str:
    return "int8" if kind is torch.int8 else "fp8"
