"""Codes: a quantized weight on the device, packed into int32 words; and widened, as rows.

Defines the layout that few_rows.py, multiply.py and many_rows.py read, and what a code is as a
number. Computes only rows of the weight: of an embedding, or all of them. Made by packed.py.

A word holds P codes, 8 of 4 bits or 4 of 8, and 4 words are a block of 4 * P neighbouring columns:
column b * 4 * P + 4 * e + q is code e of word 4 * b + q. So a thread that loads 16 bytes has whole
columns of one or two groups, to which a code each of the 4 words is 4 neighbours. Columns are
padded to whole tiles of 4 blocks; what multiplies the padding is zero.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 -- Triton knows no starred tuples

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from streamer.kernels.gpu.common import power_of_2
from streamer.kernels.weights import QuantizedWeight

SLICE = 16  # columns of the smallest group
BLOCK = 4  # words that a thread loads at once
TILE = 4  # blocks of a row's padding, and of the tensor core's step in multiply.py
MAX_WIDENED = 128  # blocks a program of `rows` and `widen`; 64 and 256 gain nothing on an H200
# Float32 of which the lowest bit of a code of 4 bits is one where it is put at bit 19 or 15 of the
# mantissa, and of a code of 8 at bit 15: 16 + code and 256 + code by a shift, which two codes of 4
# bits share, and one operation of three inputs; an integer's conversion is a quarter as fast.
# They are a kernel's arguments, since such an operation takes one immediate value, the mask.
LIFTS = {"lift16": 0x41800000, "lift256": 0x43800000}
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
    zero, table  as in QuantizedWeight, the table int64 [2 + 8]: a value a byte, the first ones
                 lowest, and then values minus zero as float32
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
            values = first.table.to(device, torch.uint8).contiguous()
            numbers = values.float() - self.zero
            self.table = torch.cat([values.view(torch.int64), numbers.view(torch.int64)])
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
    def blocks(self) -> int:
        """Blocks of 4 words in a row."""
        return self.words.shape[1] // BLOCK

    def in_order(self, x: torch.Tensor) -> torch.Tensor:
        """The columns of x [T, K] in the order of the codes'."""
        return x if self.permutation is None else x.index_select(1, self.permutation)

    def rows(self, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of the weight for tokens [T] -> [T, K]."""
        out = torch.empty(len(tokens), self.shape[1], dtype=dtype, device=self.words.device)
        self._widen(tokens, 0, out)
        if self.permutation is None:
            return out
        return torch.empty_like(out).index_copy_(1, self.permutation, out)

    def widen(self, first: int, out: torch.Tensor) -> None:
        """out [n, K] = the weight's rows from `first`, columns in the order of the codes'."""
        self._widen(None, first, out)

    def _widen(self, tokens: torch.Tensor | None, first: int, out: torch.Tensor) -> None:
        block = min(MAX_WIDENED, power_of_2(self.blocks))
        _rows_kernel[(len(out), triton.cdiv(self.blocks, block))](
            tokens_ptr=tokens,
            out_ptr=out,
            first=first,
            width=self.shape[1],
            BLOCKS=block,
            num_warps=4,
            **self.arguments(),
        )

    def arguments(self) -> dict[str, object]:
        """A kernel's arguments that describe the codes."""
        return {
            **LIFTS,
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
    """Codes [N, K], a byte each -> words int32 [N, blocks * 4]."""
    per, (n, k) = 32 // bits, codes.shape
    blocks = -(-k // (TILE * BLOCK * per)) * TILE
    whole = torch.zeros(n, blocks * BLOCK * per, dtype=torch.uint8, device=codes.device)
    whole[:, :k] = codes.view(torch.uint8)
    columns = whole.view(n, blocks, per, BLOCK)
    words = torch.zeros(n, blocks, BLOCK, dtype=torch.int32, device=codes.device)
    for e in range(per):
        words |= columns[:, :, e].int() << (bits * e)
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
def lifted(words, lift16, lift256, E: tl.constexpr, BITS: tl.constexpr):
    """Code E of each word as float32, plus 16 for an odd one of 4 bits, else plus 256."""
    SHIFT: tl.constexpr = 8 * E - 15 if BITS == 8 else 4 * (E | 1) - 19
    moved = words >> SHIFT if SHIFT > 0 else words << -SHIFT
    if BITS == 8:
        x = (moved & 0x007F8000) | lift256
    elif E % 2 == 1:
        x = (moved & 0x00780000) | lift16
    else:
        x = (moved & 0x00078000) | lift256
    return x.to(tl.float32, bitcast=True)


@triton.jit
def number(
    words, lift16, lift256, halves, E: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr,
    IS_FLOAT: tl.constexpr, HAS_TABLE: tl.constexpr,
):  # fmt: skip
    """Code E of each word as float32, before scale and offset; `halves` of halves_of."""
    if IS_FLOAT:
        code = (words >> (8 * E)).to(tl.uint8)
        x = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif HAS_TABLE:
        half = tl.where((words >> (4 * E)) & 8 == 0, halves[0], halves[1])
        value = (half >> (((words >> (4 * E)) & 7) * 8).to(tl.int64)).to(tl.int32) & 255
        x = (value << 15 | lift256).to(tl.float32, bitcast=True) - (256 + ZERO)
    else:
        x = lifted(words, lift16, lift256, E, BITS)
        x -= (16 if BITS == 4 and E % 2 == 1 else 256) + ZERO
    return x


@triton.jit
def looked_up(words, table_ptr, E: tl.constexpr):
    """Code E of each word of 4 bits [BLOCKS, N, 4] as float32, by a load, for loops that are not
    pipelined; it says that blocks lie closest for no more than the lanes' order."""
    numbers = (table_ptr + 2).to(tl.pointer_type(tl.float32), bitcast=True)
    return tl.load(numbers + tl.max_contiguous((words >> (4 * E)) & 15, [2, 1, 1]))


@triton.jit
def in_order(w, PER: tl.constexpr):
    """The tuple w of numbers [..., 4], one for each code of a word -> [..., 4, 2, 2 (, 2)], where
    the dimensions after the words are the bits of a code's place in its word, lowest first."""
    x = tl.join(tl.join(w[0], w[1]), tl.join(w[2], w[3]))
    if PER == 8:
        x = tl.join(x, tl.join(tl.join(w[4], w[5]), tl.join(w[6], w[7])))
    return x


@triton.jit
def group_of(block, half, groups, GROUP: tl.constexpr, COLUMNS: tl.constexpr):
    """The group of a block of so many columns, or of its half; of those beyond K the last."""
    g = block * 0
    if GROUP > 0:
        g = tl.minimum((block * COLUMNS + half * 16) // GROUP, groups - 1)
    return g


@triton.jit
def scales_of(
    scales_ptr, offsets_ptr, groups_at, block, groups, GROUP: tl.constexpr, COLUMNS: tl.constexpr,
    HALVES: tl.constexpr, PER_GROUP: tl.constexpr, HAS_OFFSETS: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """A tuple of what rows that start at groups_at have for blocks: scales of them or of their
    halves, then offsets. ORDER says which dimension lies closest, for no more than to have lanes
    load what their words need."""
    found = ()
    if PER_GROUP:
        for half in tl.static_range(HALVES):
            g = groups_at + group_of(block, half, groups, GROUP, COLUMNS)
            found = found + (tl.load(scales_ptr + tl.max_contiguous(g, ORDER)),)
        if HAS_OFFSETS:
            for half in tl.static_range(HALVES):
                g = groups_at + group_of(block, half, groups, GROUP, COLUMNS)
                found = found + (tl.load(offsets_ptr + tl.max_contiguous(g, ORDER)),)
    return found


@triton.jit(do_not_specialize=["first", "lift16", "lift256"])
def _rows_kernel(
    # pointers: tokens int64 [T] or None, those of Codes, out [T, K]
    tokens_ptr,
    words_ptr,
    scales_ptr,
    offsets_ptr,
    table_ptr,
    out_ptr,
    # sizes
    first,
    width,
    row_words,
    groups,
    # LIFTS
    lift16,
    lift256,
    # meta
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Program (row, blocks): out[t] = the codes' row tokens[t] or first + t, as numbers."""
    PER: tl.constexpr = 32 // BITS
    COLUMNS: tl.constexpr = 4 * PER
    HALVES: tl.constexpr = 2 if GROUP > 0 and GROUP < COLUMNS else 1
    # int64: a table of 152,000 rows of 16,384 has more than 2**31 elements
    t = tl.program_id(0).to(tl.int64)
    n = t + first
    if tokens_ptr is not None:
        n = tl.load(tokens_ptr + t).to(tl.int64)
    start = tl.program_id(1) * BLOCKS
    # blocks beyond the row are the last one, and not stored
    block = tl.minimum(start + tl.arange(0, BLOCKS), row_words // 4 - 1)
    halves = halves_of(table_ptr, HAS_TABLE)
    # [BLOCKS, 4]
    words = tl.load(words_ptr + n * row_words + (block * 4)[:, None] + tl.arange(0, 4)[None, :])
    w = ()
    for half in tl.static_range(HALVES):
        at = n * groups + group_of(block, half, groups, GROUP, COLUMNS)
        scale = tl.load(scales_ptr + at).to(tl.float32)
        offset = scale
        if HAS_OFFSETS:
            offset = tl.load(offsets_ptr + at).to(tl.float32)
        for e in tl.static_range(PER // HALVES):
            x = number(words, lift16, lift256, halves, half * (PER // 2) + e, BITS, ZERO, IS_FLOAT,
                       HAS_TABLE)  # fmt: skip
            x *= scale[:, None]
            if HAS_OFFSETS:
                x += offset[:, None]
            w = w + (x.to(out_ptr.dtype.element_ty),)
    x = in_order(w, PER)
    x = tl.permute(x, (0, 3, 2, 1) if PER == 4 else (0, 4, 3, 2, 1))
    k = start * COLUMNS + tl.arange(0, BLOCKS * COLUMNS)
    tl.store(out_ptr + t * width + k, x.reshape(BLOCKS * COLUMNS), mask=k < width)
