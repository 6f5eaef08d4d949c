"""Pictures as SVG: bars, columns, curves, distributions, timelines; as files, or in a page.

Pure: values in, markup out. A file is self-contained, without script, and follows the reader's
light or dark theme; a page gives its own colours. Lines differ in dashes as well as in colours, and
a picture in a page has a text description. Our own code, since libraries' output has no dark theme
(matplotlib) or needs a script to be drawn (Vega, Plotly).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .markup import Markup, style, tag
from .open_loop.served import percentile
from .table import number

WIDTH, MARGIN, GAP = 900, 16, 20  # of a file, in pixels
PANEL_WIDTH = (WIDTH - 2 * MARGIN - GAP) / 2  # of one of two beside each other
ROW, BAR, HEADING = 19, 11, 44  # of bars in rows, and what is above the first
LABEL, VALUE = 142, 46  # beside a bar in a row, the first at least
BOLD = 7.2  # the mean width of a bold letter
GROUP_SHARE, MAX_COLUMN = 0.78, 56  # of a group's room that its columns take; of one column
LETTER = 6.8  # the width of one, on average
NUM_COLOURS = 6
SHARES = (*(float(percent) for percent in range(100)), *(99 + tenth / 10 for tenth in range(11)))
MAX_DECADES = 5  # of a distribution's axis; what is smaller stands at its beginning
MIN_TICKS, MAX_TICKS = 3, 6

Point = tuple[float, float]


# ---------------------------------------------------------------- colours


class Palette(NamedTuple):
    """CSS colours: of text, of grid lines, of limits, and of series."""

    text: str
    soft: str
    grid: str
    limit: str
    series: Sequence[str]


LIGHT = Palette(
    *("#24292f", "#57606a", "#d8dee4", "#cf222e"),
    ("#1a7f64", "#8c959f", "#bf8700", "#8250df", "#0969da", "#cf222e"),
)
DARK = Palette(
    *("#e6edf3", "#9198a1", "#3d444d", "#ff7b72"),
    ("#3fb950", "#6e7681", "#d29922", "#a371f7", "#58a6ff", "#ff7b72"),
)


def sheet(colours: Palette) -> str:
    """The CSS rules of every class used here."""
    series = "\n".join(f".s{i} {{ fill: {c}; stroke: {c} }}" for i, c in enumerate(colours.series))
    return f"""
svg text {{ font: 12px system-ui, sans-serif; fill: {colours.text} }}
svg .note {{ fill: {colours.soft}; font-size: 11px }}
svg .title {{ font-weight: 600; font-size: 13px }} svg .bold {{ font-weight: 600 }}
svg .red {{ fill: {colours.limit}; font-size: 11px }}
{series}
.bar, .dot {{ stroke: none }} .area {{ fill-opacity: 0.35 }}
.line {{ fill: none; stroke-width: 2; stroke-linejoin: round }}
.line.s1 {{ stroke-dasharray: 6 4 }} .line.s2 {{ stroke-dasharray: 2 3 }}
.line.s3 {{ stroke-dasharray: 9 3 2 3 }}
.grid {{ stroke: {colours.grid}; fill: none }}
.limit {{ stroke: {colours.limit}; stroke-dasharray: 4 3 }}
"""


def kind_of(index: int) -> str:
    """The class of a series by its number."""
    return f"s{index % NUM_COLOURS}"


# ---------------------------------------------------------------- axes


class Axis(NamedTuple):
    """From `low` to `high`, with marks at `ticks`, which have names or are numbers of a unit."""

    low: float
    high: float
    ticks: Sequence[float]
    names: Sequence[str] = ()
    unit: str = ""
    is_log: bool = False

    def share(self, value: float) -> float:
        """A value's position on the axis, from 0 to 1."""
        low, high, at = self.low, self.high, min(self.high, max(self.low, value))
        if self.is_log:
            low, high, at = (math.log(each) for each in (low, high, at))
        return (at - low) / (high - low)

    def marks(self) -> list[tuple[float, str]]:
        """Each tick's share, and its label."""
        says = self.names or [_mark(tick, self.unit) for tick in self.ticks]
        return [(self.share(tick), name) for tick, name in zip(self.ticks, says, strict=True)]


def steps(high: float) -> list[float]:
    """Round numbers from 0 to at least `high`, four to six of them."""
    rough = high / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(f * unit for f in (1, 2, 2.5, 5, 10) if f * unit >= rough * (1 - 1e-9))
    return [step * i for i in range(math.ceil(high / step - 1e-9) + 1)]


def linear(values: Sequence[float], unit: str = "") -> Axis:
    """From 0 to a round number above all of these."""
    ticks = steps(max([*values, 0.0]) or 1.0)
    return Axis(0.0, ticks[-1], ticks, unit=unit)


def logarithmic(values: Sequence[float]) -> Axis:
    """From the smallest to the largest of these that are above 0."""
    positive = [value for value in values if value > 0] or [1.0]
    high = max(positive)
    low = max(min(positive), high / 10**MAX_DECADES)
    if high / low < 1.2:  # a single value, or nearly
        low, high = low / 1.2, high * 1.2
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        ticks = [f * 10.0**d for d in decades for f in factors if low <= f * 10.0**d <= high]
        if len(ticks) >= MIN_TICKS:
            break
    else:
        round_to = 10.0 ** (math.floor(math.log10(high - low)) - 1)
        ticks = sorted({round(at / round_to) * round_to for at in (low, high)})
    return Axis(low, high, ticks[:: -(-len(ticks) // MAX_TICKS)], is_log=True)


def named(names: Sequence[str]) -> Axis:
    """Names at 0, 1, ..., with half a place beside the first and the last."""
    return Axis(-0.5, max(1, len(names)) - 0.5, range(len(names)), names)


def _mark(value: float, unit: str) -> str:
    """As short as a mark can be."""
    if value >= 10_000:
        return f"{value / 1000:.3g}k{unit}"
    return f"{value:,.0f}{unit}" if value >= 1000 else f"{value:.3g}{unit}"


# ---------------------------------------------------------------- what pictures are made of


class Line(NamedTuple):
    """One series: its name and its points."""

    name: str
    points: Sequence[Point]


class Frame(NamedTuple):
    """Where the axes are, in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def across(self, share: float) -> float:
        return self.left + (self.right - self.left) * share

    def up(self, share: float) -> float:
        return self.bottom - (self.bottom - self.top) * share


def text(x: float, y: float, says: str, kind: str = "note", anchor: str = "start") -> Markup:
    """A line of text at (x, y)."""
    return tag("text", says, x=x, y=y, text_anchor=anchor, class_=kind or None)


def rect(x: float, y: float, width: float, height: float, kind: str, **more: float) -> Markup:
    """A filled rectangle, in the colour of its class."""
    return tag("rect", x=x, y=y, width=width, height=height, class_=f"bar {kind}", **more)


def grid(frame: Frame, x: Axis, y: Axis, has_columns: bool = False) -> list[Markup]:
    """Lines at the marks of y, and of x too where it has columns, with what the marks say."""
    places = [(frame.across(share), name) for share, name in x.marks()]
    heights = [(frame.up(share), name) for share, name in y.marks()]
    path = "".join(f"M{frame.left:.0f} {at:.1f}H{frame.right:.0f}" for at, _ in heights)
    if has_columns:
        path += "".join(f"M{at:.1f} {frame.top:.0f}V{frame.bottom:.0f}" for at, _ in places)
    kind = "" if x.names else "note"
    return [
        tag("path", class_="grid", d=path),
        *(text(frame.left - 6, at + 4, name, "note", "end") for at, name in heights),
        *(text(at, frame.bottom + 15, name, kind, "middle") for at, name in places),
    ]


def curves(
    frame: Frame, lines: Sequence[Line], x: Axis, y: Axis, has_dots: bool = True
) -> list[Markup]:
    """A line per series, with a dot per point."""
    parts = []
    for i, line in enumerate(lines):
        if not line.points:
            continue
        places = [(frame.across(x.share(at)), frame.up(y.share(v))) for at, v in line.points]
        path = " ".join(f"{at:.1f},{height:.1f}" for at, height in _thinned(places))
        parts.append(tag("polyline", points=path, class_=f"line {kind_of(i)}"))
        if has_dots:
            kind = f"dot {kind_of(i)}"
            parts += [tag("circle", cx=at, cy=height, r=3.0, class_=kind) for at, height in places]
    return parts


def columns(frame: Frame, lines: Sequence[Line], x: Axis, y: Axis) -> list[Markup]:
    """A group per name of x, a column per series, with its value where the digits fit."""
    room = (frame.right - frame.left) / max(1, len(x.names))
    width = min(MAX_COLUMN, room * GROUP_SHARE / max(1, len(lines)))
    parts = []
    for i, line in enumerate(lines):
        for at, value in line.points:
            left = frame.across(x.share(at)) + (i - len(lines) / 2) * width
            top = frame.up(y.share(value))
            inner, height = max(1.0, width - 2), frame.bottom - top
            parts.append(rect(left + 1, top, inner, height, kind_of(i), rx=2.0))
            if width >= LETTER * len(number(value)):
                parts.append(text(left + width / 2, top - 4, number(value), "note", "middle"))
    return parts


def legend(entries: Sequence[tuple[str, str]], y: float) -> list[Markup]:
    """A coloured square and a name per entry; a full line is followed by another below."""
    parts, x = [], float(MARGIN)
    for kind, name in entries:
        room = 24 + LETTER * len(name)
        if x > MARGIN and x + room > WIDTH - MARGIN:
            x, y = float(MARGIN), y + 14
        parts += [rect(x, y - 9, 10, 10, kind), text(x + 14, y, name)]
        x += room + 8
    return parts


def timeline(frame: Frame, rows: Sequence[Sequence[str]], kinds: Mapping[str, str]) -> list[Markup]:
    """A row of one state per step each; adjacent equal states are one rectangle.

    kinds  state -> class; steps in other states stay empty
    """
    num_steps = max(1, *(len(row) for row in rows))
    height, step = (frame.bottom - frame.top) / len(rows), (frame.right - frame.left) / num_steps
    parts = []
    for i, row in enumerate(rows):
        y, begin = frame.top + i * height, 0
        for state, same in itertools.groupby(row):
            length = sum(1 for _ in same)
            if kind := kinds.get(state):
                x = frame.left + begin * step
                parts.append(rect(x, y, length * step, height * 0.86, kind))
            begin += length
        if height >= LETTER * 1.5:
            parts.append(text(frame.left - 8, y + height * 0.7, f"{i}", "note", "end"))
    return parts


def area(frame: Frame, values: Sequence[float], y: Axis, kind: str) -> Markup:
    """A curve with one value per step, filled from 0."""
    step = (frame.right - frame.left) / max(1, len(values))
    points = " ".join(
        f"{frame.left + (i + edge) * step:.1f},{frame.up(y.share(value)):.1f}"
        for i, value in enumerate(values)
        for edge in (0, 1)
    )
    base = f"{frame.bottom:.1f}"
    ends = f"{frame.left:.1f},{base} {points} {frame.left + len(values) * step:.1f},{base}"
    return tag("polygon", points=ends, class_=f"area {kind}")


def limit(frame: Frame, at: float) -> Markup:
    """A dashed line across, at this share of the frame's height."""
    y = frame.up(at)
    return tag("line", class_="limit", x1=frame.left, y1=y, x2=frame.right, y2=y)


def _thinned(places: Sequence[Point]) -> list[Point]:
    """Without points that are drawn on the one before."""
    kept = list(places[:1])
    for place in places[1:]:
        if max(abs(place[0] - kept[-1][0]), abs(place[1] - kept[-1][1])) >= 0.1:
            kept.append(place)
    return kept


# ---------------------------------------------------------------- files of their own


def document(title: str, height: float, parts: Sequence[Markup]) -> str:
    """A whole SVG of WIDTH, around what is drawn."""
    return (
        tag(
            "svg",
            tag("title", title),
            style(f"{sheet(LIGHT)}@media (prefers-color-scheme: dark) {{{sheet(DARK)}}}\n"),
            "\n",
            *(piece for part in parts for piece in (part, "\n")),
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {WIDTH} {height:.0f}",
            width=WIDTH,
            role="img",
        )
        + "\n"
    )


def panels(title: str, cells: Sequence[Sequence[Markup]], height: float, note: str) -> str:
    """A file of panels of PANEL_WIDTH, each drawn at (0, 0), two in a row, over a note."""
    parts = []
    for i, cell in enumerate(cells):
        x, y = MARGIN + i % 2 * (PANEL_WIDTH + GAP), MARGIN + i // 2 * height
        parts.append(tag("g", *cell, transform=f"translate({x:.0f} {y:.0f})"))
    total = 2 * MARGIN + -(-len(cells) // 2) * height + ROW
    return document(title, total, [*parts, text(MARGIN, total - MARGIN, note)])


class Bar(NamedTuple):
    """A row of `bars`."""

    label: str
    value: float
    kind: str = "s1"
    weight: str = ""


def bars(title: str, note: str, rows: Sequence[Bar], limit: float | None = None) -> list[Markup]:
    """A panel: bars from the highest to the lowest, and a dashed line at the limit."""
    longest = max([limit or 0.0, *(row.value for row in rows), 1e-9])
    left = max([LABEL, *(len(row.label) * BOLD + 6 for row in rows)])
    scale = (PANEL_WIDTH - left - VALUE) / longest
    parts = [text(0, 14, title, "title"), text(0, 29, note)]
    for i, row in enumerate(sorted(rows, key=lambda row: -row.value)):
        y, length = HEADING + i * ROW, row.value * scale
        parts += [
            text(left - 6, y + 10, row.label, row.weight, "end"),
            rect(left, y, length, BAR, row.kind, rx=2.0),
            text(left + length + 5, y + 10, number(row.value), row.weight),
        ]
    if limit is not None:
        x, end = left + limit * scale, HEADING + len(rows) * ROW
        parts += [
            tag("line", class_="limit", x1=x, y1=HEADING - 4, x2=x, y2=end),
            text(x, HEADING - 8, f"limit {number(limit)}", "red", "middle"),
        ]
    return parts


def bars_height(num_rows: int) -> float:
    """The height of a panel of bars, with the gap below it."""
    return HEADING + ROW * max(1, num_rows) + GAP


def chart(title: str, kind: str, labels: tuple[str, str], lines: Sequence[Line], x: Axis) -> str:
    """A file of one plot: "bars" in groups or "lines"; `labels` are what x and y show."""
    frame = Frame(64, 90, WIDTH - 24, 330)
    y = linear([value for line in lines for _, value in line.points])
    draw = columns if kind == "bars" else curves
    parts = [
        text(MARGIN, 22, title, "title"),
        *legend([(kind_of(i), line.name) for i, line in enumerate(lines)], 44),
        text(MARGIN, frame.top - 14, labels[1]),
        *grid(frame, x, y),
        *draw(frame, lines, x, y),
        text((frame.left + frame.right) / 2, frame.bottom + 40, labels[0], "note", "middle"),
    ]
    return document(title, frame.bottom + 52, parts)


# ---------------------------------------------------------------- figures in a page


PAGE_WIDTH, PAGE_HEIGHT = 360.0, 216.0
PAGE_FRAME = Frame(46.0, 10.0, PAGE_WIDTH - 10.0, PAGE_HEIGHT - 36.0)


def distribution(
    name: str, title: str, unit: str, series: Sequence[tuple[str, list[float]]]
) -> Markup:
    """Cumulative: the share of values up to each; `name` makes its ids unique."""
    lines = [
        Line(run, [(percentile(values, share), share) for share in SHARES if values])
        for run, values in series
    ]
    x = logarithmic([at for line in lines for at, _ in line.points])
    y = Axis(0.0, 100.0, [0.0, 25.0, 50.0, 75.0, 90.0, 100.0], unit="%")
    description = "; ".join(
        f"{run}: half within {number(percentile(values, 50))} {unit}, "
        f"99% within {number(percentile(values, 99))} {unit}"
        for run, values in series
        if values
    )
    return _figure(name, title, description, _in_page(lines, x, y, f"{unit}, logarithmic", False))


def rates(
    name: str, title: str, series: Sequence[tuple[str, list[Point]]], unit: str = ""
) -> Markup:
    """Values over the rate, a dot each; both axes begin at 0."""
    lines = [Line(run, points) for run, points in series]
    x = linear([at for line in lines for at, _ in line.points])
    y = linear([value for line in lines for _, value in line.points], unit)
    description = "; ".join(
        f"{line.name}: from {number(line.points[0][1])} at {number(line.points[0][0])} "
        f"to {number(line.points[-1][1])} at {number(line.points[-1][0])} requests a second"
        for line in lines
        if line.points
    )
    return _figure(name, title, description, _in_page(lines, x, y, "requests a second", True))


def _in_page(lines: Sequence[Line], x: Axis, y: Axis, x_label: str, has_dots: bool) -> list[Markup]:
    """Grid, marks and lines."""
    frame = PAGE_FRAME
    parts = grid(frame, x, y, has_columns=True)
    parts.append(text(frame.right, frame.bottom + 31, x_label, "note", "end"))
    if not any(line.points for line in lines):
        says = "nothing was measured"
        parts.append(text(frame.across(0.5), frame.up(0.5), says, "note", "middle"))
    return [*parts, *curves(frame, lines, x, y, has_dots)]


def _figure(name: str, title: str, description: str, inside: Sequence[Markup]) -> Markup:
    """A figure with its heading; `description` is its description for screen readers."""
    svg = tag(
        "svg",
        tag("title", title, id=f"{name}-title"),
        tag("desc", description or "Nothing was measured.", id=f"{name}-desc"),
        *inside,
        viewBox=f"0 0 {PAGE_WIDTH:.0f} {PAGE_HEIGHT:.0f}",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
    )
    return tag("figure", tag("figcaption", title), svg)
