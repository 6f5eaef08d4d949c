"""RopeTable: it grows, up to the model's limit."""

from __future__ import annotations

import torch

from streamer.kernels.ops import for_cpu
from streamer.model.layers import RopeTable
from streamer.model.rope import parse_rope


def test_the_rope_table_grows() -> None:
    """Rows beyond the first build equal those of a table that was built long enough."""
    rope = parse_rope({"rope_theta": 10000.0}, 8, 100_000)
    table = RopeTable(for_cpu(), rope, torch.float32)
    near = table.up_to(4096)
    far = table.up_to(9001)
    assert table.length >= 9001
    assert torch.equal(near[0][[5, 4095]], far[0][[5, 4095]])
    angle = 9000.0 * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(far[0][9000, :4], angle.cos(), atol=2e-3, rtol=0)


def test_the_rope_table_is_no_longer_than_the_limit() -> None:
    """Short models do not pay for 4096 positions."""
    table = RopeTable(for_cpu(), parse_rope({}, 8, 100), torch.float32)
    assert table.up_to(100)[0].shape == (100, 8)
