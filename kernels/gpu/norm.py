"""rms_norm, of all rows or of the given ones. The matrix product before it adds the residual.

One program a row; the row stays in registers between its two uses. A row's result depends on that
row alone. Called through backend.py.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from streamer.kernels.gpu.common import power_of_2


@triton.jit
def _norm_kernel(
    # pointers: x [T, H], weight [H], rows int64 [S], out [S, H]
    x_ptr,
    weight_ptr,
    rows_ptr,
    out_ptr,
    # sizes
    width,
    eps,
    # strides
    x_row,
    # meta
    HAS_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[s] = x[row] / sqrt(mean(x[row]**2) + eps) * weight."""
    # int64: rows * H passes 2**31 at 262,144 rows of 8,192
    out_row = tl.program_id(0).to(tl.int64)
    row = out_row
    if HAS_ROWS:
        row = tl.load(rows_ptr + out_row)
    column = tl.arange(0, BLOCK)
    is_inside = column < width
    at = x_ptr + row * x_row + column
    # [BLOCK]
    x = tl.load(at, mask=is_inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=is_inside, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    y = x * factor * weight
    tl.store(out_ptr + out_row * width + column, y.to(out_ptr.dtype.element_ty), mask=is_inside)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """See Backend.rms_norm."""
    count, width = x.shape[0] if rows is None else rows.shape[0], x.shape[1]
    out = torch.empty(count, width, dtype=x.dtype, device=x.device)
    block = power_of_2(width)
    _norm_kernel[(count,)](
        x_ptr=x,
        weight_ptr=weight,
        rows_ptr=rows,
        out_ptr=out,
        width=width,
        eps=eps,
        x_row=x.stride(0),
        HAS_ROWS=rows is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),  # 16 elements a thread; unmeasured
    )
    return out
