"""`streamer bench WHAT`: the in-process measurements, each a module of the bench room.

Only finds the module and hands the flags on; what is measured is that module's business.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from streamer.cli.commands import Command, add_door, go_through

if TYPE_CHECKING:
    from rich.console import Console

BENCHES = {
    "step": Command(
        "streamer.loadtest.inside.step", "host time of a step, beside a quiet and a busy loop"
    ),
    "stream": Command(
        "streamer.loadtest.inside.stream.command", "from a step's output to the sockets, by itself"
    ),
    "gpu": Command(
        "streamer.loadtest.inside.gpu.command", "a GPU's figures, each beside its target"
    ),
    "offline": Command(
        "streamer.loadtest.inside.offline.command", "throughput, latency and swap, without a server"
    ),
    "page": Command(
        "streamer.loadtest.inside.page.command", "the page in a browser, beside its budget"
    ),
    "paper": Command("streamer.loadtest.paper.command", "what the papers published, measured here"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The bench's name; what follows is its own."""
    add_door(parser, BENCHES)


def run(args: argparse.Namespace, console: Console) -> int:
    """The bench's own exit code."""
    return go_through(args, console, BENCHES)
