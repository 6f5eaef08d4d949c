"""EngineCollector: the engine's own counts as Prometheus families, read when scraped.

Owns nothing: the scheduler counts in StepStats, the engine's thread times its phases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from streamer.engine.stats import Tally

if TYPE_CHECKING:
    from streamer.core.plan import StepStats
    from streamer.engine.base import Engine

STATES = ("waiting", "running", "paused", "preempted", "swapped")
COUNTERS = {
    "steps": "Steps of the engine.",
    "computed_tokens": "Tokens run through the model.",
    "generated_tokens": "Tokens drawn.",
    "prefix_hit_tokens": "Prompt tokens found in the prefix cache.",
    "copied_blocks": "Blocks copied on first write.",
    "rebuilds": "Times that all was computed again after a step failed.",
}


class EngineCollector(Collector):
    """Reads the engine's latest counts at every scrape."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        """Gauges and counters of each scheduler, its pools and its steps."""
        engine = self._engine
        block_bytes = engine.info.block_bytes if engine.is_ready else 0
        yield from _by_replica({n: _counts(s, block_bytes) for n, s in engine.counts.items()})
        if engine.journal is not None:
            up: dict[tuple[str, ...], float] = {(): float(engine.journal.failure is None)}
            yield _gauge("streamer_journal_up", "1 until the journal has failed.", [], up)
        if engine.phases is not None:
            yield histogram(
                "streamer_step_phase_seconds",
                "Seconds of each step by phase.",
                engine.phases.by_phase,
                label="phase",
            )

    def describe(self) -> Iterable[Metric]:
        """Nothing: at registration the engine may not have started, and has no counts."""
        return []


def _by_replica(found: Mapping[str, Iterable[Metric]]) -> Iterable[Metric]:
    """One family of each name, its samples labelled by replica where those have names."""
    families: dict[str, Metric] = {}
    for replica, metrics in found.items():
        for metric in metrics:
            family = families.setdefault(metric.name, metric)
            samples = metric.samples
            if replica:
                samples = [s._replace(labels=s.labels | {"replica": replica}) for s in samples]
            family.samples = samples if family is metric else family.samples + samples
    return families.values()


def _counts(stats: StepStats, block_bytes: int) -> Iterable[Metric]:
    """What one scheduler counts."""
    states: dict[tuple[str, ...], float] = {(s,): getattr(stats, s) for s in STATES}
    yield _gauge("streamer_requests", "Requests in the engine by state.", ["state"], states)
    yield _gauge(
        "streamer_blocks",
        "KV blocks by pool and state; cached ones are free and still hold a prefix.",
        ["pool", "state"],
        _blocks(stats),
    )
    for name, text in COUNTERS.items():
        value = getattr(stats, name)
        yield CounterMetricFamily(f"streamer_{name}", text, value=value)
    yield _counter(
        "streamer_preemptions",
        "Requests that gave their blocks up, by how they come back.",
        "kind",
        {"swap": stats.preemptions_swap, "recompute": stats.preemptions_recompute},
    )
    yield _counter(
        "streamer_swap_bytes",
        "Bytes copied to the host pool (out) and back (in).",
        "direction",
        {
            "out": stats.swapped_out_blocks * block_bytes,
            "in": stats.swapped_in_blocks * block_bytes,
        },
    )
    yield CounterMetricFamily(
        "streamer_swap_seconds", "Seconds of swap copies, both ways.", value=stats.swap_s
    )
    yield from _speculation(stats)


def _speculation(stats: StepStats) -> Iterable[Metric]:
    """As vLLM's vllm:spec_decode_..., and what was proposed by position."""
    for name, text, value in (
        ("num_drafts", "Runs of proposed tokens that were verified.", stats.verifications),
        ("num_draft_tokens", "Tokens proposed and verified.", stats.proposed_tokens),
        (
            "num_accepted_tokens",
            "Those of them that the model drew as well.",
            stats.accepted_tokens,
        ),
    ):
        yield CounterMetricFamily(f"streamer_spec_decode_{name}", text, value=value)
    for name, text, values in (
        ("num_draft_tokens_per_pos", "Tokens proposed, by position.", stats.proposed_at),
        ("num_accepted_tokens_per_pos", "Those accepted, by position.", stats.accepted_at),
    ):
        by_position = {str(i): value for i, value in enumerate(values)}
        yield _counter(f"streamer_spec_decode_{name}", text, "position", by_position)


def histogram(
    name: str, text: str, tallies: Mapping[str, Tally], label: str | None = None
) -> HistogramMetricFamily:
    """Tallies by the value of their label; one under any key where there is no label."""
    family = HistogramMetricFamily(name, text, labels=[label] if label else [])
    for key, tally in tallies.items():
        bounds = [*(str(float(b)) for b in tally.bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(tally.counts)), strict=True))
        family.add_metric([key] if label else [], buckets, tally.total)
    return family


def _gauge(
    name: str, text: str, labels: list[str], values: Mapping[tuple[str, ...], float]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _counter(name: str, text: str, label: str, values: Mapping[str, float]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _blocks(stats: StepStats) -> dict[tuple[str, ...], float]:
    blocks: dict[tuple[str, ...], float] = {}
    for pool, total, free, cached in (
        ("device", stats.blocks_total, stats.blocks_free, stats.blocks_cached),
        ("host", stats.host_blocks_total, stats.host_blocks_free, stats.host_blocks_cached),
    ):
        blocks |= {(pool, "free"): free - cached, (pool, "cached"): cached}
        blocks[pool, "used"] = total - free
    return blocks
