"""Matrices of int8 or FP8 numbers with scales: FP8 checkpoints, and most of compressed-tensors.

Its packed integers too, which differ in the words alone. Parsers from stored tensors to
QuantizedWeight; no state. Scales come one a matrix, output, group of columns or block.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping

import msgspec
import torch

from streamer.kernels.weights import QuantizedWeight
from streamer.model.checkpoint import FLOATS, TensorEntry
from streamer.model.quantization.bits import stored_layout, unpack, unsigned, words_as_bytes
from streamer.model.quantization.gptq import (
    describe_group,
    group_order,
    in_order,
    with_zeros,
)
from streamer.model.quantization.interface import (
    Form,
    Shape,
    Stored,
    held_group,
    num_groups,
    regroup,
    wrong,
)

SCALES = (*FLOATS, "F8_E8M0", "U8")  # the last two: exponents of two


class Grid(msgspec.Struct, frozen=True):
    """What one scale is for: `rows` outputs times `columns` inputs; -1: all of them."""

    rows: int = 1
    columns: int = -1

    def shapes(self, n: int, k: int) -> tuple[Shape, ...]:
        """Shapes that the scales of a matrix [n, k] may have."""
        held_group(self.columns, k)
        count = 1 if self.rows == -1 else math.ceil(n / self.rows)
        whole = (count, num_groups(k, self.columns))
        if whole[1] > 1:
            return (whole,)
        return (whole, whole[:1], ()) if count == 1 else (whole, whole[:1])

    def spread(self, scales: torch.Tensor, n: int, k: int) -> torch.Tensor:
        """Scales of this grid as float32 [n, ceil(k / held_group)]."""
        return self.spread_zeros(scale_values(scales), n, k)

    def spread_zeros(self, values: torch.Tensor, n: int, k: int) -> torch.Tensor:
        """The same of zero points, as they are."""
        values = values.reshape(-1, num_groups(k, self.columns))
        if values.shape[0] != n:  # one for several rows, the last of which may be fewer
            times = n if self.rows == -1 else min(self.rows, n)
            values = values.repeat_interleave(times, 0)[:n]
        return regroup(values, self.columns, k)

    @property
    def name(self) -> str:
        if self.rows == -1 and self.columns == -1:
            return "one scale a matrix"
        if self.rows == 1:
            return describe_group(self.columns)
        return f"blocks of {self.rows} x {self.columns}"


class Numbers(msgspec.Struct, frozen=True):
    """`weight` in int8 or e4m3, and a tensor of scales under one of `scale_names`.

    label       format and width, for people
    bits        of an integer; 8 of e4m3
    grids       what a scale may be for, told apart by the shape of the scales
    """

    label: str
    is_float: bool
    grids: tuple[Grid, ...]
    bits: int = 8
    scale_names: tuple[str, ...] = ("weight_scale",)
    has_zeros: bool = False

    @property
    def name(self) -> str:
        return f"{self.label}, {' or '.join(grid.name for grid in self.grids)}"

    def seen(self, found: Mapping[str, TensorEntry]) -> Numbers:
        """Itself; of grids of a matrix or its outputs, with the one that the scales there have."""
        scales = next((found[s] for s in self.scale_names if s in found), None)
        if scales is None or len(self.grids) == 1:
            return self
        is_one = scales.num_elements == 1
        grids = tuple(grid for grid in self.grids if (grid.rows == -1) == is_one)
        return msgspec.structs.replace(self, grids=grids)

    def stored(self, n: int, k: int, found: Collection[str]) -> dict[str, Stored]:
        scale = next((s for s in self.scale_names if s in found), self.scale_names[0])
        shapes = tuple(shape for grid in self.grids for shape in grid.shapes(n, k))
        tensors = {
            "weight": Stored(("F8_E4M3",) if self.is_float else ("I8",), ((n, k),)),
            scale: Stored(SCALES, shapes),
        }
        if self.has_zeros:
            tensors["weight_zero_point"] = Stored(("I8",), shapes)
        return tensors

    def form(self, n: int, k: int) -> Form:
        group = held_group(self.grids[0].columns, k)
        return Form(self.bits, group, is_float=self.is_float, has_zeros=self.has_zeros)

    def read(self, tensors: Mapping[str, torch.Tensor], n: int, k: int) -> QuantizedWeight:
        stored = next(tensors[s] for s in self.scale_names if s in tensors)
        grid = next(g for g in self.grids if tuple(stored.shape) in g.shapes(n, k))
        scales = grid.spread(stored, n, k)
        group = held_group(grid.columns, k)
        weight = tensors["weight"]
        if self.is_float:
            return QuantizedWeight(weight, scales, group, 8)
        zero = 1 << (self.bits - 1)
        layout = stored_layout("SIGNED", n, k) if self.bits == 8 else None
        if layout is not None:
            codes = weight
        elif self.bits == 8:
            codes = unsigned(weight)
        else:
            codes = (weight + zero).view(torch.uint8)
            if bool((codes >= 2 * zero).any()):
                raise wrong("weight", f"has values beyond {self.bits} bits", "num_bits")
        if not self.has_zeros:
            return QuantizedWeight(codes, scales, group, self.bits, zero=zero, layout=layout)
        zeros = (tensors["weight_zero_point"] + zero).view(torch.uint8)
        if self.bits < 8 and bool((zeros >= 2 * zero).any()):
            raise wrong("weight_zero_point", f"has values beyond {self.bits} bits", "num_bits")
        zeros = grid.spread_zeros(zeros, n, k)
        return with_zeros(codes, scales, zeros, self.bits, group, layout)


class Packed(msgspec.Struct, frozen=True):
    """compressed-tensors' pack-quantized: `weight_packed` [N, K * bits / 32], codes along K."""

    bits: int
    grid: Grid
    has_zeros: bool = False
    has_order: bool = False

    @property
    def name(self) -> str:
        zeros = ", zero points" if self.has_zeros else ""
        return f"compressed-tensors, {self.bits} bits, {self.grid.name}{zeros}"

    def stored(self, n: int, k: int, found: Collection[str]) -> dict[str, Stored]:
        shapes = self.grid.shapes(n, k)
        tensors = {
            "weight_packed": Stored(("I32",), ((n, math.ceil(k * self.bits / 32)),)),
            "weight_scale": Stored(FLOATS, shapes),
            "weight_shape": Stored(("I64", "I32"), ((2,),)),
        }
        if self.has_zeros:
            packed = tuple((math.ceil(s[0] * self.bits / 32), *s[1:]) for s in shapes if s)
            tensors["weight_zero_point"] = Stored(("I32",), packed)
        if self.has_order:
            tensors["weight_g_idx"] = Stored(("I32", "I64"), ((k,),))
        return tensors

    def form(self, n: int, k: int) -> Form:
        group = held_group(self.grid.columns, k)
        return Form(self.bits, group, has_zeros=self.has_zeros)

    def read(self, tensors: Mapping[str, torch.Tensor], n: int, k: int) -> QuantizedWeight:
        shape = tensors["weight_shape"].tolist()
        if shape != [n, k]:
            raise wrong("weight_shape", f"is {shape}, not {[n, k]}")
        order = group_order(tensors.get("weight_g_idx"), self.grid.columns, k)
        codes, layout = words_as_bytes(tensors["weight_packed"]), None
        if self.bits == 4 and k % 8 == 0 and order is None:
            layout = stored_layout("NIBBLES", n, k)
        if layout is None:
            codes = unpack(codes, self.bits, k)
            codes = codes if order is None else in_order(codes, order)
        scales = self.grid.spread(tensors["weight_scale"], n, k)
        group = held_group(self.grid.columns, k)
        if not self.has_zeros:
            zero = 1 << (self.bits - 1)
            return QuantizedWeight(
                codes, scales, group, self.bits, zero, permutation=order, layout=layout
            )
        words = tensors["weight_zero_point"].view(-1, num_groups(k, self.grid.columns)).t()
        count = 1 if self.grid.rows == -1 else n
        zeros = unpack(words_as_bytes(words), self.bits, count).t()
        zeros = self.grid.spread_zeros(zeros, n, k)
        weight = with_zeros(codes, scales, zeros, self.bits, group, layout)
        return dataclasses.replace(weight, permutation=order)


def scale_values(scales: torch.Tensor) -> torch.Tensor:
    """Scales as float32; bytes and e8m0 are exponents of two, of which 255 is none."""
    if scales.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        return scales.float()
    exponents = scales.view(torch.uint8)
    if exponents.numel() and int(exponents.amax()) == 255:  # any() takes 90 times as long
        raise wrong("scales", "hold an exponent of 255, which is no number")
    return exponents.view(torch.float8_e8m0fnu).float()  # a quarter of exp2's time
