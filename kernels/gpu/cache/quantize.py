"""Quantizing heads in registers, as kernels/quantized.py defines it: scales, then codes.

Inlined into the kernels that store K and V (rope.py, store_kv.py). Launches nothing.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from streamer.kernels.quantized import LIMITS, MIN_SCALE, scales_of

INTEGER = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds to an integer
SMALLEST = tl.constexpr(24576.0)  # 1.5 * 2**14: likewise to 2**-9, the step of e4m3's subnormals
TINY = tl.constexpr(MIN_SCALE)


@triton.jit
def scales_and_codes(x, LIMIT: tl.constexpr, IS_INTEGER: tl.constexpr):
    """x float32 [H, D] -> scales [H], and [H, D] values that the pool's dtype holds exactly.

    Rounded here, to the nearest and ties to even, because not every conversion from float32 to e4m3
    does so: the interpreter of Triton 3.9 turns 31.6 into 16.
    """
    is_nan = tl.max((x != x).to(tl.int32), 1) > 0
    scales = tl.max(tl.abs(x), 1) * (1.0 / LIMIT)
    scales = tl.where(is_nan, float("nan"), scales)
    inverse = tl.where(
        scales < TINY, 0.0, tl.div_rn(tl.full(scales.shape, 1.0, tl.float32), scales)
    )
    y = x * inverse[:, None]
    if IS_INTEGER:
        codes = (y + INTEGER) - INTEGER
    else:
        bits = y.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000  # three bits of mantissa
        normal = bits.to(tl.float32, bitcast=True)
        codes = tl.where(tl.abs(y) < 0.015625, (y + SMALLEST) - SMALLEST, normal)
        codes = tl.where(y != y, y, codes)
    return scales, codes


def arguments(pool_layer: torch.Tensor, block_size: int) -> dict[str, object]:
    """A storing kernel's arguments that depend on the pool's dtype; without scales LIMIT is 0."""
    is_quantized = pool_layer.dtype in LIMITS
    return {
        "scales_ptr": scales_of(pool_layer, block_size) if is_quantized else None,
        "LIMIT": LIMITS.get(pool_layer.dtype, 0.0),
        "IS_INTEGER": pool_layer.dtype is torch.int8,
    }
