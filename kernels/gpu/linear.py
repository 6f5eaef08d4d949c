"""Linear layers: torch's own matrix products, with the gates' activation behind them.

cuBLAS chooses its kernel by the number of rows, so here a row's last bits may depend on how many
rows there are, which ops.linear promises only of the CPU's backends. Called through backend.py.
"""

import torch
import torch.nn.functional as F

from streamer.kernels.gpu.activation import gate


class Weight:
    """A weight [N, K] as it came, with its bias and the activation of its gates."""

    __slots__ = ("activation", "bias", "shape", "weight")

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
    ) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self.weight = weight
        self.bias = bias
        self.activation = activation


def pack_weight(weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> Weight:
    """See ops.pack_weight: nothing is rearranged, the argument's memory is kept."""
    return Weight(weight, bias, activation)


def linear(x: torch.Tensor, weight: Weight, add_to: torch.Tensor | None) -> torch.Tensor:
    """See ops.linear."""
    if add_to is not None:
        if weight.bias is None:  # one call, and one rounding
            return add_to.addmm_(x, weight.weight.t())
        return add_to.add_(F.linear(x, weight.weight, weight.bias))
    y = F.linear(x, weight.weight, weight.bias)
    return y if weight.activation is None else gate(y, weight.activation)
