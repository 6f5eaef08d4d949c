"""Results of an open-loop sweep as a table, a page, rows and a picture. Values in, text out.

Each result is a file of served.summary: one rate.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

from .. import plots, table
from ..markup import Markup
from .arrivals import GOOD_SHARE, keeps_up, knee

# field, heading, factor
COLUMNS = (
    ("request_throughput", "done/s", 1.0),
    ("goodput_share", "good, %", 100.0),
    ("output_throughput", "tokens/s", 1.0),
    ("median_ttft_ms", "TTFT p50", 1.0),
    ("p99_ttft_ms", "p99", 1.0),
    ("median_tpot_ms", "TPOT p50", 1.0),
    ("p99_tpot_ms", "p99", 1.0),
    ("p99_itl_ms", "ITL p99", 1.0),
    ("p99_e2el_ms", "E2EL p99, ms", 1.0),
    ("failed", "failed", 1.0),
    ("unfinished", "unfinished", 1.0),
    ("p99_start_lag_ms", "sent late p99", 1.0),
)
PANELS = (
    ("output_throughput", "output tokens/s", 1.0),
    ("goodput_share", "requests that meet every objective, %", 100.0),
    ("p99_ttft_ms", "time to first token p99, ms", 1.0),
    ("p99_tpot_ms", "time per output token p99, ms", 1.0),
)
PLOT = plots.Frame(56, 28, plots.PANEL_WIDTH, 160)
Result = dict[str, Any]


def tried(results: Sequence[Result]) -> list[tuple[float, float]]:
    """(rate, share of good requests) of each; the share is 0 where fewer finished than arrived."""
    return [
        (
            float(result["request_rate"]),
            result["goodput_share"]
            if keeps_up(result["later_arrived"], result["later_finished"])
            else 0.0,
        )
        for result in results
    ]


def rows_csv(results: Sequence[Result]) -> str:
    """A rate a line, every number by its name in the result file."""
    text = io.StringIO()
    names = [name for name, value in results[0].items() if not isinstance(value, list | dict)]
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(ordered(results))
    return text.getvalue()


def rows(results: Sequence[Result]) -> table.Rows:
    """A rate a row, from the lowest to the highest."""
    lines = [["requests/s", *(heading for _, heading, _ in COLUMNS)]]
    for result in ordered(results):
        values = [table.number(float(result[name]) * factor) for name, _, factor in COLUMNS]
        lines.append([table.number(float(result["request_rate"])), *values])
    return lines


def ordered(results: Sequence[Result]) -> list[Result]:
    """By rate."""
    return sorted(results, key=lambda result: float(result["request_rate"]))


def conditions(results: Sequence[Result]) -> str:
    """The settings, the server and the knee."""
    first = results[0]
    goals = ", ".join(f"{name} {ms:g} ms" for name, ms in first["goodput"].items())
    at_once = first["max_concurrency"]
    closed = "" if at_once is None else f", at most {at_once} at once"
    lines = [
        f"{first['date']}, {first['model_id']}, workload {first['label']}, seed {first['seed']}, "
        f"{first['num_prompts']} requests in {first['duration']:.3g} s after "
        f"{first['warmup_s']:g} s of warm-up{closed}, burstiness {first['burstiness']:g}."
    ]
    finite = [pair for pair in tried(results) if math.isfinite(pair[0])]
    if finite:
        found = knee(finite)
        held = "no rate sustained" if found is None else f"sustained up to {found:.3g} requests/s"
        if found == max(rate for rate, _ in finite):
            held += ", the highest that was tried"
        good = f"{GOOD_SHARE:.0%} of requests " + ("meet them" if goals else "are answered")
        says = f"Objectives: {goals}; {held}" if goals else held[0].upper() + held[1:]
        lines.append(f"{says} ({good}, and completions keep up with arrivals).")
    return "\n".join(lines)


def report(results: Sequence[Result], is_markdown: bool = False) -> str:
    """Everything as text."""
    draw = table.markdown if is_markdown else table.plain
    return f"{conditions(results)}\n\n{draw(rows(results))}\n"


def svg(results: Sequence[Result]) -> str:
    """Curves over the rate; rates without a number (all at once) are left out."""
    finite = [result for result in ordered(results) if result["request_rate"] != "inf"]
    cells = [
        panel(title, [(float(r["request_rate"]), float(r[name]) * factor) for r in finite])
        for name, title, factor in PANELS
    ]
    note = conditions(results).splitlines()[0]
    height = PLOT.bottom + 44
    return plots.panels("What becomes of requests at rising rates", cells, height, note)


def panel(title: str, points: Sequence[tuple[float, float]]) -> list[Markup]:
    """One curve, from 0 on both axes, at (0, 0)."""
    x, y = plots.linear([at for at, _ in points]), plots.linear([value for _, value in points])
    return [
        plots.text(0, 14, title, "title"),
        *plots.grid(PLOT, x, y),
        plots.text(PLOT.right, PLOT.bottom + 30, "requests/s", "note", "end"),
        *plots.curves(PLOT, [plots.Line(title, points)], x, y),
    ]
