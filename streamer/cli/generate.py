"""`streamer generate`: one prompt, from an argument or standard input, and its answer.

Only the answer goes to standard output, as it streams, so that it can be piped; timing goes to
standard error.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from streamer.cli.arguments import UsageError
from streamer.cli.chat import AnswerTiming, stream
from streamer.cli.console import new_console
from streamer.cli.loop import new_runner
from streamer.cli.talk import (
    AnswerSource,
    InProcess,
    Message,
    Piece,
    add_source_arguments,
    source_from,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from rich.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The prompt as the positional argument; the model is a flag here."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="absent or -: standard input")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument(
        "--raw", action="store_true", help="continue the text itself, without a chat template"
    )
    add_source_arguments(parser, model=False)


def run(args: argparse.Namespace, console: Console) -> int:
    """Stream one answer; 0 when it ended, 130 when it was interrupted."""
    if args.raw and args.system:
        raise UsageError("--system is part of a chat: leave --raw out")
    opening = source_from(args)
    prompt = args.prompt
    if prompt in (None, "-"):
        prompt = sys.stdin.read()
    if not prompt.strip():
        raise UsageError("PROMPT is empty")
    with new_runner() as runner:
        runner.run(_generate(args, opening, prompt, console))
    return 0


async def _generate(
    args: argparse.Namespace,
    opening: AbstractAsyncContextManager[AnswerSource],
    prompt: str,
    console: Console,
) -> None:
    timing = AnswerTiming()
    async with opening as source:
        await stream(_pieces(args, source, prompt), timing, console)
        console.out("")
    new_console(stderr=True).print(timing.summary(), style="dim", markup=False)


def _pieces(args: argparse.Namespace, source: AnswerSource, prompt: str) -> AsyncIterator[Piece]:
    if args.raw and isinstance(source, InProcess):
        return source.complete(prompt)
    messages: list[Message] = [{"role": "system", "content": args.system}] if args.system else []
    return source.answer([*messages, {"role": "user", "content": prompt}])
