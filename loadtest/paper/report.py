"""What `streamer bench paper` says: comparisons with published figures, as Markdown, JSON and SVG.

Values and their rendering; measures nothing. The comparisons' modules make a Comparison,
paper/command.py runs them and has the report written.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from rich.console import Console

JSON, MARKDOWN = "paper.json", "README.md"
TINY = "Tiny shapes: they exercise the code and say nothing about speed."

LEFT, RIGHT, TOP, HEIGHT = 64, 24, 90, 240  # of a chart, in pixels
BELOW = 52
GROUP_SHARE = 0.78  # of a group's room that its bars take
MAX_BAR = 56
LETTER = 6.8  # pixels, on average
NUM_TICKS = 5
PALETTE = ("#1a7f64", "#8c959f", "#bf8700", "#8250df", "#0969da", "#cf222e")
DARK = ("#3fb950", "#6e7681", "#d29922", "#a371f7", "#58a6ff", "#ff7b72")


class Series(msgspec.Struct, frozen=True):
    """A line, or one bar of every group. points: (x, y); of bars x is the group's number from 0."""

    name: str
    points: tuple[tuple[float, float], ...]


class Plot(msgspec.Struct, frozen=True):
    """A chart.

    x, y   what the axes show, with units
    series this engine's first: it has the green that our charts give it
    ticks  names of x = 0, 1, ...: of bars' groups, or of points on lines; none: x is a number
    """

    kind: Literal["bars", "lines"]
    x: str
    y: str
    series: tuple[Series, ...]
    ticks: tuple[str, ...] = ()


class Comparison(msgspec.Struct, frozen=True):
    """One thing that a paper measured, measured here.

    published      the paper's figures in a sentence, with the source (paper, section)
    columns, rows  the table; numbers are shown as they are in `number`
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


def number(value: str | float) -> str:
    """Three digits that matter, thousands in groups; text as it is."""
    if isinstance(value, str):
        return value
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


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
        parts.append(_table(rows))
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
        _table([it.columns, *(tuple(map(number, row)) for row in it.rows)]),
        f"Here: {it.finding}",
        f"![{it.title}]({name}.svg)",
        f"{it.setting} Measured {where}",
    ]


def _table(rows: list[tuple[str, ...]]) -> str:
    """The first row is the heading."""
    heading, *body = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [heading, ["---"] * len(heading), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def print_comparison(console: Console, made: Measured) -> None:
    """The table, what was published and what was seen."""
    from rich.table import Table

    it = made.comparison
    table = Table(title=it.title)
    for i, column in enumerate(it.columns):
        table.add_column(column, justify="right" if i else "left")
    for row in it.rows:
        table.add_row(*map(number, row))
    console.print(table)
    console.print(f"Published: {it.published}\nHere: {it.finding}", markup=False, highlight=False)
    if made.is_tiny:
        console.print(TINY, style="dim")


# ---------------------------------------------------------------- pictures


def svg(comparison: Comparison) -> str:
    """The comparison's chart; colours follow the reader's light or dark page."""
    from streamer.loadtest.compare.chart import document

    plot = comparison.plot
    top = max((y for one in plot.series for _, y in one.points), default=0.0)
    step = nice_step(top)
    most = step * max(1, -(-top // step))
    parts = [_style(), _text(16, 22, comparison.title, "title"), *_legend(plot)]
    parts += _value_axis(plot.y, step, most)
    parts += _bars(plot, most) if plot.kind == "bars" else _lines(plot, most)
    middle = (LEFT + _width() - RIGHT) / 2
    parts.append(_text(middle, TOP + HEIGHT + BELOW - 12, plot.x, "note", "middle"))
    return document(comparison.title, TOP + HEIGHT + BELOW, parts)


def nice_step(top: float) -> float:
    """1, 2 or 5 times a power of ten, so that at most NUM_TICKS of them reach the top."""
    if top <= 0:
        return 1.0
    least = top / NUM_TICKS
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def _style() -> str:
    light = " ".join(f".s{i} {{ fill: {c}; stroke: {c} }}" for i, c in enumerate(PALETTE))
    dark = " ".join(f".s{i} {{ fill: {c}; stroke: {c} }}" for i, c in enumerate(DARK))
    shared = "polyline { fill: none !important; stroke-width: 2 } rect, circle { stroke: none }"
    return f"<style>{light} {shared} @media (prefers-color-scheme: dark) {{ {dark} }}</style>"


def _legend(plot: Plot) -> list[str]:
    """A line under the title, and another where the names are long."""
    parts, x, y = [], 16.0, 44.0
    for i, one in enumerate(plot.series):
        room = 24 + LETTER * len(one.name)
        if x > 16 and x + room > _width() - RIGHT:
            x, y = 16.0, y + 14
        kind = i % len(PALETTE)
        parts.append(f'<rect class="s{kind}" x="{x:.1f}" y="{y - 9}" width="10" height="10"/>')
        parts.append(_text(x + 14, y, one.name, "note"))
        x += room + 8
    return parts


def _value_axis(says: str, step: float, most: float) -> list[str]:
    parts = [_text(16, TOP - 14, says, "note")] if says else []
    for i in range(round(most / step) + 1):
        y = _height_of(i * step, most)
        end = _width() - RIGHT
        parts.append(f'<line class="axis" x1="{LEFT}" y1="{y:.1f}" x2="{end}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 6, y + 4, number(round(i * step, 9)), "note", "end"))
    return parts


def _bars(plot: Plot, most: float) -> list[str]:
    """Groups of bars, each with its value above it where there is room for the digits."""
    room = (_width() - LEFT - RIGHT) / max(1, len(plot.ticks))
    width = min(MAX_BAR, room * GROUP_SHARE / max(1, len(plot.series)))
    parts = [
        _text(LEFT + (i + 0.5) * room, TOP + HEIGHT + 16, tick, "", "middle")
        for i, tick in enumerate(plot.ticks)
    ]
    for i, one in enumerate(plot.series):
        for x, y in one.points:
            left = LEFT + (x + 0.5) * room + (i - len(plot.series) / 2) * width
            top = _height_of(y, most)
            parts.append(
                f'<rect class="s{i % len(PALETTE)}" x="{left + 1:.1f}" y="{top:.1f}" '
                f'width="{max(1.0, width - 2):.1f}" height="{TOP + HEIGHT - top:.1f}" rx="2"/>'
            )
            if width >= LETTER * len(number(y)):
                parts.append(_text(left + width / 2, top - 4, number(y), "note", "middle"))
    return parts


def _lines(plot: Plot, most: float) -> list[str]:
    """Lines with a dot a point, over names or over numbers."""
    xs = [x for one in plot.series for x, _ in one.points]
    low = min(xs, default=0.0)
    high = max(max(xs, default=1.0), low + 1e-9)

    def place(x: float) -> float:
        inset = 24
        share = (x - low) / (high - low)
        return LEFT + inset + share * (_width() - LEFT - RIGHT - 2 * inset)

    named = [(float(i), tick) for i, tick in enumerate(plot.ticks)]
    marks = named or [(x, number(x)) for x in _number_ticks(low, high)]
    parts = [_text(place(x), TOP + HEIGHT + 16, says, "", "middle") for x, says in marks]
    for i, one in enumerate(plot.series):
        points = [(place(x), _height_of(y, most)) for x, y in one.points]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        kind = i % len(PALETTE)
        parts.append(f'<polyline class="s{kind}" points="{joined}"/>')
        parts += [f'<circle class="s{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points]
    return parts


def _number_ticks(low: float, high: float) -> list[float]:
    step = nice_step(high - low)
    first = -(-low // step)
    count = int((high - first * step) / step + 1e-9) + 1
    return [round((first + i) * step, 9) for i in range(count)]


def _height_of(value: float, most: float) -> float:
    return TOP + HEIGHT * (1 - value / most)


def _width() -> int:
    from streamer.loadtest.compare.chart import WIDTH

    return WIDTH


def _text(x: float, y: float, says: str, kind: str = "", anchor: str = "start") -> str:
    from streamer.loadtest.compare.chart import text

    return text(x, y, says, kind, anchor)
