"""Writers of quantized matrices, from codes, as GPTQ, AWQ, FP8 and others store them.

Slow and plain on purpose: what the parsers are compared with where no writer can be installed.
Each returns the tensors of one module by their names after the module's.
"""

from __future__ import annotations

import json

import torch

Tensors = dict[str, torch.Tensor]


def pack_words(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [R, C] -> int32 [R, C * bits / 32], the first in the lowest bits."""
    per_word = 32 // bits
    words = [
        [
            sum(int(code) << (bits * i) for i, code in enumerate(row[at : at + per_word]))
            for at in range(0, len(row), per_word)
        ]
        for row in rows.tolist()
    ]
    return torch.tensor(words, dtype=torch.int64).to(torch.uint32).view(torch.int32)


def gptq(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bits: int,
    groups: torch.Tensor,
    *,
    is_v1: bool,
) -> Tensors:
    """codes [N, K], scales and zeros [N, G], the group of each column [K]."""
    qzeros = pack_words(zeros.t(), bits)
    if is_v1:  # gptqmodel subtracts from the words
        qzeros = (qzeros.long() - sum(1 << (bits * i) for i in range(32 // bits))).to(torch.int32)
    return {
        "qweight": pack_words(codes, bits).t().contiguous(),
        "qzeros": qzeros,
        "scales": scales.t().contiguous(),
        "g_idx": groups.to(torch.int32),
    }


def awq(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Tensors:
    """codes [N, K], scales and zeros [N, G]: words hold outputs 0, 2, 4, 6, 1, 3, 5, 7."""

    def words(values: torch.Tensor) -> torch.Tensor:
        order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
        columns = (torch.arange(values.shape[0]).view(-1, 1, 8)[..., order]).flatten()
        return pack_words(values.t()[:, columns], 4)

    return {"qweight": words(codes), "qzeros": words(zeros), "scales": scales.t().contiguous()}


def mxfp4(codes: torch.Tensor, exponents: torch.Tensor) -> Tensors:
    """codes [N, K] of e2m1, exponents [N, K / 32] plus 127."""
    n, k = codes.shape
    pairs = codes.view(n, k // 32, 16, 2)
    return {
        "weight_blocks": pairs[..., 0] | pairs[..., 1] << 4,
        "weight_scales": exponents.to(torch.uint8),
    }


def bnb4(
    codes: torch.Tensor, largest: torch.Tensor, values: torch.Tensor, kind: str, **more: float
) -> Tensors:
    """codes [N, K] into `values` [16], the largest of each block of 64, more of the state."""
    state = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": list(codes.shape)}
    state |= more
    pairs = codes.view(-1, 2)
    return {
        "weight": (pairs[:, :1] << 4 | pairs[:, 1:]).contiguous(),
        "weight.absmax": largest.flatten(),
        "weight.quant_map": values,
        f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }
