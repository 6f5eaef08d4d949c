"""Linear layers: torch's own matrix products but for one row or two, and the gates' activation.

cuBLAS chooses its kernel by the number of rows, so a row's last bits may depend on the number
of rows here; ops.Linear rules that out only for the CPU's backends. Called by packed.py.
"""

import torch
import torch.nn.functional as F

from streamer.kernels.gpu.linear.activation import gate
from streamer.kernels.gpu.linear.embedding import embedding
from streamer.kernels.gpu.linear.few_dense import multiply_few_dense, serves


class Linear:
    """A weight [N, K] as given, with its bias and the activation of its gates."""

    __slots__ = ("activation", "bias", "shape", "weight")

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
    ) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self.weight = weight
        self.bias = bias
        self.activation = activation

    def __call__(self, x: torch.Tensor, *, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """See ops.Linear."""
        if serves(x, self.weight):
            y = x.new_empty(len(x), self.shape[0]) if add_to is None else add_to
            multiply_few_dense(x, self.weight, self.bias, y, is_added=add_to is not None)
            return y if self.activation is None else gate(y, self.activation)
        if add_to is not None:
            if self.bias is None:  # one call, and one rounding
                return add_to.addmm_(x, self.weight.t())
            return add_to.add_(F.linear(x, self.weight, self.bias))
        y = F.linear(x, self.weight, self.bias)
        return y if self.activation is None else gate(y, self.activation)

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """See ops.Linear."""
        return embedding(tokens, self.weight)


class Dense:
    """A weight [N, K] as a part of one that has quantized parts too."""

    __slots__ = ("shape", "weight")

    def __init__(self, weight: torch.Tensor) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self.weight = weight

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, *, is_added: bool
    ) -> None:
        """out = x @ weight.T + bias, or is increased by that."""
        if serves(x, self.weight):
            multiply_few_dense(x, self.weight, bias, out, is_added=is_added)
            return
        y = F.linear(x, self.weight, bias)
        if is_added:
            out.add_(y)
        else:
            out.copy_(y)
