"""multiply: x by a weight of 4-bit, 8-bit or FP8 codes, widened in registers (W4A16, W8A16).

A program holds rows of the weight as the left factor: its codes are unpacked into the registers
from which the tensor core reads them, and x, the right one, comes from shared memory as it is.
Where few rows of x leave multiprocessors idle, K is split among programs and a second kernel adds
the parts, in one order. Called by packed.py.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
import triton
import triton.language as tl

from streamer.kernels.gpu.common import IS_INTERPRETED, power_of_2
from streamer.kernels.gpu.linear.codes import Codes, halves_of, numbers

# Unmeasured; chosen so that no register is spilled (tests/kernels/gpu/test_compile.py).
OUTPUTS = 64  # of a program
MAX_ROWS = 64  # of x in a program; the tensor core's minimum is 16
STAGES = 4
ENOUGH = 264  # programs: two for each multiprocessor of an H100 or H200
MIN_TILES = 4  # of words in a program's part of K
MAX_SPLITS = 8
SUM_BLOCK = 1024  # columns a program


@triton.jit(do_not_specialize=["rows", "splits"])
def _multiply_kernel(
    # pointers: x [T, K], those of Codes, bias [N], out [T, N] or parts float32 [splits, T, N]
    x_ptr,
    words_ptr,
    scales_ptr,
    offsets_ptr,
    table_ptr,
    bias_ptr,
    out_ptr,
    # sizes
    rows,
    outputs,
    width,
    row_words,
    groups,
    splits,
    # strides
    x_row,
    out_row,
    # meta
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_ADDED: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Program (rows of x, outputs, split): neighbours share the weight's rows."""
    PER: tl.constexpr = 32 // BITS
    PER_SLICE: tl.constexpr = GROUP > 0 or HAS_OFFSETS  # else the scale is applied to the sums
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    i = tl.arange(0, 16)
    is_row, is_output = m < rows, n < outputs
    # int64: N * K / 8 passes 2**31 at 1,000,000 outputs of 17,180; T * K at 262,144 rows of 8,192
    wide_m, wide_n = m.to(tl.int64), n.to(tl.int64)
    words_at = words_ptr + wide_n[:, None] * row_words + i[None, :]
    x_at = x_ptr + wide_m[:, None] * x_row + i[None, :]
    scales_at, offsets_at = scales_ptr + wide_n * groups, offsets_ptr
    if HAS_OFFSETS:
        offsets_at += wide_n * groups
    halves = halves_of(table_ptr, HAS_TABLE)
    tiles = row_words // 16
    per_split = tl.cdiv(tiles, splits)
    first = split * per_split
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for tile in tl.range(first, tl.minimum(tiles, first + per_split), num_stages=STAGES):
        # [BLOCK_N, 16]
        words = tl.load(words_at + tile * 16, mask=is_output[:, None], other=0)
        for j in tl.static_range(PER):
            k = (tile * PER + j) * 16
            # [BLOCK_M, 16]; beyond K the codes are zeros that scale and offset may change
            is_x = is_row[:, None] & (k + i < width)[None, :]
            x = tl.load(x_at + k, mask=is_x, other=0.0)
            if UPCAST:
                x = x.to(tl.float32)
            w = numbers((words >> (BITS * j)) & ((1 << BITS) - 1), halves, ZERO, IS_FLOAT,
                        HAS_TABLE)  # fmt: skip
            if PER_SLICE:
                g = 0
                if GROUP > 0:
                    g = tl.minimum(k // GROUP, groups - 1)
                w *= tl.load(scales_at + g, mask=is_output, other=0.0).to(tl.float32)[:, None]
                if HAS_OFFSETS:
                    w += tl.load(offsets_at + g, mask=is_output, other=0.0).to(tl.float32)[:, None]
            acc = tl.dot(w.to(x.dtype), tl.trans(x), acc, input_precision="ieee")
    if not PER_SLICE:
        acc *= tl.load(scales_at, mask=is_output, other=0.0).to(tl.float32)[:, None]
    is_out = is_output[:, None] & is_row[None, :]
    if IS_SPLIT:
        at = out_ptr + (split.to(tl.int64) * rows + wide_m)[None, :] * outputs + n[:, None]
        tl.store(at, acc, mask=is_out)
    else:
        if HAS_BIAS:
            acc += tl.load(bias_ptr + n, mask=is_output, other=0.0).to(tl.float32)[:, None]
        at = out_ptr + wide_m[None, :] * out_row + n[:, None]
        if IS_ADDED:
            acc += tl.load(at, mask=is_out, other=0.0).to(tl.float32)
        tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=is_out)


@triton.jit(do_not_specialize=["rows", "splits"])
def _sum_kernel(
    # pointers: parts float32 [splits, T, N], bias [N], out [T, N]
    parts_ptr,
    bias_ptr,
    out_ptr,
    # sizes
    rows,
    outputs,
    splits,
    # strides
    out_row,
    # meta
    HAS_BIAS: tl.constexpr,
    IS_ADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, columns): out = the parts' sum, with bias and what out holds already."""
    row = tl.program_id(0).to(tl.int64)  # int64 as above
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_output = n < outputs
    # [BLOCK]
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(splits):
        at = parts_ptr + (split * rows + row) * outputs + n
        total += tl.load(at, mask=is_output, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=is_output, other=0.0).to(tl.float32)
    to = out_ptr + row * out_row + n
    if IS_ADDED:
        total += tl.load(to, mask=is_output, other=0.0).to(tl.float32)
    tl.store(to, total.to(out_ptr.dtype.element_ty), mask=is_output)


def multiply(
    x: torch.Tensor, codes: Codes, bias: torch.Tensor | None, out: torch.Tensor, *, is_added: bool
) -> None:
    """out [T, N] (rows of any stride) = x [T, K] @ weight.T + bias, or is increased by that."""
    rows, outputs = out.shape
    if not rows:
        return
    x = codes.in_order(x)
    block = min(MAX_ROWS, max(16, power_of_2(rows)))
    splits = num_splits(rows, outputs, codes.tiles)
    ends: dict[str, Any] = {
        "bias_ptr": bias,
        "HAS_BIAS": bias is not None,
        "IS_ADDED": is_added,
        "rows": rows,
        "outputs": outputs,
        "splits": splits,
        "out_row": out.stride(0),
    }
    parts = out
    if splits > 1:
        parts = torch.empty(splits, rows, outputs, dtype=torch.float32, device=x.device)
    _multiply_kernel[(triton.cdiv(rows, block), triton.cdiv(outputs, OUTPUTS), splits)](
        x_ptr=x,
        out_ptr=parts,
        width=codes.shape[1],
        x_row=x.stride(0),
        IS_SPLIT=splits > 1,
        BLOCK_M=block,
        BLOCK_N=OUTPUTS,
        STAGES=STAGES,
        UPCAST=IS_INTERPRETED and x.dtype is torch.bfloat16,
        num_warps=4,
        **ends,
        **codes.arguments(),
    )
    if splits > 1:
        columns = min(SUM_BLOCK, power_of_2(outputs))
        grid = (rows, triton.cdiv(outputs, columns))
        _sum_kernel[grid](parts_ptr=parts, out_ptr=out, BLOCK=columns, num_warps=4, **ends)


def num_splits(rows: int, outputs: int, tiles: int) -> int:
    """Programs that share K; the same for all numbers of rows up to a power of two, so that a
    kernel for a few sizes is compiled for all."""
    programs = -(-power_of_2(rows) // MAX_ROWS) * -(-outputs // OUTPUTS)
    splits = 1
    while splits < MAX_SPLITS and programs * splits < ENOUGH and tiles >= 2 * splits * MIN_TILES:
        splits *= 2
    return splits
