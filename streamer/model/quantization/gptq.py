"""GPTQ and AWQ: codes packed in int32 words along K or N, with scales and zero points by group.

Parsers from stored tensors to QuantizedWeight; no state. Layouts: AutoGPTQ's and gptqmodel's
qweight [K * bits / 32, N] with lowest rows in the lowest bits; AutoAWQ's gemm qweight [K, N / 8]
with the outputs 0, 2, 4, 6, 1, 3, 5, 7 of each word from the lowest bits up.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import msgspec
import torch

from streamer.kernels.weights import QuantizedWeight
from streamer.model.checkpoint import FLOATS
from streamer.model.quantization.bits import unpack, words_as_bytes
from streamer.model.quantization.interface import (
    Form,
    Stored,
    held_group,
    num_groups,
    regroup,
    wrong,
)

AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of outputs 0 to 7 in a word, lowest bits first
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
        return Form(self.bits, held_group(self.group, k), not self.is_symmetric)

    def read(self, tensors: Mapping[str, torch.Tensor], n: int, k: int) -> QuantizedWeight:
        if "bias" in tensors and tensors["bias"].any():
            raise wrong("bias", "is not zero, and this architecture has none")
        words = tensors["qweight"].t()
        codes = unpack(words_as_bytes(words), self.bits, k)
        stored = tensors["qzeros"]
        if self.is_v1:  # whole words, since a zero point of 0 borrowed from its neighbour
            stored = (stored.long() + ONES[self.bits]).to(torch.int32)
        zeros = unpack(words_as_bytes(stored), self.bits, n)
        order = None
        if "g_idx" in tensors:
            order = group_order(tensors["g_idx"].long(), self.group, k)
            codes = codes if order is None else codes[:, order].contiguous()
        scales = regroup(tensors["scales"].t(), self.group, k)
        zeros = regroup(zeros.t(), self.group, k)
        return with_zeros(codes, scales, zeros, self.bits, held_group(self.group, k), order)


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
        return Form(4, held_group(self.group, k), not self.is_symmetric)

    def read(self, tensors: Mapping[str, torch.Tensor], n: int, k: int) -> QuantizedWeight:
        codes = _outputs(tensors["qweight"], n).t().contiguous()
        scales = regroup(tensors["scales"].t(), self.group, k)
        held = held_group(self.group, k)
        if "qzeros" not in tensors:
            return QuantizedWeight(codes, scales, held, 4, zero=8)
        zeros = regroup(_outputs(tensors["qzeros"], n).t(), self.group, k)
        return with_zeros(codes, scales, zeros, 4, held)


def _outputs(words: torch.Tensor, n: int) -> torch.Tensor:
    """Words [R, N / 8] -> codes uint8 [R, N] in the order of the outputs."""
    places = unpack(words_as_bytes(words), 4, n).view(words.shape[0], n // 8, 8)
    return places[..., AWQ_PLACES].view(words.shape[0], n)


def with_zeros(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bits: int,
    group: int,
    order: torch.Tensor | None = None,
) -> QuantizedWeight:
    """Codes with zero points like scales: a constant where all are equal, else offsets."""
    first = int(zeros[0, 0])
    if bool((zeros == first).all()):
        return QuantizedWeight(codes, scales, group, bits, zero=first, permutation=order)
    offsets = -scales * zeros
    return QuantizedWeight(codes, scales, group, bits, offsets=offsets, permutation=order)


def group_order(groups: torch.Tensor, group: int, k: int) -> torch.Tensor | None:
    """The order of columns in which those of a group lie together; None: as they are.

    groups: each column's group [K]. ModelNotSupported where they are not `group` columns each.
    """
    size = k if group == -1 else group
    in_order = torch.arange(k) // size
    if torch.equal(groups, in_order):
        return None
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order], in_order):
        raise wrong("g_idx", f"does not divide {k} columns into groups of {size}", "g_idx")
    return order


def describe_group(group: int) -> str:
    """ "groups of 128" or "a scale for each output"."""
    return "a scale for each output" if group == -1 else f"groups of {group}"
