"""`streamer bench paper`: the papers' published figures beside this engine's.

Runs each comparison in its own process with a time limit, since they load models and run for
minutes: one that fails, hangs or dies is reported, and the others run. Tables and pictures go to a
folder; with --only the other comparisons' figures there stay. With --tiny everything runs in
seconds, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from streamer.errors import ConfigError
from streamer.loadtest import plots, table
from streamer.loadtest.paper.comparison import Comparison
from streamer.loadtest.processes import run_apart

if TYPE_CHECKING:
    from rich.console import Console


Measure = Callable[..., Comparison]  # measure(progress, *, tiny=False)
OUT = Path(__file__).resolve().parents[1] / "results" / "paper"  # wherever it is run from
PACKAGES = ("torch", "transformers")


class Entry(NamedTuple):
    """A comparison: its time limit in seconds, and what it compares."""

    limit_s: float
    help: str


ENTRIES: dict[str, Entry] = {
    "batching": Entry(420, "continuous against static batching"),
    "allocation": Entry(270, "paged against contiguous memory"),
    "sharing": Entry(250, "blocks shared by n choices"),
    "beams": Entry(30, "blocks shared by the hypotheses of a beam search"),
    "swap": Entry(360, "preemption by swap and by recompute"),
    "chunks": Entry(220, "chunked prefill and the gaps between tokens"),
    "flow": Entry(240, "fast readers beside slow ones, with flow control and without"),
}


class Part(msgspec.Struct, frozen=True):
    """A process's result: the comparison, or its error."""

    comparison: Comparison | None = None
    failure: str = ""


def _measure(name: str) -> Measure:
    """The function that makes a comparison."""
    from streamer.loadtest.paper import batching, flow, memory, scheduling

    return {
        "batching": batching.measure,
        "allocation": memory.measure_allocation,
        "sharing": memory.measure_sharing,
        "beams": memory.measure_beams,
        "swap": scheduling.measure_swap,
        "chunks": scheduling.measure_chunks,
        "flow": flow.measure,
    }[name]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to compare, and where to write it."""
    listed = "; ".join(f"{name}: {entry.help}" for name, entry in ENTRIES.items())
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=ENTRIES, help=listed)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder for tables and plots (loadtest/results/paper; none with --tiny)",
    )
    parser.add_argument("--tiny", action="store_true", help="use tiny shapes, to try the code")
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the chosen comparisons; 1 if one of them failed."""
    names = [name for name in ENTRIES if not args.only or name in args.only]
    if args.part is not None:
        return _run_here(names[0], console, args.part, is_tiny=args.tiny)
    out = args.out or (None if args.tiny else OUT)
    if out is not None:
        _make(out)  # fails before minutes are spent on figures that can't be written
    parts, seconds = _run_all(names, console, is_tiny=args.tiny)
    before = read(out) if out else Report()
    measured = dict(before.measured)
    for name, part in parts.items():
        if part.comparison is not None:
            measured[name] = _dated(part.comparison, seconds[name], is_tiny=args.tiny)
            print_comparison(console, measured[name])
        else:
            console.print(f"{name} failed: {part.failure}", style="red", markup=False)
    failures = {name: part.failure for name, part in parts.items() if part.failure}
    if out is not None:
        in_order = {name: measured[name] for name in ENTRIES if name in measured}
        write(Report(in_order, failures), out)
        console.print(f"written to {out}", markup=False, highlight=False)
    return 1 if failures else 0


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror or error}", param="out") from error


def _run_all(
    names: list[str], console: Console, *, is_tiny: bool
) -> tuple[dict[str, Part], dict[str, float]]:
    """Run the comparisons one after the other, with a progress bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    description = TextColumn("{task.description}")
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), description)
    parts: dict[str, Part] = {}
    seconds: dict[str, float] = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(names))
        for name in names:
            began = time.perf_counter()

            def show(what: str, name: str = name) -> None:
                bar.update(task, description=f"{name}: {what}")
                if not console.is_terminal:
                    console.print(f"{name}: {what}", markup=False, highlight=False)

            show("starting")
            parts[name] = _run_apart(name, show, is_tiny=is_tiny)
            seconds[name] = time.perf_counter() - began
            bar.advance(task)
        bar.update(task, description="")
    return parts, seconds


def _run_apart(name: str, show: Callable[[str], None], *, is_tiny: bool) -> Part:
    """Run one comparison in its own process, whose output lines report its progress."""
    limit_s = ENTRIES[name].limit_s
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "part.json"
        failure = run_apart(_command(name, file, is_tiny=is_tiny), limit_s, show)
        if file.exists():
            return msgspec.json.decode(file.read_bytes(), type=Part)
    return Part(failure=failure or "it left no figures")


def _command(name: str, file: Path, *, is_tiny: bool) -> list[str]:
    """The command line that makes one comparison and writes its part to a file."""
    command = [sys.executable, "-m", "streamer", "bench", "paper", "--only", name]
    return [*command, "--part", str(file), *(["--tiny"] if is_tiny else [])]


def _run_here(name: str, console: Console, file: Path, *, is_tiny: bool) -> int:
    """One comparison in this process; 1 if it failed."""

    def show(what: str) -> None:
        console.print(what, markup=False, highlight=False, soft_wrap=True)

    try:
        part = Part(_measure(name)(show, tiny=is_tiny))
    except Exception as error:  # of any kind: the other comparisons are still to be made
        from streamer.loadtest.inside.gpu.report import describe

        part = Part(failure=describe(error))
    file.write_bytes(msgspec.json.encode(part))
    return 1 if part.failure else 0


def _dated(comparison: Comparison, took_s: float, *, is_tiny: bool) -> DatedComparison:
    from streamer.loadtest.compare.command import device

    versions = {"Python": platform.python_version()} | {name: version(name) for name in PACKAGES}
    where = ", ".join(str(value) for key, value in device().items() if key != "python")
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    return DatedComparison(comparison, date, round(took_s, 1), where, versions, is_tiny)


JSON, MARKDOWN = "paper.json", "README.md"
TINY_NOTE = "Tiny shapes: they exercise the code and say nothing about speed."


class DatedComparison(msgspec.Struct, frozen=True):
    """A comparison, with its date and machine."""

    comparison: Comparison
    date: str
    took_s: float
    device: str
    versions: dict[str, str]
    is_tiny: bool = False


class Report(msgspec.Struct, frozen=True):
    """The report, as written to JSON. `failures`: name -> the last run's error."""

    measured: dict[str, DatedComparison] = {}
    failures: dict[str, str] = {}


# ---------------------------------------------------------------- files


def read(folder: Path) -> Report:
    """The report in a folder; an empty one if there is none."""
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


def _section(name: str, made: DatedComparison) -> list[str]:
    it = made.comparison
    versions = ", ".join(f"{package} {version}" for package, version in made.versions.items())
    where = f"{made.date}, {made.device}, {versions}; {made.took_s:.0f} s."
    return [
        f'<a id="{name}"></a>',
        f"## {it.title}",
        *([TINY_NOTE] if made.is_tiny else []),
        f"Published: {it.published}",
        table.markdown([it.columns, *(tuple(map(table.number, row)) for row in it.rows)]),
        f"Here: {it.finding}",
        f"![{it.title}]({name}.svg)",
        f"{it.setting} Measured {where}",
    ]


def print_comparison(console: Console, made: DatedComparison) -> None:
    """Print the table, the published figures and the finding."""
    it = made.comparison
    rows = [it.columns, *(tuple(map(table.number, row)) for row in it.rows)]
    console.print(table.terminal(rows, it.title))
    console.print(f"Published: {it.published}\nHere: {it.finding}", markup=False, highlight=False)
    if made.is_tiny:
        console.print(TINY_NOTE, style="dim")


# ---------------------------------------------------------------- pictures


def svg(comparison: Comparison) -> str:
    """The comparison's chart."""
    plot = comparison.plot
    lines = [plots.Line(one.name, one.points) for one in plot.series]
    labels = (plot.x, plot.y)
    return plots.chart(comparison.title, plot.kind, labels, lines, plots.named(plot.ticks))
