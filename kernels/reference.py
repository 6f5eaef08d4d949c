"""Every op in plain torch: the oracle of the other backends, and the fallback without one.

The module is an ops.CpuBackend and keeps no state. Attention is in reference_attention.py, linear
layers in reference_linear.py, drawing in reference_sampling.py.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from streamer.kernels.batch import AttentionBatch, Direct, Forward, Limits
from streamer.kernels.quantized import LIMITS, quantize, scale_rows, scales_of
from streamer.kernels.reference_attention import paged_attention as paged_attention
from streamer.kernels.reference_linear import pack_weight as pack_weight
from streamer.kernels.reference_sampling import draw as draw


def new_pool(
    num_blocks: int,
    layers: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """See Backend.new_pool.

    numpy's zeros is calloc, so untouched pages cost nothing; torch.zeros writes them all (1.5 GB
    took 1.2 s and as much memory, EPYC Zen 5, 2026-11-20).
    """
    rows = block_size + scale_rows(block_size, head_dim, dtype)
    shape = (num_blocks, layers, 2, kv_heads, rows, head_dim)
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    bits = {1: np.uint8, 2: np.uint16, 4: np.uint32}[dtype.itemsize]
    return torch.from_numpy(np.zeros(shape, bits)).view(dtype)


def store_kv(
    k: torch.Tensor, v: torch.Tensor, pool_layer: torch.Tensor, batch: AttentionBatch
) -> None:
    """See Backend.store_kv."""
    place = batch.derived.get("store")
    if place is None:
        block = batch.slots // batch.block_size
        place = batch.derived["store"] = (block, batch.slots - block * batch.block_size)
    block, offset = place
    if pool_layer.dtype in LIMITS:
        scales = scales_of(pool_layer, batch.block_size)
        k, scales[block, 0, :, offset] = quantize(k, pool_layer.dtype)
        v, scales[block, 1, :, offset] = quantize(v, pool_layer.dtype)
        # Every torch can index int8, not every torch the pool's dtype.
        k, v, pool_layer = k.view(torch.int8), v.view(torch.int8), pool_layer.view(torch.int8)
    pool_layer[block, 0, :, offset] = k
    pool_layer[block, 1, :, offset] = v


def copy_blocks(pool: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """See Backend.copy_blocks."""
    if pool.dtype in LIMITS:
        pool = pool.view(torch.int8)
    pool.index_copy_(0, dst, pool.index_select(0, src))


def swap_blocks(
    src_pool: torch.Tensor, dst_pool: torch.Tensor, pairs: list[tuple[int, int]]
) -> None:
    """See Backend.swap_blocks."""
    for src, dst, count in _runs(pairs):
        dst_pool[dst : dst + count].copy_(src_pool[src : src + count], non_blocking=True)


def _runs(pairs: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(source, destination, count) of maximal runs in which both sides count up by one."""
    runs: list[tuple[int, int, int]] = []
    for src, dst in sorted(pairs):
        if runs:
            first, to, count = runs[-1]
            if (src, dst) == (first + count, to + count):
                runs[-1] = (first, to, count + 1)
                continue
        runs.append((src, dst, 1))
    return runs


def graph(forward: Forward, limits: Limits) -> Direct:
    """See Backend.graph: nothing is recorded here."""
    del limits
    return Direct(forward)


def set_threads(count: int) -> None:
    """See Backend.set_threads."""
    torch.set_num_threads(count)


def stop() -> None:
    """See CpuBackend.stop: nothing ever runs beside the caller."""


def best(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See Backend.best."""
    values, ids = x.max(-1)
    return values.float(), ids


def top(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See CpuBackend.top; on any device."""
    width = x.shape[1]
    values, ids = torch.topk(x, min(count, width))
    if not values.shape[1]:
        return values.float(), ids
    # topk chooses any of those that are equal to the last one.
    is_last = values == values[:, -1:]
    falling = torch.arange(width, 0, -1, dtype=torch.float32, device=x.device)
    equal = torch.where(x == values[:, -1:], falling, 0.0)
    lowest = torch.topk(equal, values.shape[1]).indices
    place = (is_last.cumsum(1) - 1).clamp(min=0)
    ids = torch.where(is_last, lowest.gather(1, place), ids)
    order = ids.argsort(1)
    values, ids = values.gather(1, order), ids.gather(1, order)
    order = values.argsort(dim=1, descending=True, stable=True)
    return values.gather(1, order).float(), ids.gather(1, order)


def ban(
    x: torch.Tensor, rows: torch.Tensor, words: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See CpuBackend.ban."""
    closed = ~unpacked(words, x.shape[1])
    x[rows] = x[rows].masked_fill_(closed, -torch.inf)
    return best(x[rows])


def unpacked(words: torch.Tensor, count: int) -> torch.Tensor:
    """Bits of words [F, W] int32 -> [F, count] whether each is set, the lowest first."""
    shifts = torch.arange(32, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & 1).view(len(words), -1)[:, :count].bool()


def embedding(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """See Backend.embedding."""
    return F.embedding(tokens, table)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """See Backend.rms_norm."""
    return F.rms_norm(x if rows is None else x[rows], weight.shape, weight, eps)


def rope_tables(angles: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """See Backend.rope_tables."""
    cos, sin = angles.float().cos(), angles.float().sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rope_and_store(
    qkv: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    pool_layer: torch.Tensor,
    batch: AttentionBatch,
    *,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """See Backend.rope_and_store."""
    kv_heads, _, dim = pool_layer.shape[2:]
    rows = batch.derived.get("rope")
    if rows is None:  # by the first layer of a step
        rows = batch.derived["rope"] = (tables[0][positions], tables[1][positions])
    split = qkv.view(len(qkv), -1, dim)
    heads = split.shape[1] - 2 * kv_heads
    q, k, v = split[:, :heads], split[:, heads : heads + kv_heads], split[:, heads + kv_heads :]
    if norms is not None:
        q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
    store_kv(_rope(k, *rows), v, pool_layer, batch)
    return _rope(q, *rows)


def _rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rotary = cos.shape[-1]
    if rotary == x.shape[-1]:
        return _rotate(x, cos, sin)
    return torch.cat((_rotate(x[..., :rotary], cos, sin), x[..., rotary:]), -1)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    swapped = torch.roll(x, x.shape[-1] // 2, -1)
    return torch.mul(x, cos.unsqueeze(1)).addcmul_(swapped, sin.unsqueeze(1))
