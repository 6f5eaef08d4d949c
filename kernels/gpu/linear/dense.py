"""Linear layers: torch's own matrix products, followed by the gates' activation.

cuBLAS chooses its kernel by the number of rows, so a row's last bits may depend on the number
of rows here; ops.Linear rules that out only for the CPU's backends. Called through backend.py.
"""

import torch
import torch.nn.functional as F

from streamer.kernels.gpu.linear.activation import gate


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
        if add_to is not None:
            if self.bias is None:  # one call, and one rounding
                return add_to.addmm_(x, self.weight.t())
            return add_to.add_(F.linear(x, self.weight, self.bias))
        y = F.linear(x, self.weight, self.bias)
        return y if self.activation is None else gate(y, self.activation)


def pack_weight(
    weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
) -> Linear:
    """See Backend.pack_weight: nothing is rearranged, the argument's memory is kept."""
    return Linear(weight, bias, activation)
