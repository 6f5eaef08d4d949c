"""Dense matrices -> QuantizedWeight, while a checkpoint is loaded or before one is written.

`quantize` is pure and runs on all cores: int4 and int8 in C (kernels/cpu/fit.c) where there are
native kernels, the rest in torch, a few rows at a time. OnTheFly is the scheme that
calls it for `--quantization`. What each kind loses, on the bundled model, is in
docs/quantization.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec
import torch

from streamer.errors import ConfigError
from streamer.kernels import ops
from streamer.kernels.weights import QuantizedWeight
from streamer.model.memory import num_cores
from streamer.model.quantization.interface import DENSE, Form, Stored

KINDS = ("int8", "int4", "fp8")
GROUP = 32  # columns of an int4 scale; 64 lose 1.4 times as much, as much as Q4_0 does
LEVELS = 15  # the highest code of 4 bits
# Shares of a group's range at which the search for a scale begins, and its steps from each: one
# step less loses 5% more, a fourth share or a third step gains nothing.
SHARES = (1.0, 0.9, 0.8)
STEPS = 2
# Numbers at a time. In torch int4 of 3072 x 1024 takes 35 ms; in pieces a quarter as large 71,
# since short calls wait for the GIL, in pieces twice as large 45 (2 cores of an EPYC Zen 5,
# 2026-11-22).
CHUNK = 1 << 18
FP8_MAX = 448.0
TINY = 1e-12  # numbers of less than a few of it are zeros


class OnTheFly(msgspec.Struct, frozen=True):
    """A matrix that is stored dense and quantized when it is read."""

    kind: str

    @property
    def name(self) -> str:
        size = f"groups of {GROUP}" if self.kind == "int4" else "a scale for each output"
        return f"{self.kind} made while loading, {size}"

    def stored(self, n: int, k: int, found: Collection[str]) -> dict[str, Stored]:
        return DENSE.stored(n, k, found)

    def form(self, n: int, k: int) -> Form:
        if self.kind == "int4":
            return Form(4, GROUP, has_zeros=True)
        return Form(8, k, is_float=self.kind == "fp8")

    def read(self, tensors: Mapping[str, torch.Tensor], n: int, k: int) -> QuantizedWeight:
        return quantize(tensors["weight"], self.kind)


def kind_for(module: str, asked: str) -> str:
    """What a module becomes: embeddings and the last matrix int8, which loses next to nothing."""
    return "int8" if module.endswith(("embed_tokens", "lm_head")) else asked


def made_on_the_fly(method: str, asked: str | None) -> str | None:
    """What the dense matrices of a checkpoint that is stored as `method` are made while it is
    loaded; beside quantized ones, int8 alone.

    None: they are read as they are stored. ConfigError where that is not what was asked for.
    """
    if asked in (None, method):
        return None
    if method and asked != "int8":
        raise ConfigError(
            f"quantization {asked}: the checkpoint is quantized as {method} already; int8 is for "
            "what it stores dense",
            param="quantization",
        )
    if asked not in KINDS:
        raise ConfigError(
            f"quantization {asked}: the checkpoint is dense; {', '.join(KINDS)} quantize it",
            param="quantization",
        )
    return asked


def quantize(
    weight: torch.Tensor,
    kind: str,
    scale_dtype: torch.dtype = torch.float32,
    group: int = GROUP,
) -> QuantizedWeight:
    """A dense matrix [N, K] as int8, int4 or fp8, with scales that are numbers of `scale_dtype`.

    int8  a scale for each output, of its largest number
    int4  a scale and a zero point of 0 to 15 for each `group` of columns, searched for
    fp8   e4m3 with a scale for each output, of its largest number
    """
    n, k = weight.shape
    bits, group = (4, group) if kind == "int4" else (8, k)
    codes = torch.empty(n, k, dtype=torch.float8_e4m3fn if kind == "fp8" else torch.uint8)
    scales = torch.empty(n, -(-k // group))

    def rows(first: int, last: int) -> None:
        x, out = weight[first:last].float(), codes[first:last]
        scales[first:last] = _by_largest(x, out, scale_dtype)

    is_native = not ops.why_not_native()
    if kind == "int4":
        search = _natively if is_native else _searched
        zeros = torch.empty_like(scales)
        scales = search(weight, codes, scales, zeros, scale_dtype, group)
        return QuantizedWeight(codes, scales, group, bits, zeros=zeros.to(torch.uint8))
    if kind == "int8" and is_native:
        scales = _natively(weight, codes, scales, None, scale_dtype, group)
        return QuantizedWeight(codes, scales, group, bits, zero=128)
    in_parallel(rows, n, max(1, CHUNK // k))
    return QuantizedWeight(codes, scales, group, bits, zero=0 if kind == "fp8" else 128)


def _searched(
    weight: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    scale_dtype: torch.dtype,
    group: int,
) -> torch.Tensor:
    """Fill the codes [N, K], scales and zero points [N, groups] of int4; returns the scales."""
    n, k = weight.shape

    def rows(first: int, last: int) -> None:
        x = torch.nn.functional.pad(weight[first:last].float(), (0, -k % group))
        x = x.view(-1, group).t().contiguous()
        scale, zero = fit(x, scale_dtype)
        found = steps_of(x, scale, zero).add_(zero)
        codes[first:last] = found.t().reshape(last - first, -1)[:, :k]
        scales[first:last] = scale.view(last - first, -1)
        zeros[first:last] = zero.view(last - first, -1)

    in_parallel(rows, n, max(1, CHUNK // k))
    return scales


def _natively(
    weight: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    scale_dtype: torch.dtype,
    group: int,
) -> torch.Tensor:
    """The same in C, without zero points int8: a thread searches 0.7 thousand million numbers a
    second for int4 (2026-11-22)."""
    from streamer.kernels.cpu.fit import fit, round_to_codes

    fit(weight, scales, zeros, group)
    scales = _rounded(scales, scale_dtype)
    round_to_codes(weight, scales, zeros, codes, group)
    return scales


def in_parallel(rows: Callable[[int, int], None], n: int, step: int) -> None:
    """Call rows(first, last) for all of n rows, `step` at a time, on all cores.

    Each thread computes alone: torch's own threads would wait for each other after every call.
    """
    is_inference, threads = torch.is_inference_mode_enabled(), torch.get_num_threads()

    def work(first: int) -> None:
        with torch.inference_mode(is_inference):  # a thread's own
            rows(first, min(first + step, n))

    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(num_cores()) as pool:
            for _ in pool.map(work, range(0, n, step)):
                pass
    finally:
        torch.set_num_threads(threads)


def _by_largest(x: torch.Tensor, codes: torch.Tensor, scale_dtype: torch.dtype) -> torch.Tensor:
    """Scales [N, 1] under which the largest number of a row is the largest code."""
    is_int = codes.dtype == torch.uint8
    largest = 127.0 if is_int else FP8_MAX
    scales = _rounded(x.abs().amax(1, keepdim=True) / largest, scale_dtype)
    x = (x / scales).clamp_(-largest, largest)
    codes.copy_(x.round_().add_(128) if is_int else x)
    return scales


def _rounded(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scales as numbers of the dtype, none of them 0; of a group of zeros 1, which float16 holds:
    the kernels keep all scales of a matrix as float32 where one needs it. float16 has numbers below
    its normal ones, which int8's scales are where no weight of a row is above 0.008."""
    info = torch.finfo(dtype)
    held = scales.to(dtype).float().clamp_(min=info.smallest_normal * info.eps)
    return held.masked_fill_(scales <= TINY, 1.0)


def fit(
    x: torch.Tensor, scale_dtype: torch.dtype, importance: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero point [M] of each column of x [group, M] of least squared error, found by
    turns: codes for a scale, then the scale for the codes (as llama.cpp's K-quants and HQQ do).

    importance [group, 1], of mean 1: what the square of an error weighs.
    """
    heavy = x if importance is None else x * importance
    low, high = x.amin(0), x.amax(0)
    mean, square = heavy.mean(0), (heavy * x).mean(0)
    smallest, best, best_zero = torch.full_like(low, torch.inf), low, low
    for share in SHARES:
        scale = ((high - low) * (share / LEVELS)).clamp_(min=TINY)
        zero = (LEVELS / 2 - (high + low) / 2 / scale).round_().clamp_(0, LEVELS)
        for step in range(STEPS + 1):
            steps = steps_of(x, scale, zero)
            by_x = (steps * heavy).mean(0)
            weighed = steps if importance is None else steps * importance
            by_step = (weighed * steps).mean(0)
            error = square - 2 * scale * by_x + scale.square() * by_step
            is_less = error < smallest
            smallest = torch.where(is_less, error, smallest)
            best = torch.where(is_less, scale, best)
            best_zero = torch.where(is_less, zero, best_zero)
            if step < STEPS:
                scale, zero = _fitted(scale, zero, mean, weighed.mean(0), by_x, by_step)
    best = torch.where(smallest < torch.inf, best, torch.nan)  # of an infinity or a NaN
    return _rounded(best, scale_dtype), best_zero


def steps_of(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Codes of x [..., M] less their zero point, as floats."""
    return (x * scale.reciprocal()).add_(zero).round_().clamp_(0, LEVELS).sub_(zero)


def _fitted(
    scale: torch.Tensor,
    zero: torch.Tensor,
    mean: torch.Tensor,
    steps: torch.Tensor,
    by_x: torch.Tensor,
    by_step: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero point of least squares for given codes; means over a group: of x, of the
    codes' steps from `zero`, of steps * x and of steps squared."""
    spread = by_step - steps.square()
    slope = (by_x - steps * mean) / spread.clamp(min=TINY)
    slope = torch.where((spread > 0) & (slope > 0), slope, scale)
    moved = (zero - (mean - slope * steps) / slope).round_().clamp_(0, LEVELS)
    change = zero - moved
    by_x = by_x + change * mean
    by_step = by_step + 2 * change * steps + change.square()
    slope = by_x / by_step.clamp(min=TINY)
    return torch.where((by_step > 0) & (slope > 0), slope, scale), moved
