"""`streamer loadtest WHAT`: measurements from outside, of any OpenAI-compatible server.

Only finds the program and passes the flags on; the programs know nothing of the engine.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from streamer.cli.commands import Command, add_subcommands, run_subcommand

if TYPE_CHECKING:
    from rich.console import Console

PROGRAMS = {
    "locust": Command(
        "streamer.loadtest.users.__main__", "users that wait for answers, by Locust", True
    ),
    "open-loop": Command("streamer.loadtest.open_loop.command", "requests when they are due"),
    "report": Command(
        "streamer.loadtest.open_loop.report", "one or two open-loop runs as an HTML page"
    ),
    "attacks": Command(
        "streamer.loadtest.attacks.command", "throughput left to other clients during attacks"
    ),
    "overload": Command("streamer.loadtest.overload", "ten times what a server can answer"),
    "compare": Command("streamer.loadtest.compare.command", "this engine beside installed others"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The program's name; the words after it are the program's own flags."""
    add_subcommands(parser, PROGRAMS)


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the program; returns its exit code."""
    return run_subcommand(args, console, PROGRAMS)
