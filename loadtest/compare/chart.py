"""Results as a picture: an SVG of bars, one panel a model and workload. Text out, nothing drawn.

Colours follow the reader's light or dark page. Ours is the coloured bar; the dashed line is what
the machine allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from ..table import number
from .engines import ENGINES, OURS
from .results import Results
from .workload import WORKS

WIDTH, MARGIN, GAP = 900, 16, 20
ROW, BAR, HEADING = 19, 11, 44
LABEL, VALUE = 142, 46  # beside a bar
COLUMNS = 2
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600; font-size: 13px } .note { fill: #57606a; font-size: 11px }
.ours { fill: #1a7f64 } .peer { fill: #afb8c1 } .limit { stroke: #cf222e; stroke-dasharray: 4 3 }
.line { fill: none; stroke: #1a7f64; stroke-width: 2 } .axis { stroke: #afb8c1 }
.bold { font-weight: 600 } .red { fill: #cf222e; font-size: 11px }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .note { fill: #9198a1 } .ours { fill: #3fb950 }
  .line { stroke: #3fb950 } .axis { stroke: #57606a } .peer { fill: #57606a }
  .limit { stroke: #ff7b72 } .red { fill: #ff7b72 }
}
"""


def svg(results: Results) -> str:
    """The whole picture."""
    panels = [(model, work) for model in results.models for work in results.works]
    width = (WIDTH - 2 * MARGIN - (COLUMNS - 1) * GAP) / COLUMNS
    height = HEADING + ROW * max(1, len(results.engines)) + GAP
    parts = []
    for i, (model, work) in enumerate(panels):
        x = MARGIN + (i % COLUMNS) * (width + GAP)
        y = MARGIN + (i // COLUMNS) * height
        parts.append(f'<g transform="translate({x:.0f} {y:.0f})">')
        parts += [*panel(results, model, work, width), "</g>"]
    rows = -(-len(panels) // COLUMNS)
    total = 2 * MARGIN + rows * height + ROW
    device = ", ".join(map(str, results.device.values()))
    note = f"{results.date}, {device}; medians of rounds ({results.settings['rounds']})"
    parts.append(text(MARGIN, total - MARGIN, note, "note"))
    return document("Tokens a second of engines side by side", total, parts)


def document(title: str, height: float, parts: Sequence[str]) -> str:
    """A whole SVG of WIDTH, around what is drawn."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'width="{WIDTH}" role="img"><title>{escape(title)}</title>'
    )
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>"]) + "\n"


def panel(results: Results, model: str, work: str, width: float) -> list[str]:
    """One workload: bars from the fastest engine to the slowest, at (0, 0)."""
    rates = {e: results.median(e, model, work) for e in results.engines}
    present = sorted(((r, e) for e, r in rates.items() if r is not None), reverse=True)
    limit = results.limit(model, work)
    longest = max([limit or 0.0, *(rate for rate, _ in present), 1e-9])
    scale = (width - LABEL - VALUE) / longest
    parts = [
        text(0, 14, f"{model}, {work}: tokens/s", "title"),
        text(0, 29, WORKS[work].says, "note"),
    ]
    for i, (rate, engine) in enumerate(present):
        y = HEADING + i * ROW
        kind, weight = ("ours", "bold") if engine == OURS else ("peer", "")
        length = rate * scale
        parts += [
            text(LABEL - 6, y + 10, ENGINES[engine].label, weight, "end"),
            f'<rect class="{kind}" x="{LABEL}" y="{y}" '
            f'width="{length:.1f}" height="{BAR}" rx="2"/>',
            text(LABEL + length + 5, y + 10, number(rate), weight),
        ]
    if limit is not None:
        x, end = LABEL + limit * scale, HEADING + len(present) * ROW
        parts += [
            f'<line class="limit" x1="{x:.1f}" y1="{HEADING - 4}" x2="{x:.1f}" y2="{end}"/>',
            text(x, HEADING - 8, f"limit {number(limit)}", "red", "middle"),
        ]
    return parts


def text(x: float, y: float, says: str, kind: str = "", anchor: str = "start") -> str:
    """A line of text at (x, y)."""
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {where} class="{kind}">{escape(says)}</text>'
