"""Linear layers over linear.c and quantized_linear.c: packed weights, called to multiply by them.

A layer is one or more matrices whose outputs lie side by side: parts of one form are packed as one,
others (a Q4_K beside a Q6_K) each by themselves. Called through native.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from streamer.kernels.cpu.memory import new_panels
from streamer.kernels.cpu.program import Call, Kind, issue, new_rows, team
from streamer.kernels.cpu.quantized_linear import Quantized, Records, merge, widest
from streamer.kernels.weights import QuantizedWeight, Weight, stack

ACTIVATIONS = {None: 0, "silu": 2, "gelu": 3, "gelu_tanh": 4}  # panels.h's flags
ADD = 1


class Matrix(Protocol):
    """A packed matrix [N, K] with its bias.

    num_bytes  of the packed weights
    """

    shape: tuple[int, int]
    num_bytes: int

    def multiply(self, x: torch.Tensor, out: torch.Tensor, flags: int, records: Records) -> None:
        """Issue the product of x; `records` are those of x that an earlier matrix has made."""
        ...

    def rows(self, tokens: torch.Tensor) -> torch.Tensor: ...


class Dense:
    """A matrix of floats. See Matrix."""

    __slots__ = ("_bias", "_packed", "num_bytes", "shape")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, flags: int) -> None:
        n, k = weight.shape
        self.shape = (n, k)
        self._bias = bias
        width = 2 * team.lanes
        size = width * -(-k // 2) * 2 * weight.element_size()
        panels = new_panels(n, size, has_gates=flags > ADD)
        self._packed = panels.view(weight.dtype)
        self.num_bytes = panels.numel()
        weight = weight.contiguous()
        issue(Call(Kind.PACK, panels, weight.dtype, (weight, self._packed), (k, n), flags=flags))

    def multiply(self, x: torch.Tensor, out: torch.Tensor, flags: int, records: Records) -> None:
        """See Matrix."""
        del records
        n, k = self.shape
        pointers = (x, self._packed, self._bias, out)
        sizes = (k, n, x.stride(0), out.stride(0))
        issue(Call(Kind.LINEAR, x, x.dtype, pointers, sizes, flags=flags))

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """See ops.Linear."""
        k = self.shape[1]
        out = new_rows(tokens, k, dtype=self._packed.dtype)
        issue(Call(Kind.DENSE_ROWS, tokens, out.dtype, (tokens, self._packed, out), (k,)))
        return out


class Linear:
    """Packed matrices, stacked to [N, K]. See ops.Linear."""

    __slots__ = ("activation", "matrices", "shape")

    def __init__(self, matrices: Sequence[Matrix], activation: str | None) -> None:
        self.matrices = matrices
        self.shape = (sum(m.shape[0] for m in matrices), matrices[0].shape[1])
        self.activation = activation

    def __call__(self, x: torch.Tensor, *, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """See ops.Linear."""
        width = self.shape[0] if self.activation is None else self.shape[0] // 2
        out = new_rows(x, width, dtype=x.dtype) if add_to is None else add_to
        flags = ACTIVATIONS[self.activation] if add_to is None else ADD
        records: Records = {}
        start = 0
        for matrix in self.matrices:
            matrix.multiply(x, out[:, start:], flags, records)
            start += matrix.shape[0]
        return out

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """See ops.Linear."""
        (matrix,) = self.matrices
        return matrix.rows(tokens)


def embedding(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """See Backend.embedding."""
    out = new_rows(tokens, table.shape[1], dtype=table.dtype)
    issue(Call(Kind.EMBEDDING, tokens, table.dtype, (tokens, table, out), (table.shape[1],)))
    return out


def _pack_bias(bias: torch.Tensor, flags: int) -> torch.Tensor:
    """The bias in the order of the panels: of gates and ups, a vector of each in turn."""
    lanes, bias = team.lanes, bias.float()
    if flags <= ADD:
        return torch.nn.functional.pad(bias, (0, -len(bias) % (2 * lanes)))
    halves = bias.view(2, -1)
    wider = torch.nn.functional.pad(halves, (0, -halves.shape[1] % lanes))
    return wider.view(2, -1, lanes).transpose(0, 1).reshape(-1).contiguous()


def pack_weight(
    parts: Sequence[Weight],
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    is_table: bool = False,
) -> Linear:
    """See Backend.pack_weight; a layer of gates takes the wider of two forms for both."""
    del is_table  # rows are read from the panels
    flags = ACTIVATIONS[activation]
    merged = merge(parts)
    if activation is not None and len(merged) > 1:
        merged = [widest(merged)]
    matrices: list[Matrix] = []
    start = 0
    for part in merged:
        end = start + part.shape[0]
        its_bias = None if bias is None else _pack_bias(bias[start:end], flags)
        if isinstance(part, QuantizedWeight):
            if dtype is None:
                raise ValueError("a quantized weight needs the dtype of its results")
            matrices.append(Quantized(part, its_bias, flags, dtype))
        else:
            matrices.append(Dense(stack([part], dtype), its_bias, flags))
        start = end
    return Linear(matrices, activation)
