"""A weight that pack_weight takes: dense, or as codes with scales, whatever format it came from.

Defines the one form between checkpoint formats and kernels; keeps no state. Parsers in
model/quantization and model/gguf make it, a matrix at a time and without a dense copy; ops.py and
every backend take it. What a code means is `dequantize`, the reference of every kernel.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

GROUPS = (128, 64, 32, 16)  # of QuantizedWeight, beside whole rows


@dataclass(frozen=True, slots=True)
class Layout:
    """How codes lie in a tensor of a file, from which kernels pack them without a byte for each.

    name         of kernels/cpu/blocks.py
    shape        [N, K] of the codes
    is_tall      outputs are the tensor's last dimension, not its first
    has_offsets  beside scales, among its codes
    unpack       such a weight without a layout
    """

    name: str
    shape: tuple[int, int]
    is_tall: bool
    has_offsets: bool
    unpack: Callable[[QuantizedWeight], QuantizedWeight]


class NotFinite(ValueError):
    """Scales or offsets among a weight's codes, or codes of FP8, are NaN or infinite."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """w[n, k] = scales[n, k // group] * (value - zero) + offsets[n, k // group], or with zeros of
    groups, scales * value - scales * zeros[n, k // group].

    codes        uint8 [N, K], one a byte, each below 2**bits; value = table[code] where there is a
                 table, else the code. Or float8_e4m3fn [N, K]: bits 8, zero 0, no table, no offsets
    scales       float32 [N, ceil(K / group)]; the last group may be shorter. Empty where the layout
                 has them, and offsets, among its codes. In memory by outputs or by groups, as are
                 offsets and zeros
    group        16, 32, 64, 128 or K (a scale for each output)
    bits         2 to 8
    zero         the constant zero point of a symmetric format: 8 of Q4_0, 128 of int8 as uint8
    offsets      float32 like scales: -dmin * m of Q4_K
    zeros        uint8 like scales, below 2**bits: zero points of an asymmetric format, without
                 offsets and with a zero of 0
    table        uint8 [16], the values of 4-bit codes that are no integers in order (IQ4_NL, MXFP4)
    permutation  int64 [K]: column k of codes multiplies x[:, permutation[k]] (GPTQ's desc_act)
    layout       codes are still as a file has them; all else is as without. `unpacked` ends that
    """

    codes: torch.Tensor
    scales: torch.Tensor
    group: int
    bits: int
    zero: int = 0
    offsets: torch.Tensor | None = None
    table: torch.Tensor | None = None
    permutation: torch.Tensor | None = None
    layout: Layout | None = None
    zeros: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """[N, K]."""
        return self.codes.shape if self.layout is None else torch.Size(self.layout.shape)

    @property
    def has_offsets(self) -> bool:
        """Whether groups have offsets, wherever they are."""
        return self.offsets is not None or (self.layout is not None and self.layout.has_offsets)

    def with_offsets(self) -> QuantizedWeight:
        """The same with offsets in place of zeros."""
        if self.zeros is None:
            return self
        return dataclasses.replace(self, offsets=-self.scales * self.zeros, zeros=None)

    def unpacked(self) -> QuantizedWeight:
        """The same with a byte for each code, and scales beside them."""
        return self if self.layout is None else self.layout.unpack(self)

    def to(self, device: torch.device) -> QuantizedWeight:
        """The same on another device."""
        if self.codes.device == device:
            return self
        if self.layout is not None:
            return self.unpacked().to(device)
        tensors: dict[str, Any] = {
            field.name: value.to(device)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return dataclasses.replace(self, **tensors)


Weight = torch.Tensor | QuantizedWeight


def dequantize(weight: Weight) -> torch.Tensor:
    """The weight as float32 [N, K], columns in the order of x; a dense one is converted."""
    if isinstance(weight, torch.Tensor):
        return weight.float()
    weight = weight.unpacked().with_offsets()
    n, k = weight.shape
    values = weight.codes
    if weight.table is not None:
        values = weight.table.to(values.device)[values.long()]
    dense = values.float() - weight.zero
    groups = weight.scales.shape[1]
    dense = torch.nn.functional.pad(dense, (0, groups * weight.group - k))
    dense = dense.view(n, groups, weight.group) * weight.scales.unsqueeze(-1)
    if weight.offsets is not None:
        dense += weight.offsets.unsqueeze(-1)
    dense = dense.view(n, -1)[:, :k]
    if weight.permutation is None:
        return dense.contiguous()
    out = torch.empty(n, k, device=dense.device)
    out[:, weight.permutation] = dense
    return out


def dequantize_finite(weight: Weight, dtype: torch.dtype | None = None) -> torch.Tensor:
    """As `dequantize`, in the dtype (None: float32); NotFinite where scales, offsets or codes are
    no numbers, or too large for it."""
    dense = dequantize(weight).to(dtype)
    is_finite = isinstance(weight, torch.Tensor) or math.isfinite(dense.sum())
    if not is_finite and not dense.isfinite().all():  # the sum may be too large alone
        raise NotFinite("scales, offsets or codes: some are NaN or infinite")
    return dense


def rows_of(weight: Weight, start: int, end: int) -> Weight:
    """Rows from `start` up to `end`, in memory of their own."""
    if isinstance(weight, torch.Tensor):
        return weight[start:end].clone()
    return _sliced(weight, slice(start, end), slice(None), slice(None), weight.group)


def has_columns(weight: Weight, start: int, end: int) -> bool:
    """Whether columns from `start` up to `end` are a weight: whole groups, and in the order of
    their scales (not GPTQ's desc_act)."""
    if isinstance(weight, torch.Tensor):
        return True
    k, group = weight.shape[1], weight.group
    is_whole = group >= k or not (start % group or (end % group and end != k))
    return weight.permutation is None and is_whole


def columns_of(weight: Weight, start: int, end: int) -> Weight:
    """Columns from `start` up to `end`, in memory of their own; ValueError without has_columns."""
    if isinstance(weight, torch.Tensor):
        return weight[:, start:end].contiguous()
    k, group = weight.shape[1], weight.group
    if not has_columns(weight, start, end):
        raise ValueError(f"columns {start} to {end} are no whole groups of {group}")
    if group >= k:
        return _sliced(weight, slice(None), slice(start, end), slice(None), end - start)
    groups = slice(start // group, -(-end // group))
    return _sliced(weight, slice(None), slice(start, end), groups, group)


def _sliced(
    weight: QuantizedWeight, rows: slice, columns: slice, groups: slice, group: int
) -> QuantizedWeight:
    weight = weight.unpacked()
    offsets, zeros = weight.offsets, weight.zeros
    return dataclasses.replace(
        weight,
        codes=weight.codes[rows, columns].clone(),
        scales=weight.scales[rows, groups].clone(),
        offsets=None if offsets is None else offsets[rows, groups].clone(),
        zeros=None if zeros is None else zeros[rows, groups].clone(),
        group=group,
    )


def stack(parts: Sequence[Weight], dtype: torch.dtype | None) -> torch.Tensor:
    """The parts [N_i, K] as one dense weight of the dtype (None: theirs), stacked along N."""
    dense = [
        part if isinstance(part, torch.Tensor) else dequantize_finite(part, dtype) for part in parts
    ]
    whole = dense[0] if len(dense) == 1 else torch.cat(dense)
    return whole if dtype is None else whole.to(dtype)
