"""best: the largest value of each row and its index, for greedy tokens and for sampling.

A row is cut into chunks, so that one row of 150,000 logits is not one program's work; a second,
small kernel takes the best of a row's chunks. Called through backend.py, and by sample.py.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from streamer.kernels.gpu.common import power_of_2

CHUNK = 8192  # logits a program; 19 programs a row of 152,000; unmeasured


@triton.jit
def _best_chunk_kernel(
    # pointers: x [S, V], values float32 and ids int64 [S, chunks]
    x_ptr,
    values_ptr,
    ids_ptr,
    # sizes
    width,
    chunks,
    # strides
    x_row,
    # meta
    BLOCK: tl.constexpr,
):
    """The best of one chunk of one row: the first of equals, NaN where there is one."""
    # int64: S * V passes 2**31 at 14,100 rows of 152,000
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    is_inside = column < width
    # [BLOCK]
    x = tl.load(x_ptr + row * x_row + column, mask=is_inside, other=float("-inf")).to(tl.float32)
    is_nan = x != x
    numbers = tl.where(is_nan, float("-inf"), x)
    value = tl.max(numbers, 0)
    first = tl.argmax(numbers, 0, tie_break_left=True)
    value = tl.where(tl.max(is_nan.to(tl.int32), 0) > 0, float("nan"), value)
    tl.store(values_ptr + row * chunks + chunk, value)
    tl.store(ids_ptr + row * chunks + chunk, (chunk * BLOCK + first).to(tl.int64))


@triton.jit
def _best_of_chunks_kernel(
    # pointers: values float32 and ids int64 [S, chunks], value_out float32 [S], id_out int64 [S]
    values_ptr,
    ids_ptr,
    value_out_ptr,
    id_out_ptr,
    # sizes
    chunks,
    # meta
    BLOCK: tl.constexpr,
):
    """The best of a row's chunks: the first of equals, NaN where there is one."""
    row = tl.program_id(0).to(tl.int64)  # int64 as above
    i = tl.arange(0, BLOCK)
    # [BLOCK]
    x = tl.load(values_ptr + row * chunks + i, mask=i < chunks, other=float("-inf"))
    is_nan = x != x
    numbers = tl.where(is_nan, float("-inf"), x)
    value = tl.max(numbers, 0)
    first = tl.argmax(numbers, 0, tie_break_left=True)
    value = tl.where(tl.max(is_nan.to(tl.int32), 0) > 0, float("nan"), value)
    tl.store(value_out_ptr + row, value)
    tl.store(id_out_ptr + row, tl.load(ids_ptr + row * chunks + first))


def best(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See Backend.best."""
    rows, width = x.shape
    block = min(CHUNK, power_of_2(width))
    chunks = triton.cdiv(width, block)
    values = torch.empty(rows, chunks, dtype=torch.float32, device=x.device)
    ids = torch.empty(rows, chunks, dtype=torch.int64, device=x.device)
    _best_chunk_kernel[(rows, chunks)](
        x_ptr=x,
        values_ptr=values,
        ids_ptr=ids,
        width=width,
        chunks=chunks,
        x_row=x.stride(0),
        BLOCK=block,
        num_warps=8,
    )
    return best_of_chunks(values, ids)


def best_of_chunks(values: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """values float32 and ids int64 [S, chunks] of ascending ids -> the best [S], its id [S]."""
    rows, chunks = values.shape
    if chunks == 1:
        return values[:, 0], ids[:, 0]
    value = torch.empty(rows, dtype=torch.float32, device=values.device)
    first = torch.empty(rows, dtype=torch.int64, device=values.device)
    _best_of_chunks_kernel[(rows,)](
        values_ptr=values,
        ids_ptr=ids,
        value_out_ptr=value,
        id_out_ptr=first,
        chunks=chunks,
        BLOCK=power_of_2(chunks),
        num_warps=1,
    )
    return value, first
