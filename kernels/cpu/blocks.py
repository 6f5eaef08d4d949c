"""GGUF's blocks to codes and scales, over blocks.c, by all threads.

Called by model/gguf/blocks.py, which has the same in torch, for a matrix at a time.
"""

from __future__ import annotations

import torch

from streamer.kernels.cpu.program import Call, Kind, issue

# In the order of blocks.c.
FORMATS = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "MXFP4"),
)


def unpack(
    name: str,
    blocks: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
) -> None:
    """Fill codes uint8 [N, K], scales and offsets float32 [N, K / group] from the blocks of a
    format, uint8 [N, B, bytes]; all contiguous."""
    pointers = (blocks, codes, scales, offsets)
    sizes = (blocks.shape[1], FORMATS.index(name))
    issue(Call(Kind.UNPACK, blocks, torch.float32, pointers, sizes))
