"""Prometheus metrics, in a registry of their own.

Three sources: a Record reports a request's start, first token and end (records.py); a Meter, one a
reader, the gaps between deltas; engine_metrics.py reads the engine's counts when scraped.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from streamer.engine.stats import Tally
from streamer.server.telemetry.engine_metrics import EngineCollector, histogram
from streamer.server.telemetry.refusals import Refusals

if TYPE_CHECKING:
    from streamer.engine.base import Engine
    from streamer.engine.stream import Delta, TokenStream
    from streamer.errors import StreamerError

LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
GAP_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 1)
LAG_QUANTILES = (0.5, 0.99, 1.0)


class Metrics:
    """All metrics of one server.

    live         streams of requests that have not ended: their lag is read when scraped
    gap_s        seconds per token between deltas
    ended_tokens output tokens of the requests that have ended
    loop_late_s  seconds by which the event loop was late for a timer
    """

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.live: set[TokenStream] = set()
        self.gap_s = Tally(GAP_S)
        self.loop_late_s = Tally(LATENCY_S)
        self.ended_tokens = 0
        self._refusals = Refusals()
        self.registry.register(EngineCollector(engine))
        self.registry.register(_TallyCollector(self))
        self._finished = self._counter(
            "streamer_requests_finished",
            "Requests that ended, by transport and reason (stop, length, left, cancelled, "
            "server_shutdown, failed).",
            ["reason", "transport"],
        )
        self._refused = self._counter(
            "streamer_requests_refused", "Requests that were answered with an error.", ["code"]
        )
        self._resumed = self._counter(
            "streamer_resumes",
            "Readers that came back to a response, by what they found (live, finished, gone).",
            ["status"],
        )
        self._prompt_tokens = self._counter("streamer_prompt_tokens", "Prompt tokens of requests.")
        self._cached_tokens = self._counter(
            "streamer_cached_prompt_tokens", "Prompt tokens whose KV was already there."
        )
        self._queue_s = self._seconds("streamer_queue_seconds", "From submission to the first run.")
        self._first_token_s = self._seconds(
            "streamer_time_to_first_token_seconds", "From submission to the first token."
        )
        self._total_s = self._seconds("streamer_request_seconds", "From submission to the end.")

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _seconds(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=LATENCY_S, registry=self.registry)

    def expose(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def meter(self) -> Meter:
        """A Meter for one reader."""
        return Meter(self)

    def ended(self, stream: TokenStream) -> None:
        """Keep the token count of a stream that has ended."""
        if stream in self.live:
            self.live.discard(stream)
            self.ended_tokens += stream.num_output_tokens

    def queued(self, seconds: float) -> None:
        """Observe the seconds from a request's submission to its first run."""
        self._queue_s.observe(seconds)

    def first_token(self, seconds: float) -> None:
        """Observe the seconds from a request's submission to its first token."""
        self._first_token_s.observe(seconds)

    def finished(
        self, reason: str, transport: str, prompt_tokens: int, cached_tokens: int, total_s: float
    ) -> None:
        """Count a request that has ended, with or without readers."""
        self._finished.labels(reason, transport).inc()
        self._prompt_tokens.inc(prompt_tokens)
        self._cached_tokens.inc(cached_tokens)
        self._total_s.observe(total_s)

    def refused(self, error: StreamerError) -> str:
        """Count and log a request that was answered with an error and never ran; its id."""
        self._refused.labels(error.code or error.type).inc()
        request_id = "req_" + secrets.token_hex(12)
        self._refusals.count(error, request_id)
        return request_id

    def resumed(self, status: str) -> None:
        """Count a reader that came back to a response and found it "live", "finished" or "gone"."""
        self._resumed.labels(status).inc()


class Meter:
    """Observes one reader's seconds between tokens; costs 0.5 us per delta."""

    __slots__ = ("_last", "_observe")

    def __init__(self, metrics: Metrics) -> None:
        self._observe = metrics.gap_s.observe
        self._last: dict[tuple[int, int], float] = {}

    def deltas(self, source: int, deltas: Sequence[Delta]) -> None:
        """Observe the deltas that a wake-up brought to the stream at `source`."""
        now = time.perf_counter()
        for d in deltas:
            count = len(d.token_ids)
            if count:
                key = (source, d.choice)
                last = self._last.get(key)
                if last is not None:
                    self._observe((now - last) / count)
                self._last[key] = now


class _TallyCollector(Collector):
    """Exposes what is counted without prometheus_client, and the lag of the live streams."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """The families with their current values."""
        metrics = self._metrics
        yield CounterMetricFamily(
            "streamer_output_tokens",
            "Output tokens of requests, once each, whoever read them and however often.",
            value=metrics.ended_tokens + sum(s.num_output_tokens for s in metrics.live),
        )
        yield histogram(
            "streamer_inter_token_latency_seconds",
            "Seconds a token between deltas of a choice (one observation a delta).",
            {"": metrics.gap_s},
        )
        yield histogram(
            "streamer_event_loop_lag_seconds",
            "How late the event loop came to a timer, ten times a second.",
            {"": metrics.loop_late_s},
        )
        yield self._lags()

    def _lags(self) -> Metric:
        family = GaugeMetricFamily(
            "streamer_stream_lag_tokens",
            "Output tokens that the readers of live streams have not taken, by quantile.",
            labels=["quantile"],
        )
        lags = sorted(stream.lag() for stream in self._metrics.live)
        for quantile in LAG_QUANTILES:
            at = min(int(quantile * len(lags)), len(lags) - 1)
            family.add_metric([f"{quantile:g}"], lags[at] if lags else 0)
        return family

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are fixed, and values are not read at registration."""
        return []
