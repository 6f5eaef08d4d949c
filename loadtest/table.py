"""Results as tables: plain text for the terminal, Markdown for pages.

Values in, text out: nothing is measured or written here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .compare.engines import ENGINES, OURS
from .compare.results import STREAM, Results, Verdict, median_machine, verdicts
from .compare.workload import KV_BYTES, WORKS

MIB = 1 << 20
Rows = list[list[str]]


def markdown(rows: Rows) -> str:
    """The first row is the heading."""
    heading, *body = rows
    lines = [heading, ["---"] * len(heading), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plain(rows: Rows) -> str:
    """Columns as wide as they must be; the first to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def number(value: float | None) -> str:
    """Three digits or all before the point; "-" for what was not measured."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def model_rows(results: Results, model: str) -> Rows:
    """Engines down, workloads across, medians; a * marks a single round among several."""
    works = results.works
    heading = [f"{model}, tokens/s", *works]
    if STREAM in works:
        heading += ["first token p50 / p99, ms", "between p50 / p99, ms"]
    heading.append("peak, MiB")
    rows = [heading]
    for engine in results.engines:
        row = [ENGINES[engine].label, *(_rate(results, engine, model, work) for work in works)]
        if STREAM in works:
            row += [_times(results, engine, model, kind) for kind in ("first", "gap")]
        peak = results.peak_bytes(engine, model)
        lean = "" if ENGINES[engine].has_pool or peak is None else " (no pool)"
        rows.append([*row, number(None if peak is None else peak / MIB) + lean])
    blank = [""] * (len(heading) - 1 - len(works))
    for label, value in (("ours / best peer", _ratio), ("ours / machine's limit", _share)):
        rows.append([label, *(value(results, model, work) for work in works), *blank])
    limits = [number(results.limit(model, work)) for work in works]
    rows.append(["machine's limit", *limits, *blank])
    return rows


def _rate(results: Results, engine: str, model: str, work: str) -> str:
    num_rounds = max((s.round for s in results.samples), default=0) + 1
    samples = results.of(engine, model, work)
    is_single = len(samples) == 1 and num_rounds > 1
    return number(results.median(engine, model, work)) + ("*" if is_single else "")


def _times(results: Results, engine: str, model: str, kind: str) -> str:
    values = [
        results.median(engine, model, STREAM, f"{kind}_{share}_ms") for share in ("p50", "p99")
    ]
    return "-" if values[0] is None else " / ".join(map(number, values))


def _ratio(results: Results, model: str, work: str) -> str:
    ours, best = results.median(OURS, model, work), results.best_peer(model, work)
    return "-" if ours is None or best is None else f"{ours / best[1]:.2f}"


def _share(results: Results, model: str, work: str) -> str:
    ours, limit = results.median(OURS, model, work), results.limit(model, work)
    return "-" if ours is None or not limit else f"{ours / limit:.2f}"


def verdict_rows(found: Sequence[Verdict]) -> Rows:
    """The goals, one a row."""
    rows = [["goal", "ours", "wanted", "best peer", "ratio", "of the limit", ""]]
    for v in found:
        wanted = ("<= " if v.is_less_better else ">= ") + number(v.wanted)
        share = "-" if v.share is None else f"{v.share:.2f}"
        met = "met" if v.is_met else "not met"
        label = ENGINES[v.peer].label
        name = f"{v.model} {v.what}"
        rows.append([name, number(v.ours), wanted, label, f"{v.ratio:.2f}", share, met])
    return rows


def conditions(results: Results) -> str:
    """A few lines of what was measured on what."""
    device = ", ".join(str(value) for value in results.device.values())
    lines = [
        f"{results.date}, {device}; every engine on {results.settings['threads']} threads, "
        f"bfloat16, KV pools of {KV_BYTES >> 30} GiB; medians of rounds "
        f"({results.settings['rounds']}), engines in turn in each.",
        "; ".join(f"{work}: {WORKS[work].says}" for work in results.works) + ".",
    ]
    if results.machine:
        machine = median_machine(results.machine)
        rates = ", ".join(f"{rate:.0f} at {rows}" for rows, rate in machine.gflops.items())
        lines.append(
            f"The machine, in the same run: {machine.read_gb_s:.1f} GB/s read; bfloat16 GEMM, "
            f"GFLOP/s by rows: {rates}."
        )
    versions = ", ".join(f"{ENGINES[e].label} {v}" for e, v in results.versions.items())
    return "\n".join([*lines, f"Versions: {versions}."])


def report(results: Results, draw: Callable[[Rows], str] = plain) -> str:
    """Everything, with tables drawn by `plain` or `markdown`."""
    parts = [conditions(results)]
    parts += [draw(model_rows(results, model)) for model in results.models]
    found = verdicts(results)
    if found:
        parts.append(draw(verdict_rows(found)))
    failures = [f"{f.engine}, {f.model}, round {f.round + 1}: {f.what}" for f in results.failures]
    if failures:
        parts.append("Failed:\n" + "\n".join(failures))
    return "\n\n".join(parts) + "\n"
