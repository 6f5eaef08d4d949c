"""What the native kernels round, in torch: the reference's operations over int8 activations."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from streamer.kernels import quantized, reference
from streamer.kernels.cpu import quantized_linear
from streamer.kernels.weights import QuantizedWeight


class Rounding:
    """The reference's operations, with activations rounded to int8 where weights are codes, each
    span of columns by its largest number.

    beside  kernels whose linear layers are called with the same inputs; `worst` is their largest
            error, and theirs are the results
    """

    def __init__(self, beside: Any = None) -> None:
        self.beside = beside
        self.worst = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.beside or reference, name)

    def pack_weight(
        self, parts: Any, bias: Any = None, activation: str | None = None, **options: Any
    ) -> Any:
        runs = quantized_linear.runs(parts)
        if activation is not None and len(runs) > 1:
            runs = quantized_linear.runs(quantized_linear.widest(parts))
        ends = list(accumulate(sum(part.shape[0] for part in run) for run in runs))
        biases = [None] * len(ends) if bias is None else bias.tensor_split(ends[:-1])
        linears = [
            RoundingLinear(run, its_bias, activation, options)
            for run, its_bias in zip(runs, biases, strict=True)
        ]
        theirs: Any = None
        if self.beside is not None:
            theirs = self.beside.pack_weight(parts, bias, activation, **options)

        def linear(x: torch.Tensor, *, add_to: torch.Tensor | None = None) -> torch.Tensor:
            before = None if add_to is None else add_to.clone()
            if len(linears) > 1:
                made = torch.cat([one(x) for one in linears], -1)
            else:
                made = linears[0](x, add_to=add_to if theirs is None else before)
            if theirs is None:
                return made
            got: torch.Tensor = theirs(x, add_to=add_to)
            self.worst = max(self.worst, error(got, made))
            return got

        linear.rows = linears[0].linear.rows if theirs is None else theirs.rows  # type: ignore[attr-defined]
        return linear


class RoundingLinear:
    def __init__(self, run: Any, bias: Any, activation: str | None, options: Any) -> None:
        self.span = 0
        self.order: torch.Tensor | None = None
        if isinstance(run[0], QuantizedWeight):
            run = [quantized_linear.as_integers(part) for part in run]
            self.span, self.order = quantized_linear.block_of(run[0])[1], run[0].permutation
        self.linear = reference.pack_weight(run, bias, activation, **options)

    def __call__(self, x: torch.Tensor, *, add_to: torch.Tensor | None = None) -> torch.Tensor:
        if self.span:
            order = torch.arange(x.shape[1]) if self.order is None else self.order
            wide = torch.nn.functional.pad(x[:, order], (0, -x.shape[1] % self.span))
            codes, scales = quantized.quantize(wide.view(len(x), -1, self.span), torch.int8)
            rounded = (codes * scales.unsqueeze(-1)).view(len(x), -1)[:, : x.shape[1]]
            x = torch.empty_like(rounded)
            x[:, order] = rounded
        return self.linear(x, add_to=add_to)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Root of the mean square, of the difference over that of what is expected."""
    return float((got - expected).square().mean().sqrt() / expected.square().mean().sqrt())
