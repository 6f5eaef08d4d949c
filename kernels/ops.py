"""The doors: every op's signature, shapes and dtypes, and the one place that picks a backend.

Called by streamer.model on the GPU thread. `backend` names the implementation chosen at import.
Ops check nothing a step; shapes are the caller's promise, and AttentionBatch checked its own.

Letters: T packed tokens, R rows, Hq query heads, Hk KV heads (Hq is a multiple of Hk), D head_dim,
B tokens a block, N blocks. Floats are fp32 or bf16, all of one call alike; ids are int64.
"""

from __future__ import annotations

import torch

from streamer.kernels import reference as _backend
from streamer.kernels.batch import AttentionBatch

__all__ = [
    "AttentionBatch",
    "add_rms_norm",
    "backend",
    "copy_blocks",
    "gelu_mul",
    "layer_view",
    "new_pool",
    "paged_attention",
    "rms_norm",
    "rope",
    "rope_tables",
    "silu_mul",
    "store_kv",
    "swap_blocks",
]

backend = "reference"


def new_pool(
    num_blocks: int,
    layers: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """A block pool [N, layers, 2, B, Hk, D] (0 is K, 1 is V); one block is contiguous, all layers.

    Zeroed lazily where the system can: memory is touched on first use.
    """
    return _backend.new_pool(num_blocks, layers, block_size, kv_heads, head_dim, dtype, device)


def layer_view(pool: torch.Tensor, layer: int) -> torch.Tensor:
    """Layer `layer` of a pool as the strided view [N, 2, B, Hk, D] that the other ops take."""
    return pool[:, layer]


def store_kv(
    k: torch.Tensor, v: torch.Tensor, pool_layer: torch.Tensor, batch: AttentionBatch
) -> None:
    """Write k and v [T, Hk, D] (any strides) into pool_layer [N, 2, B, Hk, D] at batch.slots."""
    _backend.store_kv(k, v, pool_layer, batch)


def paged_attention(
    q: torch.Tensor,
    pool_layer: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of every row over its own context, read through its block table.

    q [T, Hq, D] (any strides) -> [T, Hq, D], contiguous. Query head h reads KV head h // (Hq / Hk).
    All rows' K and V of this step are in the pool already, so a row may read what another row
    stored in the same step.

    scale           multiplies q . k
    sliding_window  a token at position p sees positions p - sliding_window + 1 to p; None: all
    softcap         scores become softcap * tanh(score / softcap), before masking; None: off
    sinks           [Hq] a logit per head that takes part in the softmax and adds no value
    """
    return _backend.paged_attention(
        q, pool_layer, batch, scale, sliding_window=sliding_window, softcap=softcap, sinks=sinks
    )


def copy_blocks(pool: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """pool[dst[i]] = pool[src[i]] for all i (copy-on-write); src and dst [C] share no block."""
    _backend.copy_blocks(pool, src, dst)


def swap_blocks(
    src_pool: torch.Tensor, dst_pool: torch.Tensor, pairs: list[tuple[int, int]]
) -> None:
    """dst_pool[d] = src_pool[s] for all (s, d); runs of neighbours become one copy.

    The pools have equal shapes but for N, and may be on two devices. Each d occurs once.
    """
    _backend.swap_blocks(src_pool, dst_pool, pairs)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x**2) + eps) * weight over the last dimension; statistics in fp32.

    x [..., H], weight [H] -> [..., H]. A family that scales by 1 + w adds the 1 when loading.
    """
    return _backend.rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual), all [T, H]; `residual`'s memory may be reused."""
    return _backend.add_rms_norm(x, residual, weight, eps)


def rope_tables(angles: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Angles [P, rotary / 2] fp32 -> (cos, sin), each [P, rotary], in the layout `rope` reads.

    The first half of sin is negated, so that no layer has to. Scale factors (YaRN's attention
    factor) may be multiplied into both.
    """
    return _backend.rope_tables(angles, dtype)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, neox style: pairs (i, i + rotary / 2) of the first `rotary` dimensions.

    x [T, H, D] (any strides; q and k together where they lie side by side), cos and sin
    [T, rotary]: rows of rope_tables at the tokens' positions -> [T, H, D], new memory.
    """
    return _backend.rope(x, cos, sin)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [T, 2 * I], gate first -> [T, I]."""
    return _backend.silu_mul(gate_up)


def gelu_mul(gate_up: torch.Tensor, *, tanh: bool = True) -> torch.Tensor:
    """gelu(gate) * up, like silu_mul; `tanh` is the approximation Gemma uses."""
    return _backend.gelu_mul(gate_up, tanh=tanh)
