"""Drawing tokens on the device: Gumbel-max with noise by token id; nobody waits for the host.

Gives the tokens that streamer/model/sampler.py gives for the same logits, parameters and seeds
(edited logits are the caller's: bias, min_tokens and penalties come before), except where the
noise's last bit or a sum's rounding decides. Called by the runner's CUDA part.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from streamer.kernels.gpu.best import best
from streamer.kernels.gpu.common import power_of_2
from streamer.kernels.gpu.filters import find_cuts
from streamer.kernels.gpu.philox import gumbel, philox4x32

CHUNK = 4096  # tokens a program; unmeasured
USE_SAMPLE = 0  # streamer/model/philox.py: the draw of an output token


class SamplingRows:
    """Settings of row slots on the device, [slots] each.

    temperature  float32; 0 is greedy
    keys         int64 [slots, 2], the low and high word of a seed
    choices      int64
    top_k        int32; 0: off
    top_p        float32; 1: off
    log_min_p    float32, log(min_p); -inf: off
    """

    __slots__ = ("choices", "keys", "log_min_p", "temperature", "top_k", "top_p")

    def __init__(self, slots: int, device: torch.device | str) -> None:
        self.temperature = torch.zeros(slots, dtype=torch.float32, device=device)
        self.keys = torch.zeros(slots, 2, dtype=torch.int64, device=device)
        self.choices = torch.zeros(slots, dtype=torch.int64, device=device)
        self.top_k = torch.zeros(slots, dtype=torch.int32, device=device)
        self.top_p = torch.ones(slots, dtype=torch.float32, device=device)
        self.log_min_p = torch.full((slots,), -torch.inf, dtype=torch.float32, device=device)

    def set(
        self,
        slots: Sequence[int],
        *,
        temperature: Sequence[float],
        seed: Sequence[int],
        choice: Sequence[int],
        top_k: Sequence[int],
        top_p: Sequence[float],
        min_p: Sequence[float],
    ) -> None:
        """Rows that joined, once a step for all of them; what is -1 for top_k is off."""
        device = self.temperature.device
        words = [(s & 0xFFFFFFFF, s >> 32 & 0xFFFFFFFF) for s in seed]
        with np.errstate(divide="ignore"):
            log_min_p = np.log(np.array(min_p, np.float64)).astype(np.float32)
        at = torch.tensor(slots, device=device)
        for field, values in (
            (self.temperature, temperature),
            (self.keys, words),
            (self.choices, choice),
            (self.top_k, [max(0, k) for k in top_k]),
            (self.top_p, top_p),
            (self.log_min_p, log_min_p),
        ):
            host = torch.as_tensor(values, dtype=field.dtype)
            field.index_copy_(0, at, host.to(device, non_blocking=True))


@triton.jit
def _draw_kernel(
    # pointers: logits [S, V], top float32 [S], slots and positions int64 [S], settings of
    # SamplingRows, cuts int32 [S], values float32 and ids int64 [S, chunks]
    logits_ptr,
    top_ptr,
    slots_ptr,
    positions_ptr,
    temperature_ptr,
    keys_ptr,
    choices_ptr,
    cuts_ptr,
    values_ptr,
    ids_ptr,
    # sizes
    width,
    chunks,
    use,
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
    temperature, top = tl.load(temperature_ptr + slot), tl.load(top_ptr + row)
    # top - top is 0 for what is finite and NaN for all else
    if (temperature > 0.0) & (top - top == 0.0):
        group = chunk * GROUPS + tl.arange(0, GROUPS)
        n0, n1, n2, n3 = philox4x32(
            tl.load(positions_ptr + row).to(tl.uint32) + tl.zeros((GROUPS,), tl.uint32),
            tl.load(choices_ptr + slot).to(tl.uint32) + tl.zeros((GROUPS,), tl.uint32),
            tl.zeros((GROUPS,), tl.uint32) + use,
            group.to(tl.uint32),
            tl.load(keys_ptr + 2 * slot).to(tl.uint32),
            tl.load(keys_ptr + 2 * slot + 1).to(tl.uint32),
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
    # pointers: top float32 and best int64 [S], slots int64 [S], temperature of SamplingRows, values
    # float32 and ids int64 [S, chunks], tokens int64 [S]
    top_ptr,
    best_ptr,
    slots_ptr,
    temperature_ptr,
    values_ptr,
    ids_ptr,
    tokens_ptr,
    # sizes
    chunks,
    # meta
    BLOCK: tl.constexpr,
):
    """A row's token: its best chunk's, or the best logit if it is greedy; -1 if it has none."""
    row = tl.program_id(0).to(tl.int64)  # int64 as above
    slot = tl.maximum(tl.load(slots_ptr + row), 0)
    temperature, top = tl.load(temperature_ptr + slot), tl.load(top_ptr + row)
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
    use: int = USE_SAMPLE,
) -> torch.Tensor:
    """One token a row -> [S] int64; -1 where the best logit is NaN or infinite.

    logits       [S, V] fp32, bf16 or fp16
    slots        [S] int64: where in `settings` each row is; -1: padding, whose token means nothing
    positions    [S] int64: absolute position of the token to be drawn
    has_filters  whether any row has top_k, top_p or min_p (the caller knows; costs passes if so)
    """
    rows, width = logits.shape
    top, first = best(logits)
    cuts = find_cuts(logits, top, settings, slots) if has_filters else None
    block = min(CHUNK, max(4, power_of_2(width)))
    chunks = triton.cdiv(width, block)
    values = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, chunks, dtype=torch.int64, device=logits.device)
    _draw_kernel[(rows, chunks)](
        logits_ptr=logits,
        top_ptr=top,
        slots_ptr=slots,
        positions_ptr=positions,
        temperature_ptr=settings.temperature,
        keys_ptr=settings.keys,
        choices_ptr=settings.choices,
        cuts_ptr=cuts,
        values_ptr=values,
        ids_ptr=ids,
        width=width,
        chunks=chunks,
        use=use,
        logits_row=logits.stride(0),
        HAS_CUTS=cuts is not None,
        GROUPS=block // 4,
        num_warps=4,
    )
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _choose_kernel[(rows,)](
        top_ptr=top,
        best_ptr=first,
        slots_ptr=slots,
        temperature_ptr=settings.temperature,
        values_ptr=values,
        ids_ptr=ids,
        tokens_ptr=tokens,
        chunks=chunks,
        BLOCK=power_of_2(chunks),
        num_warps=1,
    )
    return tokens
