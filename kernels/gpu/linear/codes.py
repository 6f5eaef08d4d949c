"""Codes: a quantized weight on the device, packed into int32 words; and its rows as a table.

Defines the layout that multiply.py reads; computes only rows of an embedding. Made by packed.py.

A word holds 8 codes of 4 bits or 4 of 8 that are 16 columns apart: column t * 16 * P + j * 16 + i,
P codes a word, is code j of word t * 16 + i. So a tile of 16 words is P slices of 16 neighbouring
columns, each unpacked by one shift and in the order in which the tensor core takes it. Columns
are padded to whole tiles; what multiplies the padding is masked.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from streamer.kernels.gpu.common import power_of_2
from streamer.kernels.weights import QuantizedWeight

SLICE = 16  # columns of a slice: the fewest that a tensor core multiplies
MAX_BLOCK = 1024  # columns a program of `rows`; unmeasured
# What scales and offsets may lose as float16, which halves what is read for them: half a step of
# float16, as finely as a weight is rounded in any case; and of a step between codes a 64th.
SCALE_LOSS, OFFSET_LOSS = 2.0**-11, 2.0**-6


class Codes:
    """Parts of one form, stacked along N.

    words        int32 [N, tiles * 16]
    scales       float16 or float32 [N, groups];  offsets  the same or None; float32 where the
                 weight is computed in it
    group        columns of a scale; 0: the whole row
    bits         4 or 8;  is_float  whether 8 bits are an e4m3 number
    zero, table  as in QuantizedWeight, the table int64 [2], a value a byte, the first ones lowest
    permutation  int64 [K] or None
    """

    __slots__ = (
        "bits", "group", "is_float", "offsets", "permutation", "scales", "shape", "table", "words",
        "zero",
    )  # fmt: skip

    def __init__(self, parts: Sequence[QuantizedWeight], dtype: torch.dtype) -> None:
        first = parts[0]
        k = first.shape[1]
        device = first.codes.device
        self.shape = (sum(part.shape[0] for part in parts), k)
        self.bits = packed_bits(first)
        self.is_float = first.codes.is_floating_point()
        self.zero = first.zero
        self.group = 0 if first.group >= k else first.group
        self.table = None
        if first.table is not None:
            self.table = first.table.to(device, torch.uint8).contiguous().view(torch.int64)
        self.permutation = None if first.permutation is None else first.permutation.to(device)
        self.words = torch.cat([pack(part.codes, self.bits) for part in parts])
        # by outputs, however they come: so cat makes them, and the kernel reads them
        scales, offsets = torch.cat([part.scales.contiguous() for part in parts]), None
        if first.offsets is not None:
            offsets = torch.cat([p.offsets.contiguous() for p in parts if p.offsets is not None])
        is_exact = dtype is torch.float32
        self.scales = scales if is_exact else _halved(scales, SCALE_LOSS)
        self.offsets = offsets
        if offsets is not None and not is_exact:
            self.offsets = _halved(offsets, OFFSET_LOSS, scales)

    @property
    def tiles(self) -> int:
        """Tiles of 16 words in a row."""
        return self.words.shape[1] // SLICE

    def in_order(self, x: torch.Tensor) -> torch.Tensor:
        """The columns of x [T, K] in the order of the codes'."""
        return x if self.permutation is None else x.index_select(1, self.permutation)

    def rows(self, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of the weight for tokens [T] -> [T, K]."""
        count, width = tokens.shape[0], self.shape[1]
        out = torch.empty(count, width, dtype=dtype, device=self.words.device)
        block = min(MAX_BLOCK, power_of_2(width))
        _rows_kernel[(count, triton.cdiv(width, block))](
            tokens_ptr=tokens,
            out_ptr=out,
            width=width,
            BLOCK=block,
            num_warps=4,
            **self.arguments(),
        )
        if self.permutation is None:
            return out
        return torch.empty_like(out).index_copy_(1, self.permutation, out)

    def arguments(self) -> dict[str, object]:
        """A kernel's arguments that describe the codes."""
        return {
            "words_ptr": self.words,
            "scales_ptr": self.scales,
            "offsets_ptr": self.offsets,
            "table_ptr": self.table,
            "row_words": self.words.shape[1],
            "groups": self.scales.shape[1],
            "GROUP": self.group,
            "BITS": self.bits,
            "ZERO": self.zero,
            "IS_FLOAT": self.is_float,
            "HAS_OFFSETS": self.offsets is not None,
            "HAS_TABLE": self.table is not None,
        }


def packed_bits(weight: QuantizedWeight) -> int:
    """Bits that a code takes here."""
    return 4 if weight.bits <= 4 else 8


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [N, K], a byte each -> words int32 [N, tiles * 16]."""
    per, (n, k) = 32 // bits, codes.shape
    tiles = -(-k // (SLICE * per))
    whole = torch.zeros(n, tiles * SLICE * per, dtype=torch.uint8, device=codes.device)
    whole[:, :k] = codes.view(torch.uint8)
    slices = whole.view(n, tiles, per, SLICE)
    words = torch.zeros(n, tiles, SLICE, dtype=torch.int32, device=codes.device)
    for j in range(per):
        words |= slices[:, :, j].int() << (bits * j)
    return words.view(n, -1)


def _halved(values: torch.Tensor, loss: float, measure: torch.Tensor | None = None) -> torch.Tensor:
    """As float16 where none changes by more than a share of `measure`, or itself; else float32."""
    half = values.half()
    limit = loss * (values if measure is None else measure).abs()
    is_close = (half.float() - values).abs() <= limit
    return half.contiguous() if bool(is_close.all()) else values.float().contiguous()


@triton.jit
def halves_of(table_ptr, HAS_TABLE: tl.constexpr):
    """The table as two scalars, loaded before the loop: a load by code would not be pipelined."""
    low = tl.zeros((), tl.int64)
    high = low
    if HAS_TABLE:
        low, high = tl.load(table_ptr), tl.load(table_ptr + 1)
    return low, high


@triton.jit
def numbers(codes, halves, ZERO: tl.constexpr, IS_FLOAT: tl.constexpr, HAS_TABLE: tl.constexpr):
    """Codes int32 as float32, before scale and offset; `halves` of halves_of."""
    if IS_FLOAT:
        x = codes.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif HAS_TABLE:
        half = tl.where(codes < 8, halves[0], halves[1])
        x = ((half >> ((codes & 7) * 8).to(tl.int64)) & 255).to(tl.int32).to(tl.float32) - ZERO
    else:
        x = codes.to(tl.float32) - ZERO
    return x


@triton.jit
def _rows_kernel(
    # pointers: tokens int64 [T], those of Codes, out [T, K]
    tokens_ptr,
    words_ptr,
    scales_ptr,
    offsets_ptr,
    table_ptr,
    out_ptr,
    # sizes
    width,
    row_words,
    groups,
    # meta
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[t] = the codes' row tokens[t], as numbers."""
    # int64: a table of 152,000 rows of 16,384 has more than 2**31 elements
    t = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = k < width
    token = tl.load(tokens_ptr + t).to(tl.int64)
    PER: tl.constexpr = 32 // BITS
    tile, j = k // (16 * PER), k % (16 * PER) // 16
    # [BLOCK] each
    words = tl.load(words_ptr + token * row_words + tile * 16 + k % 16, mask=is_inside, other=0)
    codes = (words >> (BITS * j)) & ((1 << BITS) - 1)
    x = numbers(codes, halves_of(table_ptr, HAS_TABLE), ZERO, IS_FLOAT, HAS_TABLE)
    at = token * groups + k // (GROUP if GROUP > 0 else width)
    x *= tl.load(scales_ptr + at, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_OFFSETS:
        x += tl.load(offsets_ptr + at, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * width + k, x.to(out_ptr.dtype.element_ty), mask=is_inside)
