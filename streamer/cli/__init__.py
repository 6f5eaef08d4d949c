"""The command line: finds a command, runs it, and turns its outcome into an exit code.

Imports a command's module only when that command runs, and heavy packages only inside its
functions, so `--help` answers at once. Exit codes: 0: done; 1: a StreamerError or a disk that takes
nothing, printed without a traceback; 2: wrong usage, with the flag, variable or key named; 130:
interrupted.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence

from streamer.cli import others
from streamer.cli.arguments import UNKNOWN, Parser, UsageError
from streamer.cli.commands import Command, listed, load
from streamer.errors import StreamerError
from streamer.spelling import hint

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

COMMANDS = {
    "serve": Command("streamer.cli.serve", "serve a model over HTTP, SSE and WebSocket"),
    "chat": Command("streamer.cli.chat", "talk to a model, or to a server, in the terminal"),
    "generate": Command("streamer.cli.generate", "answer one prompt"),
    "info": Command("streamer.cli.info", "what a checkpoint is and what it needs"),
    "quantize": Command("streamer.cli.quantize", "write a checkpoint with 4 or 8 bits a weight"),
    "doctor": Command("streamer.cli.doctor", "check this machine and say how to fix it"),
    "simulate": Command(
        "streamer.loadtest.inside.simulate", "simulate the scheduler, without a model"
    ),
    "bench": Command("streamer.cli.bench", "benchmark one part by itself"),
    "loadtest": Command("streamer.cli.loadtest", "load-test a server, this one or another"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    _open_missing_streams()
    try:
        if not words or words[0] not in COMMANDS:
            return _without_command(words)
        return _run(words[0], words[1:])
    except SystemExit as leaving:
        if not isinstance(leaving.code, int):
            raise  # with a message, which Python prints
        return leaving.code
    except KeyboardInterrupt:
        return INTERRUPTED


def _open_missing_streams() -> None:
    """Put the null device where standard input, output or error is closed.

    Else the next file or socket gets its descriptor, and uvloop ends the process over one below 3.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free one: fd
            setattr(sys, name, open(fd, "w" if fd else "r", closefd=False))  # noqa: SIM115


def _without_command(words: list[str]) -> int:
    from streamer import __version__

    parser = Parser(
        prog="streamer",
        usage="streamer COMMAND ...",
        description="A streaming engine for language models.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"{listed(COMMANDS)}\n\n`streamer COMMAND --help` lists a command's flags.",
    )
    parser.add_argument("--version", action="version", version=f"streamer {__version__}")
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    if words and not words[0].startswith("-"):
        here = others.COMMANDS.get(words[0])
        meant = f"; here: {here}" if here else hint(words[0], COMMANDS)
        names = ", ".join(COMMANDS)
        parser.error(f"unknown command {words[0]!r}{meant}; the commands are {names}")
    parser.parse_args(words)
    parser.print_help()
    return OK if words else USAGE


def _run(name: str, words: list[str]) -> int:
    module = load(COMMANDS[name])
    parser = Parser(
        prog=f"streamer {name}", usage="%(prog)s [ARGUMENTS]", description=COMMANDS[name].help
    )
    module.add_arguments(parser)
    if not words and parser.epilog:  # a group of commands
        parser.print_help()
        return USAGE
    for word in words:
        if word.startswith("-h") and word in others.FLAGS:  # argparse sees -h in -hf
            parser.error(UNKNOWN + word)
    args = parser.parse_args(words)

    from streamer.cli.console import new_console

    console = new_console()
    try:
        return module.run(args, console)
    except UsageError as error:
        parser.error(parser.with_flag(error.message, error.param))
    except StreamerError as error:
        message = parser.with_flag(error.message, error.param)
        new_console(stderr=True).print(f"[red]error:[/] {_plain(message)}")
        return FAILED
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        new_console(stderr=True).print(f"[red]error:[/] {_plain(os.strerror(error.errno))}")
        console.on_broken_pipe()  # drops what is left of the output, and leaves
        return FAILED


def _plain(text: str) -> str:
    from rich.markup import escape

    from streamer.cli.console import printable

    return escape(printable(text))
