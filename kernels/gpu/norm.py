"""rms_norm, of all rows or of those named, and with a residual added first.

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
    # pointers: x, added [T, H], weight [H], rows int64 [S], out [S, H]
    x_ptr,
    added_ptr,
    weight_ptr,
    rows_ptr,
    out_ptr,
    # sizes
    width,
    eps,
    # strides
    x_row,
    added_row,
    # meta
    HAS_ADDED: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[s] = x[row] / sqrt(mean(x[row]**2) + eps) * weight, after x[row] += added[row]."""
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
    if HAS_ADDED:
        x += tl.load(added_ptr + row * added_row + column, mask=is_inside, other=0.0).to(tl.float32)
        # The norm sees what the residual stream holds from now on.
        x = x.to(x_ptr.dtype.element_ty)
        tl.store(at, x, mask=is_inside)
        x = x.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=is_inside, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    y = x * factor * weight
    tl.store(out_ptr + out_row * width + column, y.to(out_ptr.dtype.element_ty), mask=is_inside)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, rows: torch.Tensor | None
) -> torch.Tensor:
    """See ops.rms_norm."""
    count, width = x.shape[0] if rows is None else rows.shape[0], x.shape[1]
    out = torch.empty(count, width, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, rows, out, eps)
    return out


def add_rms_norm(
    residual: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """residual += added, in place, then rms_norm of it -> [T, H]; one pass over both."""
    out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    _launch(residual, added, weight, None, out, eps)
    return out


def _launch(
    x: torch.Tensor,
    added: torch.Tensor | None,
    weight: torch.Tensor,
    rows: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
) -> None:
    width = x.shape[1]
    block = power_of_2(width)
    _norm_kernel[(out.shape[0],)](
        x_ptr=x,
        added_ptr=added,
        weight_ptr=weight,
        rows_ptr=rows,
        out_ptr=out,
        width=width,
        eps=eps,
        x_row=x.stride(0),
        added_row=0 if added is None else added.stride(0),
        HAS_ADDED=added is not None,
        HAS_ROWS=rows is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),  # 16 elements a thread; unmeasured
    )
