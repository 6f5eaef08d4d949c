"""Codes as files have them, to one a byte and, of GGUF's blocks, their scales, over blocks.c.

Called by the parsers in model/gguf and model/quantization, which have the same in torch. The linear
layers pack codes of these layouts as they are; `unpack` is for what they can't.
"""

from __future__ import annotations

import dataclasses

import torch

from streamer.kernels.cpu.program import Call, Kind, issue
from streamer.kernels.weights import GROUPS, Layout, QuantizedWeight

# In the order of blocks.c.
FORMATS = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "MXFP4"),
)
LAYOUTS = ("BYTES", "SIGNED", "NIBBLES", "WORDS", "OUTPUTS", "FLOAT8", *FORMATS)
TALL = ("WORDS", "OUTPUTS")
OFFSETS = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")


def layout(name: str, n: int, k: int) -> Layout:
    """The layout of codes [n, k]; what each is, blocks.c says."""
    return Layout(name, (n, k), name in TALL, name in OFFSETS, unpack)


def bits_of(weight: QuantizedWeight) -> int:
    """What blocks.c calls bits: of FLOAT8 the columns of a scale, as many as its scales tell."""
    if weight.layout is None or weight.layout.name != "FLOAT8":
        return weight.bits
    k, count = weight.shape[1], weight.scales.shape[1]
    return next((size for size in GROUPS if -(-k // size) == count), k)


def unpack(weight: QuantizedWeight) -> QuantizedWeight:
    """See Layout."""
    if weight.layout is None:
        return weight
    (n, k), name = weight.shape, weight.layout.name
    codes = torch.empty(n, k, dtype=torch.uint8)
    scales, offsets = weight.scales, weight.offsets
    if name == "FLOAT8" or name in FORMATS:
        scales = torch.empty(n, -(-k // weight.group))
        offsets = torch.empty_like(scales) if weight.has_offsets else None
    beside = (None, None) if scales is weight.scales else (scales, offsets)
    stored = weight.scales.contiguous()
    pointers = (weight.codes.contiguous(), codes, *beside, weight.permutation, stored)
    sizes = (k, n, LAYOUTS.index(name), bits_of(weight))
    issue(Call(Kind.UNPACK, codes, torch.float32, pointers, sizes))
    return dataclasses.replace(weight, codes=codes, scales=scales, offsets=offsets, layout=None)
