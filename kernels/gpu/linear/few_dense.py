"""multiply_few_dense: one row or two of x by a dense weight or by e4m3, without the tensor core.

For so few rows cuBLAS takes 6 to 10 us for the smaller matrices of a small model, of which memory
needs one to three; larger ones it reads at memory's rate. A thread loads 16 bytes of several rows
of the weight at once and multiplies them in float32; a program's threads are side by side in K, and
add their sums once, at the end. Called by dense.py and fp8.py.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 -- Triton knows no starred tuples

import torch
import triton
import triton.language as tl

from streamer.kernels.gpu.common import power_of_2

MAX_FEW = 2  # rows; a power of two, as what is compiled for fewer is
# Of a weight in x's dtype. On an H200 (2026-11-27) a token of Qwen3-0.6B, of whose matrices
# the head alone has more, took 0.09 ms less of 1.52, though decodes' splits became longer; one of
# Llama-3.1-8B, with this kernel for its matrices of 33 to 235 MB too, 0.3 ms more of 4.8.
MAX_BYTES = 16 << 20
MAX_COLUMNS = 1024  # of a step: 8 for each of 128 threads
MAX_OUTPUTS = 8  # of a program, all loaded before the first is multiplied
ENOUGH = 512  # programs, nearly four for each multiprocessor of an H100 or H200


@triton.jit(do_not_specialize=["rows"])
def _few_dense_kernel(
    # pointers: x [T, K], weight [N, K], scales float32 [N] or none, bias [N], out [T, N]
    x_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    # sizes
    rows,
    outputs,
    width,
    # strides
    x_row,
    weight_row,
    out_row,
    # meta
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_ADDED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (outputs): all rows of x, at most ROWS."""
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = n < outputs
    # int64: N * K passes 2**31 at 524,288 outputs of 4,096
    weight_at = weight_ptr + n.to(tl.int64)[:, None] * weight_row
    sums = ()
    for _ in tl.static_range(ROWS):
        sums = sums + (tl.zeros((OUTPUTS, COLUMNS), tl.float32),)
    for first in range(0, width, COLUMNS):
        k = first + tl.arange(0, COLUMNS)
        # [OUTPUTS, COLUMNS]
        is_inside = is_output[:, None] & (k < width)[None, :]
        w = tl.load(weight_at + k[None, :], mask=is_inside, other=0.0).to(tl.float32)
        new_sums = ()
        for m in tl.static_range(ROWS):
            x_at = x_ptr + tl.minimum(m, rows - 1) * x_row + k
            x = tl.load(x_at, mask=k < width, other=0.0).to(tl.float32)
            new_sums = new_sums + (sums[m] + w * x[None, :],)
        sums = new_sums
    for m in tl.static_range(ROWS):
        y = tl.sum(sums[m], 1)
        is_out = n < tl.where(m < rows, outputs, 0)
        at = out_ptr + m * out_row + n
        if HAS_SCALES:
            y *= tl.load(scales_ptr + n, mask=is_output, other=0.0)
        if HAS_BIAS:
            y += tl.load(bias_ptr + n, mask=is_output, other=0.0).to(tl.float32)
        if IS_ADDED:
            y += tl.load(at, mask=is_out, other=0.0).to(tl.float32)
        tl.store(at, y.to(out_ptr.dtype.element_ty), mask=is_out)


def serves(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether x [T, K] has so few rows, of 16 bits a number, and rows of both are whole."""
    is_few = 0 < len(x) <= MAX_FEW and x.element_size() == 2
    is_small = weight.element_size() == 1 or weight.nbytes <= MAX_BYTES
    return is_few and is_small and x.stride(1) == 1 and weight.stride(1) == 1


def multiply_few_dense(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, *,
    is_added: bool, scales: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """out [T, N] (rows of any stride) = x [T, K] @ weight.T * scales + bias, or is increased by
    that; weight [N, K] in x's dtype or e4m3, scales float32, one for each output."""
    rows, (outputs, width) = len(x), weight.shape
    size = MAX_OUTPUTS
    while size > 1 and triton.cdiv(outputs, size) < ENOUGH:
        size //= 2
    _few_dense_kernel[(triton.cdiv(outputs, size),)](
        x_ptr=x,
        weight_ptr=weight,
        scales_ptr=scales,
        bias_ptr=bias,
        out_ptr=out,
        rows=rows,
        outputs=outputs,
        width=width,
        x_row=x.stride(0),
        weight_row=weight.stride(0),
        out_row=out.stride(0),
        HAS_SCALES=scales is not None,
        HAS_BIAS=bias is not None,
        IS_ADDED=is_added,
        ROWS=power_of_2(rows),
        OUTPUTS=size,
        COLUMNS=min(MAX_COLUMNS, power_of_2(width)),
        num_warps=4,
    )
