"""`streamer chat`: a conversation in the terminal, streamed, with its timing.

Ctrl-C cancels a running answer; at the prompt it ends the program. A line that is one word and
begins with a slash is a command. The conversation is kept in memory only.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec

from streamer.cli.loop import new_runner
from streamer.cli.talk import AnswerSource, Message, Piece, add_source_arguments, source_from
from streamer.errors import StreamerError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from rich.console import Console

HELP = "[dim]/help lists commands. Ctrl-C stops an answer; Ctrl-D at the prompt leaves.[/]"
LIST, NEW, LEAVE = "this list", "begin a new conversation", "leave, as Ctrl-D and Ctrl-C do"
COMMANDS = {
    **dict.fromkeys(("/help", "/?"), LIST),
    **dict.fromkeys(("/new", "/clear"), NEW),
    **dict.fromkeys(("/exit", "/quit", "/bye"), LEAVE),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A model or a URL, sampling, and the system prompt."""
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    add_source_arguments(parser, model=True)


class AnswerTiming(msgspec.Struct):
    """An answer as it arrives. Times in seconds since its request; None: not yet known."""

    text: str = ""
    num_tokens: int | None = None
    first_s: float | None = None
    total_s: float = 0.0
    end: str | None = None

    def add(self, piece: Piece, elapsed_s: float) -> None:
        if self.first_s is None and (piece.text or piece.num_tokens):
            self.first_s = elapsed_s
        self.text += piece.text
        self.num_tokens = piece.num_tokens if piece.num_tokens is not None else self.num_tokens
        self.end = piece.end or self.end
        self.total_s = elapsed_s

    def summary(self) -> str:
        """Time to first token and tokens a second after it, where known."""
        parts = []
        if self.first_s is not None:
            parts.append(f"first token {self.first_s * 1e3:,.0f} ms")
        if self.num_tokens is not None:
            parts.append(f"{self.num_tokens} tokens")
            after_s = self.total_s - (self.first_s or 0.0)
            if self.num_tokens > 1 and after_s > 0:
                parts.append(f"{(self.num_tokens - 1) / after_s:,.0f} tokens/s")
        if self.end not in (None, "stop"):
            parts.append(f"ended: {self.end}")
        return ", ".join(parts)


async def stream(pieces: AsyncIterator[Piece], into: AnswerTiming, console: Console) -> None:
    """Print pieces as they come; leaving early (Ctrl-C) cancels the answer."""
    began = time.perf_counter()
    async with aclosing(pieces) as closing:  # type: ignore[type-var]
        async for piece in closing:
            into.add(piece, time.perf_counter() - began)
            console.out(piece.text, end="", highlight=False)
            console.file.flush()


def run(args: argparse.Namespace, console: Console) -> int:
    """Converse until the user ends it; 1 if there were questions and no answer to any."""
    opening = source_from(args)
    # The loop does not run while the user types: nothing streams then, and Ctrl-C reaches input().
    with new_runner() as runner:
        source = runner.run(opening.__aenter__())
        try:
            console.print(f"[bold]{source.name}[/]  {HELP}")
            conversation = converse(runner, source, console, args.system)
        finally:
            runner.run(_close(opening))
    return 1 if conversation.num_asked and not conversation.num_answered else 0


async def _close(opening: AbstractAsyncContextManager[AnswerSource]) -> None:
    await opening.__aexit__(None, None, None)


class Conversation(msgspec.Struct):
    """The messages since the beginning or /new, and the number of questions and answers in all."""

    messages: list[Message]
    num_asked: int = 0
    num_answered: int = 0


def converse(
    runner: asyncio.Runner, source: AnswerSource, console: Console, system: str | None
) -> Conversation:
    """Ask and answer until the end of input; returns the conversation at the end."""
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    now = Conversation(list(opening))
    while True:
        try:
            line = console.input("[bold green]> [/]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return now
        command = COMMANDS.get(line.lower())
        if command == LEAVE:
            return now
        if command == NEW:
            now.messages = list(opening)
            console.print("[dim]forgotten[/]")
        elif command == LIST:
            console.print(_listed(), style="dim", markup=False)
        elif re.fullmatch(r"/[a-zA-Z]+", line):
            console.print(f"unknown command {line}; /help lists them", style="dim", markup=False)
        elif line:
            asked = [*now.messages, {"role": "user", "content": line}]
            now.messages = _turn(runner, source, console, asked)
            now.num_asked += 1
            now.num_answered += len(now.messages) > len(asked)


def _listed() -> str:
    """The commands, those of one meaning on a line."""
    lines = []
    for meaning in (LIST, NEW, LEAVE):
        names = ", ".join(name for name, means in COMMANDS.items() if means == meaning)
        lines.append(f"{names:<20}{meaning}")
    return "\n".join(lines)


def _turn(
    runner: asyncio.Runner, source: AnswerSource, console: Console, messages: list[Message]
) -> list[Message]:
    """The conversation after this turn; a turn without an answer is left out."""
    timing = AnswerTiming()
    try:
        runner.run(stream(source.answer(messages), timing, console))
    except KeyboardInterrupt:
        timing.end = "cancelled"
    except StreamerError as error:
        console.print()
        console.print(error.message, style="red", markup=False)
    console.print()
    console.print(timing.summary(), style="dim", markup=False)
    if not timing.text:
        return messages[:-1]
    return [*messages, {"role": "assistant", "content": timing.text}]
