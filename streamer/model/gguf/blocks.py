"""GGUF's blocks as QuantizedWeight: the scales multiplied out, nothing rounded.

Pure functions over a matrix's bytes, and the Scheme that says what they make: in C where there are
native kernels, which pack the codes from the blocks, else in torch, codes one a byte. What each
format means is ggml's; the `gguf` package's dequantizers are the oracle of the tests. Called by
loader.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import torch

from streamer.kernels.weights import QuantizedWeight, Weight
from streamer.model.checkpoint import TensorEntry
from streamer.model.quantization.bits import stored_layout
from streamer.model.quantization.interface import DENSE, Form, Scheme, Stored

# What four-bit codes stand for, where that is not a number plus `zero`.
IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice e2m1's values

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # codes, scales, offsets


class Layout(NamedTuple):
    """What a block is. `parse` takes blocks [N, B, bytes]; see QuantizedWeight for the others.

    values  what codes stand for, if they are no numbers in order
    """

    parse: Callable[[torch.Tensor], Parts]
    bytes: int
    weights: int
    group: int
    bits: int
    zero: int = 0
    has_offsets: bool = False
    values: tuple[int, ...] = ()


def unpack(name: str, rows: torch.Tensor) -> QuantizedWeight:
    """The matrix of which `rows` are the bytes, uint8 [N, blocks * bytes of a block].

    name  the format, as header.py has it
    """
    layout = LAYOUTS[name]
    n, num_blocks = rows.shape[0], rows.shape[1] // layout.bytes
    values = [value + layout.zero for value in layout.values]
    table = torch.tensor(values, dtype=torch.uint8) if values else None
    group, bits, zero = layout.group, layout.bits, layout.zero
    stored = stored_layout(name, n, num_blocks * layout.weights)
    if stored is not None:
        scales = torch.empty(0)  # in the blocks
        return QuantizedWeight(rows, scales, group, bits, zero, table=table, layout=stored)
    codes, scales, offsets = layout.parse(rows.view(n, -1, layout.bytes))
    offsets = None if offsets is None else offsets.reshape(n, -1)
    codes, scales = codes.reshape(n, -1), scales.reshape(n, -1)
    return QuantizedWeight(codes, scales, group, bits, zero, offsets, table)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The fp16 at byte `at` of each block [N, B, bytes] -> float32 [N, B, 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _split(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Fields of a byte, the lowest first: [..., n] -> [..., 8 / bits, n]."""
    parts = [(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, -2)


def _q4_0(b: torch.Tensor) -> Parts:
    return _split(b[..., 2:], 4), _half(b, 0), None


def _q4_1(b: torch.Tensor) -> Parts:
    return _split(b[..., 4:], 4), _half(b, 0), _half(b, 2)


def _fifth_bits(b: torch.Tensor, at: int) -> torch.Tensor:
    """Bit i of the 32 at byte `at` is bit 4 of weight i -> [N, B, 2, 16]."""
    shifts = torch.arange(8, dtype=torch.uint8)
    bits = ((b[..., at : at + 4].unsqueeze(-1) >> shifts) & 1) << 4
    return bits.view(*b.shape[:2], 2, 16)


def _q5_0(b: torch.Tensor) -> Parts:
    return _split(b[..., 6:], 4) | _fifth_bits(b, 2), _half(b, 0), None


def _q5_1(b: torch.Tensor) -> Parts:
    return _split(b[..., 8:], 4) | _fifth_bits(b, 4), _half(b, 0), _half(b, 2)


def _q8_0(b: torch.Tensor) -> Parts:
    return b[..., 2:] ^ 128, _half(b, 0), None


def _q2_k(b: torch.Tensor) -> Parts:
    codes = _split(b[..., 16:80].view(*b.shape[:2], 2, 32), 2)
    return codes, _half(b, 80) * (b[..., :16] & 15), -_half(b, 82) * (b[..., :16] >> 4)


def _q3_k(b: torch.Tensor) -> Parts:
    low = _split(b[..., 32:96].view(*b.shape[:2], 2, 32), 2)
    high = _split(b[..., :32], 1).view(*b.shape[:2], 2, 4, 32)
    low_scales, high_scales = _split(b[..., 96:104], 4), _split(b[..., 104:108], 2)
    scales = low_scales.flatten(-2) | high_scales.flatten(-2) << 4
    return low | high << 2, _half(b, 108) * (scales.to(torch.int8) - 32), None


def _scales_and_mins(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q4_K's and Q5_K's eight scales and offsets of a block, of 6 bits each -> [N, B, 8]."""
    low, low_mins, both = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scales = torch.cat([low & 63, (both & 15) | ((low >> 2) & 48)], -1)
    mins = torch.cat([low_mins & 63, (both >> 4) | ((low_mins >> 2) & 48)], -1)
    return _half(b, 0) * scales, -_half(b, 2) * mins


def _q4_k(b: torch.Tensor) -> Parts:
    return _split(b[..., 16:].view(*b.shape[:2], 4, 32), 4), *_scales_and_mins(b)


def _q5_k(b: torch.Tensor) -> Parts:
    low = _split(b[..., 48:].view(*b.shape[:2], 4, 32), 4)
    high = _split(b[..., 16:48], 1).view(*b.shape[:2], 4, 2, 32)
    return low | high << 4, *_scales_and_mins(b)


def _q6_k(b: torch.Tensor) -> Parts:
    low = _split(b[..., :128].view(*b.shape[:2], 2, 64), 4).view(*b.shape[:2], 2, 4, 32)
    high = _split(b[..., 128:192].view(*b.shape[:2], 2, 32), 2)
    return low | high << 4, _half(b, 208) * b[..., 192:208].view(torch.int8), None


def _mxfp4(b: torch.Tensor) -> Parts:
    # The scale 2**(e - 127) halved, since the values are doubled; below 2, a subnormal number.
    e = b[..., 0].int()
    scales = torch.where(e < 2, 0x200000 << e.clamp(max=1), (e - 1) << 23).view(torch.float32)
    return _split(b[..., 1:], 4), scales, None


LAYOUTS = {
    "Q4_0": Layout(_q4_0, 18, 32, 32, 4, 8),
    "Q4_1": Layout(_q4_1, 20, 32, 32, 4, has_offsets=True),
    "Q5_0": Layout(_q5_0, 22, 32, 32, 5, 16),
    "Q5_1": Layout(_q5_1, 24, 32, 32, 5, has_offsets=True),
    "Q8_0": Layout(_q8_0, 34, 32, 32, 8, 128),
    "Q2_K": Layout(_q2_k, 84, 256, 16, 2, has_offsets=True),
    "Q3_K": Layout(_q3_k, 110, 256, 16, 3, 4),
    "Q4_K": Layout(_q4_k, 144, 256, 32, 4, has_offsets=True),
    "Q5_K": Layout(_q5_k, 176, 256, 32, 5, has_offsets=True),
    "Q6_K": Layout(_q6_k, 210, 256, 16, 6, 32),
    "IQ4_NL": Layout(_q4_0, 18, 32, 32, 4, 128, values=IQ4_NL),
    "MXFP4": Layout(_mxfp4, 17, 32, 32, 4, 12, values=MXFP4),
}


class Blocks:
    """The Scheme of a matrix in one of GGUF's formats."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype

    @property
    def name(self) -> str:
        return f"GGUF {self._dtype}"

    def stored(self, n: int, k: int, found: Collection[str]) -> dict[str, Stored]:
        return {"weight": Stored((self._dtype,), ((n, k),))}

    def form(self, n: int, k: int) -> Form:
        layout = LAYOUTS[self._dtype]
        return Form(layout.bits, layout.group, layout.has_offsets)

    def read(self, tensors: Mapping[str, torch.Tensor], n: int, k: int) -> Weight:
        return unpack(self._dtype, tensors["weight"])


def scheme_of(found: Mapping[str, TensorEntry]) -> Scheme:
    """How the matrix of a module is stored in GGUF, by its tensors' names after the module's."""
    weight = found.get("weight")
    return DENSE if weight is None or weight.dtype not in LAYOUTS else Blocks(weight.dtype)
