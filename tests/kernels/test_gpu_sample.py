"""Sampling on the device against the host's sampler: noise, filters, greedy rows, failed rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from streamer.kernels import ops, reference
from streamer.kernels.philox import gumbel, philox4x32

triton: Any = pytest.importorskip("triton")
tl: Any = triton.language
philox: Any = pytest.importorskip("streamer.kernels.gpu.philox")

WIDTHS = [1, 6, 257, 5000]


@triton.jit  # type: ignore[untyped-decorator]
def noise_kernel(  # type: ignore[no-untyped-def]
    in_ptr, words_ptr, noise_ptr, N: tl.constexpr, BLOCK: tl.constexpr
):
    """Words [4, N] and the noise of the first of counters and keys [6, N]."""
    i = tl.arange(0, BLOCK)
    c0 = tl.load(in_ptr + i, mask=i < N).to(tl.uint32)
    c1 = tl.load(in_ptr + N + i, mask=i < N).to(tl.uint32)
    c2 = tl.load(in_ptr + 2 * N + i, mask=i < N).to(tl.uint32)
    c3 = tl.load(in_ptr + 3 * N + i, mask=i < N).to(tl.uint32)
    k0 = tl.load(in_ptr + 4 * N + i, mask=i < N).to(tl.uint32)
    k1 = tl.load(in_ptr + 5 * N + i, mask=i < N).to(tl.uint32)
    c0, c1, c2, c3 = philox.philox4x32(c0, c1, c2, c3, k0, k1)
    tl.store(words_ptr + i, c0.to(tl.int64), mask=i < N)
    tl.store(words_ptr + N + i, c1.to(tl.int64), mask=i < N)
    tl.store(words_ptr + 2 * N + i, c2.to(tl.int64), mask=i < N)
    tl.store(words_ptr + 3 * N + i, c3.to(tl.int64), mask=i < N)
    tl.store(noise_ptr + i, philox.gumbel(c0), mask=i < N)


def noise(device: str, counter: np.ndarray, key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The kernel's words [4, n] and their noise for counters [4, n] and keys [2, n]."""
    n = counter.shape[1]
    inputs = torch.from_numpy(np.concatenate([counter, key]).astype(np.int64)).to(device)
    words = torch.zeros(4, n, dtype=torch.int64, device=device)
    out = torch.zeros(n, device=device)
    noise_kernel[(1,)](inputs, words, out, N=n, BLOCK=triton.next_power_of_2(n))
    return words.cpu().numpy().astype(np.uint32), out.cpu().numpy()


def test_noise_is_the_reference_s(device: str) -> None:
    """Words bit for bit, the published answers' counters included; floats within 2 ulp a log."""
    rng = np.random.default_rng(0)
    counter = rng.integers(0, 1 << 32, (4, 1001), dtype=np.uint32)
    key = rng.integers(0, 1 << 32, (2, 1001), dtype=np.uint32)
    counter[:, 0], key[:, 0], counter[:, 1], key[:, 1] = 0, 0, 0xFFFFFFFF, 0xFFFFFFFF
    words, floats = noise(device, counter, key)
    expected = philox4x32(counter, key)
    assert (words == expected).all()
    exact = gumbel(expected[0])
    inner = np.abs(np.exp(-exact.astype(np.float64)))  # 2 ulp of the inner log, then of the outer
    assert (np.abs(floats - exact) <= 2 * np.spacing(np.abs(exact)) + 2**-22 * (1 + inner)).all()


def draws_of(
    temperatures: list[float], filters: list[tuple[int, float, float]], rows: list[int]
) -> ops.Draws:
    """A draw for each temperature from these rows, with (top_k, top_p, min_p) each."""
    with np.errstate(divide="ignore"):
        settings = [
            (t, top_p, float(np.log(min_p)))
            for t, (_, top_p, min_p) in zip(temperatures, filters, strict=True)
        ]
    origin = np.random.default_rng(len(rows)).integers(0, 1 << 32, (len(rows), 5), dtype=np.uint32)
    return ops.Draws(rows, [top_k for top_k, _, _ in filters], settings, origin)


TEMPERATURES = [1.0, 1.5, 0.3, 2.0, 1.0, 1e-3, 0.7, 1.9, 1.0, 1.0]
FILTERS = [
    (3, 1.0, 0.0),
    (4, 1.0, 0.0),
    (0, 0.6, 0.0),
    (5, 0.95, 0.0),
    (0, 1.0, 0.2),
    (1, 1.0, 0.0),
    (10**6, 0.9, 0.0),
    (40, 0.8, 0.05),
    (0, 1e-6, 0.0),
    (0, 1.0, 1.0),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_filters", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_draws_are_the_reference_s(
    device: str, width: int, has_filters: bool, dtype: torch.dtype
) -> None:
    """Of strided rows in any order; ties at the cut, bans, settings that keep one or all."""
    from streamer.kernels.gpu import backend

    rng = torch.Generator().manual_seed(width)
    logits = (torch.randn(9, width + 3, generator=rng) * 2).to(dtype)[:, :width]
    logits[1] = logits[1].round()
    if width > 4:
        logits[3, ::3] = -torch.inf
    filters = FILTERS if has_filters else [(0, 1.0, 0.0)] * 10
    draws = draws_of(TEMPERATURES, filters, [8, 1, 2, 3, 0, 1, 1, 7, 5, 4])
    expected = reference.draw(logits, draws)
    got = backend.draw(logits.to(device), draws)
    assert got.dtype is torch.int64
    assert got.tolist() == expected.tolist()


def test_rows_that_are_not_finite_give_some_id(device: str) -> None:
    from streamer.kernels.gpu import backend

    logits = torch.zeros(4, 40)
    logits[0], logits[1, 3], logits[2] = torch.nan, torch.inf, -torch.inf
    for filters in FILTERS:
        draws = draws_of([1.0] * 4, [filters] * 4, [0, 1, 2, 3])
        assert all(0 <= i < 40 for i in backend.draw(logits.to(device), draws).tolist())


@pytest.mark.parametrize("has_filters", [False, True])
def test_settings_and_positions_on_the_device(device: str, has_filters: bool) -> None:
    """Rows in scattered slots: the same draws, the best where greedy, -1 where not finite."""
    from streamer.kernels.gpu.sample import SamplingRows, sample

    logits = torch.randn(10, 77, generator=torch.Generator().manual_seed(0))
    logits[2, 5], logits[4], logits[9, 0] = torch.nan, -torch.inf, torch.inf
    slots = [7, 1, 14, 3, 0, 12, 5, 9, 2, 8]
    filters = FILTERS if has_filters else [(0, 1.0, 0.0)] * 10
    settings, positions = SamplingRows(16, device), torch.arange(10) * 1000
    stored = draws_of(TEMPERATURES, filters, slots)
    of_slots = np.zeros(16, np.int64), np.ones((16, 3), np.float32), np.zeros((16, 5), np.uint32)
    for table, part in zip(of_slots, (stored.top_k, stored.settings, stored.origin), strict=True):
        table[slots] = part.numpy()
    settings.packed.copy_(torch.from_numpy(settings.pack(*of_slots)))
    settings.settings[3, 0] = 0.0  # row 3 becomes greedy
    drawn = sample(
        logits.to(device),
        settings,
        torch.tensor([*slots[:8], -1, slots[9]], device=device),
        positions.to(device),
        has_filters=has_filters,
    ).tolist()
    origin = stored.origin.numpy().copy()
    origin[:, 2] = positions.numpy()
    expected = reference.draw(
        logits.nan_to_num(posinf=0.0, neginf=0.0),
        ops.Draws(list(range(10)), [k for k, _, _ in filters], stored.settings.tolist(), origin),
    ).tolist()
    expected[2] = expected[4] = expected[9] = -1
    expected[3] = int(logits[3].argmax())
    padding = 8
    del drawn[padding], expected[padding]
    assert drawn == expected
