"""Prometheus metrics, in a registry of their own.

Counts of the engine are read when scraped; a Meter a request observes what only the transport
knows: time to the first token, gaps between tokens, and how it ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from streamer.server.histogram import LoopCounter, LoopHistogram

if TYPE_CHECKING:
    from streamer.core.plan import StepStats
    from streamer.engine.engine import AsyncEngine
    from streamer.engine.stream import Delta, TokenStream

LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
GAP_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 1)


class Metrics:
    """All metrics of one server."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(engine))
        self._finished = Counter(
            "streamer_choices_finished",
            "Choices answered, by reason (stop, length, cancelled, failed, left).",
            ["reason"],
            registry=self.registry,
        )
        self._prompt_tokens = Counter(
            "streamer_prompt_tokens", "Prompt tokens of requests.", registry=self.registry
        )
        self._output_tokens = LoopCounter(
            "streamer_output_tokens", "Output tokens handed to readers."
        )
        self.registry.register(self._output_tokens)
        self._cached_tokens = Counter(
            "streamer_cached_prompt_tokens",
            "Prompt tokens whose KV was already there.",
            registry=self.registry,
        )
        self._first_token_s = Histogram(
            "streamer_time_to_first_token_seconds",
            "From submission to the first token.",
            buckets=LATENCY_S,
            registry=self.registry,
        )
        self._gap_s = LoopHistogram(
            "streamer_inter_token_latency_seconds",
            "Seconds a token between deltas of a choice (one observation a delta).",
            GAP_S,
        )
        self.registry.register(self._gap_s)
        self._total_s = Histogram(
            "streamer_request_seconds",
            "From submission to the end.",
            buckets=LATENCY_S,
            registry=self.registry,
        )

    def expose(self) -> bytes:
        """The text exposition."""
        return generate_latest(self.registry)

    def meter(self, streams: Sequence[TokenStream]) -> Meter:
        """A Meter for a request that was just submitted."""
        return Meter(self, streams)


class Meter:
    """Observes one request; `close` counts how it ended."""

    def __init__(self, metrics: Metrics, streams: Sequence[TokenStream]) -> None:
        self._m = metrics
        self._streams = streams
        self._start = time.monotonic()
        self._last: dict[tuple[int, int], float] = {}

    def deltas(self, source: int, deltas: Sequence[Delta]) -> None:
        """What a wake-up brought to the stream at `source`."""
        now = time.monotonic()
        for d in deltas:
            num_tokens = len(d.token_ids)
            if not num_tokens:
                continue
            key = (source, d.choice)
            last = self._last.get(key)
            if last is None:
                self._m._first_token_s.observe(now - self._start)
            else:
                self._m._gap_s.observe((now - last) / num_tokens)
            self._last[key] = now
            self._m._output_tokens.value += num_tokens

    def close(self) -> None:
        """The request is answered, or its reader left."""
        self._m._total_s.observe(time.monotonic() - self._start)
        for stream in self._streams:
            self._m._prompt_tokens.inc(stream.num_prompt_tokens)
            self._m._cached_tokens.inc(stream.cached_tokens)
            for finish in stream.finishes:
                reason = "left" if finish is None else finish.reason.value
                self._m._finished.labels(reason).inc()


class _EngineCollector(Collector):
    """Reads the engine's latest counts at every scrape."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        """Gauges and counters of the scheduler and its pools."""
        stats = self._engine.stats
        yield _gauge(
            "streamer_requests",
            "Requests in the engine by state.",
            "state",
            {
                s: getattr(stats, s)
                for s in ("waiting", "running", "paused", "preempted", "swapped")
            },
        )
        yield _blocks(stats)
        counters = {
            "steps": "Steps of the engine.",
            "computed_tokens": "Tokens run through the model.",
            "generated_tokens": "Tokens drawn.",
            "prefix_hit_tokens": "Prompt tokens found in the prefix cache.",
            "preemptions_swap": "Preemptions by swap.",
            "preemptions_recompute": "Preemptions by recompute.",
            "swapped_out_blocks": "Blocks copied to the host pool.",
            "swapped_in_blocks": "Blocks copied back.",
            "copied_blocks": "Blocks copied on first write.",
        }
        for name, text in counters.items():
            yield CounterMetricFamily(f"streamer_{name}", text, value=getattr(stats, name))

    def describe(self) -> Iterable[Metric]:
        """Nothing: the counts of an engine that is not there yet are not asked for."""
        return []


def _gauge(name: str, text: str, label: str, values: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _blocks(stats: StepStats) -> GaugeMetricFamily:
    family = GaugeMetricFamily(
        "streamer_blocks",
        "KV blocks by pool and state; cached ones are free and still hold a prefix.",
        labels=["pool", "state"],
    )
    free = stats.blocks_free - stats.blocks_cached
    family.add_metric(["device", "free"], free)
    family.add_metric(["device", "cached"], stats.blocks_cached)
    family.add_metric(["device", "used"], stats.blocks_total - stats.blocks_free)
    family.add_metric(["host", "free"], stats.host_blocks_free)
    family.add_metric(["host", "used"], stats.host_blocks_total - stats.host_blocks_free)
    return family
