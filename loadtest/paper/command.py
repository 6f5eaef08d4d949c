"""`streamer bench paper`: what the papers published, measured with this engine and put beside it.

Runs each comparison in a process of its own with a time limit, since they load models and take
their time on purpose: one that fails, hangs or dies is said, and the others run. Their tables and
pictures go to a folder; with --only the others' figures there stay. With --tiny everything runs in
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
from streamer.loadtest.inside.apart import run_apart
from streamer.loadtest.paper import report as paper_report
from streamer.loadtest.paper.report import Comparison, Measured, Report

if TYPE_CHECKING:
    from rich.console import Console

Measure = Callable[..., Comparison]  # measure(progress, *, tiny=False)
OUT = Path("loadtest/results/paper")
PACKAGES = ("torch", "transformers")


class Entry(NamedTuple):
    """A comparison: the seconds that it may take, and what it compares."""

    limit_s: float
    help: str


ENTRIES: dict[str, Entry] = {
    "batching": Entry(420, "continuous against static batching"),
    "allocation": Entry(270, "paged against contiguous memory"),
    "sharing": Entry(250, "blocks shared by n choices"),
    "swap": Entry(360, "preemption by swap and by recompute"),
    "chunks": Entry(220, "chunked prefill and the gaps between tokens"),
    "flow": Entry(240, "fast readers beside slow ones, with flow control and without"),
}


class Part(msgspec.Struct, frozen=True):
    """What a process leaves: the comparison, or what went wrong."""

    comparison: Comparison | None = None
    failure: str = ""


def _measure(name: str) -> Measure:
    """What makes a comparison."""
    from streamer.loadtest.paper import allocation as paper_allocation
    from streamer.loadtest.paper import batching as paper_batching
    from streamer.loadtest.paper import chunks as paper_chunks
    from streamer.loadtest.paper import flow as paper_flow
    from streamer.loadtest.paper import sharing as paper_sharing
    from streamer.loadtest.paper import swap as paper_swap

    return {
        "batching": paper_batching.measure,
        "allocation": paper_allocation.measure,
        "sharing": paper_sharing.measure,
        "swap": paper_swap.measure,
        "chunks": paper_chunks.measure,
        "flow": paper_flow.measure,
    }[name]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to compare, and where to write it."""
    listed = "; ".join(f"{name}: {entry.help}" for name, entry in ENTRIES.items())
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=ENTRIES, help=listed)
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help=f"for tables and plots ({OUT}; not with --tiny)"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try the code")
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)


def run(args: argparse.Namespace, console: Console) -> int:
    """Every comparison asked for; 1 if one of them failed."""
    names = [name for name in ENTRIES if not args.only or name in args.only]
    if args.part is not None:
        return _run_here(names[0], console, args.part, is_tiny=args.tiny)
    out = args.out or (None if args.tiny else OUT)
    if out is OUT and not OUT.parent.is_dir():
        raise ConfigError(f"there is no {OUT.parent} here: name a folder with --out", param="out")
    if out is not None:
        _make(out)  # before minutes are spent on what could not be written
    parts, seconds = _run_all(names, console, is_tiny=args.tiny)
    before = paper_report.read(out) if out else Report()
    measured = dict(before.measured)
    for name, part in parts.items():
        if part.comparison is not None:
            measured[name] = _dated(part.comparison, seconds[name], is_tiny=args.tiny)
            paper_report.print_comparison(console, measured[name])
        else:
            console.print(f"{name} failed: {part.failure}", style="red", markup=False)
    failures = {name: part.failure for name, part in parts.items() if part.failure}
    if out is not None:
        in_order = {name: measured[name] for name in ENTRIES if name in measured}
        paper_report.write(Report(in_order, failures), out)
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
    """One after the other, with a bar that says what goes on."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    told = TextColumn("{task.description}")
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), told)
    parts: dict[str, Part] = {}
    seconds: dict[str, float] = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(names))
        for name in names:
            began = time.perf_counter()

            def say(what: str, name: str = name) -> None:
                bar.update(task, description=f"{name}: {what}")
                if not console.is_terminal:
                    console.print(f"{name}: {what}", markup=False, highlight=False)

            say("starting")
            parts[name] = _run_apart(name, say, is_tiny=is_tiny)
            seconds[name] = time.perf_counter() - began
            bar.advance(task)
        bar.update(task, description="")
    return parts, seconds


def _run_apart(name: str, say: Callable[[str], None], *, is_tiny: bool) -> Part:
    """In a process of its own, whose lines say what it does."""
    limit_s = ENTRIES[name].limit_s
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "part.json"
        failure = run_apart(_command(name, file, is_tiny=is_tiny), limit_s, say)
        if file.exists():
            return msgspec.json.decode(file.read_bytes(), type=Part)
    return Part(failure=failure or "it left no figures")


def _command(name: str, file: Path, *, is_tiny: bool) -> list[str]:
    """What makes one comparison and writes its part to a file."""
    command = [sys.executable, "-m", "streamer", "bench", "paper", "--only", name]
    return [*command, "--part", str(file), *(["--tiny"] if is_tiny else [])]


def _run_here(name: str, console: Console, file: Path, *, is_tiny: bool) -> int:
    """One comparison in this process; 1 if it failed."""

    def say(what: str) -> None:
        console.print(what, markup=False, highlight=False, soft_wrap=True)

    try:
        part = Part(_measure(name)(say, tiny=is_tiny))
    except Exception as error:  # of any kind: the other comparisons are still to be made
        from streamer.loadtest.inside.gpu.report import describe

        part = Part(failure=describe(error))
    file.write_bytes(msgspec.json.encode(part))
    return 1 if part.failure else 0


def _dated(comparison: Comparison, took_s: float, *, is_tiny: bool) -> Measured:
    from streamer.loadtest.compare.command import device

    versions = {"Python": platform.python_version()} | {name: version(name) for name in PACKAGES}
    where = ", ".join(str(value) for key, value in device().items() if key != "python")
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    return Measured(comparison, date, round(took_s, 1), where, versions, is_tiny)
