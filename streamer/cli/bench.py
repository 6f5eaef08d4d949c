"""`streamer bench WHAT`: the in-process measurements, each a module of loadtest/.

Only finds the module and passes the flags on; the module measures.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from streamer.cli.commands import Command, add_subcommands, run_subcommand

if TYPE_CHECKING:
    from rich.console import Console

BENCHES = {
    "step": Command(
        "streamer.loadtest.inside.step", "host time of a step, beside a quiet and a busy loop"
    ),
    "stream": Command(
        "streamer.loadtest.inside.stream.command", "from a step's output to the sockets, by itself"
    ),
    "linear": Command(
        "streamer.loadtest.inside.linear", "the CPU's matrix products, dense and quantized"
    ),
    "load": Command(
        "streamer.loadtest.inside.loading", "weights from files into the CPU's form, by format"
    ),
    "accuracy": Command(
        "streamer.loadtest.inside.accuracy.command",
        "perplexity and divergence of quantized weights and KV",
    ),
    "gpu": Command(
        "streamer.loadtest.inside.gpu.command", "a GPU's figures, each beside its target"
    ),
    "offline": Command(
        "streamer.loadtest.inside.offline.command", "throughput, latency and swap, without a server"
    ),
    "journal": Command("streamer.loadtest.inside.journal", "a journal beside none, in pairs"),
    "speculation": Command(
        "streamer.loadtest.inside.speculation.command",
        "speculation beside none: edits, text without repeats, a draft model",
    ),
    "page": Command(
        "streamer.loadtest.inside.page.command", "the page in a browser, beside its budget"
    ),
    "paper": Command("streamer.loadtest.paper.command", "what the papers published, measured here"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The bench's name; the words after it are the bench's own flags."""
    add_subcommands(parser, BENCHES)


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the bench; returns its exit code."""
    return run_subcommand(args, console, BENCHES)
