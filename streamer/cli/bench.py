"""`streamer bench WHAT`: the in-process measurements, each a module of the bench room.

Only finds the module and hands the flags on; what is measured is that module's business.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from streamer.cli.arguments import Parser

if TYPE_CHECKING:
    from rich.console import Console


class Bench(NamedTuple):
    """A bench: the module that implements it, and its line in `--help`."""

    module: str
    help: str


BENCHES = {
    "step": Bench("streamer.bench.step", "host time of a step, beside a quiet and a busy loop"),
    "stream": Bench("streamer.bench.stream", "from a step's output to the sockets, by itself"),
    "gpu": Bench("streamer.bench.gpu", "a GPU's figures, each beside its target"),
    "page": Bench("streamer.bench.page", "the page in a browser, beside its budget"),
    "paper": Bench("streamer.bench.paper", "what the papers published, measured here"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The bench's name; what follows is its own."""
    listed = "; ".join(f"{name}: {bench.help}" for name, bench in BENCHES.items())
    parser.add_argument("bench", metavar="WHAT", choices=BENCHES, help=listed)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(args: argparse.Namespace, console: Console) -> int:
    """The bench's own exit code; only the one that is named is imported."""
    bench = BENCHES[args.bench]
    module = import_module(bench.module)
    parser = Parser(prog=f"streamer bench {args.bench}", description=bench.help)
    module.add_arguments(parser)
    code: int = module.run(parser.parse_args(args.rest), console)
    return code
