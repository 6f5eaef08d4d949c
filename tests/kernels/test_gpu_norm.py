"""The norm that adds to the residual first, which ops.py has no door for."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")


def test_norm_after_a_residual(device: str) -> None:
    from streamer.kernels.gpu.norm import add_rms_norm, rms_norm

    rng = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float16):
        residual, added = (torch.randn(5, 33, generator=rng).to(device, dtype) for _ in range(2))
        weight = torch.randn(33, generator=rng).to(device, dtype)
        total = residual + added
        y = add_rms_norm(residual, added, weight, 1e-5)
        assert torch.equal(residual, total)
        assert torch.equal(y, rms_norm(total, weight, 1e-5, None))
