"""Gated activations: act(gate) * up, where the first half of a row is the gates.

One pass, computed in float32. Called by dense.py.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from streamer.kernels.gpu.common import power_of_2

MAX_BLOCK = 1024  # columns a program; unmeasured
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


@triton.jit
def _gate_kernel(
    # pointers: x [T, 2 * width], out [T, width]
    x_ptr,
    out_ptr,
    # sizes
    width,
    # strides
    x_row,
    # meta
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = act(x[:, :width]) * x[:, width:]."""
    # int64: T * 2 * width passes 2**31 at 37,500 tokens of 2 * 28,672
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = column < width
    at = x_ptr + t * x_row + column
    # [BLOCK] each
    gate = tl.load(at, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=is_inside, other=0.0).to(tl.float32)
    if ACTIVATION == 0:
        act = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == 1:
        act = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # gelu's tanh form: 0.5 * (1 + tanh(z)) is 1 / (1 + exp(-2 * z))
        z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        act = gate / (1.0 + tl.exp(-2.0 * z))
    y = act * up
    tl.store(out_ptr + t * width + column, y.to(out_ptr.dtype.element_ty), mask=is_inside)


def gate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """x [T, 2 * N], `activation` as in Backend.pack_weight -> [T, N]."""
    count, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(count, width, dtype=x.dtype, device=x.device)
    block = min(MAX_BLOCK, power_of_2(width))
    _gate_kernel[(count, triton.cdiv(width, block))](
        x_ptr=x,
        out_ptr=out,
        width=width,
        x_row=x.stride(0),
        ACTIVATION=ACTIVATIONS[activation],
        BLOCK=block,
        num_warps=4,
    )
    return out
