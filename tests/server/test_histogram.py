"""LoopHistogram and LoopCounter are scraped as prometheus_client's own would be."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from streamer.server.histogram import LoopCounter, LoopHistogram

BOUNDS = (0.5, 1, 2.5)
VALUES = (0.0, 0.5, 0.75, 1.0, 2.5, 2.6, 100.0)


def samples(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


def test_the_exposition_is_the_same() -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("gap_seconds", "Gaps.", buckets=BOUNDS, registry=theirs)
    counter = Counter("tokens", "Tokens.", registry=theirs)
    loop_histogram = LoopHistogram("gap_seconds", "Gaps.", BOUNDS)
    loop_counter = LoopCounter("tokens", "Tokens.")
    ours.register(loop_histogram)
    ours.register(loop_counter)
    assert samples(ours) == samples(theirs)
    for value in VALUES:
        histogram.observe(value)
        loop_histogram.observe(value)
        counter.inc(3)
        loop_counter.value += 3
    assert samples(ours) == samples(theirs)
