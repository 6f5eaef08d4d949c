"""Codes of 2 to 8 bits out of bytes, vectorized, for one matrix at a time.

Pure functions on tensors, called by the parsers where the kernels do not know a layout. 3072 x 1024
codes of 4 bits take 0.25 ms on one thread of an EPYC Zen 4 (2026-11-28); each to its own place in
turn took 7 times as long.
"""

from __future__ import annotations

import torch

from streamer.kernels import ops
from streamer.kernels.weights import Layout


def stored_layout(name: str, n: int, k: int) -> Layout | None:
    """The layout of codes [n, k] that the native kernels pack as they are stored; None where there
    are no such kernels: codes are unpacked to a byte each."""
    if ops.why_not_native():
        return None
    from streamer.kernels.cpu.blocks import layout

    return layout(name, n, k)


def unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Bytes [R, B] of little-endian bit fields -> codes uint8 [R, count], the lowest bits first.

    Fields run on over bytes and words, so that 3, 5, 6 and 7 bits have no gaps.
    """
    rows, num_bytes = packed.shape
    if bits == 8:
        return packed[:, :count].contiguous()
    if bits == 4:
        pairs = packed.to(torch.int16, memory_format=torch.contiguous_format)
        pairs.bitwise_or_(pairs << 4).bitwise_and_(0x0F0F)
        return pairs.view(torch.uint8)[:, :count].contiguous()
    spare = -num_bytes % bits
    if spare:
        packed = torch.nn.functional.pad(packed, (0, spare))
    fields = packed.view(rows, -1, bits)  # `bits` bytes hold 8 codes
    codes = torch.empty(rows, fields.shape[1], 8, dtype=torch.uint8)
    for i in range(8):
        byte, low = divmod(i * bits, 8)
        code = fields[..., byte] >> low
        if low + bits > 8:
            code |= fields[..., byte + 1] << (8 - low)
        codes[..., i] = code & ((1 << bits) - 1)
    return codes.view(rows, -1)[:, :count].contiguous()


def words_as_bytes(words: torch.Tensor) -> torch.Tensor:
    """int32 [R, W] -> uint8 [R, 4 W], little-endian, as safetensors files are."""
    words = words.contiguous()  # of one column its strides may be any, which a view refuses
    return words.view(-1).view(torch.uint8).view(len(words), -1)


def unsigned(codes: torch.Tensor) -> torch.Tensor:
    """int8 values as uint8 codes with zero 128."""
    return codes.contiguous().view(torch.uint8) ^ 0x80
