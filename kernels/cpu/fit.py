"""Dense weights to codes of 4 or 8 bits over fit.c, by all threads.

Called by model/quantization/on_the_fly.py, which has the same in torch, for a matrix at a time.
"""

from __future__ import annotations

import torch

from streamer.kernels.cpu.program import DTYPES, Call, Kind, issue


def fit(x: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int) -> None:
    """Fill scale and zero point, float32 [N, groups], of least squared error for x [N, K] in groups
    of at most 128 columns; without zeros the scales [N, 1] under which a row's largest number is
    127."""
    _issue(Kind.FIT, x, (scales, zeros), group)


def round_to_codes(
    x: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    codes: torch.Tensor,
    group: int,
) -> None:
    """Fill the codes, uint8 [N, K], of x [N, K] under these scales and zero points; without zeros
    128 is zero."""
    _issue(Kind.ROUND, x, (scales, zeros, codes), group)


def _issue(
    kind: Kind, x: torch.Tensor, tensors: tuple[torch.Tensor | None, ...], group: int
) -> None:
    x = (x if x.dtype in DTYPES else x.float()).contiguous()
    issue(Call(kind, x, x.dtype, (x, *tensors), (x.shape[1], group)))
