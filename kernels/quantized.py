"""K and V in eight bits: INT8 or FP8 (e4m3) codes, with a float32 scale for each token and KV head.

Defines how a pool of such codes is laid out and how a head's vector becomes codes; keeps no state.
Called by ops.py and by every backend that has these dtypes. A pool's dtype says which it holds.

One scheme serves both dtypes: scale = max |x| / limit over the D elements of one token's K or V of
one head, code = x / scale, rounded to the nearest, ties to even. Why this one:
- A static scale of 1.0 for FP8 (vLLM's and SGLang's default) clips what exceeds 448, which keys of
  models with a bias in qkv do, and loses what is below 2**-6 to e4m3's subnormals. A scale for the
  whole tensor needs a calibrated checkpoint; a scale for a whole block changes when the block's
  next token arrives: codes would be rounded twice and depend on how a prompt was cut.
- A scale for each token and head is known when the token is stored and never changes: a vector's
  codes depend on the vector alone, not on the batch, the prompt's chunks, swap, copy or recompute.

Scales are stored in their block, so that swap and copy-on-write remain one copy without code for
scales: each head has `scale_rows` more rows of D bytes below its B tokens, which hold B float32 (at
16 tokens a block one row: 6% at 128 dimensions, half of it unused). Beside each token's codes,
rows of D + 4 bytes would not be aligned to the lines of a GPU's memory (vLLM's issue 56081
measured an attention kernel 6.3 times slower for that).

Error: INT8's is at most scale / 2, 0.4% of the head's largest element. FP8's is at most a 16th of
each element, or scale * 2**-10 for those below scale * 2**-6. Where a head has a NaN or an
infinity, the scale is not finite, and neither is any element read back.
"""

from __future__ import annotations

import torch

LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # the largest code
SCALE_BYTES = 4
MIN_SCALE = 1e-30  # a head whose elements are all below this is stored as zeros


def scale_rows(block_size: int, head_dim: int, dtype: torch.dtype) -> int:
    """Rows below a head's tokens that hold their scales; 0 for a dtype that has none.

    ValueError for a head_dim of which a row does not hold whole scales.
    """
    if dtype not in LIMITS:
        return 0
    if head_dim % SCALE_BYTES:
        raise ValueError(f"head_dim {head_dim} must be a multiple of {SCALE_BYTES} for {dtype}")
    return -(-block_size * SCALE_BYTES // head_dim)


def scales_of(pool_layer: torch.Tensor, block_size: int) -> torch.Tensor:
    """The scales of a layer [N, 2, Hk, B + scale_rows, D] as a view, float32 [N, 2, Hk, B]."""
    words = pool_layer.view(torch.float32)
    blocks, sides, heads = words.shape[:3]
    at = words.storage_offset() + block_size * words.stride(3)
    return words.as_strided((blocks, sides, heads, block_size), (*words.stride()[:3], 1), at)


def quantize(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] -> codes [..., D] of dtype, scales float32 [...].

    Every operation is exact or rounded once, in float32, so that the Triton kernels
    (gpu/quantize.py) give the same bits.
    """
    wide = x.float()
    scales = wide.abs().amax(-1) * (1.0 / LIMITS[dtype])
    inverse = torch.where(scales < MIN_SCALE, 0.0, 1.0 / scales)
    scaled = wide * inverse.unsqueeze(-1)
    return (scaled.round() if dtype is torch.int8 else scaled).to(dtype), scales
