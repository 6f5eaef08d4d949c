"""Batching beside the papers: the sustained rate, and a run of all of it on tiny shapes."""

from __future__ import annotations

import pytest

from streamer.bench import paper_batching
from streamer.bench.paper_batching import SYSTEMS, sustained


@pytest.mark.parametrize(
    ("latencies", "rate"),
    [
        ([(1.0, 0.1), (2.0, 0.2), (4.0, 0.4)], 2.5),  # a quarter of the way from 2 to 4
        ([(1.0, 0.1), (2.0, 0.2)], 2.0),
        ([(1.0, 0.3)], 0.0),
    ],
)
def test_sustained_rate(latencies: list[tuple[float, float]], rate: float) -> None:
    assert sustained(latencies, 0.25) == pytest.approx(rate)


def test_it_runs() -> None:
    told: list[str] = []
    found = paper_batching.measure(told.append, tiny=True)
    assert found.columns[1:4] == SYSTEMS
    assert [str(row[0]).split(":")[1] for row in found.rows] == [
        *(" tokens/s", " slots used", " latency, ms a token") * 2,
        " requests/s at 250 ms a token",
    ]
    assert "ShareGPT, batches of 2: transformers, static" in told
    assert len(found.plot.series) == 3
