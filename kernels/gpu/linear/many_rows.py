"""multiply_many: x of many rows by a weight of codes, pieces of which are widened for cuBLAS.

A piece of outputs at a time becomes a dense matrix in memory that the call allocates, in which the
next one takes its place; cuBLAS multiplies by it into the outputs' columns. Called by multiply.py.
"""

import torch
import triton

from streamer.kernels.gpu.linear.codes import Codes

# Of a widened piece: about what an H100's L2 holds, from which cuBLAS may then read it, and little
# beside a pool: a head of 152,000 outputs would be 1.2 GB.
PIECE_BYTES = 64 << 20


def multiply_many(
    x: torch.Tensor, codes: Codes, bias: torch.Tensor | None, out: torch.Tensor, *, is_added: bool
) -> None:
    """As multiply.multiply, x in the order of the codes; the weight is rounded to x's dtype."""
    outputs, k = codes.shape
    pieces = triton.cdiv(outputs * k * x.element_size(), PIECE_BYTES)
    size = min(outputs, triton.cdiv(outputs, 16 * pieces) * 16)  # their outputs are aligned alike
    scratch = torch.empty(size, k, dtype=x.dtype, device=x.device)
    if bias is not None:
        bias = bias.to(x.dtype)
    for first in range(0, outputs, size):
        end = min(outputs, first + size)
        weight = scratch[: end - first]
        codes.widen(first, weight)
        to = out[:, first:end]
        if is_added:
            to.addmm_(x, weight.t())
            if bias is not None:
                to.add_(bias[first:end])
        elif bias is None:
            torch.mm(x, weight.t(), out=to)
        else:
            torch.addmm(bias[first:end], x, weight.t(), out=to)
