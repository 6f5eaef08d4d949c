"""pack_weight: a Linear of dense and quantized parts, each in the form that its kernel reads.

Dense parts of one weight become one matrix, quantized ones of one form one Codes or Fp8; a mixture
(Q4_K beside Q6_K) is several that write their outputs side by side. Called through backend.py.
"""

from collections.abc import Sequence
from itertools import groupby

import torch

from streamer.kernels.gpu.linear.activation import gate
from streamer.kernels.gpu.linear.codes import BLOCK, SLICE, Codes, packed_bits
from streamer.kernels.gpu.linear.dense import Dense, Linear
from streamer.kernels.gpu.linear.fp8 import Fp8, can_multiply
from streamer.kernels.gpu.linear.multiply import multiply
from streamer.kernels.weights import QuantizedWeight, Weight, stack


class Widened:
    """Codes that multiply.py widens in registers."""

    __slots__ = ("codes", "shape")

    def __init__(self, codes: Codes) -> None:
        self.codes = codes
        self.shape = codes.shape

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, *, is_added: bool
    ) -> None:
        """See multiply.multiply."""
        multiply(x, self.codes, bias, out, is_added=is_added)


Part = Dense | Widened | Fp8


class Packed:
    """Parts [N_i, K] whose outputs lie side by side, with bias and the activation of the gates."""

    __slots__ = ("_bias", "_dtype", "_parts", "activation", "shape")

    def __init__(
        self, parts: list[Part], bias: torch.Tensor | None, activation: str | None,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        self.activation = activation
        self._parts = parts
        self._bias = bias
        self._dtype = dtype

    def __call__(self, x: torch.Tensor, *, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """See ops.Linear."""
        y = add_to
        if y is None:
            y = torch.empty(x.shape[0], self.shape[0], dtype=x.dtype, device=x.device)
        first = 0
        for part in self._parts:
            end = first + part.shape[0]
            bias = None if self._bias is None else self._bias[first:end]
            part.multiply(x, bias, y[:, first:end], is_added=add_to is not None)
            first = end
        return y if self.activation is None else gate(y, self.activation)

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """See ops.Linear: of a table, which is one part of codes."""
        (part,) = self._parts
        if not isinstance(part, Widened):
            raise TypeError("a table of several parts, or of FP8 products")
        return part.codes.rows(tokens, self._dtype)


def pack_weight(
    parts: Sequence[Weight],
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    is_table: bool = False,
) -> Linear | Packed:
    """See Backend.pack_weight. A single dense part is not rearranged, and its memory is kept."""
    parts = [
        part if isinstance(part, torch.Tensor) else part.unpacked().with_offsets() for part in parts
    ]
    computing = dtype
    if computing is None:
        computing = next((p.dtype for p in parts if isinstance(p, torch.Tensor)), torch.bfloat16)
    if all(_form(part, computing, is_table=is_table) is None for part in parts):
        return Linear(stack(parts, dtype), bias, activation)
    packed: list[Part] = []
    for form, found in groupby(parts, lambda part: _form(part, computing, is_table=is_table)):
        group = list(found)
        codes = [part for part in group if isinstance(part, QuantizedWeight)]
        if form is None:
            packed.append(Dense(stack(group, computing)))
        elif form == "fp8":
            packed.append(Fp8(codes))
        else:
            packed.append(Widened(Codes(codes, computing)))
    return Packed(packed, bias, activation, computing)


def _form(part: Weight, dtype: torch.dtype, *, is_table: bool) -> object:
    """Parts of an equal form are packed as one; None: dense, as are groups of odd sizes."""
    if isinstance(part, torch.Tensor):
        return None
    if not is_table and can_multiply(part, dtype):
        return "fp8"
    k = part.shape[1]
    block = BLOCK * 32 // packed_bits(part)  # columns that a thread loads, of a group or of two
    if part.group < k and part.group % block and part.group != SLICE:
        return None
    order = None if part.permutation is None else part.permutation.cpu().numpy().tobytes()
    table = None if part.table is None else bytes(part.table.tolist())
    group = min(part.group, k)
    kind = part.codes.dtype, packed_bits(part), part.zero, part.offsets is None
    return kind, group, table, order
