"""The small ops against float64, at odd shapes and strides; block copies against loops."""

from __future__ import annotations

import math

import pytest
import torch

from streamer.kernels import ops
from tests.kernels.oracle import rand

pytestmark = pytest.mark.usefixtures("backend")

SHAPES = [(1, 3), (5, 33), (32, 256)]


def test_the_pool_is_block_major_and_a_block_is_contiguous(kernels: ops.Backend) -> None:
    pool = kernels.new_pool(5, 3, 16, 2, 8, torch.bfloat16)
    assert pool.shape == (5, 3, 2, 2, 16, 8)
    assert pool[4].is_contiguous()
    assert not pool.any()
    view = ops.layer_view(pool, 1)
    view[2, 1, :, 3] = 1.0
    assert bool((pool[2, 1, 1, :, 3] == 1.0).all())


def test_a_block_of_a_real_model_has_two_mebibytes(kernels: ops.Backend) -> None:
    pool = kernels.new_pool(1, 32, 16, 8, 128, torch.bfloat16)
    assert pool[0].numel() * pool.element_size() == 2_097_152


def test_store_kv_writes_its_slots_and_nothing_else(kernels: ops.Backend) -> None:
    pool = torch.zeros(6, 2, 2, 3, 4, 5)
    slots = torch.tensor([21, 0, 7, 8])
    k, v = rand(4, 3, 5), rand(4, 3, 5, seed=1)
    batch = ops.AttentionBatch(
        query_lens=[4],
        context_lens=[4],
        block_tables=torch.zeros(1, 1, dtype=torch.int64),
        slots=slots,
        block_size=4,
    )
    kernels.store_kv(k, v, ops.layer_view(pool, 1), batch)
    expected = torch.zeros_like(pool)
    for token, slot in enumerate(slots.tolist()):
        expected[slot // 4, 1, 0, :, slot % 4] = k[token]
        expected[slot // 4, 1, 1, :, slot % 4] = v[token]
    assert torch.equal(pool, expected)


def test_copy_blocks_copies_all_layers_at_once(kernels: ops.Backend) -> None:
    pool = rand(9, 2, 2, 4, 1, 3)
    before = pool.clone()
    kernels.copy_blocks(pool, torch.tensor([1, 1, 7]), torch.tensor([4, 0, 8]))
    for block in range(9):
        assert torch.equal(pool[block], before[{4: 1, 0: 1, 8: 7}.get(block, block)])


@pytest.mark.parametrize(
    "pairs",
    [
        [],
        [(3, 0)],
        [(0, 2), (1, 3), (2, 4)],
        [(5, 4), (4, 3), (3, 2), (0, 0)],
        [(2, 5), (3, 4)],
        [(1, 1), (1, 2), (2, 3)],
    ],
    ids=str,
)
def test_swap_blocks_moves_each_pair(kernels: ops.Backend, pairs: list[tuple[int, int]]) -> None:
    source, target = rand(7, 2, 2, 4, 1, 3), torch.zeros(6, 2, 2, 4, 1, 3)
    kernels.swap_blocks(source, target, pairs)
    expected = torch.zeros_like(target)
    for src, dst in pairs:
        expected[dst] = source[src]
    assert torch.equal(target, expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(kernels: ops.Backend, shape: tuple[int, int]) -> None:
    x, weight = rand(*shape) * 3, rand(shape[1], seed=1)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(
        kernels.rms_norm(x, weight, 1e-5).double(), expected, atol=2e-6, rtol=1e-5
    )


def test_rms_norm_of_some_rows_and_of_a_strided_view(kernels: ops.Backend) -> None:
    x, weight = rand(7, 40), rand(20, seed=1)
    view = x[:, 20:]
    whole = kernels.rms_norm(view, weight, 1e-6)
    assert torch.equal(whole, kernels.rms_norm(view.contiguous(), weight, 1e-6))
    rows = torch.tensor([6, 0, 3])
    assert torch.equal(kernels.rms_norm(view, weight, 1e-6, rows=rows), whole[rows])


def test_embedding(kernels: ops.Backend) -> None:
    table, tokens = rand(9, 5).bfloat16(), torch.tensor([8, 0, 8, 3])
    assert torch.equal(kernels.embedding(tokens, table), table[tokens])


def rope_oracle(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    out = x.double().clone()
    half = angles.shape[1]
    for t in range(x.shape[0]):
        for i in range(half):
            cos, sin = math.cos(angles[t, i]), math.sin(angles[t, i])
            first, second = x[t, :, i].double(), x[t, :, i + half].double()
            out[t, :, i] = first * cos - second * sin
            out[t, :, i + half] = second * cos + first * sin
    return out


def norm_oracle(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (80, 32), (128, 128), (6, 2), (24, 24)])
def test_rope_and_store(kernels: ops.Backend, dim: int, rotary: int, has_norms: bool) -> None:
    """Two heads of q beside one of k and v, at places of a strided qkv."""
    angles = rand(20, rotary // 2) * 5
    tables = kernels.rope_tables(angles, torch.float32)
    assert tables[0].shape == tables[1].shape == (20, rotary)
    positions, slots = torch.tensor([3, 19, 0]), torch.tensor([7, 2, 16])
    qkv = rand(3, 4 * dim + 5)[:, : 4 * dim]
    norms = (rand(dim, seed=1), rand(dim, seed=2)) if has_norms else None
    pool = torch.full((5, 2, 2, 1, 4, dim), 7.0)
    batch = ops.AttentionBatch(
        query_lens=[3],
        context_lens=[3],
        block_tables=torch.zeros(1, 1, dtype=torch.int64),
        slots=slots,
        block_size=4,
    )
    out = kernels.rope_and_store(
        qkv, tables, positions, ops.layer_view(pool, 1), batch, norms=norms, eps=1e-5
    )
    q, k, v = qkv.reshape(3, 4, dim).split((2, 1, 1), 1)
    if norms is not None:
        q, k = norm_oracle(q, norms[0]), norm_oracle(k, norms[1])
    close = {"atol": 4e-6, "rtol": 1e-5}
    torch.testing.assert_close(out.double(), rope_oracle(q, angles[positions]), **close)
    stored = pool.transpose(3, 4)[:, 1].transpose(1, 2).reshape(20, 2, 1, dim)[slots]
    torch.testing.assert_close(stored[:, 0].double(), rope_oracle(k, angles[positions]), **close)
    assert torch.equal(stored[:, 1], v)
    assert int((pool == 7.0).sum()) == pool.numel() - 6 * dim


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 5, 16, 97, 1000])
def test_best(kernels: ops.Backend, vocab: int, dtype: torch.dtype) -> None:
    """Of strided rows; the first of equals, bans, infinities and NaN included."""
    x = rand(9, vocab + 3).to(dtype)[:, :vocab]
    x[1] = 2.0
    x[2, : vocab // 2] = x[2, vocab // 2 :][: vocab // 2] = 9.0
    x[3], x[4, vocab // 2] = -torch.inf, -torch.inf
    x[5, vocab - 1], x[6, 0] = torch.inf, torch.nan
    x[7, vocab // 2], x[8] = torch.nan, torch.nan
    values, ids = kernels.best(x)
    assert values.dtype is torch.float32
    assert values[6:].isnan().all()
    assert torch.equal(values[:6], x[:6].max(-1).values.float())
    first = [row.tolist().index(max(row.tolist())) for row in x[:6]]
    assert ids[:6].tolist() == first


def test_denormals_have_the_same_bits_in_every_column_and_number_of_rows(
    kernels: ops.Backend, backend: str
) -> None:
    """Of bfloat16: whole vectors and what is left of a row; results are near 0 all the same."""
    small = torch.full((20, 37), 3e-39, dtype=torch.bfloat16)
    ones, weight = torch.ones_like(small), kernels.pack_weight([torch.zeros_like(small)])
    for y in (
        kernels.rms_norm(ones, small[0], 0.0),
        weight(small, add_to=small[:, :20].clone()),
    ):
        assert torch.equal(y, y[:1, :1].expand_as(y)), y
        assert 0 <= float(y.max()) < 1e-38
    if backend == "native":  # others multiply by what torch chooses for a number of rows
        unit = kernels.pack_weight([torch.eye(37, dtype=torch.bfloat16)])
        for x in (small, small * 10):  # the second are normal
            assert torch.equal(unit(x[:1]), unit(x)[:1])
