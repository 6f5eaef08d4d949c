"""bench paper: the door runs each comparison apart, says who failed, and keeps what was there."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from streamer.errors import ConfigError
from streamer.loadtest.paper import command as paper
from streamer.loadtest.paper import report as paper_report
from streamer.loadtest.paper.command import Entry, Part
from streamer.loadtest.paper.report import Comparison, Measured, Plot, Report, Series

BARS = Plot("bars", "x", "y", (Series("ours", ((0.0, 1.0), (1.0, 3.0))),), ("a", "b"))


def comparison(name: str, finding: str = "here 3") -> Comparison:
    return Comparison(name, name, "there 2", ("", "n"), (("a", 3.0),), finding, "so.", BARS)


def run(*flags: str) -> tuple[int, str]:
    """Exit code and what was printed."""
    parser = argparse.ArgumentParser()
    paper.add_arguments(parser)
    text = io.StringIO()
    return paper.run(parser.parse_args(flags), Console(file=text, width=200)), text.getvalue()


def scripted(scripts: dict[str, str]) -> Callable[..., list[str]]:
    """Instead of this program: a script a comparison, which is given its file's name."""

    def command(name: str, file: Path, **_: Any) -> list[str]:
        return [sys.executable, "-c", f"import os, sys, time; {scripts[name]}", str(file)]

    return command


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper, "ENTRIES", {"one": Entry(60, "first"), "two": Entry(60, "second")})


def leaves(name: str, finding: str = "here 3") -> str:
    """A script that leaves this comparison."""
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
def test_one_that_fails_is_said_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, limit_s: float, why: str
) -> None:
    monkeypatch.setattr(paper, "_command", scripted({"one": script, "two": leaves("two")}))
    monkeypatch.setitem(paper.ENTRIES, "one", Entry(limit_s, "first"))
    code, text = run("--out", str(tmp_path))
    assert code == 1
    assert f"one failed: {why}" in text
    assert "here 3" in text
    found = paper_report.read(tmp_path)
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
    found = paper_report.read(tmp_path).measured
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


def test_figures_are_not_written_to_where_nobody_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="name a folder with --out"):
        run("--only", "sharing")


def test_every_entry_has_a_measure_and_all_take_under_half_an_hour() -> None:
    assert all(callable(paper._measure(name)) for name in paper.ENTRIES)
    assert sum(entry.limit_s for entry in paper.ENTRIES.values()) < 30 * 60


def test_a_measured_report_survives_its_file(tmp_path: Path) -> None:
    made = Measured(comparison("one"), "2026-11-22", 1.5, "a CPU", {"torch": "2"})
    report = Report({"one": made}, {"two": "hung"})
    assert paper_report.read(tmp_path) == Report()
    paper_report.write(report, tmp_path)
    assert paper_report.read(tmp_path) == report
