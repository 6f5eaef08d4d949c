"""Linear layers over linear.c: packed weights, which are called to multiply by them.

Called through native.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from streamer.kernels.cpu.program import Call, Kind, issue, new_rows, team
from streamer.kernels.weights import Weight, stack

ACTIVATIONS = {None: 0, "silu": 2, "gelu": 3, "gelu_tanh": 4}  # linear.c's flags
ADD = 1


class Linear:
    """A packed weight [N, K] with its bias and the activation of its gates. See ops.Linear."""

    __slots__ = ("_table", "activation", "bias", "packed", "shape")

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
        *,
        is_table: bool,
    ) -> None:
        n, k = weight.shape
        width = 2 * team.lanes
        self.shape = (n, k)
        self._table = weight if is_table else weight[:0]
        self.activation = activation
        self.packed = torch.empty(-(-n // width) * width * -(-k // 2) * 2, dtype=weight.dtype)
        self.bias = None
        if bias is not None:
            self.bias = torch.zeros(-(-n // width) * width)
            self.bias[:n] = bias
            if activation is not None:
                self.bias = _interleave(bias.float(), team.lanes)
        team.pack(weight.contiguous(), self.packed, activation is not None)

    def __call__(self, x: torch.Tensor, *, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """See ops.Linear."""
        n, k = self.shape
        width = n if self.activation is None else n // 2
        out = new_rows(x, width, dtype=x.dtype) if add_to is None else add_to
        flags = ACTIVATIONS[self.activation] if add_to is None else ADD
        issue(
            Call(
                Kind.LINEAR,
                x,
                x.dtype,
                (x, self.packed, self.bias, out),
                (k, n, x.stride(0), out.stride(0)),
                flags=flags,
            )
        )
        return out

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """See ops.Linear."""
        return embedding(tokens, self._table)


def embedding(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """See Backend.embedding."""
    out = new_rows(tokens, table.shape[1], dtype=table.dtype)
    issue(Call(Kind.EMBEDDING, tokens, table.dtype, (tokens, table, out), (table.shape[1],)))
    return out


def _interleave(bias: torch.Tensor, lanes: int) -> torch.Tensor:
    """The bias of gates and ups in the order of their panels: `lanes` of each in turn."""
    halves = bias.view(2, -1)
    padded = torch.nn.functional.pad(halves, (0, -halves.shape[1] % lanes))
    return padded.view(2, -1, lanes).transpose(0, 1).reshape(-1).contiguous()


def pack_weight(
    parts: Sequence[Weight],
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    is_table: bool = False,
) -> Linear:
    """See Backend.pack_weight."""
    return Linear(stack(parts, dtype), bias, activation, is_table=is_table)
