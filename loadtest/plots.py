"""Two runs drawn over each other, as SVG inside a page: curves over the rate, and distributions.

Pure: values in, markup out. The page's style gives colours by class (`first`, `second`); the second
run is dashed too, so nobody has to tell colours apart. A picture says in words what it shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from .markup import Markup, tag
from .open_loop.served import percentile
from .table import number

WIDTH, HEIGHT = 360.0, 216.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 10.0, 10.0, 36.0
CLASSES = ("first", "second")
SHARES = (*(float(percent) for percent in range(100)), *(99 + tenth / 10 for tenth in range(11)))
MOST_DECADES = 5  # of a distribution's axis; what is smaller stands at its beginning
FEW_TICKS, MANY_TICKS = 3, 6

Point = tuple[float, float]


class Line(NamedTuple):
    """One run's: its name, its class, and what is drawn."""

    name: str
    class_: str
    points: list[Point]


class Axis(NamedTuple):
    """From `low` to `high`, with marks at `ticks`."""

    low: float
    high: float
    ticks: list[float]
    is_log: bool = False

    def share(self, value: float) -> float:
        """Where a value is on it, from 0 to 1."""
        low, high, at = self.low, self.high, min(self.high, max(self.low, value))
        if self.is_log:
            low, high, at = (math.log(each) for each in (low, high, at))
        return (at - low) / (high - low)


def steps(high: float) -> list[float]:
    """Round numbers from 0 to at least `high`, four to six of them."""
    rough = high / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= rough)
    return [step * i for i in range(math.ceil(high / step - 1e-9) + 1)]


def linear(values: Sequence[float]) -> Axis:
    """From 0 to a round number above all of these."""
    ticks = steps(max([*values, 0.0]) or 1.0)
    return Axis(0.0, ticks[-1], ticks)


def logarithmic(values: Sequence[float]) -> Axis:
    """From the smallest to the largest of these that are above 0."""
    positive = [value for value in values if value > 0] or [1.0]
    high = max(positive)
    low = max(min(positive), high / 10**MOST_DECADES)
    if high / low < 1.2:  # a single value, or nearly
        low, high = low / 1.2, high * 1.2
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        ticks = [f * 10.0**d for d in decades for f in factors if low <= f * 10.0**d <= high]
        if len(ticks) >= FEW_TICKS:
            break
    else:
        round_to = 10.0 ** (math.floor(math.log10(high - low)) - 1)
        ticks = sorted({round(at / round_to) * round_to for at in (low, high)})
    return Axis(low, high, ticks[:: -(-len(ticks) // MANY_TICKS)], True)


def distribution(
    name: str, title: str, unit: str, series: Sequence[tuple[str, list[float]]]
) -> Markup:
    """Cumulative: the share of values up to each; `name` makes its ids unique."""
    lines = [
        Line(run, kind, [(percentile(values, share), share) for share in SHARES])
        for (run, values), kind in zip(series, CLASSES, strict=False)
        if values
    ]
    x = logarithmic([at for line in lines for at, _ in line.points])
    y = Axis(0.0, 100.0, [0.0, 25.0, 50.0, 75.0, 90.0, 100.0])
    said = "; ".join(
        f"{run}: half within {number(percentile(values, 50))} {unit}, "
        f"99% within {number(percentile(values, 99))} {unit}"
        for run, values in series
        if values
    )
    return _picture(name, title, said, _plot(lines, x, y, f"{unit}, logarithmic", "%"))


def curves(
    name: str, title: str, series: Sequence[tuple[str, list[Point]]], unit: str = ""
) -> Markup:
    """Values over the rate, a dot each; both axes begin at 0."""
    lines = [
        Line(run, kind, points)
        for (run, points), kind in zip(series, CLASSES, strict=False)
        if points
    ]
    x = linear([at for line in lines for at, _ in line.points])
    y = linear([value for line in lines for _, value in line.points])
    said = "; ".join(
        f"{line.name}: from {number(line.points[0][1])} at {number(line.points[0][0])} "
        f"to {number(line.points[-1][1])} at {number(line.points[-1][0])} requests a second"
        for line in lines
    )
    return _picture(name, title, said, _plot(lines, x, y, "requests a second", unit, dots=True))


def _picture(name: str, title: str, said: str, inside: Sequence[Markup]) -> Markup:
    """A figure with its heading; the words in it are for who can't see it."""
    svg = tag(
        "svg",
        tag("title", title, id=f"{name}-title"),
        tag("desc", said or "Nothing was measured.", id=f"{name}-desc"),
        *inside,
        viewBox=f"0 0 {WIDTH:.0f} {HEIGHT:.0f}",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
    )
    return tag("figure", tag("figcaption", title), svg)


def _plot(
    lines: Sequence[Line], x: Axis, y: Axis, x_label: str, unit: str, dots: bool = False
) -> list[Markup]:
    """Grid, marks and lines."""
    end, base = WIDTH - RIGHT, HEIGHT - BOTTOM

    def across(value: float) -> float:
        return LEFT + (end - LEFT) * x.share(value)

    def up(value: float) -> float:
        return base - (base - TOP) * y.share(value)

    parts = [
        tag(
            "path",
            class_="grid",
            d="".join(f"M{LEFT:.0f} {up(tick):.1f}H{end:.0f}" for tick in y.ticks),
        ),
        tag(
            "path",
            class_="grid",
            d="".join(f"M{across(tick):.1f} {TOP:.0f}V{base:.0f}" for tick in x.ticks),
        ),
    ]
    parts += [_text(LEFT - 6, up(tick) + 4, _mark(tick, unit), "end") for tick in y.ticks]
    parts += [_text(across(tick), base + 15, _mark(tick), "middle") for tick in x.ticks]
    parts.append(_text(end, base + 31, x_label, "end"))
    if not lines:
        parts.append(_text((LEFT + end) / 2, (TOP + base) / 2, "nothing was measured", "middle"))
    for line in lines:
        places = [(across(at), up(value)) for at, value in line.points]
        path = " ".join(f"{at:.1f},{height:.1f}" for at, height in _thinned(places))
        parts.append(tag("polyline", points=path, class_=f"line {line.class_}"))
        if dots:
            parts += [_dot(place, line.class_) for place in places]
    return parts


def _thinned(places: Sequence[Point]) -> list[Point]:
    """Without points that are drawn on the one before."""
    kept = list(places[:1])
    for place in places[1:]:
        if max(abs(place[0] - kept[-1][0]), abs(place[1] - kept[-1][1])) >= 0.1:
            kept.append(place)
    return kept


def _dot(place: Point, kind: str) -> Markup:
    return tag("circle", cx=place[0], cy=place[1], r=3.0, class_=f"dot {kind}")


def _text(x: float, y: float, says: str, anchor: str) -> Markup:
    return tag("text", says, x=x, y=y, text_anchor=anchor)


def _mark(value: float, unit: str = "") -> str:
    """As short as a mark can be."""
    if value >= 10_000:
        return f"{value / 1000:.3g}k{unit}"
    return f"{value:.4g}{unit}" if value >= 1000 else f"{value:.3g}{unit}"
