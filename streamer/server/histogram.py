"""The metrics that are observed with every delta, at a tenth of prometheus_client's own price.

Its Histogram and Counter take a lock for every number; these live on the loop and are read there,
when scraped. metrics.py makes them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class LoopHistogram(Collector):
    """A histogram without labels; `bounds` are its buckets' upper ends, ascending."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """One more value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        """The buckets, each with those below it, as Prometheus has them."""
        ends = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(ends, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class LoopCounter(Collector):
    """A counter without labels; `value` is added to where it is counted."""

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._text = text
        self.value = 0

    def collect(self) -> Iterable[Metric]:
        """The count."""
        yield CounterMetricFamily(self._name, self._text, value=self.value)
