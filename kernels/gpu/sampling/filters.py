"""Where top_k, top_p and min_p cut a row, found on the device without sorting.

A token's distance below the best, (top - logit) / temperature, is not negative, so its bits as an
integer ascend with it: the cut is a distance. A pass over the row counts the tokens within several
limits at once and adds up their mass; what lies between the two limits around the cut, a few tokens
after one or two passes, is gathered and searched in registers. top_k and top_p together take up to
8 passes (tests/kernels/gpu/test_sample.py), at most 7 of a vocabulary of 152,000 with a top_k up to
1,000 and logits as models have; they took 62 when each found one bit. Called by sample.py.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
import triton
import triton.language as tl

from streamer.kernels.gpu.common import power_of_2

# Unmeasured.
BLOCK = 1024  # tokens a pass takes at once; 2,048 spill registers
# Of a pass. No choice of them guarantees 8 passes: a pass finds 3 of a distance's 31 bits, which is
# 11 passes a filter, and 4 for each of two filters would be 256 limits. Counted in a NumPy model of
# the passes, 24 rows of 151,936 logits by 13 settings (2026-11-26): the mean, the most, how many of
# the 312 took more than 8, and the mean of rows like models' with a top_k up to 1,000:
#   these 8                         4.30  11   8  2.67
#   16, twice the work of a pass    4.09  11   6  2.58
#   8 evenly by bits                4.66  11  35  3.75
#   16 evenly by bits               4.23  10   5  3.42
# The 8 have a top_k of 20,000 or more and a top_p, over tokens that lie in narrow clusters or over
# 60 powers of ten. Limits interpolated from the counts of the pass before, with a top_p that begins
# between limits of top_k's, took 3.59 instead of 4.14 of 22 of the rows, and 12 at most.
LIMITS = 8
ROOM = 4096  # tokens that are searched in registers
SPAN = tl.constexpr(20.0)  # the distances that the first pass divides; few cuts are beyond
OUTSIDE = tl.constexpr(0x7FFFFFFF)  # above the bits of every distance


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
def _limits(low, high, LIMITS: tl.constexpr):
    """LIMITS bits in (low, high], the last of them high: evenly by distance, at first up to SPAN,
    and one by bits, so that every pass at least halves what is left."""
    j = tl.arange(0, LIMITS)
    start = tl.maximum(low, 0).to(tl.float32, bitcast=True)
    end = tl.minimum(high.to(tl.float32, bitcast=True), tl.maximum(SPAN, 2.0 * start))
    limits = start + (end - start) * ((j + 1).to(tl.float32) * (1.0 / (LIMITS - 1)))
    limits = tl.minimum(limits.to(tl.int32, bitcast=True), high)
    limits = tl.where(j == LIMITS - 2, low + (high - low) // 2, limits)
    return tl.where(j == LIMITS - 1, high, limits)


@triton.jit
def _within(row_ptr, width, top, temperature, low, high, limits, BLOCK: tl.constexpr,
            LIMITS: tl.constexpr):  # fmt: skip
    """Tokens in (low, limit] for each limit, their mass, and the smallest and the largest bits in
    (low, high]."""
    count = tl.zeros((LIMITS, BLOCK), tl.int32)
    mass = tl.zeros((LIMITS, BLOCK), tl.float32)
    smallest = tl.full((BLOCK,), OUTSIDE, tl.int32)
    largest = tl.full((BLOCK,), -1, tl.int32)
    for first in tl.range(0, width, BLOCK, num_stages=4):
        bits = _bits(row_ptr, first, width, top, temperature, BLOCK)
        is_inside = (bits > low) & (bits <= high)
        smallest = tl.minimum(smallest, tl.where(is_inside, bits, OUTSIDE))
        largest = tl.maximum(largest, tl.where(is_inside, bits, -1))
        # [LIMITS, BLOCK]
        is_within = is_inside[None, :] & (bits[None, :] <= limits[:, None])
        count += is_within.to(tl.int32)
        mass += tl.where(is_within, _mass(bits)[None, :], 0.0)
    return tl.sum(count, 1), tl.sum(mass, 1), tl.min(smallest, 0), tl.max(largest, 0)


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
def _smallest(row_ptr, room_ptr, width, top, temperature, high, inside, share, total,
              BY_MASS: tl.constexpr, BLOCK: tl.constexpr, LIMITS: tl.constexpr,
              ROOM: tl.constexpr):  # fmt: skip
    """The smallest distance up to `high` within which there is share * total: of the mass, or of
    the number of tokens; `high` where there is none.

    inside  at most so many tokens are within `high`
    total   below 0: the mass within `high`
    Returns its bits, the tokens and the mass within it, and the number of passes.
    """
    low = tl.full((), -1, tl.int32)
    passes = tl.zeros((), tl.int32)
    before_count = tl.zeros((), tl.int32)  # within `low`
    before_mass = tl.zeros((), tl.float32)
    high_count, high_mass = inside, tl.zeros((), tl.float32)  # within `high`
    while (high - low > 1) & (high_count - before_count > ROOM):
        limits = _limits(low, high, LIMITS)
        count, mass, smallest, largest = _within(
            row_ptr, width, top, temperature, low, high, limits, BLOCK, LIMITS
        )
        count += before_count
        mass += before_mass
        total = tl.where(total < 0, tl.max(mass, 0), total)
        values = mass if BY_MASS else count.to(tl.float32)
        is_enough = values >= share * total
        high_count = tl.min(tl.where(is_enough, count, tl.max(count, 0)), 0)
        high_mass = tl.min(tl.where(is_enough, mass, tl.max(mass, 0)), 0)
        before_count = tl.max(tl.where(is_enough, before_count, count), 0)
        before_mass = tl.max(tl.where(is_enough, before_mass, mass), 0)
        new_high = tl.minimum(tl.min(tl.where(is_enough, limits, high), 0), largest)
        low = tl.max(tl.where(is_enough, tl.maximum(low, smallest - 1), limits), 0)
        high = tl.maximum(new_high, low)
        passes += 1
    if high - low > 1:
        bits = _gather(row_ptr, room_ptr, width, top, temperature, low, high, BLOCK, ROOM)
        mass = _mass(bits)
        total = tl.where(total < 0, tl.sum(mass, 0), total)
        before = before_mass if BY_MASS else before_count.to(tl.float32)
        values = mass if BY_MASS else tl.full(bits.shape, 1.0, tl.float32)
        low += 1
        while low < high:
            middle = low + (high - low) // 2
            is_short = before + tl.sum(tl.where(bits <= middle, values, 0.0), 0) < share * total
            low = tl.where(is_short, middle + 1, low)
            high = tl.where(is_short, high, middle)
        high_count = before_count + tl.sum((bits <= high).to(tl.int32), 0)
        high_mass = before_mass + tl.sum(tl.where(bits <= high, mass, 0.0), 0)
        passes += 1
    return high, high_count, high_mass, passes


@triton.jit
def _cut_kernel(
    # pointers: logits [S, V], top float32 [S], slots int32 [S], settings and top_k of
    # SamplingRows, room int32 [S, ROOM], cuts and passes int32 [S]
    logits_ptr,
    top_ptr,
    slots_ptr,
    settings_ptr,
    top_k_ptr,
    room_ptr,
    cuts_ptr,
    passes_ptr,
    # sizes
    width,
    # strides
    logits_row,
    # meta
    BLOCK: tl.constexpr,
    LIMITS: tl.constexpr,
    ROOM: tl.constexpr,
):
    """The largest distance that a row keeps: min_p, then top_k, then top_p of what those leave.

    Tokens that tie with the last one kept are kept.
    """
    # int64: S * V passes 2**31 at 14,100 rows of 152,000
    row = tl.program_id(0).to(tl.int64)
    slot = tl.maximum(tl.load(slots_ptr + row), 0)
    row_ptr, room_ptr = logits_ptr + row * logits_row, room_ptr + row * ROOM
    temperature, top = tl.load(settings_ptr + 3 * slot), tl.load(top_ptr + row)
    passes = tl.zeros((), tl.int32)
    if (temperature > 0.0) & (top - top == 0.0):
        top_k, top_p = tl.load(top_k_ptr + slot), tl.load(settings_ptr + 3 * slot + 1)
        # abs, not minus: the logarithm of 1 would become -0, whose bits are negative
        cut = tl.abs(tl.load(settings_ptr + 3 * slot + 2)).to(tl.int32, bitcast=True)
        count, mass = tl.zeros((), tl.int32) + width, tl.full((), -1.0, tl.float32)
        if top_k > 0:
            cut, count, mass, passes = _smallest(
                row_ptr, room_ptr, width, top, temperature, cut, count, top_k.to(tl.float32),
                tl.full((), 1.0, tl.float32),
                False, BLOCK, LIMITS, ROOM,
            )  # fmt: skip
        if top_p < 1.0:
            cut, count, mass, more = _smallest(
                row_ptr, room_ptr, width, top, temperature, cut, count, top_p, mass,
                True, BLOCK, LIMITS, ROOM,
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
    _cut_kernel[(rows,)](
        logits_ptr=logits,
        top_k_ptr=top_k,
        room_ptr=torch.empty(rows, room, dtype=torch.int32, device=logits.device),
        cuts_ptr=cuts,
        passes_ptr=passes,
        width=width,
        logits_row=logits.stride(0),
        BLOCK=min(BLOCK, power_of_2(width)),
        LIMITS=LIMITS,
        ROOM=room,
        num_warps=16,
        **shared,
    )
    return cuts, passes
