"""Arrivals: rates, burstiness, seeds; and the search for the knee, with functions as servers."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest

from streamer.loadtest.open_loop.arrivals import knee, next_rate, offsets


def spread(burstiness: float) -> float:
    """Standard deviation of gaps over their mean: 1 / sqrt(shape) for a gamma distribution."""
    gaps = [b - a for a, b in itertools.pairwise(offsets(5.0, burstiness, 20_000, 1))]
    assert statistics.fmean(gaps) == pytest.approx(0.2)
    return statistics.pstdev(gaps) / statistics.fmean(gaps)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_gamma(burstiness: float) -> None:
    assert spread(burstiness) == pytest.approx(1 / math.sqrt(burstiness), rel=0.06)


def test_a_clock_all_at_once_and_one() -> None:
    assert offsets(4.0, math.inf, 4, 0) == [0.0, 0.25, 0.5, 0.75]
    assert offsets(math.inf, 1.0, 3, 0) == [0.0, 0.0, 0.0]
    assert offsets(4.0, 1.0, 1, 0) == [0.0]


def test_seeds_and_order() -> None:
    times = offsets(3.0, 1.0, 100, 7)
    assert times == offsets(3.0, 1.0, 100, 7) == sorted(times)
    assert times != offsets(3.0, 1.0, 100, 8)
    assert (times[0], times[-1]) == (0.0, pytest.approx(33.0))


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0)])
def test_a_rate_must_be_a_positive_number(rate: float, burstiness: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        offsets(rate, burstiness, 3, 0)


@pytest.mark.parametrize("limit", [0.03, 0.7, 1.0, 5.5, 37.0, 900.0])
@pytest.mark.parametrize("start", [1.0, 10.0])
def test_the_sweep_ends_at_the_knee(limit: float, start: float) -> None:
    tried: list[tuple[float, float]] = []
    rate: float | None = start
    while rate is not None:
        tried.append((rate, 1.0 if rate <= limit else 0.5))
        rate = next_rate(tried)
    found = knee(tried)
    assert found is not None
    assert found <= limit < 1.1 * found + 1e-9
    assert len(tried) <= 20


def test_servers_that_hold_nothing_or_everything() -> None:
    for share in (0.0, 1.0):
        tried: list[tuple[float, float]] = []
        rate: float | None = 1.0
        while rate is not None:
            tried.append((rate, share))
            rate = next_rate(tried)
        assert len(tried) < 20
    assert knee([(1.0, 0.5)]) is None
    assert (
        knee([(1.0, 1.0), (2.0, 0.5), (4.0, 1.0)]) == 1.0
    )  # a lucky result above the limit does not count
