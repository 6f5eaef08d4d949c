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
from streamer.kernels.cpu.quantized_linear import Quantized, Records, runs, widest
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

    def __init__(
        self, parts: Sequence[torch.Tensor], bias: torch.Tensor | None, flags: int
    ) -> None:
        n, k = sum(len(part) for part in parts), parts[0].shape[1]
        self.shape = (n, k)
        self._bias = bias
        width, dtype = 2 * team.lanes, parts[0].dtype
        pairs = 2 if dtype is torch.bfloat16 else 1  # numbers that lie together
        size = width * -(-k // pairs) * pairs * dtype.itemsize
        panels = new_panels(n, size, has_gates=flags > ADD)
        self._packed = panels.view(dtype)
        self.num_bytes = panels.numel()
        for piece in _dense_pieces(parts, has_gates=flags > ADD):
            rows = sum(len(part) for part in piece)
            count = -(-rows // width) if len(piece) == 1 else len(panels)
            panels, here = panels[count:], panels[:count]
            pointers = (piece[0], here, *piece[1:])
            issue(Call(Kind.PACK, here, dtype, pointers, (k, rows), flags=flags))

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


def _dense_pieces(
    parts: Sequence[torch.Tensor], *, has_gates: bool
) -> list[tuple[torch.Tensor, ...]]:
    """See quantized_linear.pieces_of."""
    parts = [part.contiguous() for part in parts]
    if not has_gates:
        if all(len(part) % (2 * team.lanes) == 0 for part in parts[:-1]):
            return [(part,) for part in parts]
        return [(torch.cat(parts),)]
    if len(parts) == 2 and len(parts[0]) == len(parts[1]):
        return [tuple(parts)]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return [tuple(whole.chunk(2))]


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
    found = runs(parts)
    if activation is not None and len(found) > 1:
        found = runs(widest(parts, dtype))
    matrices: list[Matrix] = []
    start = 0
    for run in found:
        end = start + sum(part.shape[0] for part in run)
        its_bias = None if bias is None else _pack_bias(bias[start:end], flags)
        quantized = [part for part in run if isinstance(part, QuantizedWeight)]
        if not quantized:
            dense = [stack([part], dtype) for part in run]
            matrices.append(Dense(dense, its_bias, flags))
        elif dtype is None:
            raise ValueError("a quantized weight needs the dtype of its results")
        else:
            matrices.append(Quantized(quantized, its_bias, flags, dtype))
        start = end
    return Linear(matrices, activation)
