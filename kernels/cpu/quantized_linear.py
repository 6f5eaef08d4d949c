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

import torch

from streamer.kernels.cpu.blocks import LAYOUTS
from streamer.kernels.cpu.memory import new_panels
from streamer.kernels.cpu.program import Call, Kind, issue, new_rows, team
from streamer.kernels.weights import QuantizedWeight, Weight, dequantize

# quantized_linear.c's form
EIGHT_BITS, SIX_BITS, OFFSETS, WIDE_SCALES, ZEROS, ZERO = 1, 2, 4, 8, 16, 32
TOGETHER = 4  # groups whose zeros lie together
BLOCK = 32  # columns that share a scale of the activations,
SPAN = 128  # and beside weights of few bits: beyond, integer sums may exceed dot.h's 2**22
FEW_BITS = 6
RECORD_BYTES = 16  # quantize.c's, before a block's codes

Records = dict[tuple[int, int, int, int], torch.Tensor]  # by block, span, zero, permutation


class Quantized:
    """A matrix of codes. See linear.Matrix."""

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
        self, weight: QuantizedWeight, bias: torch.Tensor | None, flags: int, dtype: torch.dtype
    ) -> None:
        weight = as_integers(weight)
        n, k = weight.shape
        block, span = block_of(weight)
        blocks = -(-k // block)
        group = blocks * block if weight.group >= k else weight.group
        zeros = zero_points(weight)
        if zeros is not None:
            weight = dataclasses.replace(weight, offsets=None)
        scales, offsets = _narrow(weight)
        bits = packed_bits(weight)
        form = {4: 0, 6: SIX_BITS, 8: EIGHT_BITS}[bits] + OFFSETS * (offsets is not None)
        form += ZEROS * (zeros is not None)
        form += WIDE_SCALES * (scales.dtype is torch.float32) + ZERO * weight.zero
        width = 2 * team.lanes
        header = width * scales.element_size() * (1 if offsets is None else 2)
        groups = -(-k // group)
        size = groups * header + blocks * block * width // 8 * bits
        if zeros is not None:
            size += -(-groups // TOGETHER) * TOGETHER * team.lanes
        self._packed = new_panels(n, size, has_gates=flags > 1)
        self.num_bytes = self._packed.numel()
        self._sizes = (group, block, span, form)
        self._bias, self._table, self._permutation = bias, weight.table, weight.permutation
        self._dtype = dtype
        self.shape = (n, k)
        beside = offsets if zeros is None else zeros
        layout = "BYTES" if weight.layout is None else weight.layout.name
        codes = weight.codes.contiguous()
        pointers = (codes, self._packed, scales, beside, weight.permutation)
        sizes = (k, n, group, block, form, LAYOUTS.index(layout), weight.bits)
        issue(Call(Kind.PACK_QUANTIZED, self._packed, torch.float32, pointers, sizes, flags=flags))

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


def zero_points(weight: QuantizedWeight) -> torch.Tensor | None:
    """The zero points uint8 [N, groups] of a weight whose offsets are those of 4-bit codes; else
    None. A first row tells most others."""
    if weight.offsets is None or weight.zero or packed_bits(weight) > 4 or weight.table is not None:
        return None
    first = -(weight.offsets[:1] / weight.scales[:1]).round()
    if not bool(((first >= 0) & (first <= 15)).all()):
        return None
    zeros = torch.empty(weight.scales.shape, dtype=torch.uint8)
    scales, offsets = weight.scales.contiguous(), weight.offsets.contiguous()
    return None if _faults(Kind.ZEROS, scales, offsets, zeros) else zeros


def _narrow(weight: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales and offsets as float16, or both as float32 where that would round by more."""
    both = [weight.scales] if weight.offsets is None else [weight.scales, weight.offsets]
    both = [t.contiguous() for t in both]
    halves = [torch.empty(t.shape, dtype=torch.float16) for t in both]
    if not any(_faults(Kind.NARROW, t, half) for t, half in zip(both, halves, strict=True)):
        both = halves
    return both[0], both[1] if len(both) > 1 else None


def _faults(kind: Kind, *tensors: torch.Tensor) -> bool:
    """Issue an op of scales.c on tensors [N, G]; whether it found a fault in a row."""
    faults = torch.empty(tensors[0].shape[0], dtype=torch.uint8)
    sizes = (tensors[0].shape[1],)
    issue(Call(kind, tensors[0], torch.float32, (*tensors, faults), sizes))
    return bool(faults.any())


def as_integers(weight: QuantizedWeight) -> QuantizedWeight:
    """float8 codes as 8-bit integers in groups of 32: the error is a fifth of theirs, and adds a
    fiftieth to it (the bundled model, and normal numbers)."""
    if weight.codes.dtype is not torch.float8_e4m3fn:
        return weight
    n, k = weight.shape
    codes = torch.empty(n, k, dtype=torch.uint8)
    scales = torch.empty(n, -(-k // BLOCK))
    pointers = (weight.codes.contiguous(), weight.scales.contiguous(), codes, scales)
    issue(Call(Kind.FLOAT8, codes, torch.float32, pointers, (k, weight.group)))
    return QuantizedWeight(codes, scales, BLOCK, 8, 128, permutation=weight.permutation)


def merge(parts: Sequence[Weight]) -> list[Weight]:
    """The parts, neighbours of one form as one."""
    runs: list[list[Weight]] = []
    for part in parts:
        if runs and _is_one_form(runs[-1][0], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return [run[0] if len(run) == 1 else _stacked(run) for run in runs]


def _is_one_form(a: Weight, b: Weight) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype is b.dtype
    return (
        (a.group, packed_bits(a), a.zero, a.codes.is_floating_point())
        == (b.group, packed_bits(b), b.zero, b.codes.is_floating_point())
        and _same(a.table, b.table)
        and _same(a.permutation, b.permutation)
        and (a.offsets is None) == (b.offsets is None)
    )


def _stacked(parts: Sequence[Weight]) -> Weight:
    """Parts of one form as one."""
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    if not quantized:
        return torch.cat([part for part in parts if isinstance(part, torch.Tensor)])
    offsets = [part.offsets for part in quantized if part.offsets is not None]
    if len({None if p.layout is None else (p.layout.name, p.bits) for p in quantized}) > 1:
        quantized = [part.unpacked() for part in quantized]
    layout = quantized[0].layout
    if layout is not None:
        n = sum(part.shape[0] for part in quantized)
        layout = dataclasses.replace(layout, shape=(n, layout.shape[1]))
    along = 1 if layout is not None and layout.is_tall else 0
    return dataclasses.replace(
        quantized[0],
        codes=torch.cat([part.codes for part in quantized], along),
        layout=layout,
        scales=torch.cat([part.scales for part in quantized]),
        bits=max(part.bits for part in quantized),
        offsets=torch.cat(offsets) if offsets else None,
    )


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)


def widest(parts: Sequence[Weight]) -> Weight:
    """The parts in one form that holds them all exactly: codes of the most bits in their smallest
    groups, or dense where one is or where permutations differ."""
    if any(isinstance(part, torch.Tensor) for part in parts):
        return torch.cat([dequantize(part) for part in parts])
    quantized = [
        as_integers(part.unpacked()) for part in parts if isinstance(part, QuantizedWeight)
    ]
    if not all(_same(part.permutation, quantized[0].permutation) for part in quantized):
        return torch.cat([dequantize(part) for part in quantized])
    k = quantized[0].shape[1]
    group = math.gcd(*(part.group for part in quantized if part.group < k)) or k
    zero = quantized[0].zero if len({part.zero for part in quantized}) == 1 else 0
    has_offsets = any(part.offsets is not None or part.zero != zero for part in quantized)
    bits = max(8 if part.table is not None else packed_bits(part) for part in quantized)
    wide = [_widen(part, group, bits, zero, has_offsets=has_offsets) for part in quantized]
    (one,) = merge(wide)
    return one


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
