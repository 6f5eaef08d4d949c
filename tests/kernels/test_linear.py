"""Linear layers: against float64, rows independent of the batch size, gates, sums."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from streamer.kernels import ops, reference_linear

pytestmark = pytest.mark.usefixtures("backend")

SHAPES = [(64, 96), (704, 256), (3072, 96), (5000, 64), (97, 33), (7, 1), (1031, 40)]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """The same numbers every time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize("has_bias", [True, False])
def test_equals_float64(
    kernels: ops.Backend, k: int, n: int, dtype: torch.dtype, has_bias: bool
) -> None:
    """Within rounding, for 1 to 100 rows; and added to the output's previous values."""
    weight = random(n, k, dtype=dtype)
    bias = random(n, dtype=dtype, seed=2) if has_bias else None
    packed = kernels.pack_weight([weight], bias)
    assert packed.shape == (n, k)
    for rows in (1, 7, 13, 100):
        x = random(rows, k, dtype=dtype, seed=rows)
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        near = {"rtol": 1e-5 if dtype is torch.float32 else 2**-7, "atol": 2e-5 * math.sqrt(k)}
        y = packed(x)
        assert y.shape == (rows, n)
        torch.testing.assert_close(y.double(), exact, **near)
        total = random(rows, n, dtype=dtype, seed=3)
        exact += total.double()
        assert packed(x, add_to=total) is total
        near["atol"] += 0.0 if dtype is torch.float32 else 2**-8 * float(y.abs().max())
        torch.testing.assert_close(total.double(), exact, **near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_rows_do_not_depend_on_their_number(
    kernels: ops.Backend, k: int, n: int, dtype: torch.dtype, backend: str
) -> None:
    """Bit for bit: a single row, 1 to 40 rows, and more than one pass takes."""
    if backend in ("triton", "cuda"):
        pytest.skip("torch multiplies there, by a kernel that it chooses by the number of rows")
    if backend == "torch" and not reference_linear.can_pack(dtype):
        pytest.skip("no packed weights on this CPU: rows may differ in the last bits")
    if backend == "torch" and dtype is torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        pytest.skip("oneDNN splits sums in AMX tiles by the number of rows")
    weight = kernels.pack_weight([random(n, k, dtype=dtype)])
    x = random(40, k, dtype=dtype, seed=1)
    whole = weight(x)
    wrong = [r for r in range(1, 41) if not torch.equal(weight(x[:r]), whole[:r])]
    assert wrong == []
    assert torch.equal(weight(x[11:12]), whole[11:12])
    many = weight(x.repeat(25, 1))
    assert torch.equal(many, whole.repeat(25, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 3, 24, 37])
def test_matrices_side_by_side_are_one(kernels: ops.Backend, dtype: torch.dtype, k: int) -> None:
    """Each is packed from where it is, behind the panels of those before it."""
    parts = [random(rows, k, dtype=dtype, seed=rows) for rows in (32, 64, 5)]
    x = random(3, k, dtype=dtype)
    assert torch.equal(kernels.pack_weight(parts)(x), kernels.pack_weight([torch.cat(parts)])(x))


def test_without_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where oneDNN is missing, F.linear serves."""
    monkeypatch.setattr(reference_linear, "can_pack", lambda dtype: False)
    weight, x = random(8, 6), random(3, 6)
    packed = reference_linear.pack_weight([weight])
    assert not packed.is_packed
    assert torch.equal(packed(x), F.linear(x, weight))


def test_strided_input(kernels: ops.Backend) -> None:
    """A view of a wider tensor."""
    weight, x = random(8, 6), random(3, 12)
    got = kernels.pack_weight([weight])(x[:, 6:])
    torch.testing.assert_close(got, F.linear(x[:, 6:], weight))


@pytest.mark.parametrize("half", [1, 5, 16, 33, 256])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gates(kernels: ops.Backend, activation: str, half: int) -> None:
    """act(gate) * up, gates first, bias included."""
    weight, bias, x = random(2 * half, 24), random(2 * half, seed=1), random(5, 24, seed=2)
    got = kernels.pack_weight([weight], bias, activation)(x)
    gate, up = F.linear(x.double(), weight.double(), bias.double()).chunk(2, -1)
    tanh = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    exact = 0.5 * gate * (1 + torch.erf(gate / math.sqrt(2)))
    act = {"silu": gate / (1 + torch.exp(-gate)), "gelu": exact, "gelu_tanh": tanh}[activation]
    assert got.shape == (5, half)
    torch.testing.assert_close(got.double(), act * up, atol=2e-5, rtol=2e-5)


def test_gates_far_from_zero(kernels: ops.Backend) -> None:
    """No overflow where the gate is very large or very small."""
    gates = torch.tensor([-1e4, -200.0, -90.0, -20.0, 20.0, 90.0, 200.0, 1e4])
    for activation, act in (("silu", F.silu), ("gelu", F.gelu), ("gelu_tanh", F.gelu)):
        weight = torch.cat([gates, torch.ones(8)])[:, None]
        got = kernels.pack_weight([weight], None, activation)(torch.ones(1, 1))
        torch.testing.assert_close(got[0], act(gates), atol=1e-5, rtol=1e-5)


def test_rows_of_a_packed_table_are_its_rows(kernels: ops.Backend) -> None:
    table = random(37, 24, dtype=torch.bfloat16)
    packed = kernels.pack_weight([table], is_table=True)
    tokens = torch.tensor([36, 0, 5, 5])
    assert torch.equal(packed.rows(tokens), table[tokens])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_packed_weights_do_not_keep_what_they_were_packed_from(dtype: torch.dtype) -> None:
    """A view of no rows did: each matrix was held twice where there are no native kernels."""
    linear = reference_linear.Linear(torch.randn(64, 64).to(dtype))
    if linear.is_packed:
        assert linear._table.untyped_storage().nbytes() == 0
