"""Codes as files have them: to one a byte and, of GGUF's blocks, to scales, over blocks.c.

Called by the parsers in model/gguf and model/quantization, which have the same in torch, for a
matrix at a time. The linear layers pack codes of these layouts as they are.
"""

from __future__ import annotations

from functools import partial

import torch

from streamer.kernels.cpu.program import Call, Kind, issue
from streamer.kernels.weights import Layout, QuantizedWeight

# In the order of blocks.c.
FORMATS = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "MXFP4"),
)
LAYOUTS = ("BYTES", "SIGNED", "NIBBLES", "WORDS", "OUTPUTS", *FORMATS)
TALL = ("WORDS", "OUTPUTS")


def layout(name: str, n: int, k: int) -> Layout:
    """The layout of codes [n, k]; what each is, blocks.c says."""
    return Layout(name, (n, k), name in TALL, partial(_codes, name))


def scales_of(
    name: str, blocks: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None, k: int
) -> None:
    """Fill scales and offsets float32 [N, K / group] from rows of a format's blocks."""
    _issue(name, (blocks, None, scales, offsets, None), blocks.shape[0], k, 0)


def _codes(name: str, weight: QuantizedWeight) -> torch.Tensor:
    n, k = weight.shape
    codes = torch.empty(n, k, dtype=torch.uint8)
    pointers = (weight.codes.contiguous(), codes, None, None, weight.permutation)
    _issue(name, pointers, n, k, weight.bits)
    return codes


def _issue(name: str, pointers: tuple[torch.Tensor | None, ...], n: int, k: int, bits: int) -> None:
    rows = torch.empty(n, 0)
    sizes = (k, n, LAYOUTS.index(name), bits)
    issue(Call(Kind.UNPACK, rows, torch.float32, pointers, sizes))
