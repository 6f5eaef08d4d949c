"""multiply: x by a weight of 4-bit, 8-bit or FP8 codes: three ways by the number of x's rows.

One row or two go to few_rows.py and many to many_rows.py. Between them (W4A16, W8A16) a program
holds rows of the weight as the left factor, unpacked in the registers from which the tensor core
reads them, and x, the right one, comes from shared memory. Where that leaves multiprocessors idle,
K is split among programs and a second kernel adds the parts, in one order. Called by packed.py.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 -- Triton knows no starred tuples

from typing import Any

import torch
import triton
import triton.language as tl

from streamer.kernels.gpu.common import IS_INTERPRETED, power_of_2
from streamer.kernels.gpu.linear import few_rows
from streamer.kernels.gpu.linear.codes import (
    TILE,
    Codes,
    halves_of,
    in_order,
    lifted,
    number,
    scales_of,
)
from streamer.kernels.gpu.linear.many_rows import multiply_many

# Chosen by what tests/kernels/gpu/test_compile.py says of registers. On an H200 2 and 3 stages, 132
# and 528 programs and 128 outputs for up to 16 rows gained at most 5%, and lost up to half.
OUTPUTS = {16: 64, 32: 128, 64: 128}  # of a program by its rows of x; a warp has 16
MAX_ROWS = max(OUTPUTS)  # of x in a program
STAGES = 4
REGISTERS = 128  # of a thread, at most: 16 warps a multiprocessor, for which 24 bytes are spilled
ENOUGH = 264  # programs of 64 outputs: two for each multiprocessor of an H100 or H200
MIN_TILES = 4  # of words in a program's part of K
MAX_SPLITS = 8
SUM_BLOCK = 1024  # columns a program
# Rows that are multiplied without widening the weight in memory. On an H200, 28,672 x 4,096, to
# read 58 MB of 4 bits and write 235 MB takes 75 us, and cuBLAS 63 us for up to 128 rows and 308 for
# 1,024; here 64 rows take 25 to 50 us by their loop's instructions, and 64 more as many again.
MAX_MEDIUM = 128


@triton.jit
def _widened(
    words, found, lift16, lift256, halves, HALF: tl.constexpr, COUNT: tl.constexpr,
    BITS: tl.constexpr, ZERO: tl.constexpr, IS_FLOAT: tl.constexpr, HAS_TABLE: tl.constexpr,
    PER_GROUP: tl.constexpr, HAS_OFFSETS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """A tuple of COUNT codes of each word as numbers, with scales and offsets of scales_of where
    groups have them."""
    w = ()
    scale, offset = 1.0, 0.0
    if PER_GROUP:
        scale = found[HALF].to(tl.float32)[:, :, None]
        if HAS_OFFSETS:
            offset = found[len(found) // 2 + HALF].to(tl.float32)[:, :, None]
    # what a code is lifted by, taken off with its offset
    add16, add256 = offset - scale * (16 + ZERO), offset - scale * (256 + ZERO)
    for e in tl.static_range(COUNT):
        if PER_GROUP and not IS_FLOAT and not HAS_TABLE:
            x = lifted(words, lift16, lift256, HALF * COUNT + e, BITS) * scale
            x += add16 if BITS == 4 and e % 2 == 1 else add256
        else:
            x = number(words, lift16, lift256, halves, HALF * COUNT + e, BITS, ZERO, IS_FLOAT,
                       HAS_TABLE)  # fmt: skip
            if PER_GROUP:
                x *= scale
            if HAS_OFFSETS:
                x += offset
        w = w + (x.to(DTYPE),)
    return w


@triton.jit
def _arranged(w, BLOCK_N: tl.constexpr, PER: tl.constexpr, WARPS: tl.constexpr):
    """Numbers of in_order, [BLOCK_N, 4 blocks, 4, 2, ...], in the kernel's orders of rows and
    columns: [BLOCK_N, 16 * PER]. What a thread has loaded is then what it multiplies."""
    HIGH: tl.constexpr = BLOCK_N // (16 * WARPS)
    if PER == 4:
        w = w.reshape(HIGH, 2, WARPS, 8, 4, 2, 2, 2, 2)
        w = tl.permute(w, (0, 2, 1, 3, 8, 7, 5, 4, 6))
    else:
        w = w.reshape(HIGH, 2, WARPS, 8, 4, 2, 2, 2, 2, 2)
        w = tl.permute(w, (0, 2, 1, 3, 9, 8, 7, 5, 4, 6))
    return w.reshape(BLOCK_N, 16 * PER)


@triton.jit(do_not_specialize=["rows", "splits", "lift16", "lift256"])
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
    # LIFTS
    lift16,
    lift256,
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
    WARPS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Program (rows of x, outputs, split): neighbours share the weight's rows."""
    PER: tl.constexpr = 32 // BITS
    COLUMNS: tl.constexpr = 4 * PER  # of a block
    HALVES: tl.constexpr = 2 if GROUP > 0 and GROUP < COLUMNS else 1
    PER_GROUP: tl.constexpr = GROUP > 0 or HAS_OFFSETS  # else the scale is applied to the sums
    # Rows of the weight in the order of a warpgroup's product, which has 16 to a warp, where loads
    # have 8: rows 8 * WARPS apart lie together in a thread.
    j = tl.arange(0, BLOCK_N)
    n_loaded = tl.program_id(1) * BLOCK_N + j
    n = tl.program_id(1) * BLOCK_N + j // (16 * WARPS) * (16 * WARPS)
    n += j % 16 // 8 * (8 * WARPS) + j // 16 % WARPS * 8 + j % 8
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    is_row, is_output = m < rows, n < outputs
    # As in few_rows.py, what is beyond the last row or tile is that one once more. int64: N * K / 8
    # passes 2**31 at 1,000,000 outputs of 17,180; T * K at 262,144 rows of 8,192.
    wide_m = tl.minimum(m, rows - 1).to(tl.int64)
    wide_n = tl.minimum(n_loaded, outputs - 1).to(tl.int64)
    words_at = words_ptr + wide_n[:, None] * row_words + tl.arange(0, 16)[None, :]
    # Columns in the order in which a thread that holds words of a row, a block, holds its pairs.
    i = tl.arange(0, 4 * COLUMNS)
    column = i % 2 + i // 2 % 4 * COLUMNS + i // 8 * 2
    x_at = x_ptr + wide_m[:, None] * x_row + column[None, :]
    groups_at = (wide_n * groups)[:, None]
    halves = halves_of(table_ptr, HAS_TABLE)
    tiles = row_words // 16
    per_split = tl.cdiv(tiles, splits)
    first = split * per_split
    end = tl.minimum(tiles, first + per_split)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    b = tl.arange(0, 4)[None, :]
    ahead = scales_of(scales_ptr, offsets_ptr, groups_at, first * 4 + b, groups, GROUP, COLUMNS,
                      HALVES, PER_GROUP, HAS_OFFSETS, [1, 2])  # fmt: skip
    for tile in tl.range(first, end, num_stages=STAGES):
        # [BLOCK_N, 4 blocks, 4]
        words = tl.load(words_at + tile * 16).reshape(BLOCK_N, 4, 4)
        k = tile * (4 * COLUMNS)
        # [BLOCK_M, 4 * COLUMNS]
        x = tl.load(x_at + k, mask=(column < width - k)[None, :], other=0.0)
        if UPCAST:
            x = x.to(tl.float32)
        # Of the next tile: loads of two bytes can't be pipelined, and would be waited for.
        found = ahead
        ahead = scales_of(scales_ptr, offsets_ptr, groups_at, tile * 4 + 4 + b, groups, GROUP,
                          COLUMNS, HALVES, PER_GROUP, HAS_OFFSETS, [1, 2])  # fmt: skip
        w = ()
        for half in tl.static_range(HALVES):
            w = w + _widened(words, found, lift16, lift256, halves, half, PER // HALVES, BITS, ZERO,
                             IS_FLOAT, HAS_TABLE, PER_GROUP, HAS_OFFSETS, x.dtype)  # fmt: skip
        acc = tl.dot(_arranged(in_order(w, PER), BLOCK_N, PER, WARPS), tl.trans(x), acc,
                     input_precision="ieee")  # fmt: skip
    if not PER_GROUP:
        at = tl.minimum(n, outputs - 1).to(tl.int64)
        acc *= tl.load(scales_ptr + at).to(tl.float32)[:, None]
    wide_m = m.to(tl.int64)
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
    if rows > MAX_MEDIUM:
        multiply_many(x, codes, bias, out, is_added=is_added)
        return
    splits = num_splits(rows, codes)
    ends: dict[str, Any] = {
        "bias_ptr": bias,
        "HAS_BIAS": bias is not None,
        "IS_ADDED": is_added,
        "outputs": outputs,
        "splits": splits,
        "out_row": out.stride(0),
    }
    parts = out
    if splits > 1:
        parts = torch.empty(splits, rows, outputs, dtype=torch.float32, device=x.device)
    if rows <= few_rows.MAX_FEW:
        few_rows.multiply_few(x, codes, parts, is_split=splits > 1, ends=ends)
    else:
        _multiply_medium(x, codes, parts, is_split=splits > 1, ends=ends)
    if splits > 1:
        columns = min(SUM_BLOCK, power_of_2(outputs))
        _sum_kernel[(rows, triton.cdiv(outputs, columns))](
            parts_ptr=parts, out_ptr=out, rows=rows, BLOCK=columns, num_warps=4, **ends
        )


def _multiply_medium(
    x: torch.Tensor, codes: Codes, to: torch.Tensor, *, is_split: bool, ends: dict[str, Any]
) -> None:
    """As few_rows.multiply_few."""
    rows = len(x)
    block = min(MAX_ROWS, max(16, power_of_2(rows)))
    outputs = OUTPUTS[block]
    grid = (triton.cdiv(rows, block), triton.cdiv(codes.shape[0], outputs), ends["splits"])
    _multiply_kernel[grid](
        x_ptr=x,
        out_ptr=to,
        rows=rows,
        width=codes.shape[1],
        x_row=x.stride(0),
        IS_SPLIT=is_split,
        BLOCK_M=block,
        BLOCK_N=outputs,
        STAGES=STAGES,
        WARPS=outputs // 16,
        UPCAST=IS_INTERPRETED and x.dtype is torch.bfloat16,
        num_warps=outputs // 16,
        maxnreg=REGISTERS if x.element_size() == 2 else None,  # float32 is not made for speed
        **ends,
        **codes.arguments(),
    )


def num_splits(rows: int, codes: Codes) -> int:
    """Programs that share K; the same for all numbers of rows up to a power of two, so that a
    kernel for a few sizes is compiled for all."""
    outputs = codes.shape[0]
    if rows <= few_rows.MAX_FEW:
        programs, enough = -(-outputs // few_rows.OUTPUTS), few_rows.ENOUGH
        most = few_rows.steps_of(codes)
    else:
        programs = -(-power_of_2(rows) // MAX_ROWS) * -(-outputs // 64)
        most, enough = codes.blocks // TILE // MIN_TILES, ENOUGH
    splits = 1
    while splits < MAX_SPLITS and programs * splits < enough and most >= 2 * splits:
        splits *= 2
    return splits
