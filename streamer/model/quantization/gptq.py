"""GPTQ and AWQ: codes packed in int32 words along K or N, with scales and zero points by group.

Parsers from stored tensors to QuantizedWeight; no state. Layouts: AutoGPTQ's and gptqmodel's
qweight [K * bits / 32, N] with lowest rows in the lowest bits; AutoAWQ's gemm qweight [K, N / 8]
with the outputs 0, 2, 4, 6, 1, 3, 5, 7 of each word from the lowest bits up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping

import msgspec
import torch

from streamer.kernels.weights import Layout, QuantizedWeight
from streamer.model.checkpoint import FLOATS
from streamer.model.quantization.bits import stored_layout, unpack, words_as_bytes
from streamer.model.quantization.interface import (
    Form,
    Stored,
    held_group,
    num_groups,
    regroup,
    wrong,
)

AWQ_SHIFTS = torch.tensor([0, 16, 4, 20, 8, 24, 12, 28], dtype=torch.int32)  # of a word's outputs
ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # what v1 subtracted from words of zeros


class Gptq(msgspec.Struct, frozen=True):
    """AutoGPTQ's and gptqmodel's form. group -1: whole rows; is_v1: stored zeros are one less."""

    bits: int
    group: int
    is_symmetric: bool
    has_order: bool
    is_v1: bool

    @property
    def name(self) -> str:
        order = ", activation order" if self.has_order else ""
        return f"GPTQ, {self.bits} bits, {describe_group(self.group)}{order}"

    def stored(self, n: int, k: int, found: Collection[str]) -> dict[str, Stored]:
        held_group(self.group, k)
        groups = num_groups(k, self.group)
        tensors = {
            "qweight": Stored(("I32",), ((math.ceil(k * self.bits / 32), n),)),
            "qzeros": Stored(("I32",), ((groups, math.ceil(n * self.bits / 32)),)),
            "scales": Stored(FLOATS, ((groups, n),)),
            "g_idx": Stored(("I32", "I64"), ((k,),), is_needed=self.has_order),
        }
        if "bias" in found:  # AutoGPTQ wrote zeros where a model has no bias
            tensors["bias"] = Stored(FLOATS, ((n,),), is_needed=False)
        return tensors

    def form(self, n: int, k: int) -> Form:
        return Form(self.bits, held_group(self.group, k), has_zeros=not self.is_symmetric)

    def read(self, tensors: Mapping[str, torch.Tensor], n: int, k: int) -> QuantizedWeight:
        if "bias" in tensors and tensors["bias"].any():
            raise wrong("bias", "is not zero, and this architecture has none")
        stored = tensors["qzeros"]
        if self.is_v1:  # whole words, since a zero point of 0 borrowed from its neighbour
            stored = stored + ONES[self.bits]
        zeros = unpack(words_as_bytes(stored), self.bits, n)
        order = group_order(tensors.get("g_idx"), self.group, k)
        layout = stored_layout("WORDS", n, k)
        codes = tensors["qweight"]
        if layout is None:
            codes = unpack(words_as_bytes(codes.t()), self.bits, k)
            codes = codes if order is None else in_order(codes, order)
        scales = regroup(tensors["scales"].t(), self.group, k)
        zeros = regroup(zeros.t(), self.group, k)
        held = held_group(self.group, k)
        weight = with_zeros(codes, scales, zeros, self.bits, held, layout)
        return dataclasses.replace(weight, permutation=order)


class Awq(msgspec.Struct, frozen=True):
    """AutoAWQ's gemm form, 4 bits."""

    group: int
    is_symmetric: bool

    @property
    def name(self) -> str:
        return f"AWQ, 4 bits, {describe_group(self.group)}"

    def stored(self, n: int, k: int, found: Collection[str]) -> dict[str, Stored]:
        held_group(self.group, k)
        if n % 8:
            raise wrong("AWQ", f"{n} outputs are no multiple of 8")
        groups = num_groups(k, self.group)
        return {
            "qweight": Stored(("I32",), ((k, n // 8),)),
            "qzeros": Stored(("I32",), ((groups, n // 8),), is_needed=not self.is_symmetric),
            "scales": Stored(FLOATS, ((groups, n),)),
        }

    def form(self, n: int, k: int) -> Form:
        return Form(4, held_group(self.group, k), has_zeros=not self.is_symmetric)

    def read(self, tensors: Mapping[str, torch.Tensor], n: int, k: int) -> QuantizedWeight:
        layout = stored_layout("OUTPUTS", n, k)
        codes = tensors["qweight"]
        if layout is None:
            codes = _outputs(codes.t().contiguous(), 0)
        scales = regroup(tensors["scales"].t(), self.group, k)
        held = held_group(self.group, k)
        if "qzeros" not in tensors:
            return QuantizedWeight(codes, scales, held, 4, zero=8, layout=layout)
        zeros = regroup(_outputs(tensors["qzeros"], 1).t(), self.group, k)
        return with_zeros(codes, scales, zeros, 4, held, layout)


def _outputs(words: torch.Tensor, along: int) -> torch.Tensor:
    """int32 words of 8 outputs each along a dimension, 0 or 1 -> codes uint8, the outputs in order.

    Where these are the first one, the words were transposed: 8 times fewer than the codes.
    """
    shifts = AWQ_SHIFTS if along else AWQ_SHIFTS.unsqueeze(1)
    codes = (words.unsqueeze(along + 1) >> shifts).to(torch.uint8).bitwise_and_(15)
    return codes.flatten(along, along + 1)


def with_zeros(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bits: int,
    group: int,
    layout: Layout | None = None,
) -> QuantizedWeight:
    """Codes with zero points, uint8 like scales: a constant where all are equal."""
    # aminmax takes ten times as long where outputs lie side by side
    if (zero := int(zeros.amin())) == int(zeros.amax()):
        return QuantizedWeight(codes, scales, group, bits, zero=zero, layout=layout)
    return QuantizedWeight(codes, scales, group, bits, layout=layout, zeros=zeros)


def group_order(groups: torch.Tensor | None, group: int, k: int) -> torch.Tensor | None:
    """The order in which a group's columns are side by side; None: as they are.

    groups: each column's group [K]. ModelNotSupported where they are not `group` columns each.
    """
    if groups is None:
        return None
    size = k if group == -1 else group
    side_by_side = torch.arange(k) // size
    groups = groups.long()
    if torch.equal(groups, side_by_side):
        return None
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order], side_by_side):
        raise wrong("g_idx", f"does not divide {k} columns into groups of {size}", "g_idx")
    return order


def in_order(codes: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Codes [N, K] with their columns in the order."""
    # 1.2 ms for 3072 x 1024; codes[:, order] takes 13 (EPYC Zen 5, 2026-11-22).
    return codes.gather(1, order.expand(codes.shape[0], -1))


def describe_group(group: int) -> str:
    """ "groups of 128" or "a scale for each output"."""
    return "a scale for each output" if group == -1 else f"groups of {group}"
