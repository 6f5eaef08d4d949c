"""What `streamer bench paper` says: comparisons with published figures, as Markdown, JSON and SVG.

Values and their rendering; measures nothing. The comparisons' modules make a Comparison,
paper/command.py runs them and has the report written.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from streamer.loadtest import plots, table

if TYPE_CHECKING:
    from rich.console import Console

JSON, MARKDOWN = "paper.json", "README.md"
TINY = "Tiny shapes: they exercise the code and say nothing about speed."


class Series(msgspec.Struct, frozen=True):
    """A line, or one bar of every group. points: (x, y); of bars x is the group's number from 0."""

    name: str
    points: tuple[tuple[float, float], ...]


class Plot(msgspec.Struct, frozen=True):
    """A chart.

    x, y   what the axes show, with units
    series this engine's first: it has the green that our charts give it
    ticks  names of x = 0, 1, ...: of bars' groups, or of points on lines
    """

    kind: Literal["bars", "lines"]
    x: str
    y: str
    series: tuple[Series, ...]
    ticks: tuple[str, ...] = ()


class Comparison(msgspec.Struct, frozen=True):
    """One thing that a paper measured, measured here.

    published      the paper's figures in a sentence, with the source (paper, section)
    columns, rows  the table; numbers are shown as `table.number` does
    finding        what was seen here, in a sentence or two, computed from the rows
    setting        model, lengths, pools, seeds
    """

    name: str
    title: str
    published: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float, ...], ...]
    finding: str
    setting: str
    plot: Plot


class Measured(msgspec.Struct, frozen=True):
    """A comparison, and when and where it was made."""

    comparison: Comparison
    date: str
    took_s: float
    device: str
    versions: dict[str, str]
    is_tiny: bool = False


class Report(msgspec.Struct, frozen=True):
    """All that is known, as its JSON has it. `failures`: name -> what the last run met."""

    measured: dict[str, Measured] = {}
    failures: dict[str, str] = {}


# ---------------------------------------------------------------- files


def read(folder: Path) -> Report:
    """What was written there before; an empty report if nothing was."""
    file = folder / JSON
    return msgspec.json.decode(file.read_bytes(), type=Report) if file.exists() else Report()


def write(report: Report, folder: Path) -> None:
    """paper.json, README.md with the tables, and a picture a comparison."""
    folder.mkdir(parents=True, exist_ok=True)
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=1)
    (folder / JSON).write_bytes(encoded + b"\n")
    (folder / MARKDOWN).write_text(markdown(report), encoding="utf-8")
    for name, made in report.measured.items():
        (folder / f"{name}.svg").write_text(svg(made.comparison), encoding="utf-8")


# ---------------------------------------------------------------- text


def markdown(report: Report) -> str:
    """The whole report: a summary, then each comparison with its table and picture."""
    parts = [
        "# Beside the papers",
        "What the papers on continuous batching and paged memory published, measured with this "
        "engine. `make paper` measures all of it again and writes this page.",
    ]
    if report.measured:
        rows: list[tuple[str, ...]] = [("", "published", "here")]
        for name, made in report.measured.items():
            it = made.comparison
            rows.append((f"[{it.title}](#{name})", it.published, it.finding))
        parts.append(table.markdown(rows))
    for name, made in report.measured.items():
        parts += _section(name, made)
    if report.failures:
        parts.append("## Failed in the last run")
        parts += [f"- {name}: {why}" for name, why in report.failures.items()]
    return "\n\n".join(parts) + "\n"


def _section(name: str, made: Measured) -> list[str]:
    it = made.comparison
    versions = ", ".join(f"{package} {version}" for package, version in made.versions.items())
    where = f"{made.date}, {made.device}, {versions}; {made.took_s:.0f} s."
    return [
        f'<a id="{name}"></a>',
        f"## {it.title}",
        *([TINY] if made.is_tiny else []),
        f"Published: {it.published}",
        table.markdown([it.columns, *(tuple(map(table.number, row)) for row in it.rows)]),
        f"Here: {it.finding}",
        f"![{it.title}]({name}.svg)",
        f"{it.setting} Measured {where}",
    ]


def print_comparison(console: Console, made: Measured) -> None:
    """The table, what was published and what was seen."""
    it = made.comparison
    rows = [it.columns, *(tuple(map(table.number, row)) for row in it.rows)]
    console.print(table.terminal(rows, it.title))
    console.print(f"Published: {it.published}\nHere: {it.finding}", markup=False, highlight=False)
    if made.is_tiny:
        console.print(TINY, style="dim")


# ---------------------------------------------------------------- pictures


def svg(comparison: Comparison) -> str:
    """The comparison's chart."""
    plot = comparison.plot
    lines = [plots.Line(one.name, one.points) for one in plot.series]
    labels = (plot.x, plot.y)
    return plots.chart(comparison.title, plot.kind, labels, lines, plots.named(plot.ticks))
