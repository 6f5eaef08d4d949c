"""Where top_k, top_p and min_p cut a row, found on the device without sorting.

A token's distance below the best, (top - logit) / temperature, is not negative, so its bits as an
integer ascend with it: the cut is a distance, found bit by bit by counting the tokens within it and
adding up their mass. top_k and top_p take 31 passes each over a row, which lies in L2; a sort of
152,000 logits moves more (both unmeasured). Called by sample.py.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
import triton
import triton.language as tl

from streamer.kernels.gpu.common import power_of_2

BLOCK = 8192  # tokens a pass takes at once; unmeasured


@triton.jit
def _within(row_ptr, width, top, temperature, limit, BLOCK: tl.constexpr):
    """Tokens whose distance's bits are at most `limit`: how many, and the sum of exp(-distance)."""
    count = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, width, BLOCK):
        i = first + tl.arange(0, BLOCK)
        # [BLOCK]; beyond the row the distance is infinite
        logits = tl.load(row_ptr + i, mask=i < width, other=float("-inf")).to(tl.float32)
        below = tl.div_rn(top - logits, temperature)
        is_within = (below.to(tl.int32, bitcast=True) <= limit) & (i < width)
        count += is_within.to(tl.int32)
        mass += tl.where(is_within, tl.exp(-below), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _cut_kernel(
    # pointers: logits [S, V], top float32 [S], slots int64 [S], settings and top_k of
    # SamplingRows, cuts int32 [S]
    logits_ptr,
    top_ptr,
    slots_ptr,
    settings_ptr,
    top_k_ptr,
    cuts_ptr,
    # sizes
    width,
    # strides
    logits_row,
    # meta
    BLOCK: tl.constexpr,
):
    """The largest distance that a row keeps: min_p, then top_k, then top_p of what those leave.

    Tokens that tie with the last one kept are kept.
    """
    # int64: S * V passes 2**31 at 14,100 rows of 152,000
    row = tl.program_id(0).to(tl.int64)
    slot = tl.maximum(tl.load(slots_ptr + row), 0)
    row_ptr = logits_ptr + row * logits_row
    temperature, top = tl.load(settings_ptr + 3 * slot), tl.load(top_ptr + row)
    if (temperature > 0.0) & (top - top == 0.0):
        top_k, top_p = tl.load(top_k_ptr + slot), tl.load(settings_ptr + 3 * slot + 1)
        # abs, not minus: the logarithm of 1 would become -0, whose bits are negative
        cut = tl.abs(tl.load(settings_ptr + 3 * slot + 2)).to(tl.int32, bitcast=True)
        low = tl.zeros((), tl.int32)
        if top_k > 0:
            # The smallest distance within which there are top_k tokens.
            high = cut
            while low < high:
                middle = low + (high - low) // 2
                count, _ = _within(row_ptr, width, top, temperature, middle, BLOCK)
                has_all = count >= top_k
                high = tl.where(has_all, middle, high)
                low = tl.where(has_all, low, middle + 1)
            cut = high
        if top_p < 1.0:
            # The largest distance below which there is less than top_p of the mass left.
            _, mass = _within(row_ptr, width, top, temperature, cut, BLOCK)
            low = tl.zeros((), tl.int32)
            high = cut
            while low < high:
                middle = low + (high - low + 1) // 2
                _, before = _within(row_ptr, width, top, temperature, middle - 1, BLOCK)
                is_short = before < top_p * mass
                low = tl.where(is_short, middle, low)
                high = tl.where(is_short, high, middle - 1)
            cut = low
        tl.store(cuts_ptr + row, cut)


def find_cuts(logits: torch.Tensor, top_k: torch.Tensor, whose: dict[str, Any]) -> torch.Tensor:
    """Bits of the largest distance that each row of logits [S, V] keeps -> int32 [S].

    `whose` are the arguments that sample.py's kernels share. Rows that are greedy or not finite get
    no value.
    """
    cuts = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    _cut_kernel[(logits.shape[0],)](
        logits_ptr=logits,
        top_k_ptr=top_k,
        cuts_ptr=cuts,
        width=logits.shape[1],
        logits_row=logits.stride(0),
        BLOCK=min(BLOCK, power_of_2(logits.shape[1])),
        num_warps=16,
        **whose,
    )
    return cuts
