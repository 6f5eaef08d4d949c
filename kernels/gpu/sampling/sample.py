"""sample: tokens by Gumbel-max with noise by token id, from settings that live on the device.

Takes the place of CpuBackend.draw, whose draws the host lists. The tokens are those of
reference_sampling.py for the same logits, settings and noise, except where the noise's last bit or
a sum's rounding decides; greedy rows are included. Logits come with bias, masks and penalties
already in them. Called by model/sampling/device.py.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from streamer.kernels.gpu.common import power_of_2
from streamer.kernels.gpu.sampling.best import best
from streamer.kernels.gpu.sampling.filters import find_cuts
from streamer.kernels.gpu.sampling.philox import gumbel, philox4x32

CHUNK = 4096  # tokens a program; unmeasured
SLOT_BYTES = 8 + 12 + 20  # of SamplingRows


class SamplingRows:
    """Settings of row slots on the device; those of Draws, a row for each slot.

    packed    the tensors below as bytes, one after the other, so that one copy writes all
    top_k     [slots] int64; 0: off
    settings  [slots, 3] fp32: temperature (0: greedy), top_p (1: off), log(min_p) (-inf: off)
    origin    [slots, 5] int32, the bits of Draws.origin; the position in it is not read
    """

    __slots__ = ("origin", "packed", "settings", "top_k")

    def __init__(self, slots: int, device: torch.device | str) -> None:
        room = -(-slots // 4) * 4  # so that each part begins at a multiple of 16 bytes
        self.packed = torch.zeros(room * SLOT_BYTES, dtype=torch.uint8, device=device)
        settings, origin = room * 8, room * 20  # where they begin
        self.top_k = self.packed[:settings].view(torch.int64)[:slots]
        self.settings = self.packed[settings:origin].view(torch.float32).view(room, 3)[:slots]
        self.origin = self.packed[origin:].view(torch.int32).view(room, 5)[:slots]
        self.settings.copy_(torch.tensor([0.0, 1.0, -torch.inf]))

    def pack(
        self, top_k: NDArray[np.int64], settings: NDArray[np.float32], origin: NDArray[np.uint32]
    ) -> NDArray[np.uint8]:
        """The content of `packed` for these settings of all slots, as bytes on the host."""
        packed = np.zeros(self.packed.shape[0], np.uint8)
        room = len(packed) // SLOT_BYTES
        for first, part in ((0, top_k), (room * 8, settings), (room * 20, origin)):
            raw = np.ascontiguousarray(part).view(np.uint8).ravel()
            packed[first : first + len(raw)] = raw
        return packed


@triton.jit
def _draw_kernel(
    # pointers: logits [S, V], top float32 [S], slots and positions int64 [S], settings and origin
    # of SamplingRows, cuts int32 [S], values float32 and ids int64 [S, chunks]
    logits_ptr,
    top_ptr,
    slots_ptr,
    positions_ptr,
    settings_ptr,
    origin_ptr,
    cuts_ptr,
    values_ptr,
    ids_ptr,
    # sizes
    width,
    chunks,
    # strides
    logits_row,
    # meta
    HAS_CUTS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """The best of noise - (top - logit) / temperature in one chunk of one row, the first of equals.

    Greedy rows have no noise to add: _choose_kernel takes their best logit.
    """
    # int64: S * V passes 2**31 at 14,100 rows of 152,000
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.maximum(tl.load(slots_ptr + row), 0)
    temperature, top = tl.load(settings_ptr + 3 * slot), tl.load(top_ptr + row)
    # top - top is 0 where top is finite and NaN elsewhere
    if (temperature > 0.0) & (top - top == 0.0):
        group = chunk * GROUPS + tl.arange(0, GROUPS)
        origin = origin_ptr + 5 * slot
        zeros = tl.zeros((GROUPS,), tl.uint32)
        n0, n1, n2, n3 = philox4x32(
            zeros + tl.load(positions_ptr + row).to(tl.uint32),
            zeros + tl.load(origin + 3).to(tl.uint32, bitcast=True),
            zeros + tl.load(origin + 4).to(tl.uint32, bitcast=True),
            group.to(tl.uint32),
            tl.load(origin).to(tl.uint32, bitcast=True),
            tl.load(origin + 1).to(tl.uint32, bitcast=True),
        )
        # [4 * GROUPS], by token id
        bits = tl.interleave(tl.interleave(n0, n2), tl.interleave(n1, n3))
        token = chunk * GROUPS * 4 + tl.arange(0, 4 * GROUPS)
        logits = tl.load(
            logits_ptr + row * logits_row + token, mask=token < width, other=float("-inf")
        ).to(tl.float32)
        below = tl.div_rn(top - logits, temperature)
        score = gumbel(bits) - below
        if HAS_CUTS:
            kept = below.to(tl.int32, bitcast=True) <= tl.load(cuts_ptr + row)
            score = tl.where(kept, score, float("-inf"))
        at = row * chunks + chunk
        tl.store(values_ptr + at, tl.max(score, 0))
        first = tl.argmax(score, 0, tie_break_left=True)
        tl.store(ids_ptr + at, (chunk * GROUPS * 4 + first).to(tl.int64))


@triton.jit
def _choose_kernel(
    # pointers: top float32 and best int64 [S], slots and settings as above, values float32 and
    # ids int64 [S, chunks], tokens int64 [S]
    top_ptr,
    best_ptr,
    slots_ptr,
    settings_ptr,
    values_ptr,
    ids_ptr,
    tokens_ptr,
    # sizes
    chunks,
    # meta
    BLOCK: tl.constexpr,
):
    """A row's token: its best chunk's, the best logit if greedy, -1 where that is not finite."""
    row = tl.program_id(0).to(tl.int64)  # int64 as above
    slot = tl.maximum(tl.load(slots_ptr + row), 0)
    temperature, top = tl.load(settings_ptr + 3 * slot), tl.load(top_ptr + row)
    token = tl.load(best_ptr + row)
    if (temperature > 0.0) & (top - top == 0.0):
        i = tl.arange(0, BLOCK)
        # [BLOCK]
        values = tl.load(values_ptr + row * chunks + i, mask=i < chunks, other=float("-inf"))
        token = tl.load(ids_ptr + row * chunks + tl.argmax(values, 0, tie_break_left=True))
    token = tl.where(top - top == 0.0, token, -1)
    tl.store(tokens_ptr + row, token)


def sample(
    logits: torch.Tensor,
    settings: SamplingRows,
    slots: torch.Tensor,
    positions: torch.Tensor,
    *,
    has_filters: bool,
) -> torch.Tensor:
    """One token a row -> [S] int64; -1 where the best logit is NaN or infinite.

    logits       [S, V] fp32, bf16 or fp16
    slots        [S] int64: where in `settings` each row is; -1: padding, whose token is undefined
    positions    [S] int64: absolute position of the token to be drawn
    has_filters  whether any row has top_k, top_p or min_p (the caller knows; filters cost passes)
    """
    top, first = best(logits)
    rows, width = logits.shape
    # A row of one token keeps it. Triton 3.6.0 does not compile the search for a width of 1, which
    # is a constant to it.
    has_filters = has_filters and width > 1
    block = min(CHUNK, max(4, power_of_2(width)))
    chunks = triton.cdiv(width, block)
    device = logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    shared = {"top_ptr": top, "slots_ptr": slots, "settings_ptr": settings.settings}
    found = {
        "values_ptr": torch.empty(rows, chunks, dtype=torch.float32, device=device),
        "ids_ptr": torch.empty(rows, chunks, dtype=torch.int64, device=device),
        "chunks": chunks,
    }
    _draw_kernel[(rows, chunks)](
        logits_ptr=logits,
        positions_ptr=positions,
        origin_ptr=settings.origin,
        cuts_ptr=find_cuts(logits, settings.top_k, shared)[0] if has_filters else None,
        width=width,
        logits_row=logits.stride(0),
        HAS_CUTS=has_filters,
        GROUPS=block // 4,
        num_warps=4,
        **shared,
        **found,
    )
    _choose_kernel[(rows,)](
        best_ptr=first,
        tokens_ptr=tokens,
        BLOCK=power_of_2(chunks),
        num_warps=1,
        **shared,
        **found,
    )
    return tokens
