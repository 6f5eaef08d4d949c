"""draw, and sample: tokens by Gumbel-max with noise by token id; nobody waits for the host.

Both give what reference_sampling.py gives for the same logits, settings and noise, except where
the noise's last bit or a sum's rounding decides. `draw` is the door, for draws that the host lists;
`sample` reads settings and positions that live on the device, and takes greedy rows too. Logits
come with bias, masks and penalties already in them. Called through backend.py, and by
model/device_sampler.py.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from streamer.kernels.draws import Draws
from streamer.kernels.gpu.best import best
from streamer.kernels.gpu.common import power_of_2
from streamer.kernels.gpu.filters import find_cuts
from streamer.kernels.gpu.philox import gumbel, philox4x32

CHUNK = 4096  # tokens a program; unmeasured
SLOT_BYTES = 8 + 12 + 20  # of SamplingRows


class SamplingRows:
    """Settings of row slots on the device; what Draws has, a row for each slot.

    packed    everything below as bytes, one after the other, so that one copy writes all
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
        """What `packed` has to become for these settings of all slots, as bytes on the host."""
        packed = np.zeros(self.packed.shape[0], np.uint8)
        room = len(packed) // SLOT_BYTES
        for first, part in ((0, top_k), (room * 8, settings), (room * 20, origin)):
            raw = np.ascontiguousarray(part).view(np.uint8).ravel()
            packed[first : first + len(raw)] = raw
        return packed


@triton.jit
def _draw_kernel(
    # pointers: logits [S, V], top float32 [S], rows, slots and positions int64 [F], settings and
    # origin of SamplingRows, cuts int32 [F], values float32 and ids int64 [F, chunks]
    logits_ptr,
    top_ptr,
    rows_ptr,
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
    HAS_ROWS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    HAS_CUTS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """The best of noise - (top - logit) / temperature in one chunk of one row, the first of equals.

    Greedy rows have no noise to add: _choose_kernel takes their best logit.
    """
    # int64: S * V passes 2**31 at 14,100 rows of 152,000
    draw, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, slot = draw, draw
    if HAS_ROWS:
        row = tl.load(rows_ptr + draw)
    if HAS_SLOTS:
        slot = tl.maximum(tl.load(slots_ptr + draw), 0)
    temperature, top = tl.load(settings_ptr + 3 * slot), tl.load(top_ptr + row)
    # top - top is 0 for what is finite and NaN for all else
    if (temperature > 0.0) & (top - top == 0.0):
        group = chunk * GROUPS + tl.arange(0, GROUPS)
        origin = origin_ptr + 5 * slot
        if HAS_POSITIONS:
            position = tl.load(positions_ptr + draw).to(tl.uint32)
        else:
            position = tl.load(origin + 2).to(tl.uint32, bitcast=True)
        zeros = tl.zeros((GROUPS,), tl.uint32)
        n0, n1, n2, n3 = philox4x32(
            zeros + position,
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
            kept = below.to(tl.int32, bitcast=True) <= tl.load(cuts_ptr + draw)
            score = tl.where(kept, score, float("-inf"))
        at = draw * chunks + chunk
        tl.store(values_ptr + at, tl.max(score, 0))
        first = tl.argmax(score, 0, tie_break_left=True)
        tl.store(ids_ptr + at, (chunk * GROUPS * 4 + first).to(tl.int64))


@triton.jit
def _choose_kernel(
    # pointers: top float32 and best int64 [S], rows, slots, settings as above, values float32 and
    # ids int64 [F, chunks], tokens int64 [F]
    top_ptr,
    best_ptr,
    rows_ptr,
    slots_ptr,
    settings_ptr,
    values_ptr,
    ids_ptr,
    tokens_ptr,
    # sizes
    chunks,
    failed,
    # meta
    HAS_ROWS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A draw's token: its best chunk's, or the best logit if it is greedy; `failed` if none is."""
    draw = tl.program_id(0).to(tl.int64)  # int64 as above
    row, slot = draw, draw
    if HAS_ROWS:
        row = tl.load(rows_ptr + draw)
    if HAS_SLOTS:
        slot = tl.maximum(tl.load(slots_ptr + draw), 0)
    temperature, top = tl.load(settings_ptr + 3 * slot), tl.load(top_ptr + row)
    token = tl.load(best_ptr + row)
    if (temperature > 0.0) & (top - top == 0.0):
        i = tl.arange(0, BLOCK)
        # [BLOCK]
        values = tl.load(values_ptr + draw * chunks + i, mask=i < chunks, other=float("-inf"))
        token = tl.load(ids_ptr + draw * chunks + tl.argmax(values, 0, tie_break_left=True))
    token = tl.where(top - top == 0.0, token, failed)
    tl.store(tokens_ptr + draw, token)


def draw(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """See ops.draw; the result is on the logits' device, `draws` may be on the host."""
    has_filters = draws.top_k.device.type != "cpu"  # looking would wait for the device
    if not has_filters:
        off = torch.tensor([1.0, -torch.inf])
        has_filters = bool((draws.top_k > 0).any() or (draws.settings[:, 1:] != off).any())
    device = logits.device
    return _run(
        logits,
        rows=draws.rows.to(device, non_blocking=True),
        slots=None,
        positions=None,
        settings=draws.settings.to(device, non_blocking=True),
        top_k=draws.top_k.to(device, non_blocking=True),
        origin=draws.origin.view(torch.int32).to(device, non_blocking=True),
        has_filters=has_filters,
        failed=0,
    )


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
    slots        [S] int64: where in `settings` each row is; -1: padding, whose token means nothing
    positions    [S] int64: absolute position of the token to be drawn
    has_filters  whether any row has top_k, top_p or min_p (the caller knows; costs passes if so)
    """
    return _run(
        logits,
        rows=None,
        slots=slots,
        positions=positions,
        settings=settings.settings,
        top_k=settings.top_k,
        origin=settings.origin,
        has_filters=has_filters,
        failed=-1,
    )


def _run(
    logits: torch.Tensor,
    *,
    rows: torch.Tensor | None,
    slots: torch.Tensor | None,
    positions: torch.Tensor | None,
    settings: torch.Tensor,
    top_k: torch.Tensor,
    origin: torch.Tensor,
    has_filters: bool,
    failed: int,
) -> torch.Tensor:
    """Draw f is from logits row rows[f] with settings slots[f]; None: f itself."""
    top, first = best(logits)
    count, width = logits.shape[0] if rows is None else rows.shape[0], logits.shape[1]
    block = min(CHUNK, max(4, power_of_2(width)))
    chunks = triton.cdiv(width, block)
    device = logits.device
    tokens = torch.empty(count, dtype=torch.int64, device=device)
    whose = {
        "top_ptr": top,
        "rows_ptr": rows,
        "slots_ptr": slots,
        "settings_ptr": settings,
        "HAS_ROWS": rows is not None,
        "HAS_SLOTS": slots is not None,
    }
    found = {
        "values_ptr": torch.empty(count, chunks, dtype=torch.float32, device=device),
        "ids_ptr": torch.empty(count, chunks, dtype=torch.int64, device=device),
        "chunks": chunks,
    }
    _draw_kernel[(count, chunks)](
        logits_ptr=logits,
        positions_ptr=positions,
        origin_ptr=origin,
        cuts_ptr=find_cuts(logits, count, top_k, whose) if has_filters else None,
        width=width,
        logits_row=logits.stride(0),
        HAS_POSITIONS=positions is not None,
        HAS_CUTS=has_filters,
        GROUPS=block // 4,
        num_warps=4,
        **whose,
        **found,
    )
    _choose_kernel[(count,)](
        best_ptr=first,
        tokens_ptr=tokens,
        failed=failed,
        BLOCK=power_of_2(chunks),
        num_warps=1,
        **whose,
        **found,
    )
    return tokens
