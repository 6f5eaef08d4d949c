"""Plain torch of every op: the oracle of the other backends, and what serves without one.

Signatures are those of ops.py, which is the only caller. Attention lives in
reference_attention.py; nothing here keeps state.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from streamer.kernels.batch import AttentionBatch
from streamer.kernels.reference_attention import paged_attention

__all__ = [
    "add_rms_norm",
    "copy_blocks",
    "gelu_mul",
    "new_pool",
    "paged_attention",
    "rms_norm",
    "rope",
    "rope_tables",
    "silu_mul",
    "store_kv",
    "swap_blocks",
]


def new_pool(
    num_blocks: int,
    layers: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> torch.Tensor:
    """See ops.new_pool.

    numpy's zeros is calloc, so untouched pages cost nothing; torch.zeros writes them all (1.5 GB
    took 1.2 s and as much memory, EPYC Zen 5, 2026-11-20).
    """
    shape = (num_blocks, layers, 2, block_size, kv_heads, head_dim)
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    bits = {1: np.uint8, 2: np.uint16, 4: np.uint32}[dtype.itemsize]
    return torch.from_numpy(np.zeros(shape, bits)).view(dtype)


def store_kv(
    k: torch.Tensor, v: torch.Tensor, pool_layer: torch.Tensor, batch: AttentionBatch
) -> None:
    """See ops.store_kv."""
    place = batch.derived.get("store")
    if place is None:
        block = batch.slots // batch.block_size
        place = batch.derived["store"] = (block, batch.slots - block * batch.block_size)
    pool_layer[:, 0].index_put_(place, k)
    pool_layer[:, 1].index_put_(place, v)


def copy_blocks(pool: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """See ops.copy_blocks."""
    pool.index_copy_(0, dst, pool.index_select(0, src))


def swap_blocks(
    src_pool: torch.Tensor, dst_pool: torch.Tensor, pairs: list[tuple[int, int]]
) -> None:
    """See ops.swap_blocks."""
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


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See ops.rms_norm."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ops.add_rms_norm."""
    residual = residual.add_(x)
    return F.rms_norm(residual, weight.shape, weight, eps), residual


def rope_tables(angles: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """See ops.rope_tables."""
    cos, sin = angles.float().cos(), angles.float().sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See ops.rope."""
    rotary = cos.shape[-1]
    if rotary == x.shape[-1]:
        return _rotate(x, cos, sin)
    return torch.cat((_rotate(x[..., :rotary], cos, sin), x[..., rotary:]), -1)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    swapped = torch.roll(x, x.shape[-1] // 2, -1)
    return torch.mul(x, cos.unsqueeze(1)).addcmul_(swapped, sin.unsqueeze(1))


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See ops.silu_mul."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def gelu_mul(gate_up: torch.Tensor, *, tanh: bool) -> torch.Tensor:
    """See ops.gelu_mul."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh" if tanh else "none").mul_(up)
