"""How many replicas are wanted, by what they report."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from streamer.replicas.scaling import ByLoad


def wanted(rows: list[float], kv: list[float], queued: list[float]) -> float:
    named = {
        name: dict(enumerate(values))
        for name, values in (("row_use", rows), ("kv_use", kv), ("queued_tokens", queued))
    }
    context = SimpleNamespace(aggregated_metrics=named, target_num_replicas=7)
    return ByLoad(queued_tokens=1000, use=0.8)(context)[0]


@pytest.mark.parametrize(
    ("rows", "kv", "queued", "replicas"),
    [
        ([0.8, 0.8], [0.1, 0.1], [0, 0], 2),
        ([0.2, 0.2], [0.2, 0.2], [0, 0], 0.5),  # one is enough
        ([0.1], [0.96], [0], 1.2),  # KV blocks alone
        ([0.4], [0.1], [2000], 3),  # two more for what waits
        ([0.4], [0.1], [999], 0.5),
        ([2.4], [0.1], [1000], 3),
        ([0.0, 0.0], [0.0, 0.0], [0, 0], 0),
    ],
)
def test_rows_blocks_and_queue(
    rows: list[float], kv: list[float], queued: list[float], replicas: float
) -> None:
    assert wanted(rows, kv, queued) == pytest.approx(replicas)


def test_without_reports_nothing_changes() -> None:
    assert wanted([], [], []) == 7


def test_targets_that_can_not_be_met_are_refused() -> None:
    for given in ({"queued_tokens": 0}, {"use": 0.0}, {"use": 1.5}):
        with pytest.raises(ValueError, match="must be"):
            ByLoad(**given)
