"""Linear and RopeTable: packed against plain, rows that do not depend on their neighbours."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from streamer.model import layers
from streamer.model.layers import Linear, RopeTable
from streamer.model.rope import parse_rope

SHAPES = [(64, 96), (704, 256), (3072, 96), (5000, 64), (97, 33)]


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """The same numbers every time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize("has_bias", [True, False])
def test_equals_plain(k: int, n: int, dtype: torch.dtype, has_bias: bool) -> None:
    """F.linear within rounding."""
    weight, x = random(n, k, dtype=dtype), random(7, k, dtype=dtype, seed=1)
    bias = random(n, dtype=dtype, seed=2) if has_bias else None
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    error = (Linear(weight, bias)(x).double() - exact).abs().max()
    assert error < (1e-3 if dtype is torch.float32 else 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_rows_do_not_depend_on_their_number(k: int, n: int, dtype: torch.dtype) -> None:
    """Bit for bit, 1 to 40 rows, the single row included."""
    if not layers.can_pack(dtype):
        pytest.skip("no packed weights on this CPU: rows may differ in the last bits")
    linear = Linear(random(n, k, dtype=dtype))
    assert linear.is_packed
    x = random(40, k, dtype=dtype, seed=1)
    whole = linear(x)
    wrong = [rows for rows in range(1, 41) if not torch.equal(linear(x[:rows]), whole[:rows])]
    assert wrong == []
    assert torch.equal(linear(x[11:12]), whole[11:12])


def test_without_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where oneDNN is missing, F.linear serves."""
    monkeypatch.setattr(layers, "can_pack", lambda dtype: False)
    weight, x = random(8, 6, dtype=torch.float32), random(3, 6, dtype=torch.float32)
    linear = Linear(weight)
    assert not linear.is_packed
    assert torch.equal(linear(x), F.linear(x, weight))


def test_strided_input() -> None:
    """A view of a wider tensor."""
    weight, x = random(8, 6, dtype=torch.float32), random(3, 12, dtype=torch.float32)
    got = Linear(weight)(x[:, 6:])
    torch.testing.assert_close(got, F.linear(x[:, 6:], weight))


def test_the_rope_table_grows() -> None:
    """Rows beyond the first build equal those of a table that was built long enough."""
    rope = parse_rope({"rope_theta": 10000.0}, 8, 100_000)
    table = RopeTable(rope, torch.float32)
    near = table.rows(torch.tensor([5, 4095]), 4096)
    far = table.rows(torch.tensor([5, 4095, 9000]), 9001)
    assert torch.equal(near[0], far[0][:2])
    angle = 9000.0 * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(far[0][2, :4], angle.cos(), atol=2e-3, rtol=0)


def test_the_rope_table_is_no_longer_than_the_limit() -> None:
    """Short models do not pay for 4096 positions."""
    table = RopeTable(parse_rope({}, 8, 100), torch.float32)
    assert table.rows(torch.tensor([99]), 100)[0].shape == (1, 8)
    with pytest.raises(IndexError):
        table.rows(torch.tensor([100]), 100)
