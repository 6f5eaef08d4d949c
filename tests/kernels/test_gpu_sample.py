"""Sampling on the device against the host's sampler: noise, filters, greedy rows, failed rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from streamer.core.sampling import SamplingParams
from streamer.model.philox import gumbel, philox4x32
from streamer.model.sampler import Sampler

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


def compare(
    device: str, logits: torch.Tensor, params: list[SamplingParams], at: list[int]
) -> tuple[list[int], list[int]]:
    """(the device's tokens, the host's) for rows in scattered slots."""
    from streamer.kernels.gpu.sample import SamplingRows, sample

    count, width = logits.shape
    slots = [(7 * i + 3) % 16 for i in range(count)]
    settings = SamplingRows(16, device)
    settings.set(
        slots,
        temperature=[p.temperature for p in params],
        seed=[p.seed or 0 for p in params],
        choice=list(range(count)),
        top_k=[p.top_k for p in params],
        top_p=[p.top_p for p in params],
        min_p=[p.min_p for p in params],
    )
    host = Sampler(width, 16)
    for i, slot in enumerate(slots):
        host.join(slot, params[i], [0], 1, i)
    expected = host.sample(logits.clone(), slots, at).tokens
    drawn = sample(
        logits.to(device),
        settings,
        torch.tensor(slots, device=device),
        torch.tensor(at, device=device),
        has_filters=any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params),
    )
    assert drawn.dtype is torch.int64
    return drawn.tolist(), expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
def test_draws_are_the_host_s(device: str, width: int, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(width)
    logits = (torch.randn(9, width, generator=rng) * 2).to(dtype)
    if width > 4:
        logits[2, : width // 2] = -torch.inf
    params = [
        SamplingParams(temperature=t, seed=s)
        for t, s in zip(
            (1.0, 0.0, 1.5, 0.3, 2.0, 1.0, 0.0, 1e-3, 1.0),
            (1, 2, -3, 1 << 62, 5, 5, 6, 7, -(1 << 63)),
            strict=True,
        )
    ]
    got, expected = compare(device, logits, params, [5, 6, 1, 99, 100_000, 3, 2, 1, 0])
    assert got == expected


@pytest.mark.parametrize("width", [6, 300, 9000])
def test_filters_are_the_host_s(device: str, width: int) -> None:
    """Alone and together, with ties at the cut, bans, and settings that keep one or all."""
    rng = torch.Generator().manual_seed(width)
    logits = torch.randn(10, width, generator=rng) * 2
    logits[1] = logits[1].round()  # ties
    logits[3, ::3] = -torch.inf
    settings: list[dict[str, float]] = [
        {"top_k": 3},
        {"top_k": 4},
        {"top_p": 0.6},
        {"top_p": 0.95, "top_k": 5},
        {"min_p": 0.2},
        {"top_k": 1},
        {"top_k": 10**6, "top_p": 0.9},
        {"min_p": 0.05, "top_k": 40, "top_p": 0.8, "temperature": 0.7},
        {"top_p": 1e-6},
        {"min_p": 1.0, "temperature": 1.9},
    ]
    params = [
        SamplingParams(**{"temperature": 1.0, "seed": i, **kwargs})  # type: ignore[arg-type]
        for i, kwargs in enumerate(settings)
    ]
    got, expected = compare(device, logits, params, list(range(10)))
    assert got == expected


def test_a_row_that_is_not_finite_fails_alone(device: str) -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    logits[1, 7], logits[2, 7], logits[3] = torch.nan, torch.inf, -torch.inf
    logits[4, 1:] = -torch.inf
    for temperature in (0.0, 1.0):
        for top_k in (0, 3):
            params = [SamplingParams(temperature=temperature, seed=i, top_k=top_k)
                      for i in range(6)]  # fmt: skip
            got, expected = compare(device, logits, params, [4] * 6)
            assert got == expected
            assert got[1:5] == [-1, -1, -1, 0]
