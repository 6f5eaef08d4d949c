"""store_kv: new keys and values into their slots of the pool's layer.

One program a token and head. A slot below 0 (the padding of a CUDA graph) stores nothing. Called
through backend.py.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from streamer.kernels.batch import AttentionBatch
from streamer.kernels.gpu.cache.quantize import arguments, scales_and_codes
from streamer.kernels.gpu.common import power_of_2


@triton.jit
def _store_kernel(
    # pointers: k, v [T, Hk, D], slots int64 [T], pool's layer [N, 2, Hk, B, D], its scales
    k_ptr,
    v_ptr,
    slots_ptr,
    pool_ptr,
    scales_ptr,
    # strides
    k_token,
    k_head,
    v_token,
    v_head,
    pool_block,
    pool_side,
    pool_head,
    pool_token,
    # meta
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LIMIT: tl.constexpr,
    IS_INTEGER: tl.constexpr,
):
    """pool[slot // B, 0 or 1, head, slot % B] = k or v[token, head]; LIMIT 0: not quantized."""
    # int64: a pool has far more than 2**31 elements, and T * stride may pass that
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        i = tl.arange(0, D_PAD)
        at = slot // BLOCK_SIZE * pool_block + head * pool_head
        to = pool_ptr + at + slot % BLOCK_SIZE * pool_token + i
        # [D_PAD] each
        k = tl.load(k_ptr + token * k_token + head * k_head + i, mask=i < D, other=0.0)
        v = tl.load(v_ptr + token * v_token + head * v_head + i, mask=i < D, other=0.0)
        if LIMIT > 0:
            side = tl.arange(0, 2)
            # [2, D_PAD]: k, then v
            x = tl.where(side[:, None] == 0, k[None, :], v[None, :]).to(tl.float32)
            scales, codes = scales_and_codes(x, LIMIT, IS_INTEGER)
            codes = codes.to(pool_ptr.dtype.element_ty)
            tl.store(to[None, :] + (side * pool_side)[:, None], codes, mask=(i < D)[None, :])
            tl.store(scales_ptr + (at + side * pool_side) // 4 + slot % BLOCK_SIZE, scales)
        else:
            tl.store(to, k, mask=i < D)
            tl.store(to + pool_side, v, mask=i < D)


def store_kv(
    k: torch.Tensor, v: torch.Tensor, pool_layer: torch.Tensor, batch: AttentionBatch
) -> None:
    """See Backend.store_kv."""
    kv_heads, _, dim = pool_layer.shape[2:]
    _store_kernel[(k.shape[0], kv_heads)](
        k_ptr=k,
        v_ptr=v,
        slots_ptr=batch.slots,
        pool_ptr=pool_layer,
        k_token=k.stride(0),
        k_head=k.stride(1),
        v_token=v.stride(0),
        v_head=v.stride(1),
        pool_block=pool_layer.stride(0),
        pool_side=pool_layer.stride(1),
        pool_head=pool_layer.stride(2),
        pool_token=pool_layer.stride(3),
        D=dim,
        D_PAD=power_of_2(dim),
        BLOCK_SIZE=batch.block_size,
        num_warps=1,
        **arguments(pool_layer, batch.block_size),
    )
