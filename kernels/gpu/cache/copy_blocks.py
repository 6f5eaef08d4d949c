"""copy_blocks: whole blocks within the pool, one launch for all pairs.

Called through backend.py.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from streamer.kernels.gpu.common import power_of_2

PIECE = 8192  # elements a program; unmeasured


# src and dst lie side by side where they were uploaded: dst is aligned for some numbers of copies
# only, which must not cause another compilation.
@triton.jit(do_not_specialize_on_alignment=["src_ptr", "dst_ptr"])
def _copy_kernel(
    # pointers: pool [N, ...], src and dst int64 [C]
    pool_ptr,
    src_ptr,
    dst_ptr,
    # sizes
    width,
    # strides
    pool_block,
    # meta
    BLOCK: tl.constexpr,
):
    """One piece of pool[dst[c]] = pool[src[c]]."""
    c = tl.program_id(0)
    # int64: a pool is far larger than 2**31 elements
    src = tl.load(src_ptr + c).to(tl.int64)
    dst = tl.load(dst_ptr + c).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # [BLOCK]
    piece = tl.load(pool_ptr + src * pool_block + i, mask=i < width)
    tl.store(pool_ptr + dst * pool_block + i, piece, mask=i < width)


def copy_blocks(pool: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """See Backend.copy_blocks; src and dst may be on the host."""
    if pool.element_size() == 1:  # codes and scales alike
        pool = pool.view(torch.int8)
    width = pool[0].numel()
    block = min(PIECE, power_of_2(width))
    _copy_kernel[(src.shape[0], triton.cdiv(width, block))](
        pool_ptr=pool,
        src_ptr=src.to(pool.device, non_blocking=True),
        dst_ptr=dst.to(pool.device, non_blocking=True),
        width=width,
        pool_block=pool.stride(0),
        BLOCK=block,
        num_warps=8,
    )
