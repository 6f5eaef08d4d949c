"""GGUF's blocks as QuantizedWeight: codes one a byte, the scales multiplied out, nothing rounded.

Pure functions over a matrix's bytes, and the Scheme that says what they make. What each format
means is ggml's; the `gguf` package's dequantizers are the oracle of the tests. Called by source.py
and loader.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch

from streamer.kernels.weights import QuantizedWeight, Weight
from streamer.model.checkpoint import TensorEntry
from streamer.model.quantization.interface import DENSE, Form, Scheme, Stored

# Four-bit codes of which each stands for a value: here plus `zero`, as QuantizedWeight has them.
IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice e2m1's values


def unpack(name: str, rows: torch.Tensor) -> QuantizedWeight:
    """The matrix of which `rows` are the bytes, uint8 [N, blocks * bytes of a block].

    name  the format, as header.py has it
    """
    make, num_bytes = PARSERS[name]
    return make(rows.view(rows.shape[0], -1, num_bytes))


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The fp16 at byte `at` of each block [N, B, bytes] -> float32 [N, B]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1).float()


def _split(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Fields of a byte, the lowest first: [..., n] -> [..., 8 / bits, n]."""
    parts = [(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, -2)


def _rows(blocks: torch.Tensor) -> torch.Tensor:
    """[N, B, ...] -> [N, K]."""
    return blocks.reshape(blocks.shape[0], -1)


def _q4_0(b: torch.Tensor) -> QuantizedWeight:
    return QuantizedWeight(_rows(_split(b[..., 2:], 4)), _half(b, 0), group=32, bits=4, zero=8)


def _q4_1(b: torch.Tensor) -> QuantizedWeight:
    codes = _rows(_split(b[..., 4:], 4))
    return QuantizedWeight(codes, _half(b, 0), group=32, bits=4, offsets=_half(b, 2))


def _fifth_bits(b: torch.Tensor, at: int) -> torch.Tensor:
    """Bit i of the 32 at byte `at` is bit 4 of weight i -> [N, B, 2, 16]."""
    shifts = torch.arange(8, dtype=torch.uint8)
    bits = ((b[..., at : at + 4].unsqueeze(-1) >> shifts) & 1) << 4
    return bits.view(*b.shape[:2], 2, 16)


def _q5_0(b: torch.Tensor) -> QuantizedWeight:
    codes = _rows(_split(b[..., 6:], 4) | _fifth_bits(b, 2))
    return QuantizedWeight(codes, _half(b, 0), group=32, bits=5, zero=16)


def _q5_1(b: torch.Tensor) -> QuantizedWeight:
    codes = _rows(_split(b[..., 8:], 4) | _fifth_bits(b, 4))
    return QuantizedWeight(codes, _half(b, 0), group=32, bits=5, offsets=_half(b, 2))


def _q8_0(b: torch.Tensor) -> QuantizedWeight:
    return QuantizedWeight(_rows(b[..., 2:] ^ 128), _half(b, 0), group=32, bits=8, zero=128)


def _q2_k(b: torch.Tensor) -> QuantizedWeight:
    d, dmin = _half(b, 80).unsqueeze(-1), _half(b, 82).unsqueeze(-1)
    codes = _split(b[..., 16:80].view(*b.shape[:2], 2, 32), 2)
    scales, mins = d * (b[..., :16] & 15), -dmin * (b[..., :16] >> 4)
    return QuantizedWeight(_rows(codes), _rows(scales), group=16, bits=2, offsets=_rows(mins))


def _q3_k(b: torch.Tensor) -> QuantizedWeight:
    low = _split(b[..., 32:96].view(*b.shape[:2], 2, 32), 2)
    high = _split(b[..., :32], 1).view(*b.shape[:2], 2, 4, 32)
    packed, top = b[..., 96:104], b[..., 104:108]
    low_scales, high_scales = _split(packed, 4).flatten(-2), _split(top, 2).flatten(-2)
    scales = (low_scales | high_scales << 4).to(torch.int8) - 32
    codes = _rows(low | high << 2)
    scaled = _half(b, 108).unsqueeze(-1) * scales
    return QuantizedWeight(codes, _rows(scaled), group=16, bits=3, zero=4)


def _scales_and_mins(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q4_K's and Q5_K's eight scales and offsets of a block, from 6 bits each -> [N, B * 8]."""
    d, m, both = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scales = torch.cat([d & 63, (both & 15) | ((d >> 2) & 48)], -1)
    mins = torch.cat([m & 63, (both >> 4) | ((m >> 2) & 48)], -1)
    return _rows(_half(b, 0).unsqueeze(-1) * scales), _rows(-_half(b, 2).unsqueeze(-1) * mins)


def _q4_k(b: torch.Tensor) -> QuantizedWeight:
    scales, offsets = _scales_and_mins(b)
    codes = _rows(_split(b[..., 16:].view(*b.shape[:2], 4, 32), 4))
    return QuantizedWeight(codes, scales, group=32, bits=4, offsets=offsets)


def _q5_k(b: torch.Tensor) -> QuantizedWeight:
    scales, offsets = _scales_and_mins(b)
    low = _split(b[..., 48:].view(*b.shape[:2], 4, 32), 4)
    high = _split(b[..., 16:48], 1).view(*b.shape[:2], 4, 2, 32) << 4
    return QuantizedWeight(_rows(low | high), scales, group=32, bits=5, offsets=offsets)


def _q6_k(b: torch.Tensor) -> QuantizedWeight:
    low = _split(b[..., :128].view(*b.shape[:2], 2, 64), 4).view(*b.shape[:2], 2, 4, 32)
    high = _split(b[..., 128:192].view(*b.shape[:2], 2, 32), 2) << 4
    scales = _half(b, 208).unsqueeze(-1) * b[..., 192:208].view(torch.int8)
    return QuantizedWeight(_rows(low | high), _rows(scales), group=16, bits=6, zero=32)


def _iq4_nl(b: torch.Tensor) -> QuantizedWeight:
    table = torch.tensor([value + 128 for value in IQ4_NL], dtype=torch.uint8)
    codes = _rows(_split(b[..., 2:], 4))
    return QuantizedWeight(codes, _half(b, 0), group=32, bits=4, zero=128, table=table)


def _mxfp4(b: torch.Tensor) -> QuantizedWeight:
    table = torch.tensor([value + 12 for value in MXFP4], dtype=torch.uint8)
    # The scale 2**(e - 127) halved, since the values are doubled; below 2, a subnormal number.
    e = b[..., 0].int()
    scales = torch.where(e < 2, 0x200000 << e.clamp(max=1), (e - 1) << 23).view(torch.float32)
    codes = _rows(_split(b[..., 1:], 4))
    return QuantizedWeight(codes, scales, group=32, bits=4, zero=12, table=table)


PARSERS: dict[str, tuple[Callable[[torch.Tensor], QuantizedWeight], int]] = {
    "Q4_0": (_q4_0, 18),
    "Q4_1": (_q4_1, 20),
    "Q5_0": (_q5_0, 22),
    "Q5_1": (_q5_1, 24),
    "Q8_0": (_q8_0, 34),
    "Q2_K": (_q2_k, 84),
    "Q3_K": (_q3_k, 110),
    "Q4_K": (_q4_k, 144),
    "Q5_K": (_q5_k, 176),
    "Q6_K": (_q6_k, 210),
    "IQ4_NL": (_iq4_nl, 18),
    "MXFP4": (_mxfp4, 17),
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
        made = unpack(self._dtype, torch.zeros(1, PARSERS[self._dtype][1], dtype=torch.uint8))
        return Form(made.bits, made.group, made.offsets is not None)

    def read(self, tensors: Mapping[str, torch.Tensor], n: int, k: int) -> Weight:
        return unpack(self._dtype, tensors["weight"])


def scheme_of(found: Mapping[str, TensorEntry]) -> Scheme:
    """How the matrix of a module is stored in GGUF, by its tensors' names after the module's."""
    weight = found.get("weight")
    return DENSE if weight is None or weight.dtype not in PARSERS else Blocks(weight.dtype)
