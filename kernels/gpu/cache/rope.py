"""rope_and_store: norm and rotate q and k, store k and v, in one pass over qkv.

One program for a token and HEADS of its heads. The pair of each dimension is read a second time,
from cache, rather than exchanged between registers. Called through backend.py.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from streamer.kernels.batch import AttentionBatch
from streamer.kernels.gpu.cache.quantize import arguments, scales_and_codes
from streamer.kernels.gpu.common import power_of_2

HEADS = 8  # a program; unmeasured


@triton.jit
def _rope_kernel(
    # pointers: qkv [T, (Hq + 2 * Hk) * D], weights [D], tables [P, ROTARY], positions and slots
    # int64 [T], pool's layer [N, 2, Hk, B, D] and its scales, out [T, Hq, D]
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    slots_ptr,
    pool_ptr,
    scales_ptr,
    out_ptr,
    # sizes
    eps,
    # strides
    qkv_token,
    pool_block,
    pool_side,
    pool_head,
    pool_token,
    # meta
    HEADS_Q: tl.constexpr,
    HEADS_K: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    LIMIT: tl.constexpr,
    IS_INTEGER: tl.constexpr,
):
    """Heads [0, Hq) are q, then k, then v, which is only stored."""
    # int64: T * stride may pass 2**31, and a pool has far more elements
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    i = tl.arange(0, D_PAD)
    pair = tl.where(i < ROTARY // 2, i + ROTARY // 2, i - ROTARY // 2)
    is_rotated = i < ROTARY
    is_inside = (head < HEADS_Q + 2 * HEADS_K)[:, None] & (i < D)[None, :]
    is_q, is_v = head < HEADS_Q, head >= HEADS_Q + HEADS_K
    has_pair = is_inside & is_rotated[None, :]
    # [BLOCK_H, D_PAD] each
    at = qkv_ptr + token * qkv_token + head[:, None] * D
    plain = tl.load(at + i[None, :], mask=is_inside, other=0.0)
    x = plain.to(tl.float32)
    other = tl.load(at + pair[None, :], mask=has_pair, other=0.0).to(tl.float32)
    if HAS_NORMS:
        factor = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps)
        # [D_PAD] each
        q_weight = tl.load(q_norm_ptr + i, mask=i < D, other=0.0).to(tl.float32)
        k_weight = tl.load(k_norm_ptr + i, mask=i < D, other=0.0).to(tl.float32)
        q_pair = tl.load(q_norm_ptr + pair, mask=is_rotated, other=0.0).to(tl.float32)
        k_pair = tl.load(k_norm_ptr + pair, mask=is_rotated, other=0.0).to(tl.float32)
        x *= factor[:, None] * tl.where(is_q[:, None], q_weight[None, :], k_weight[None, :])
        other *= factor[:, None] * tl.where(is_q[:, None], q_pair[None, :], k_pair[None, :])
    position = tl.load(positions_ptr + token).to(tl.int64)
    # [D_PAD] each; the first half of sin is negative already
    cos = tl.load(cos_ptr + position * ROTARY + i, mask=is_rotated, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + position * ROTARY + i, mask=is_rotated, other=0.0).to(tl.float32)
    y = (x * cos[None, :] + other * sin[None, :]).to(out_ptr.dtype.element_ty)
    to_q = out_ptr + (token * HEADS_Q + head[:, None]) * D + i[None, :]
    tl.store(to_q, y, mask=is_inside & is_q[:, None])
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        # By division: Triton does not know that a tl.where of strides is aligned, and would store
        # two bytes at a time.
        kv = tl.maximum(head - HEADS_Q, 0)
        in_block = kv // HEADS_K * pool_side + kv % HEADS_K * pool_head
        to_kv = pool_ptr + slot // BLOCK_SIZE * pool_block + slot % BLOCK_SIZE * pool_token
        to_kv = to_kv + in_block[:, None] + i[None, :]
        if LIMIT > 0:
            x = tl.where(is_v[:, None], plain, y).to(tl.float32)
            scales, codes = scales_and_codes(x, LIMIT, IS_INTEGER)
            is_kv = (head >= HEADS_Q) & (head < HEADS_Q + 2 * HEADS_K)
            codes = codes.to(pool_ptr.dtype.element_ty)
            tl.store(to_kv, codes, mask=is_inside & is_kv[:, None])
            to_scale = scales_ptr + (slot // BLOCK_SIZE * pool_block + in_block) // 4
            tl.store(to_scale + slot % BLOCK_SIZE, scales, mask=is_kv)
        else:
            is_k = (head >= HEADS_Q) & (head < HEADS_Q + HEADS_K)
            tl.store(to_kv, y, mask=is_inside & is_k[:, None])
            tl.store(to_kv, plain, mask=is_inside & is_v[:, None])


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
    """See Backend.rope_and_store. A slot below 0 stores nothing."""
    kv_heads, _, dim = pool_layer.shape[2:]
    count, heads = qkv.shape[0], qkv.shape[1] // dim - 2 * kv_heads
    out = torch.empty(count, heads, dim, dtype=qkv.dtype, device=qkv.device)
    q_norm, k_norm = norms or (None, None)
    block = min(HEADS, power_of_2(heads + 2 * kv_heads))
    _rope_kernel[(count, triton.cdiv(heads + 2 * kv_heads, block))](
        qkv_ptr=qkv,
        q_norm_ptr=q_norm,
        k_norm_ptr=k_norm,
        cos_ptr=tables[0],
        sin_ptr=tables[1],
        positions_ptr=positions,
        slots_ptr=batch.slots,
        pool_ptr=pool_layer,
        out_ptr=out,
        eps=eps,
        qkv_token=qkv.stride(0),
        pool_block=pool_layer.stride(0),
        pool_side=pool_layer.stride(1),
        pool_head=pool_layer.stride(2),
        pool_token=pool_layer.stride(3),
        HEADS_Q=heads,
        HEADS_K=kv_heads,
        D=dim,
        D_PAD=power_of_2(dim),
        ROTARY=tables[0].shape[1],
        BLOCK_SIZE=batch.block_size,
        HAS_NORMS=norms is not None,
        BLOCK_H=block,
        num_warps=4,
        **arguments(pool_layer, batch.block_size),
    )
    return out
