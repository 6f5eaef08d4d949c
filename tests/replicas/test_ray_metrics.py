"""What Ray gets of a replica's counts; Ray's own classes are not needed for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from streamer.core.plan import StepStats
from streamer.replicas.ray_metrics import RayMetrics


class Kind:
    """A metric of Ray's: its labels by value, set or added up."""

    found: dict[str, Kind]

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        assert description
        self._tag_keys = set(tag_keys)
        self.values: dict[tuple[str, ...], float] = {}
        self.found[name] = self

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == self._tag_keys
        self.values[tuple(tags.values())] = value

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0, "Ray raises for it"
        self.set(self.values.get(tuple(tags.values()), 0.0) + value, tags)


class Engine:
    is_ready = True
    journal = phases = None
    info = SimpleNamespace(block_bytes=100)

    def __init__(self) -> None:
        self.stats = StepStats()

    @property
    def counts(self) -> dict[str, StepStats]:
        return {"": self.stats}


def test_gauges_are_set_and_counters_go_on_from_what_was_told() -> None:
    kind = type("AKind", (Kind,), {"found": {}})
    engine: Any = Engine()
    metrics = RayMetrics(engine, SimpleNamespace(Gauge=kind, Counter=kind))
    for running, drawn in ((3, 10), (2, 10), (0, 25)):
        engine.stats = StepStats(running=running, generated_tokens=drawn, swapped_out_blocks=drawn)
        metrics.report()
        found = {name: each.values for name, each in kind.found.items()}
        assert found["streamer_requests"]["running",] == running
        assert found["streamer_generated_tokens"] == {(): drawn}
        assert found["streamer_swap_bytes"] == {("out",): 100 * drawn}
    assert found["streamer_blocks"]["device", "used"] == 0
