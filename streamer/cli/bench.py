"""`streamer bench WHAT`: the in-process measurements, each a module of the bench room.

Only finds the module and hands the parsed flags on; what is measured is that module's business.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

BENCHES = {"step": ("streamer.bench.step", "host time of a step: schedule, inputs and apply")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subcommand a bench; only the one that is named is imported."""
    which = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    for name, (module, help_text) in BENCHES.items():
        bench = which.add_parser(name, help=help_text, description=help_text)
        if name in sys.argv:
            import_module(module).add_arguments(bench)


def run(args: argparse.Namespace, console: Console) -> int:
    """The bench's own exit code."""
    module, _ = BENCHES[args.bench]
    code: int = import_module(module).run(args, console)
    return code
