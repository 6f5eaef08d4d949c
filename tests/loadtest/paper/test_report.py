"""Reports of bench paper: Markdown that has published beside ours, SVG that is to scale."""

from __future__ import annotations

import xml.etree.ElementTree as Xml

import pytest

from streamer.loadtest.paper.report import (
    Comparison,
    Measured,
    Plot,
    Report,
    Series,
    markdown,
    svg,
)

SVG = "{http://www.w3.org/2000/svg}"


def drawn(plot: Plot) -> Xml.Element:
    made = Comparison("a", "A < B", "2 | 3", ("", "n"), (("x", 1234.0),), "4.", "so.", plot)
    return Xml.fromstring(svg(made))


def texts(picture: Xml.Element) -> list[str]:
    return [t.text or "" for t in picture.iter(f"{SVG}text")]


def test_bars_are_as_high_as_their_values() -> None:
    series = (
        Series("ours", ((0.0, 4.0), (1.0, 2.0))),
        Series("theirs", ((0.0, 1.0), (1.0, 0.0))),
    )
    picture = drawn(Plot("bars", "batch", "tokens/s", series, ("eight", "sixteen")))
    bars = [r for r in picture.iter(f"{SVG}rect") if r.get("rx")]
    heights = [float(r.get("height", "")) for r in bars]
    assert heights == pytest.approx([4 * heights[2], 2 * heights[2], heights[2], 0])
    lefts = [float(r.get("x", "")) for r in bars]
    assert lefts[0] < lefts[2] < lefts[1] < lefts[3], "side by side within their group"
    said = texts(picture)
    assert {"A < B", "ours", "theirs", "eight", "sixteen", "batch", "tokens/s", "4"} <= set(said)


def test_lines_go_through_their_points() -> None:
    ticks = ("16", "32", "64")
    points = ((0.0, 0.0), (1.0, 5.0), (2.0, 10.0))
    picture = drawn(Plot("lines", "x", "y", (Series("ours", points),), ticks))
    places = [
        (float(c.get("cx", "")), float(c.get("cy", ""))) for c in picture.iter(f"{SVG}circle")
    ]
    (x0, y0), (x1, y1), (x2, y2) = places
    assert (x1 - x0, y0 - y1) == pytest.approx((x2 - x1, y1 - y2))
    assert x0 < x1
    assert y2 < y0
    line = next(picture.iter(f"{SVG}polyline"))
    assert line.get("points") == " ".join(f"{x},{y}" for x, y in places)
    assert set(ticks) <= set(texts(picture))


def test_a_picture_of_nothing() -> None:
    drawn(Plot("bars", "", "", ()))
    drawn(Plot("lines", "", "", (Series("one", ((3.0, 0.0),)),)))


def test_markdown_has_published_beside_ours() -> None:
    plot = Plot("bars", "", "", (Series("ours", ((0.0, 1.0),)),), ("a",))
    made = Comparison("a", "A", "2 | 3", ("", "n"), (("x", 1234.0),), "4.", "So.", plot)
    where = {"torch": "2.13"}
    text = markdown(
        Report(
            {"a": Measured(made, "2026-11-22", 3.2, "a CPU", where, is_tiny=True)}, {"b": "hung"}
        )
    )
    assert "| [A](#a) | 2 \\| 3 | 4. |" in text
    assert "|  | n |\n| --- | --- |\n| x | 1,234 |" in text
    assert "![A](a.svg)" in text
    assert "So. Measured 2026-11-22, a CPU, torch 2.13; 3 s." in text
    assert "say nothing about speed" in text
    assert "- b: hung" in text
