"""multiply_many: x of many rows by a weight of codes, pieces of which are widened for cuBLAS.

A piece of outputs at a time becomes a dense matrix in memory that the call allocates, in which the
next one takes its place; cuBLAS multiplies by it into the outputs' columns. Called by multiply.py.
"""

import torch
import triton

from streamer.kernels.gpu.linear.codes import Codes

# Of a widened piece. An H200 took 384 us for 1,024 rows by 28,672 x 4,096 in 4 bits (dense 308); in
# pieces of 64 MiB 414, of 32 388, of 16 413, and for 256 rows 172, 173, 182 and 252 (2026-11-27). A
# head of 152,000 outputs would be 1.2 GB.
PIECE_BYTES = 256 << 20


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
