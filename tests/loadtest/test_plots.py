"""Axes, drawing to scale, and files that load nothing from elsewhere."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from streamer.loadtest import plots

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    "times", [[5.0], [0.0, 0.0], [9.9, 10.1], [0.001, 5.0, 80_000.0], [0.3, 0.4, 47.0]]
)
def test_axes_hold_what_is_drawn(times: list[float]) -> None:
    axis = plots.logarithmic(times)
    assert axis.ticks
    assert len(axis.ticks) <= 8
    assert all(low < high for low, high in pairwise(axis.ticks))
    assert all(0 <= axis.share(at) <= 1 for at in (*times, *axis.ticks))
    even = plots.linear(times)
    assert even.ticks[0] == 0
    assert even.ticks[-1] >= max(times)
    assert 3 <= len(even.ticks) <= 7


@pytest.mark.parametrize(
    ("high", "step"),
    [(10, 2), (11, 2.5), (100, 20), (99, 20), (0.4, 0.1), (0.5, 0.1), (7000, 2000), (5, 1)],
)
def test_steps_of_an_axis(high: float, step: float) -> None:
    assert plots.steps(high)[:2] == [0, pytest.approx(step)]


def test_a_file_loads_nothing_and_has_two_themes() -> None:
    text = plots.chart("a < b", "bars", ("x", "y"), [plots.Line("&", [(0, 1)])], plots.named(["n"]))
    root = ElementTree.fromstring(text)
    assert {part.tag.removeprefix(SVG) for part in root.iter()} == (
        {"svg", "title", "style", "text", "rect", "path"}
    )
    assert not re.search(r"url\(|@import|href|script", text)
    light, dark = text.split("@media (prefers-color-scheme: dark)")
    for name in re.findall(r"\.([a-z0-9]+) \{ (?:fill|stroke): #", light):
        assert f".{name} {{" in dark


def test_a_timeline_joins_equal_states_and_leaves_others_out() -> None:
    frame = plots.Frame(0, 0, 60, 40)
    rows = [["run", "run", "wait", "run"], ["", "run", "run", "run", "run", "run"]]
    parts = plots.timeline(frame, rows, {"run": "s0"})
    found = [ElementTree.fromstring(part) for part in parts if part.startswith("<rect")]
    places = [tuple(float(bar.get(key, "")) for key in ("x", "width", "y")) for bar in found]
    assert places == [(0, 20, 0), (30, 10, 0), (10, 50, 20)]
