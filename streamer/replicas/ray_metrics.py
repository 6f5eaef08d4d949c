"""RayMetrics: a replica's counts among Ray's own metrics, under the names that /metrics has.

Ray exports them on every machine for Prometheus, each name after `ray_` and labelled with the
deployment, the application and Ray's id of the replica.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamer.engine.base import Engine


class RayMetrics:
    """Gauges and counters of one engine; histograms stay in its ingresses' /metrics.

    kinds  ray.serve.metrics
    """

    def __init__(self, engine: Engine, kinds: Any) -> None:
        from streamer.server.telemetry.engine_metrics import EngineCollector

        self._collector = EngineCollector(engine)
        self._kinds = kinds
        self._metrics: dict[str, Any] = {}
        self._counted: dict[tuple[str, tuple[str, ...]], float] = {}

    def report(self) -> None:
        """Give Ray the counts of now."""
        for family in self._collector.collect():
            if family.type not in ("gauge", "counter"):
                continue
            for sample in family.samples:
                metric = self._metrics.get(family.name)
                if metric is None:
                    kind = getattr(self._kinds, family.type.capitalize())
                    metric = kind(family.name, family.documentation, tuple(sample.labels))
                    self._metrics[family.name] = metric
                if family.type == "gauge":
                    metric.set(sample.value, sample.labels)
                    continue
                key = family.name, tuple(sample.labels.values())
                more = sample.value - self._counted.get(key, 0.0)
                if more > 0:  # Ray takes differences, and none of 0
                    self._counted[key] = sample.value
                    metric.inc(more, sample.labels)
