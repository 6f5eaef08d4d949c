"""Sampling on the device against the reference: noise, filters, greedy rows, failed rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from streamer.kernels import ops, reference
from streamer.kernels.philox import gumbel, philox4x32

triton: Any = pytest.importorskip("triton")
tl: Any = triton.language
philox: Any = pytest.importorskip("streamer.kernels.gpu.sampling.philox")


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
    temperatures: list[float], filters: list[tuple[int, float, float]], seed: int = 0
) -> ops.Draws:
    """A draw for each temperature from the row of its number, with (top_k, top_p, min_p) each."""
    with np.errstate(divide="ignore"):
        settings = [
            (t, top_p, float(np.log(min_p)))
            for t, (_, top_p, min_p) in zip(temperatures, filters, strict=True)
        ]
    count = len(temperatures)
    origin = np.random.default_rng(seed).integers(0, 1 << 32, (count, 5), dtype=np.uint32)
    return ops.Draws(range(count), [top_k for top_k, _, _ in filters], settings, origin)


def sampled(
    device: str, logits: torch.Tensor, draws: ops.Draws, slots: list[int], *, has_filters: bool
) -> list[int]:
    """Tokens that the rows draw on the device, with the settings of their slots (-1: padding)."""
    from streamer.kernels.gpu.sampling.sample import SamplingRows, sample

    settings = SamplingRows(16, device)
    of_slots = np.zeros(16, np.int64), np.ones((16, 3), np.float32), np.zeros((16, 5), np.uint32)
    for table, part in zip(of_slots, (draws.top_k, draws.settings, draws.origin), strict=True):
        table[slots] = part.numpy()
    settings.packed.copy_(torch.from_numpy(settings.pack(*of_slots)))
    positions = torch.from_numpy(draws.origin.numpy()[:, 2].astype(np.int64))
    where = torch.tensor(slots, device=device)
    tokens = sample(
        logits.to(device), settings, where, positions.to(device), has_filters=has_filters
    )
    assert tokens.dtype is torch.int64
    return tokens.tolist()


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


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pieces, so that a row of a few hundred tokens has several."""
    from streamer.kernels.gpu.sampling import filters, sample

    monkeypatch.setattr(sample, "CHUNK", 64)
    monkeypatch.setattr(filters, "BLOCK", 256)
    monkeypatch.setattr(filters, "ROOM", 16)


@pytest.mark.parametrize("has_filters", [False, True])
@pytest.mark.parametrize(
    ("width", "dtype"),
    [(1, torch.float32), (6, torch.float32), (300, torch.bfloat16)],
)
def test_rows_draw_what_the_reference_draws(
    device: str, width: int, has_filters: bool, dtype: torch.dtype
) -> None:
    """Strided rows; ties at the cut, bans, settings that keep one or all."""
    rng = torch.Generator().manual_seed(width)
    logits = (torch.randn(10, width + 3, generator=rng) * 2).to(dtype)[:, :width]
    logits[1] = logits[1].round()
    if width > 4:
        logits[3, ::3] = -torch.inf
    draws = draws_of(TEMPERATURES, FILTERS if has_filters else [(0, 1.0, 0.0)] * 10, width)
    got = sampled(device, logits, draws, list(range(10)), has_filters=has_filters)
    assert got == reference.draw(logits, draws).tolist()


@pytest.mark.parametrize("has_filters", [False, True])
def test_greedy_rows_failed_rows_and_padding(device: str, has_filters: bool) -> None:
    """In scattered slots: the best where greedy, -1 where not finite; the others are unchanged."""
    logits = torch.randn(10, 77, generator=torch.Generator().manual_seed(0))
    draws = draws_of(TEMPERATURES, FILTERS if has_filters else [(0, 1.0, 0.0)] * 10)
    expected = reference.draw(logits, draws).tolist()
    draws.settings[3, 0] = 0.0
    expected[3] = int(logits[3].argmax())
    logits[2, 5], logits[4], logits[9, 0] = torch.nan, -torch.inf, torch.inf
    logits[6, 7:9] = torch.nan
    draws.settings[6, 0] = 0.0
    expected[2] = expected[4] = expected[6] = expected[9] = -1
    slots = [7, 1, 14, 3, 0, 12, 5, 9, -1, 8]
    drawn = sampled(device, logits, draws, slots, has_filters=has_filters)
    padding = 8
    del drawn[padding], expected[padding]
    assert drawn == expected


def assert_cuts_are_those_of_sorting(
    device: str, x: torch.Tensor, asked: list[tuple[int, float, float]], temperature: float
) -> list[int]:
    """Compare what each (top_k, top_p, min_p) keeps of x [V] with sorting -> their passes."""
    from streamer.kernels.gpu.sampling import filters
    from streamer.kernels.gpu.sampling.sample import SamplingRows

    settings = SamplingRows(len(asked), device)
    draws = draws_of([temperature] * len(asked), asked)
    tables = (draws.top_k, draws.settings, draws.origin)
    settings.packed.copy_(torch.from_numpy(settings.pack(*(table.numpy() for table in tables))))
    logits = x.expand(len(asked), -1).contiguous().to(device)
    slots = torch.arange(len(asked), dtype=torch.int32, device=device)
    top = logits.float().amax(1)
    shared = {"top_ptr": top, "slots_ptr": slots, "settings_ptr": settings.settings}
    cuts, passes = filters.find_cuts(logits, settings.top_k, shared)
    below = ((x.float().max() - x.float()) / torch.tensor(temperature)).sort().values
    below = below[below.isfinite()].double()  # the others can't be drawn, kept or not
    for (top_k, top_p, min_p), bits in zip(asked, cuts.tolist(), strict=True):
        got = int((below <= float(np.array(bits, np.int32).view(np.float32))).sum())
        kept = below[below <= (-math.log(min_p) if min_p else math.inf)]
        if top_k:
            kept = kept[kept <= kept[min(top_k, len(kept)) - 1]]
        expected = [len(kept)] * 2
        if top_p < 1:
            mass = (-kept).exp().cumsum(0)
            places = [  # a sum's rounding may move the last token
                int((mass < top_p * near * mass[-1]).sum()) for near in (1 - 2e-6, 1 + 2e-6)
            ]
            expected = [int((kept <= kept[min(i, len(kept) - 1)]).sum()) for i in places]
        assert expected[0] <= got <= expected[1], f"{top_k}, {top_p}, {min_p}"
    return passes.tolist()


WIDTH = 4736
ROWS = {
    "a model's": lambda rng: torch.randn(WIDTH, generator=rng) * 3,
    "flat": lambda rng: torch.rand(WIDTH, generator=rng) * 0.01,
    "all alike": lambda rng: torch.full((WIDTH,), 2.5),
    "peaked": lambda rng: torch.randn(WIDTH, generator=rng) * 0.5 - 30 * torch.arange(WIDTH).gt(2),
    # over sixty powers of ten, as no model's are
    "far apart": lambda rng: -torch.logspace(-30, 30, WIDTH),
    "mostly banned": lambda rng: torch.randn(WIDTH, generator=rng).where(
        torch.arange(WIDTH) % 7 == 0, -torch.inf
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_cuts_are_those_of_sorting_in_few_passes(
    device: str, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    """Filters alone and together; as many of the tokens are searched in registers as of 152,000."""
    from streamer.kernels.gpu.sampling import filters

    monkeypatch.setattr(filters, "BLOCK", 2048)
    monkeypatch.setattr(filters, "ROOM", 128)
    asked = [
        (50, 1.0, 0.0),
        (0, 0.9, 0.0),
        (400, 0.8, 0.0),
        (WIDTH - 1, 0.999, 1e-4),
        (10**6, 0.5, 0.0),
        (WIDTH - 1, 1.0, 0.0),
    ]
    x = ROWS[name](torch.Generator().manual_seed(1)).to(dtype)
    assert max(assert_cuts_are_those_of_sorting(device, x, asked, 0.8)) <= 8


VOCABULARY = 151_936
LARGEST = 0x7F7FFFFF  # bits of the largest float


def at_distances(bits: torch.Tensor) -> torch.Tensor:
    """Logits whose distances below the best have these bits, at a temperature of 1."""
    bits[0] = 0
    return -bits.to(torch.int32).view(torch.float32)


def near(start: float, span: int, rng: torch.Generator) -> torch.Tensor:
    """Bits of distances within `span` units in the last place above `start`."""
    first = int(torch.tensor(start).view(torch.int32))
    return first + torch.randint(0, span, (VOCABULARY,), generator=rng)


def one_of(parts: list[torch.Tensor], rng: torch.Generator) -> torch.Tensor:
    """Each token from one of the parts [V]."""
    which = torch.randint(0, len(parts), (1, VOCABULARY), generator=rng)
    return torch.stack(parts).gather(0, which)[0]


# Rows in which a pass with few limits divides little, and those in which buckets do.
HARD = {
    "flat": lambda rng: torch.rand(VOCABULARY, generator=rng) * 0.01,
    "all alike": lambda rng: torch.full((VOCABULARY,), 2.5),
    "few levels": lambda rng: -torch.randn(VOCABULARY, generator=rng).abs().mul(3).round(),
    "ten left": lambda rng: torch.randn(VOCABULARY, generator=rng).where(
        torch.arange(VOCABULARY) < 10, -torch.inf
    ),
    "60 powers of ten": lambda rng: -torch.logspace(-30, 30, VOCABULARY),
    "all powers of ten": lambda rng: at_distances(
        torch.randint(0, LARGEST, (VOCABULARY,), generator=rng)
    ),
    "narrow clusters": lambda rng: at_distances(
        one_of([near(start, 2000, rng) for start in (1e-3, 0.7, 2.0, 2.9, 6.0, 11.0)], rng)
    ),
    "both ends": lambda rng: at_distances(
        one_of([near(0.0, 12_000, rng), LARGEST - near(0.0, 12_000, rng)], rng)
    ),
    # a third of the tokens in one bucket of the second pass, of the third and of the fourth each
    "nested": lambda rng: at_distances(
        one_of([near(1.7, span, rng) for span in (1 << 20, 1 << 10, 1)], rng)
    ),
    "nested near 0": lambda rng: at_distances(
        one_of([near(1e-9, span, rng) for span in (1 << 26, 1 << 18, 1 << 9)], rng)
    ),
}


@pytest.mark.parametrize("name", HARD)
def test_no_row_takes_more_than_eight_passes(
    device: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of a real vocabulary, with as many buckets and as much room as on a GPU."""
    from streamer.kernels.gpu.sampling import filters

    # the most that Triton allows; the interpreter takes as long for a small block
    monkeypatch.setattr(filters, "BLOCK", 1 << 17 if device == "cpu" else 1024)
    monkeypatch.setattr(filters, "ROOM", 4096)
    asked = [(50, 0.9, 0.0), (0, 0.999, 0.0), (20_000, 0.9, 0.0), (100_000, 0.95, 1e-4)]
    x = HARD[name](torch.Generator().manual_seed(1))
    passes = assert_cuts_are_those_of_sorting(device, x, asked, 1.0)
    assert max(passes) <= 8
    if name == "nested":
        assert max(passes) == 8  # each filter needs its four
    if name == "ten left":
        assert passes[0] == 2  # banned tokens cost nothing
