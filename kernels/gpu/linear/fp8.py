"""FP8 products: x quantized for each token, by torch's own kernel, where the device has them.

One row or two are multiplied as they are (few_dense.py): torch's kernel and its preparations take
longer than reading the weight.

Serves weights of e4m3 with a scale for each output; those with groups are widened instead
(multiply.py). Called by packed.py.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from streamer.kernels.gpu.cache.quantize import scales_and_codes
from streamer.kernels.gpu.common import power_of_2
from streamer.kernels.gpu.linear.few_dense import multiply_few_dense, serves
from streamer.kernels.quantized import LIMITS
from streamer.kernels.weights import QuantizedWeight

E4M3 = torch.float8_e4m3fn
CAPABILITY = (8, 9)  # compute capability from which a device multiplies e4m3
MULTIPLE = 16  # of K and N that torch._scaled_mm takes
MAX_WIDTH = 32_768  # columns of a row that one program quantizes


class Fp8:
    """A weight [N, K] of e4m3 with a scale for each output."""

    __slots__ = ("_codes", "_scales", "shape")

    def __init__(self, parts: list[QuantizedWeight]) -> None:
        self._codes = torch.cat([part.codes.view(torch.uint8) for part in parts]).view(E4M3)
        self._scales = torch.cat([part.scales for part in parts]).float().view(1, -1).contiguous()
        self.shape = (self._codes.shape[0], self._codes.shape[1])

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, *, is_added: bool
    ) -> None:
        """As multiply.multiply, with the rounding of more than two rows of x to e4m3.

        The sums keep float32: use_fast_accum would leave Hopper 14 bits of them.
        """
        if not len(x):
            return
        if serves(x, self._codes):
            multiply_few_dense(x, self._codes, bias, out, is_added=is_added, scales=self._scales)
            return
        codes, scales = quantize_rows(x)
        y = torch._scaled_mm(
            codes,
            self._codes.t(),
            scale_a=scales,
            scale_b=self._scales,
            bias=bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=False,
        )
        if is_added:
            out.add_(y)
        else:
            out.copy_(y)


def can_multiply(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """Whether torch._scaled_mm takes this weight on its device; its result is bfloat16."""
    n, k = weight.shape
    return (
        weight.codes.dtype is E4M3
        and weight.group >= k
        and weight.permutation is None
        and dtype is torch.bfloat16
        and n % MULTIPLE == k % MULTIPLE == 0
        and k <= MAX_WIDTH
        and has_products(weight.codes.device)
    )


def has_products(device: torch.device) -> bool:
    """Whether the device multiplies e4m3."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY


@triton.jit
def _quantize_kernel(
    # pointers: x [T, K], codes e4m3 [T, K], scales float32 [T]
    x_ptr,
    codes_ptr,
    scales_ptr,
    # sizes
    width,
    # strides
    x_row,
    # meta
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row's scale, so that its largest element becomes the largest code, and its codes."""
    row = tl.program_id(0).to(tl.int64)  # int64: T * K passes 2**31 at 262,144 rows of 8,192
    k = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_row + k, mask=k < width, other=0.0).to(tl.float32)
    # [1], [1, BLOCK]
    scales, codes = scales_and_codes(x[None, :], LIMIT, False)
    to = codes_ptr + row * width + k[None, :]
    tl.store(to, codes.to(codes_ptr.dtype.element_ty), mask=(k < width)[None, :])
    tl.store(scales_ptr + row + tl.arange(0, 1), scales)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] -> e4m3 [T, K], scales float32 [T, 1]."""
    rows, width = x.shape
    codes = torch.empty(rows, width, dtype=E4M3, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = power_of_2(width)
    _quantize_kernel[(rows,)](
        x_ptr=x,
        codes_ptr=codes,
        scales_ptr=scales,
        width=width,
        x_row=x.stride(0),
        LIMIT=LIMITS[E4M3],
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return codes, scales
