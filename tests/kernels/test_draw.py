"""Drawing: the native backend draws what torch draws, from sharp and flat logits, all filters."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from streamer.kernels import ops, reference
from streamer.kernels.cpu import native

FILTERS = [
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (7, 1.0, 0.0),
    (300, 1.0, 0.0),
    (100_000, 1.0, 0.0),
    (0, 0.9, 0.0),
    (0, 0.2, 0.0),
    (0, 0.99999, 0.0),
    (0, 1.0, 0.05),
    (0, 1.0, 1e-9),
    (40, 0.95, 0.01),
    (500, 0.999, 1e-6),
    (3, 0.5, 0.5),
]


def draws_of(count: int, filters: tuple[int, float, float], seed: int) -> ops.Draws:
    """`count` draws, row i from row i, each with its own seed, position and temperature."""
    top_k, top_p, min_p = filters
    origin = np.random.default_rng(seed).integers(0, 1 << 32, (count, 5), dtype=np.uint32)
    log_min_p = math.log(min_p) if min_p else -math.inf
    settings = [(0.2 + i % 7 * 0.3, top_p, log_min_p) for i in range(count)]
    return ops.Draws(list(range(count)), [top_k] * count, settings, origin)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize(("vocab", "count"), [(1, 3), (37, 60), (3001, 60), (32_003, 12)])
def test_both_backends_draw_the_same(
    vocab: int, count: int, filters: tuple[int, float, float], dtype: torch.dtype
) -> None:
    rng = torch.Generator().manual_seed(vocab)
    wide = torch.randn(count, vocab + 5, generator=rng)
    wide *= torch.linspace(0.0, 8.0, count)[:, None]  # from flat to sharp
    wide[:, : vocab // 3] += -torch.inf if vocab > 1 else 0.0  # bans
    logits = wide.to(dtype)[:, :vocab]
    draws = draws_of(count, filters, seed=vocab)
    got, expected = native.draw(logits, draws), reference.draw(logits, draws)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 31, 64, 1000])
def test_both_backends_ban_the_same(vocab: int, dtype: torch.dtype) -> None:
    """Of strided rows: words with none, all and some bits, equals, and rows with nothing left."""
    rng = np.random.default_rng(vocab)
    words = rng.integers(-(1 << 31), 1 << 31, (5, -(-vocab // 32)), dtype=np.int64)
    words[:, 1::3], words[:, 2::3], words[3], words[4] = 0, -1, 0, -1
    masks = torch.from_numpy(words.astype(np.int32))
    wide = torch.randn(8, vocab + 3, generator=torch.Generator().manual_seed(vocab))
    wide[1], wide[6, vocab // 2 :] = 2.0, -torch.inf
    rows, x = torch.tensor([6, 1, 3, 0, 4]), wide.to(dtype)
    ours, theirs = x.clone(), x.clone()
    got = native.ban(ours[:, :vocab], rows, masks)
    expected = reference.ban(theirs[:, :vocab], rows, masks)
    assert torch.equal(ours, theirs)
    assert torch.equal(got[0], expected[0])
    bits = np.unpackbits(masks.numpy().view(np.uint8), axis=1, count=vocab, bitorder="little")
    closed = torch.from_numpy(bits == 0)
    assert torch.equal(ours[rows, :vocab], x[rows, :vocab].masked_fill(closed, -torch.inf))
    left = ours[rows, :vocab].tolist()
    assert got[1].tolist() == [row.index(max(row)) for row in left]


@pytest.mark.parametrize("backend", [native, reference], ids=["native", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 5, 97, 1000, 5003])
def test_top(backend: ops.CpuBackend, vocab: int, dtype: torch.dtype) -> None:
    """Of strided rows; equals, bans, whole rows of either, rising and falling ones included."""
    wide = torch.randn(9, vocab + 3, generator=torch.Generator().manual_seed(vocab))
    x = wide.to(dtype)[:, :vocab]
    x[1], x[2], x[3, : vocab // 2] = 2.0, -torch.inf, -torch.inf
    x[4] = (x[4] * 4).round()  # few values
    x[5], x[6] = torch.arange(vocab), -torch.arange(vocab)
    x[7, vocab // 2], x[8, vocab - 1] = torch.inf, torch.nan
    orders = [sorted(range(vocab), key=lambda i: (-row[i], i)) for row in x[:8].tolist()]
    for count in (0, 1, 2, 20, 65, 300, 6000):
        values, ids = backend.top(x, count)
        assert values.dtype is torch.float32
        assert values.shape == ids.shape == (9, min(count, vocab))
        for row in range(8):
            order = orders[row][:count]
            assert ids[row].tolist() == order
            assert values[row].tolist() == x[row, order].tolist()
        assert ids[8].tolist() == [i % vocab for i in ids[8].tolist()]


def test_the_order_of_rows_is_the_draws_own() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    draws = draws_of(6, (0, 0.9, 0.0), seed=1)
    whole = native.draw(logits, draws)
    some = ops.Draws([4, 1], [0, 0], draws.settings[[4, 1]].tolist(), draws.origin.numpy()[[4, 1]])
    assert torch.equal(native.draw(logits, some), whole[[4, 1]])


def test_rows_that_are_not_finite_give_some_id() -> None:
    logits = torch.full((3, 40), torch.nan)
    logits[1], logits[2] = torch.inf, -torch.inf
    for filters in FILTERS:
        ids = native.draw(logits, draws_of(3, filters, seed=2))
        assert all(0 <= i < 40 for i in ids.tolist())


@pytest.mark.parametrize("temperature", [1e-37, 1e-39, 1e-300])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_next_to_no_temperature_draws_the_best(temperature: float, top_p: float) -> None:
    """Its reciprocal, and then the temperature itself, is beyond a float."""
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
    origin = np.ones((2, 5), np.uint32)
    draws = ops.Draws([0, 1], [0, 0], [(temperature, top_p, -math.inf)] * 2, origin)
    assert torch.equal(native.draw(logits, draws), logits.argmax(1))
