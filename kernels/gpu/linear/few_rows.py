"""multiply_few: one row or two of x by a weight of codes, without the tensor core.

A thread loads 16 bytes of each of OUTPUTS rows of the weight, which are whole columns of a group,
and multiplies what it unpacks by the same columns of x in float32: a code takes a shift of two, an
operation of bits and a fused multiply and add for each row. What a code was lifted by is taken off
a block's sum, as the sum of x times it. A program's threads are side by side in K, and add their
sums once, at the end. Called by multiply.py.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 -- Triton knows no starred tuples

from typing import Any

import torch
import triton
import triton.language as tl

from streamer.kernels.gpu.common import power_of_2
from streamer.kernels.gpu.linear.codes import Codes, lifted, looked_up, number, scales_of

# Instructions of the loop for a code of 4 bits in groups of 32, counted: 3.6 for one row, 5.1 for
# two, 10.0 for four, and 5.2 in multiply.py for up to 32. For 28,672 x 4,096, one for each code is
# 4 us of an H200, which took 25, 39 and 77 us, and 42 in multiply.py (2026-11-27). 4 and 16 outputs
# took 29 and 28 for one row, 1 and 4 warps 27, two steps at once 25 and 52 for two rows; over codes
# of 8 bits one warp took 31 for 35.
MAX_FEW = 2  # a power of two, as what is compiled for fewer is
OUTPUTS = 8  # of a program, and of each of its threads
WARPS = 2  # of a program, each 32 blocks of K
UNROLL = 1  # steps whose loads are issued together
ENOUGH = 512  # programs, nearly 4 for each multiprocessor of an H100 or H200, so 16 KB under way


@triton.jit
def _block_sums(x_ptr, x_row, rows, k, words, lifts, table_ptr, width, HALF: tl.constexpr,
                COUNT: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr,
                IS_FLOAT: tl.constexpr, HAS_TABLE: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Of each row of x and COUNT codes of each word: the sums of x times code, [BLOCKS, OUTPUTS],
    and of x, [BLOCKS]: two tuples."""
    IS_LIFTED: tl.constexpr = not IS_FLOAT and not HAS_TABLE
    products = ()
    raised = ()
    sums = ()
    for _ in tl.static_range(ROWS):
        products = products + (tl.zeros(words.shape, tl.float32),)
        raised = raised + (tl.zeros(k.shape, tl.float32),)
        sums = sums + (tl.zeros(k.shape, tl.float32),)
    for e in tl.static_range(COUNT):
        if IS_LIFTED:
            w = lifted(words, lifts[0], lifts[1], HALF * COUNT + e, BITS)
        elif HAS_TABLE:
            w = looked_up(words, table_ptr, HALF * COUNT + e)
        else:
            w = number(words, lifts[0], lifts[1], 0, HALF * COUNT + e, BITS, ZERO, IS_FLOAT, False)
        new_products = ()
        new_raised = ()
        new_sums = ()
        at = k + (HALF * COUNT + e) * 4
        for m in tl.static_range(ROWS):
            # [BLOCKS, 4]
            x_at = x_ptr + tl.minimum(m, rows - 1) * x_row + at
            x = tl.load(x_at, mask=at < width, other=0.0).to(tl.float32)
            new_products = new_products + (products[m] + w * x[:, None, :],)
            lift = (16 if BITS == 4 and e % 2 == 1 else 256) + ZERO
            new_raised = new_raised + (raised[m] + x * lift,)
            new_sums = new_sums + (sums[m] + x,)
        products = new_products
        raised = new_raised
        sums = new_sums
    totals = ()
    of_x = ()
    for m in tl.static_range(ROWS):
        total = tl.sum(products[m], 2)
        if IS_LIFTED:
            total -= tl.sum(raised[m], 1)[:, None]
        totals = totals + (total,)
        of_x = of_x + (tl.sum(sums[m], 1),)
    return totals, of_x


@triton.jit(do_not_specialize=["rows", "splits", "lift16", "lift256"])
def _few_kernel(
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
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Program (outputs, split): all rows of x, at most ROWS."""
    PER: tl.constexpr = 32 // BITS
    COLUMNS: tl.constexpr = 4 * PER
    HALVES: tl.constexpr = 2 if GROUP > 0 and GROUP < COLUMNS else 1
    PER_GROUP: tl.constexpr = GROUP > 0 or HAS_OFFSETS  # else the scale is applied to the sums
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    is_output = n < outputs
    # What is beyond the last row or block is that one once more, which no mask of loads does as
    # cheaply: its sums are not stored, and x there is zero. int64: N * K / 8 passes 2**31.
    wide_n = tl.minimum(n, outputs - 1).to(tl.int64)
    words_at = (wide_n * row_words)[None, :, None] + tl.arange(0, 4)[None, None, :]
    groups_at = (wide_n * groups)[None, :]
    blocks = row_words // 4
    steps = tl.cdiv(blocks, BLOCKS)
    per_split = tl.cdiv(steps, splits)
    first = split * per_split
    acc = ()
    for _ in tl.static_range(ROWS):
        acc = acc + (tl.zeros((BLOCKS, BLOCK_N), tl.float32),)
    at = first * BLOCKS + tl.arange(0, BLOCKS)
    ahead = scales_of(scales_ptr, offsets_ptr, groups_at, at[:, None], groups, GROUP, COLUMNS,
                      HALVES, PER_GROUP, HAS_OFFSETS, [2, 1])  # fmt: skip
    for step in tl.range(first, tl.minimum(steps, first + per_split), loop_unroll_factor=UNROLL):
        at = step * BLOCKS + tl.arange(0, BLOCKS)
        block = tl.minimum(at, blocks - 1)
        # [BLOCKS, BLOCK_N, 4]; blocks are said to lie closer than rows of the weight, for no more
        # than to have lanes side by side in K, and all rows in each
        words = tl.load(
            words_ptr + tl.max_contiguous(words_at + (block * 4)[:, None, None], [2, 1, 4])
        )
        k = at[:, None] * COLUMNS + tl.arange(0, 4)[None, :]
        # of the next step: else they are asked for where they are needed, and waited for
        found = ahead
        ahead = scales_of(scales_ptr, offsets_ptr, groups_at, (at + BLOCKS)[:, None], groups, GROUP,
                          COLUMNS, HALVES, PER_GROUP, HAS_OFFSETS, [2, 1])  # fmt: skip
        for half in tl.static_range(HALVES):
            scale, offset = 1.0, 0.0
            if PER_GROUP:
                scale = found[half].to(tl.float32)
            if HAS_OFFSETS:
                offset = found[HALVES + half].to(tl.float32)
            totals, of_x = _block_sums(
                x_ptr, x_row, rows, k, words, (lift16, lift256), table_ptr, width, half,
                PER // HALVES, BITS, ZERO, IS_FLOAT, HAS_TABLE, ROWS,
            )  # fmt: skip
            new_acc = ()
            for m in tl.static_range(ROWS):
                total = totals[m]
                if PER_GROUP:
                    total *= scale
                if HAS_OFFSETS:
                    total += offset * of_x[m][:, None]
                new_acc = new_acc + (acc[m] + total,)
            acc = new_acc
    for m in tl.static_range(ROWS):
        y = tl.sum(acc[m], 0)
        if not PER_GROUP:
            y *= tl.load(scales_ptr + wide_n).to(tl.float32)
        is_out = n < tl.where(m < rows, outputs, 0)
        if IS_SPLIT:
            tl.store(out_ptr + (split.to(tl.int64) * rows + m) * outputs + n, y, mask=is_out)
        else:
            if HAS_BIAS:
                y += tl.load(bias_ptr + n, mask=is_output, other=0.0).to(tl.float32)
            to = out_ptr + m * out_row + n
            if IS_ADDED:
                y += tl.load(to, mask=is_out, other=0.0).to(tl.float32)
            tl.store(to, y.to(out_ptr.dtype.element_ty), mask=is_out)


def warps_of(codes: Codes) -> int:
    """Warps of a program: no more than there are blocks for."""
    return min(WARPS, max(1, codes.blocks // 32))


def steps_of(codes: Codes) -> int:
    """Steps of all programs that share K."""
    return int(triton.cdiv(codes.blocks, 32 * warps_of(codes)))


def multiply_few(
    x: torch.Tensor, codes: Codes, to: torch.Tensor, *, is_split: bool, ends: dict[str, Any]
) -> None:
    """to [T, N], or parts float32 [splits, T, N], as _few_kernel's; `ends` are its arguments that
    multiply.py's kernels take too."""
    warps = warps_of(codes)
    _few_kernel[(triton.cdiv(codes.shape[0], OUTPUTS), ends["splits"])](
        x_ptr=x,
        out_ptr=to,
        width=codes.shape[1],
        x_row=x.stride(0),
        IS_SPLIT=is_split,
        rows=len(x),
        ROWS=power_of_2(len(x)),
        BLOCK_N=OUTPUTS,
        BLOCKS=32 * warps,
        UNROLL=UNROLL,
        num_warps=warps,
        **ends,
        **codes.arguments(),
    )
