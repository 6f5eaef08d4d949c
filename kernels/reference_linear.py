"""Linear layers in torch: oneDNN's packed weights where torch can make them, else F.linear.

Called through reference.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F

from streamer.kernels.weights import Weight, stack


@lru_cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch and CPU multiply by packed weights, found by trying it once."""
    if not torch._C._has_mkldnn:
        return False
    weight = torch.eye(16, dtype=dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        y = torch.ops.mkldnn._linear_pointwise(weight, packed, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return bool(torch.equal(y, weight))


@lru_cache
def keeps_rows(dtype: torch.dtype) -> bool:
    """Whether a row's result is the same bit for bit in any number of rows: with packed weights
    that are not multiplied by AMX tiles, whose sums oneDNN splits by the number of rows."""
    has_tiles = dtype is torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    return can_pack(dtype) and not has_tiles


_SINGLE_ROW_DIFFERS: dict[tuple[torch.Size, torch.dtype, int], bool] = {}  # what probes found


class Linear:
    """A weight [N, K], packed once (oneDNN) where possible.

    Packed weights read 1.5 (bf16) to 2.4 (fp32) times faster than F.linear at 1 to 32 rows (2 cores
    of an EPYC Zen 5, 2026-11-20), and where `keeps_rows` a row's result does not depend on how many
    rows there are, with one exception: a single row of a long K takes another path. A probe finds
    such layers at packing, and they compute two rows instead of one.
    """

    __slots__ = ("_bias", "_pads", "_table", "_weight", "activation", "is_packed", "shape")

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        *,
        is_table: bool = False,
    ) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self.activation = activation
        self.is_packed = weight.device.type == "cpu" and can_pack(weight.dtype)
        self._bias = bias
        self._table = weight if is_table else weight.new_empty(0, weight.shape[1])
        self._pads = False
        if self.is_packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
            self._pads = self._single_row_differs(weight)
        else:
            self._weight = weight

    def __call__(self, x: torch.Tensor, *, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """See ops.Linear."""
        y = self.multiply(x)
        if add_to is not None:
            return add_to.add_(y)
        if self.activation is None:
            return y
        gate, up = y.chunk(2, -1)
        if self.activation == "silu":
            return F.silu(gate).mul_(up)
        approximate = "tanh" if self.activation == "gelu_tanh" else "none"
        return F.gelu(gate, approximate=approximate).mul_(up)

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """See ops.Linear."""
        return F.embedding(tokens, self._table)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] -> [T, N], the activation left out."""
        if not self.is_packed:
            return F.linear(x, self._weight, self._bias)
        if self._pads and x.shape[0] == 1:
            return self._multiply(x.expand(2, -1))[:1]
        return self._multiply(x)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return y

    def _single_row_differs(self, weight: torch.Tensor) -> bool:
        """Probe once a shape: a large model has hundreds of layers, and few shapes."""
        key = (weight.shape, weight.dtype, torch.get_num_threads())
        if key not in _SINGLE_ROW_DIFFERS:
            x = torch.linspace(-1.3, 1.7, 2 * weight.shape[1]).reshape(2, -1).to(weight.dtype)
            same = torch.equal(self._multiply(x[:1]), self._multiply(x)[:1])
            _SINGLE_ROW_DIFFERS[key] = not same
        return _SINGLE_ROW_DIFFERS[key]


def pack_weight(
    parts: Sequence[Weight],
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    is_table: bool = False,
) -> Linear:
    """See Backend.pack_weight: codes are dequantized once, here, and multiplied as dense."""
    return Linear(stack(parts, dtype), bias, activation, is_table=is_table)
