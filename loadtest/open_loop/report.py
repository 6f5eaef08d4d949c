"""`streamer loadtest report`: runs of the open loop as one HTML file, two of them side by side.

A run is a result file, or the folder of a sweep or of several rates. Nothing is measured here.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from .page import page
from .runs import Run

OK, UNUSABLE = 0, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    add = parser.add_argument
    add("first", type=Path, metavar="RUN", help="a result file of open-loop, or its folder")
    add(
        "second",
        type=Path,
        metavar="RUN",
        nargs="?",
        help="a second run, to compare with the first",
    )
    says = "of the runs, instead of their files' names"
    add("--names", nargs="+", default=[], metavar="NAME", help=says)
    add("--out", type=Path, default=Path("report.html"), metavar="FILE", help="report.html")


def run(args: argparse.Namespace, console: Console) -> int:
    """Write the page; 2 where a file can't be read or lacks a field."""
    places = [place for place in (args.first, args.second) if place is not None]
    try:
        if args.names and len(args.names) != len(places):
            raise ValueError(f"--names has {len(args.names)} names for {len(places)} runs")
        names = args.names or [""] * len(places)
        runs = [Run.read(*pair) for pair in zip(places, names, strict=True)]
        args.out.write_text(page(apart(runs)), encoding="utf-8")
    except (OSError, ValueError) as error:
        console.out(f"Can't make a report: {error}")
        return UNUSABLE
    console.out(f"Written to {args.out}")
    return OK


def apart(runs: list[Run]) -> list[Run]:
    """The runs, renamed where two have the same name."""
    if len({run.name for run in runs}) == len(runs):
        return runs
    return [
        Run(f"{run.name} ({letter})", run.results) for run, letter in zip(runs, "AB", strict=True)
    ]
