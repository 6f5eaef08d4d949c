"""Batching beside the papers: a run of all of it on tiny shapes."""

from __future__ import annotations

from streamer.loadtest.paper import batching as paper_batching
from streamer.loadtest.paper.batching import SYSTEMS


def test_it_runs() -> None:
    told: list[str] = []
    found = paper_batching.measure(told.append, tiny=True)
    assert found.columns[1:4] == SYSTEMS
    assert [str(row[0]).split(":")[1] for row in found.rows] == [
        *(" tokens/s", " slots used", " latency, ms a token") * 2,
    ]
    assert "ShareGPT, batches of 2: transformers, static" in told
    assert len(found.plot.series) == 3
