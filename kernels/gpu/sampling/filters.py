"""Where top_k, top_p and min_p cut a row, found on the device without sorting.

A token's distance below the best, (top - logit) / temperature, is not negative, so its bits as an
integer ascend with it: the cut is a distance. A pass over the row counts the tokens within several
limits, and where many are left between two, up to three more count in a thousand buckets each; the
few tokens around the cut are gathered and searched in registers. Never more than 4 passes for top_k
and 4 for top_p: 8 together, see _smallest. Called by sample.py.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
import triton
import triton.language as tl

from streamer.kernels.gpu.common import power_of_2

# Unmeasured.
BLOCK = 1024  # tokens a pass takes at once; 2,048 spill registers
# Of a filter's first pass; those after it have buckets. Counted in a NumPy model of the passes, on
# 3,300 rows of 151,936 logits of 22 kinds by 13 settings (2026-11-27): the mean, the most, how many
# of the 42,900 took more than 8, and the mean of rows like models' with a top_k up to 1,000:
#   8 limits, then buckets    3.79   8     0  2.50
#   8 limits in every pass    4.58  15  3590  2.72
# 4 and 16 limits before the buckets: 2.59 and 2.46 of rows like models', where 8 took 2.49. Only
# rows with thousands of tokens at the same logit take more, since no pass looks for the smallest
# and the largest of what is left: 4.77 for 3.08 with 20 different logits, 4.62 for 1.08 with one.
LIMITS = 8
BUCKETS = 1024  # at least: 2**10, see _smallest
ROOM = 4096  # tokens that are searched in registers
SPAN = tl.constexpr(20.0)  # the distances that the first pass divides; few cuts are beyond
FINITE = tl.constexpr(0x7F7FFFFF)  # bits of the largest distance; tokens at infinity have no mass
OUTSIDE = tl.constexpr(0x7FFFFFFF)  # above the bits of every distance
# Buckets hold mass in whole units of 2**-42, so that a sum does not depend on its order. The sum of
# 2**20 tokens fits, and what 152,000 lose by rounding down is below the last bit of a float32 sum.
UNITS = tl.constexpr(float(1 << 42))


@triton.jit
def _bits(row_ptr, first, width, top, temperature, BLOCK: tl.constexpr):
    """Bits of the distances of tokens [first, first + BLOCK); OUTSIDE beyond the row."""
    i = first + tl.arange(0, BLOCK)
    logits = tl.load(row_ptr + i, mask=i < width, other=float("-inf")).to(tl.float32)
    below = tl.div_rn(top - logits, temperature)
    return tl.where(i < width, below.to(tl.int32, bitcast=True), OUTSIDE)


@triton.jit
def _mass(bits):
    """exp(-distance); 0 for OUTSIDE."""
    return tl.where(bits == OUTSIDE, 0.0, tl.exp(-bits.to(tl.float32, bitcast=True)))


@triton.jit
def _limits(high, LIMITS: tl.constexpr):
    """LIMITS bits up to `high`, the last of them: evenly by distance up to SPAN, and one by bits,
    so that the pass at least halves what is left."""
    j = tl.arange(0, LIMITS)
    end = tl.minimum(high.to(tl.float32, bitcast=True), SPAN)
    limits = (end * ((j + 1).to(tl.float32) * (1.0 / (LIMITS - 1)))).to(tl.int32, bitcast=True)
    limits = tl.where(j == LIMITS - 2, high // 2, tl.minimum(limits, high))
    return tl.where(j == LIMITS - 1, high, limits)


@triton.jit
def _within(row_ptr, width, top, temperature, limits, BY_MASS: tl.constexpr, BLOCK: tl.constexpr,
            LIMITS: tl.constexpr):  # fmt: skip
    """Tokens within each limit, int32, and BY_MASS their mass, float32."""
    count = tl.zeros((LIMITS, BLOCK), tl.int32)
    mass = tl.zeros((LIMITS, BLOCK), tl.float32)
    for first in tl.range(0, width, BLOCK, num_stages=4):
        bits = _bits(row_ptr, first, width, top, temperature, BLOCK)
        # [LIMITS, BLOCK]
        is_within = bits[None, :] <= limits[:, None]
        count += is_within.to(tl.int32)
        if BY_MASS:
            mass += tl.where(is_within, _mass(bits)[None, :], 0.0)
    return tl.sum(count, 1), tl.sum(mass, 1)


@triton.jit
def _in_buckets(row_ptr, buckets_ptr, width, top, temperature, low, high, shift,
                BY_MASS: tl.constexpr, BLOCK: tl.constexpr, BUCKETS: tl.constexpr):  # fmt: skip
    """Tokens in each part of 2**shift bits of (low, high], and BY_MASS their mass in UNITS,
    otherwise the tokens again; int64 [BUCKETS] each."""
    i = tl.arange(0, BUCKETS)
    count_ptr, mass_ptr = buckets_ptr, buckets_ptr + BUCKETS
    tl.debug_barrier()  # other threads have read what the pass before left here
    tl.store(count_ptr + i, tl.zeros((BUCKETS,), tl.int64))
    tl.store(mass_ptr + i, tl.zeros((BUCKETS,), tl.int64))
    tl.debug_barrier()
    for first in tl.range(0, width, BLOCK, num_stages=4):
        bits = _bits(row_ptr, first, width, top, temperature, BLOCK)
        is_inside = (bits > low) & (bits <= high)
        bucket = (bits - low - 1) >> shift
        one = tl.full((BLOCK,), 1, tl.int64)
        tl.atomic_add(count_ptr + bucket, one, mask=is_inside, sem="relaxed", scope="cta")
        if BY_MASS:
            mass = (_mass(bits) * UNITS).to(tl.int64)
            tl.atomic_add(mass_ptr + bucket, mass, mask=is_inside, sem="relaxed", scope="cta")
    tl.debug_barrier()  # what other threads added is read
    count = tl.load(count_ptr + i)
    return count, tl.load(mass_ptr + i) if BY_MASS else count


@triton.jit
def _gather(row_ptr, room_ptr, width, top, temperature, low, high, BLOCK: tl.constexpr,
            ROOM: tl.constexpr):  # fmt: skip
    """Bits of the at most ROOM tokens in (low, high], in the row's order; OUTSIDE after them."""
    done = tl.zeros((), tl.int32)
    for first in tl.range(0, width, BLOCK, num_stages=4):
        bits = _bits(row_ptr, first, width, top, temperature, BLOCK)
        is_inside = ((bits > low) & (bits <= high)).to(tl.int32)
        at = done + tl.cumsum(is_inside, 0) - 1
        tl.store(room_ptr + at, bits, mask=(is_inside > 0) & (at < ROOM))
        done += tl.sum(is_inside, 0)
    tl.debug_barrier()  # what other threads stored is read
    i = tl.arange(0, ROOM)
    return tl.load(room_ptr + i, mask=i < done, other=OUTSIDE)


@triton.jit
def _smallest(row_ptr, room_ptr, buckets_ptr, width, top, temperature, high, inside, asked,
              BY_MASS: tl.constexpr, BLOCK: tl.constexpr, LIMITS: tl.constexpr,
              BUCKETS: tl.constexpr, ROOM: tl.constexpr):  # fmt: skip
    """The smallest distance up to `high` within which there is what is asked for: so many tokens
    or, BY_MASS, such a share of the mass within `high`; `high` where there is less.

    inside  tokens within `high`, at most
    Returns its bits, the tokens within it, and the number of passes.

    At most 4 passes. One limit of the first halves the 2**31 bits that a distance can have, and
    buckets divide what is left by 2**10: 2**30, 2**20, 2**10, 1. A pass that gathers takes the
    place of one of these. What a pass found to be too little or enough, no later one revises.
    """
    units = UNITS if BY_MASS else 1.0
    low = tl.full((), -1, tl.int32)
    before = tl.zeros((), tl.int32)  # tokens within `low`; `inside` becomes those in (low, high]
    missing = tl.zeros((), tl.int64)  # of what is asked for, within `low`; in units
    passes = tl.zeros((), tl.int32)
    if inside > ROOM:
        limits = _limits(high, LIMITS)
        count, mass = _within(row_ptr, width, top, temperature, limits, BY_MASS, BLOCK, LIMITS)
        values = mass if BY_MASS else count.to(tl.float32)
        target = asked * tl.max(values, 0) if BY_MASS else asked
        is_enough = values >= target
        low = tl.max(tl.where(is_enough, low, limits), 0)
        high = tl.min(tl.where(is_enough, limits, high), 0)
        before = tl.max(tl.where(is_enough, 0, count), 0)
        inside = tl.min(tl.where(is_enough, count, tl.max(count, 0)), 0) - before
        # rounded up, and the mass in buckets down, so that rounding never keeps less
        missing = target - tl.max(tl.where(is_enough, 0.0, values), 0)
        missing = tl.ceil(missing * units).to(tl.int64)
        passes += 1
    while (high - low > 1) & (inside > ROOM):
        shift = tl.zeros((), tl.int32)
        while (high - low - 1) >> shift >= BUCKETS:
            shift += 1
        count, values = _in_buckets(
            row_ptr, buckets_ptr, width, top, temperature, low, high, shift,
            BY_MASS, BLOCK, BUCKETS,
        )  # fmt: skip
        i = tl.arange(0, BUCKETS)
        is_short = tl.cumsum(values, 0) < missing
        # the last where there was enough only by the first pass's sums, which are rounded
        bucket = tl.minimum(tl.sum(is_short.to(tl.int32), 0), (high - low - 1) >> shift)
        before += tl.sum(tl.where(i < bucket, count, 0), 0).to(tl.int32)
        inside = tl.sum(tl.where(i == bucket, count, 0), 0).to(tl.int32)
        missing -= tl.sum(tl.where(i < bucket, values, 0), 0)
        low += bucket << shift
        high = tl.minimum(high, low + (1 << shift))
        passes += 1
    if high - low > 1:
        bits = _gather(row_ptr, room_ptr, width, top, temperature, low, high, BLOCK, ROOM)
        values = _mass(bits) if BY_MASS else tl.full(bits.shape, 1.0, tl.float32)
        target = asked * tl.sum(values, 0) if BY_MASS else asked
        target = tl.where(passes == 0, target, missing.to(tl.float32) / units)
        low += 1
        while low < high:
            middle = low + (high - low) // 2
            is_short = tl.sum(tl.where(bits <= middle, values, 0.0), 0) < target
            low = tl.where(is_short, middle + 1, low)
            high = tl.where(is_short, high, middle)
        inside = tl.sum((bits <= high).to(tl.int32), 0)
        passes += 1
    return high, before + inside, passes


@triton.jit
def _cut_kernel(
    # pointers: logits [S, V], top float32 [S], slots int32 [S], settings and top_k of
    # SamplingRows, room int32 [S, ROOM], buckets int64 [S, 2, BUCKETS], cuts and passes int32 [S]
    logits_ptr,
    top_ptr,
    slots_ptr,
    settings_ptr,
    top_k_ptr,
    room_ptr,
    buckets_ptr,
    cuts_ptr,
    passes_ptr,
    # sizes
    width,
    # strides
    logits_row,
    # meta
    BLOCK: tl.constexpr,
    LIMITS: tl.constexpr,
    BUCKETS: tl.constexpr,
    ROOM: tl.constexpr,
):
    """The largest distance that a row keeps: min_p, then top_k, then top_p of what those leave.

    Tokens that tie with the last one kept are kept; those at infinity, which can't be drawn, never.
    """
    # int64: S * V passes 2**31 at 14,100 rows of 152,000
    row = tl.program_id(0).to(tl.int64)
    slot = tl.maximum(tl.load(slots_ptr + row), 0)
    row_ptr, room_ptr = logits_ptr + row * logits_row, room_ptr + row * ROOM
    buckets_ptr += row * 2 * BUCKETS
    temperature, top = tl.load(settings_ptr + 3 * slot), tl.load(top_ptr + row)
    passes = tl.zeros((), tl.int32)
    if (temperature > 0.0) & (top - top == 0.0):
        top_k, top_p = tl.load(top_k_ptr + slot), tl.load(settings_ptr + 3 * slot + 1)
        # abs, not minus: the logarithm of 1 would become -0, whose bits are negative
        cut = tl.abs(tl.load(settings_ptr + 3 * slot + 2)).to(tl.int32, bitcast=True)
        cut, count = tl.minimum(cut, FINITE), tl.zeros((), tl.int32) + width
        if top_k > 0:
            cut, count, passes = _smallest(
                row_ptr, room_ptr, buckets_ptr, width, top, temperature, cut, count,
                top_k.to(tl.float32),
                False, BLOCK, LIMITS, BUCKETS, ROOM,
            )  # fmt: skip
        if top_p < 1.0:
            cut, count, more = _smallest(
                row_ptr, room_ptr, buckets_ptr, width, top, temperature, cut, count, top_p,
                True, BLOCK, LIMITS, BUCKETS, ROOM,
            )  # fmt: skip
            passes += more
        tl.store(cuts_ptr + row, cut)
    tl.store(passes_ptr + row, passes)


def find_cuts(
    logits: torch.Tensor, top_k: torch.Tensor, shared: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bits of the largest distance that each row of logits [S, V] keeps, and the passes that it
    took over the row -> int32 [S] each.

    `shared` are the arguments of all of sample.py's kernels. Rows that are greedy or not finite get
    no cut.
    """
    rows, width = logits.shape
    cuts, passes = (torch.empty(rows, dtype=torch.int32, device=logits.device) for _ in range(2))
    room = min(ROOM, power_of_2(width))
    count = BUCKETS if width > room else 0  # a row that fits into the room needs none
    buckets = torch.empty(rows, 2, count, dtype=torch.int64, device=logits.device)
    _cut_kernel[(rows,)](
        logits_ptr=logits,
        top_k_ptr=top_k,
        room_ptr=torch.empty(rows, room, dtype=torch.int32, device=logits.device),
        buckets_ptr=buckets,
        cuts_ptr=cuts,
        passes_ptr=passes,
        width=width,
        logits_row=logits.stride(0),
        BLOCK=min(BLOCK, power_of_2(width)),
        LIMITS=LIMITS,
        BUCKETS=BUCKETS,
        ROOM=room,
        num_warps=16,
        **shared,
    )
    return cuts, passes
