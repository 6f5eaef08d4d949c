"""embedding: rows of a table.

One program for a token and a piece of its row. Called through backend.py.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from streamer.kernels.gpu.common import power_of_2

MAX_BLOCK = 2048  # columns a program; unmeasured


@triton.jit
def _embedding_kernel(
    # pointers: tokens int64 [T], table [V, H], out [T, H]
    tokens_ptr,
    table_ptr,
    out_ptr,
    # sizes
    width,
    # strides
    table_row,
    # meta
    BLOCK: tl.constexpr,
):
    """out[t] = table[tokens[t]]."""
    # int64: a table of 152,000 rows of 16,384 has more than 2**31 elements
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens_ptr + t).to(tl.int64)
    # [BLOCK]
    row = tl.load(table_ptr + token * table_row + column, mask=column < width)
    tl.store(out_ptr + t * width + column, row, mask=column < width)


def embedding(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """See Backend.embedding."""
    count, width = tokens.shape[0], table.shape[1]
    out = torch.empty(count, width, dtype=table.dtype, device=table.device)
    block = min(MAX_BLOCK, power_of_2(width))
    _embedding_kernel[(count, triton.cdiv(width, block))](
        tokens_ptr=tokens,
        table_ptr=table,
        out_ptr=out,
        width=width,
        table_row=table.stride(0),
        BLOCK=block,
        num_warps=4,
    )
    return out
