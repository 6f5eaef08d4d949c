"""Packed quantized matrices over quantized_linear.c: 4, 6 or 8 bits, activations in int8.

Three forms serve every format: codes of at most 4 bits are packed as 4, of 5 and 6 as 6, others as
8; scales and offsets as float16 where that is exact or rounds within 2**-11, else as float32;
offsets that are zero points of 4-bit codes as these, in 4 bits: 4.63 bits a weight in groups of 32
instead of 5. So GGUF's float16 scales stay exact, bfloat16 ones are unless they are very small, and
products such as Q4_K's 6-bit scale times its block's are rounded, by a tenth of what rounding
activations costs.

Activations have a scale for every 32 columns, or 16 where weights have one for 16; beside weights
of at most 6 bits for every 128, which costs no accuracy there. The bundled model, its weights
rounded to the nearest in groups of 128 and activations exact, then with a scale for 16, 32, 64 and
128, KL divergence from float32 (2026-11-22): 4 bits 0.0144, then 0.0145, 0.0145, 0.0144, 0.0144;
8 bits 0.000038, then 0.000062, 0.000073, 0.000090, 0.000119. Called by linear.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch

from streamer.kernels.cpu.blocks import LAYOUTS, TALL, bits_of, layout
from streamer.kernels.cpu.memory import chunks, new_panels
from streamer.kernels.cpu.program import Call, Kind, issue, new_rows, team
from streamer.kernels.weights import NotFinite, QuantizedWeight, Weight, dequantize_finite

# quantized_linear.c's form
EIGHT_BITS, SIX_BITS, OFFSETS, WIDE_SCALES, ZEROS, ZERO = 1, 2, 4, 8, 16, 32
NOT_FINITE = 2  # pack.c's fault
TALL_SCALES, TALL_BESIDE = 256, 512  # and with its layout
TOGETHER = 4  # groups whose zeros lie together
BLOCK = 32  # columns that share a scale of the activations,
SPAN = 128  # and beside weights of few bits: beyond, integer sums may exceed dot.h's 2**22
FEW_BITS = 6
RECORD_BYTES = 16  # quantize.c's, before a block's codes

Records = dict[tuple[int, int, int, int], torch.Tensor]  # by block, span, zero, permutation


class Quantized:
    """A matrix of codes, of parts that `runs` has put together. See linear.Matrix."""

    __slots__ = (
        "_bias",
        "_dtype",
        "_packed",
        "_permutation",
        "_sizes",
        "_table",
        "num_bytes",
        "shape",
    )

    def __init__(
        self,
        parts: Sequence[QuantizedWeight],
        bias: torch.Tensor | None,
        flags: int,
        dtype: torch.dtype,
    ) -> None:
        parts = [as_integers(part) for part in parts]
        if packed_bits(parts[0]) > 4 or parts[0].table is not None:  # zeros take 4 bits
            parts = [part.with_offsets() for part in parts]
        first = parts[0]
        n, k = sum(part.shape[0] for part in parts), first.shape[1]
        block, span = block_of(first)
        group = -(-k // block) * block if first.group >= k else first.group
        self._bias, self._table, self._permutation = bias, first.table, first.permutation
        self._dtype = dtype
        self.shape = (n, k)
        pieces = pieces_of(parts, has_gates=flags > 1)
        form = {4: 0, 6: SIX_BITS, 8: EIGHT_BITS}[packed_bits(first)] + ZERO * first.zero
        form += ZEROS if first.zeros is not None else OFFSETS * first.has_offsets
        for scales in (0, WIDE_SCALES):
            self._sizes = (group, block, span, form + scales)
            self._packed = new_panels(
                n, _panel_bytes(k, group, block, form + scales), has_gates=flags > 1
            )
            faults = self._pack(pieces, flags)
            if faults & NOT_FINITE:
                raise NotFinite("scales, offsets or codes: some are NaN or infinite")
            if not faults:
                break
            chunks.give_back(self._packed.view(-1))
        self.num_bytes = self._packed.numel()

    def _pack(self, pieces: Sequence[tuple[QuantizedWeight, ...]], flags: int) -> int:
        """Fill the panels from pieces: parts, or gates and ups; the faults of pack.c."""
        group, block, _, form = self._sizes
        panels = self._packed
        found = 0
        for piece in pieces:
            part = piece[0]
            n, k = sum(p.shape[0] for p in piece), part.shape[1]
            count = -(-n // (2 * team.lanes)) if len(piece) == 1 else len(panels)
            panels, here = panels[count:], panels[:count]
            faults = torch.zeros(count, dtype=torch.uint8)
            (codes, scales, beside), *ups = [_pointers(p) for p in piece]
            pointers = (codes, here, scales, beside, part.permutation, *(ups or [(None,) * 3])[0])
            layout, side_by_side = _laid(part)
            sizes = (k, n, group, block, form, layout, bits_of(part), side_by_side)
            call = Call(
                Kind.PACK_QUANTIZED, here, torch.float32, (*pointers, faults), sizes, flags=flags
            )
            issue(call)
            found |= int(np.bitwise_or.reduce(faults.numpy()))
        return found

    def multiply(self, x: torch.Tensor, out: torch.Tensor, flags: int, records: Records) -> None:
        """See linear.Matrix."""
        n, k = self.shape
        (_, block, span, form), permutation = self._sizes, self._permutation
        key = (block, span, form // ZERO, 0 if permutation is None else permutation.data_ptr())
        if key not in records:
            records[key] = quantize(x, block, span, form // ZERO, permutation)
        codes = records[key]
        pointers = (codes, self._packed, self._bias, out, self._table)
        sizes = (k, n, codes.stride(0), out.stride(0), *self._sizes)
        issue(Call(Kind.QUANTIZED_LINEAR, x, x.dtype, pointers, sizes, flags=flags))

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """See ops.Linear."""
        n, k = self.shape
        out = new_rows(tokens, k, dtype=self._dtype)
        pointers = (tokens, self._packed, None, out, self._table, self._permutation)
        sizes = (k, n, 0, 0, *self._sizes)
        issue(Call(Kind.QUANTIZED_ROWS, tokens, self._dtype, pointers, sizes))
        return out


def quantize(
    x: torch.Tensor, block: int, span: int, zero: int, permutation: torch.Tensor | None
) -> torch.Tensor:
    """x [T, K] as the records of quantize.c, uint8 [T, bytes]."""
    k = x.shape[1]
    size = -(-k // block) * (RECORD_BYTES + block)
    records = new_rows(x, size, dtype=torch.uint8)
    sizes = (k, block, x.stride(0), size, zero, span)
    issue(Call(Kind.QUANTIZE, x, x.dtype, (x, records, permutation), sizes))
    return records


def packed_bits(weight: QuantizedWeight) -> int:
    """Bits that a code takes."""
    return 4 if weight.bits <= 4 else 6 if weight.bits <= FEW_BITS else 8


def block_of(weight: QuantizedWeight) -> tuple[int, int]:
    """Columns whose products are summed as integers, and columns that share a scale of the
    activations; ValueError for a group that holds no block."""
    k, group = weight.shape[1], weight.group
    for block in (SPAN, SPAN // 2, BLOCK, BLOCK // 2):
        if weight.bits > FEW_BITS and block > BLOCK:
            continue
        if group >= k or group % block == 0:
            return block, SPAN if weight.bits <= FEW_BITS else block
    raise ValueError(f"groups of {group} columns: the native kernels need a multiple of 16")


def _panel_bytes(k: int, group: int, block: int, form: int) -> int:
    """Bytes of a panel, as quantized_linear.c has it."""
    width, groups = 2 * team.lanes, -(-k // group)
    bits = 8 if form & EIGHT_BITS else 6 if form & SIX_BITS else 4
    header = width * (4 if form & WIDE_SCALES else 2) * (2 if form & OFFSETS else 1)
    zeros = -(-groups // TOGETHER) * TOGETHER * team.lanes if form & ZEROS else 0
    return groups * header + -(-k // block) * block * width // 8 * bits + zeros


def _pointers(part: QuantizedWeight) -> tuple[torch.Tensor | None, ...]:
    """Codes, and scales and offsets or zeros that are not among them."""
    beside = part.offsets if part.zeros is None else part.zeros
    return part.codes, part.scales if len(part.scales) else None, beside


def _laid(part: QuantizedWeight) -> tuple[int, int]:
    """pack.c's layout, and outputs side by side: those of the whole matrix that was read, of which
    codes, scales and what is beside them are the same rows."""
    name = "BYTES" if part.layout is None else part.layout.name
    beside = part.offsets if part.zeros is None else part.zeros
    layout, outputs = LAYOUTS.index(name), 0
    if name in TALL:
        outputs = part.codes.stride(0) * (8 if name == "OUTPUTS" else 1)
    for numbers, flag in ((part.scales, TALL_SCALES), (beside, TALL_BESIDE)):
        if numbers is not None and not _is_by_rows(numbers):
            layout, outputs = layout + flag, numbers.stride(1)
    return layout, outputs


def _is_by_rows(numbers: torch.Tensor) -> bool:
    """Whether the numbers [N, groups] of an output lie side by side, not the outputs of a group."""
    return numbers.dim() < 2 or numbers.shape[1] < 2 or numbers.stride(1) == 1


def pieces_of(
    parts: Sequence[QuantizedWeight], *, has_gates: bool
) -> list[tuple[QuantizedWeight, ...]]:
    """The parts of a run in the pieces that fill whole panels: each by itself, or gates and ups;
    parts that end within a panel are stacked before."""
    parts = [_contiguous(part) for part in parts]
    if not has_gates:
        if all(part.shape[0] % (2 * team.lanes) == 0 for part in parts[:-1]):
            return [(part,) for part in parts]
        return [(_stacked(parts),)]
    first, *others = parts
    is_pair = [part.shape for part in others] == [first.shape] and _is_laid_alike(*parts)
    if is_pair and _laid(others[0]) == _laid(first):
        return [tuple(parts)]
    whole = _stacked(parts)
    half = whole.shape[0] // 2
    if whole.layout is not None and whole.layout.name == "OUTPUTS" and half % 8:
        whole = whole.unpacked()
    return [(_cut(whole, 0, half), _cut(whole, half, 2 * half))]


def _contiguous(part: QuantizedWeight) -> QuantizedWeight:
    return dataclasses.replace(
        part,
        codes=part.codes.contiguous(),
        scales=_in_line(part.scales),
        offsets=None if part.offsets is None else _in_line(part.offsets),
        zeros=None if part.zeros is None else _in_line(part.zeros),
    )


def _in_line(numbers: torch.Tensor) -> torch.Tensor:
    """The numbers without gaps, by outputs or by groups, as they are."""
    return numbers if numbers.dim() == 2 and numbers.t().is_contiguous() else numbers.contiguous()


def _is_laid_alike(a: QuantizedWeight, b: QuantizedWeight) -> bool:
    """Whether codes lie in the same layout."""
    names = [None if part.layout is None else (part.layout.name, part.bits) for part in (a, b)]
    return names[0] == names[1]


def _cut(weight: QuantizedWeight, first: int, last: int) -> QuantizedWeight:
    """Rows as views; of words of several outputs whole ones."""
    layout, codes, rows = weight.layout, weight.codes, slice(first, last)
    if layout is not None:
        layout = dataclasses.replace(layout, shape=(last - first, layout.shape[1]))
    if layout is None or not layout.is_tall:
        codes = codes[rows]
    else:
        outputs = weight.shape[0] // codes.shape[1]  # of a word
        codes = codes[:, first // outputs : last // outputs]
    return dataclasses.replace(
        weight,
        codes=codes,
        scales=weight.scales[rows],
        offsets=None if weight.offsets is None else weight.offsets[rows],
        layout=layout,
        zeros=None if weight.zeros is None else weight.zeros[rows],
    )


def as_integers(weight: QuantizedWeight) -> QuantizedWeight:
    """float8 codes as 8-bit integers in groups of 32, or of 16 where scales are for so many, made
    when they are packed: the error is a fifth of theirs, and adds a fiftieth to it (the bundled
    model, and normal numbers)."""
    if weight.codes.dtype is not torch.float8_e4m3fn:
        return weight
    codes, stored = weight.codes.view(torch.uint8), layout("FLOAT8", *weight.shape)
    scales, order = weight.scales.contiguous(), weight.permutation
    integers = QuantizedWeight(codes, scales, BLOCK, 8, 128, permutation=order, layout=stored)
    return dataclasses.replace(integers, group=min(BLOCK, bits_of(integers)))


def runs(parts: Sequence[Weight]) -> list[list[Weight]]:
    """The parts, neighbours of one form together."""
    found: list[list[Weight]] = []
    for part in parts:
        if found and _is_one_form(found[-1][0], part):
            found[-1].append(part)
        else:
            found.append([part])
    return found


def _is_one_form(a: Weight, b: Weight) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype is b.dtype
    return (
        (a.group, packed_bits(a), a.zero, a.codes.is_floating_point())
        == (b.group, packed_bits(b), b.zero, b.codes.is_floating_point())
        and _same(a.table, b.table)
        and _same(a.permutation, b.permutation)
        and (a.has_offsets, a.zeros is None) == (b.has_offsets, b.zeros is None)
    )


def _stacked(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Parts of one form as one."""
    if len(parts) == 1:
        return parts[0]
    if not all(_is_laid_alike(part, parts[0]) for part in parts):
        parts = [part.unpacked() for part in parts]
    offsets = [part.offsets for part in parts if part.offsets is not None]
    zeros = [part.zeros for part in parts if part.zeros is not None]
    layout = parts[0].layout
    if layout is not None:
        n = sum(part.shape[0] for part in parts)
        layout = dataclasses.replace(layout, shape=(n, layout.shape[1]))
    along = 1 if layout is not None and layout.is_tall else 0
    return dataclasses.replace(
        parts[0],
        codes=torch.cat([part.codes for part in parts], along),
        layout=layout,
        scales=torch.cat([part.scales for part in parts]),
        bits=max(part.bits for part in parts),
        offsets=torch.cat(offsets) if offsets else None,
        zeros=torch.cat(zeros) if zeros else None,
    )


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)


def widest(parts: Sequence[Weight], dtype: torch.dtype | None = None) -> list[Weight]:
    """The parts in one form that holds them all exactly: codes of the most bits in their smallest
    groups, or dense, in the dtype (None: float32), where one is or where permutations differ."""
    quantized = [
        as_integers(part).unpacked().with_offsets()
        for part in parts
        if isinstance(part, QuantizedWeight)
    ]
    is_one_order = all(_same(part.permutation, quantized[0].permutation) for part in quantized)
    if len(quantized) < len(parts) or not is_one_order:
        return [dequantize_finite(part, dtype) for part in parts]
    k = quantized[0].shape[1]
    group = math.gcd(*(part.group for part in quantized if part.group < k)) or k
    zero = quantized[0].zero if len({part.zero for part in quantized}) == 1 else 0
    has_offsets = any(part.offsets is not None or part.zero != zero for part in quantized)
    bits = max(8 if part.table is not None else packed_bits(part) for part in quantized)
    return [_widen(part, group, bits, zero, has_offsets=has_offsets) for part in quantized]


def _widen(
    weight: QuantizedWeight, group: int, bits: int, zero: int, *, has_offsets: bool
) -> QuantizedWeight:
    """The same values with this group, bits and zero, no table."""
    k = weight.shape[1]
    codes = weight.codes if weight.table is None else weight.table[weight.codes.long()]
    groups = torch.arange(-(-k // group)) * group // weight.group
    scales = weight.scales[:, groups]
    offsets = None
    if has_offsets:
        offsets = scales * (zero - weight.zero)
        if weight.offsets is not None:
            offsets += weight.offsets[:, groups]
    return QuantizedWeight(
        codes, scales, group, bits, zero, offsets, permutation=weight.permutation
    )
