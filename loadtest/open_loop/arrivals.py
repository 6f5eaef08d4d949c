"""Arrival times of requests, and the next rate of a sweep.

Pure: seeded draws and arithmetic, no clock.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

GOOD_SHARE = 0.9  # of requests that must meet every objective for a rate to count as held
PRECISION = 1.1  # of the knee, as a ratio
MIN_RATE, MAX_RATE = 0.01, 10_000.0  # a second; above the maximum the generator is the limit


def offsets(rate: float, burstiness: float, count: int, seed: int | str) -> list[float]:
    """Seconds from the start to each of `count` arrivals, the first at 0, `rate` a second.

    Gaps are gamma distributed with shape `burstiness`: 1 is Poisson, below 1 comes in bursts, above
    1 is more even, infinity is evenly spaced. Gaps are scaled so that the last arrival is on time,
    as `vllm bench serve` does: otherwise short runs differ in rate. An infinite rate: all at once.
    """
    if rate <= 0 or burstiness <= 0:
        raise ValueError(f"rate {rate} and burstiness {burstiness} must be above 0")
    if math.isinf(rate):
        return [0.0] * count
    source = random.Random(f"arrivals {seed}")
    is_clock = math.isinf(burstiness)
    gaps = [1.0 if is_clock else source.gammavariate(burstiness, 1.0) for _ in range(count - 1)]
    stretch = (count - 1) / rate / sum(gaps) if gaps else 0.0
    return [stretch * at for at in itertools.accumulate(gaps, initial=0.0)][:count]


def keeps_up(arrived: int, finished: int) -> bool:
    """Whether as many requests finish as arrive, within chance; False: the queue grows."""
    return finished >= GOOD_SHARE * arrived - math.sqrt(arrived)


def next_rate(tried: Sequence[tuple[float, float]]) -> float | None:
    """The rate to try after these (rate, share of good requests); None when the knee is found.

    Doubles while the rate holds, halves while even the lowest does not, then tries the geometric
    mean until the highest rate that holds and the lowest that does not are within PRECISION.
    """
    held, failed = knee(tried), lowest_failed(tried)
    if failed is None:
        doubled = 2 * max(rate for rate, _ in tried)
        return doubled if doubled <= MAX_RATE else None
    if held is None:
        return failed / 2 if failed / 2 >= MIN_RATE else None
    return math.sqrt(held * failed) if failed / held > PRECISION else None


def lowest_failed(tried: Sequence[tuple[float, float]]) -> float | None:
    """The lowest rate that did not hold; None if all did."""
    return min((rate for rate, share in tried if share < GOOD_SHARE), default=None)


def knee(tried: Sequence[tuple[float, float]]) -> float | None:
    """The highest rate that held below the lowest that did not; None if none held."""
    failed = lowest_failed(tried)
    held = [r for r, share in tried if share >= GOOD_SHARE and (failed is None or r < failed)]
    return max(held, default=None)
