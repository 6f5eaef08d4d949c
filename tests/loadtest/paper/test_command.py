"""bench paper: each comparison runs in a process, failures are reported, the report has all."""

from __future__ import annotations

import argparse
import io
import sys
import xml.etree.ElementTree as Xml
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from streamer.loadtest.paper import command as paper
from streamer.loadtest.paper.command import DatedComparison, Entry, Part, Report, markdown, svg
from streamer.loadtest.paper.comparison import Comparison, Plot, Series

BARS = Plot("bars", "x", "y", (Series("ours", ((0.0, 1.0), (1.0, 3.0))),), ("a", "b"))


def comparison(name: str, finding: str = "here 3") -> Comparison:
    return Comparison(name, name, "there 2", ("", "n"), (("a", 3.0),), finding, "so.", BARS)


def run(*flags: str) -> tuple[int, str]:
    """Exit code and output."""
    parser = argparse.ArgumentParser()
    paper.add_arguments(parser)
    text = io.StringIO()
    return paper.run(parser.parse_args(flags), Console(file=text, width=200)), text.getvalue()


def scripted(scripts: dict[str, str]) -> Callable[..., list[str]]:
    """In place of this program: one script per comparison, which gets the name of its file."""

    def command(name: str, file: Path, **_: Any) -> list[str]:
        return [sys.executable, "-c", f"import os, sys, time; {scripts[name]}", str(file)]

    return command


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper, "ENTRIES", {"one": Entry(60, "first"), "two": Entry(60, "second")})


def leaves(name: str, finding: str = "here 3") -> str:
    """A script that writes this comparison."""
    part = msgspec.json.encode(Part(comparison(name, finding)))
    return f"print('half way', flush=True); open(sys.argv[1], 'wb').write({part!r})"


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("script", "limit_s", "why"),
    [
        ("os.abort()", 60, "its process ended with -6"),
        ("print('working', flush=True); time.sleep(600)", 1.0, "killed after 1 s"),
        (
            f"open(sys.argv[1], 'wb').write({msgspec.json.encode(Part(failure='no model'))!r})",
            60,
            "no model",
        ),
    ],
)
def test_a_failure_is_reported_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, limit_s: float, why: str
) -> None:
    monkeypatch.setattr(paper, "_command", scripted({"one": script, "two": leaves("two")}))
    monkeypatch.setitem(paper.ENTRIES, "one", Entry(limit_s, "first"))
    code, text = run("--out", str(tmp_path))
    assert code == 1
    assert f"one failed: {why}" in text
    assert "here 3" in text
    found = paper.read(tmp_path)
    assert found.failures == {"one": why}
    assert list(found.measured) == ["two"]
    assert f"- one: {why}" in (tmp_path / "README.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("two")
def test_only_one_leaves_the_others_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = {"one": leaves("one"), "two": leaves("two")}
    monkeypatch.setattr(paper, "_command", scripted(scripts))
    assert run("--out", str(tmp_path), "--only", "two")[0] == 0
    scripts["two"] = leaves("two", "here 4")
    assert run("--out", str(tmp_path))[0] == 0
    assert run("--out", str(tmp_path), "--only", "one")[0] == 0
    found = paper.read(tmp_path).measured
    assert [(name, m.comparison.finding) for name, m in found.items()] == [
        ("one", "here 3"),
        ("two", "here 4"),
    ]
    assert {f.name for f in tmp_path.iterdir()} == {"paper.json", "README.md", "one.svg", "two.svg"}


@pytest.mark.usefixtures("two")
def test_a_process_leaves_its_comparison_or_why_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(progress: Callable[[str], None], *, tiny: bool) -> Comparison:
        progress("half way")
        return comparison("one", f"tiny {tiny}")

    def broken(progress: Callable[[str], None], *, tiny: bool) -> Comparison:
        raise ValueError("no such\nthing")

    file = tmp_path / "part.json"
    monkeypatch.setattr(paper, "_measure", lambda name: {"one": measure, "two": broken}[name])
    code, text = run("--only", "one", "--tiny", "--part", str(file))
    assert (code, text) == (0, "half way\n")
    assert msgspec.json.decode(file.read_bytes(), type=Part).comparison == comparison(
        "one", "tiny True"
    )
    assert run("--only", "two", "--part", str(file))[0] == 1
    assert msgspec.json.decode(file.read_bytes(), type=Part) == Part(failure="ValueError: no such")


def test_figures_go_to_the_checkout_from_wherever_it_is_run() -> None:
    assert paper.OUT.is_absolute()
    assert (paper.OUT / "paper.json").is_file()


def test_every_entry_has_a_measure_and_all_take_under_half_an_hour() -> None:
    assert all(callable(paper._measure(name)) for name in paper.ENTRIES)
    assert sum(entry.limit_s for entry in paper.ENTRIES.values()) < 30 * 60


def test_a_measured_report_survives_its_file(tmp_path: Path) -> None:
    made = DatedComparison(comparison("one"), "2026-11-22", 1.5, "a CPU", {"torch": "2"})
    report = Report({"one": made}, {"two": "hung"})
    assert paper.read(tmp_path) == Report()
    paper.write(report, tmp_path)
    assert paper.read(tmp_path) == report


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
    found = texts(picture)
    assert {"A < B", "ours", "theirs", "eight", "sixteen", "batch", "tokens/s", "4"} <= set(found)


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


def test_an_empty_plot_is_drawn() -> None:
    drawn(Plot("bars", "", "", ()))
    drawn(Plot("lines", "", "", (Series("one", ((3.0, 0.0),)),)))


def test_markdown_has_published_beside_ours() -> None:
    plot = Plot("bars", "", "", (Series("ours", ((0.0, 1.0),)),), ("a",))
    made = Comparison("a", "A", "2 | 3", ("", "n"), (("x", 1234.0),), "4.", "So.", plot)
    where = {"torch": "2.13"}
    text = markdown(
        Report(
            {"a": DatedComparison(made, "2026-11-22", 3.2, "a CPU", where, is_tiny=True)},
            {"b": "hung"},
        )
    )
    assert "| [A](#a) | 2 \\| 3 | 4. |" in text
    assert "|  | n |\n| --- | --- |\n| x | 1,234 |" in text
    assert "![A](a.svg)" in text
    assert "So. Measured 2026-11-22, a CPU, torch 2.13; 3 s." in text
    assert "say nothing about speed" in text
    assert "- b: hung" in text
