"""Commands by name: each a module that adds its own flags and runs, imported when it is used.

`streamer NAME` is one; a group such as `streamer bench WHAT` is a command whose first word names
another command and whose other words are the flags of that command.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from streamer.cli.arguments import Parser, UsageError

if TYPE_CHECKING:
    from rich.console import Console


class Command(NamedTuple):
    """A command: the module that implements it, and its line in `--help`.

    is_foreign: the flags are another program's, and go unread to the module's `main(words)`.
    """

    module: str
    help: str
    is_foreign: bool = False


class CommandModule(Protocol):
    """The two functions that a command's module has."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace, console: Console) -> int: ...


def load(command: Command) -> CommandModule:
    """The command's module; UsageError where the wheel left it out."""
    try:
        return cast(CommandModule, import_module(command.module))
    except ModuleNotFoundError as error:
        missing = f"{error.name}."
        if not f"{command.module}.".startswith(missing) or not missing.startswith("streamer."):
            raise
        raise UsageError(
            "this command is not installed, since it needs a checkout: run "
            "`pip install -e '.[dev]'` in the folder of Streamer's source, and then the command"
        ) from None


def listed(commands: Mapping[str, Command]) -> str:
    """The commands as `--help` lists them, each with its line."""
    width = max(map(len, commands))
    lines = (f"  {name:<{width}}  {command.help}" for name, command in commands.items())
    return "commands:\n" + "\n".join(lines)


def add_subcommands(parser: argparse.ArgumentParser, commands: Mapping[str, Command]) -> None:
    """The name of one of these commands; the words after it are that command's flags."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = listed(commands)
    parser.add_argument("what", metavar="WHAT", choices=commands, help="a command of these")
    rest = parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    rest.required = False  # else the error for a missing WHAT names both
    parser.set_defaults(prog=parser.prog)


def run_subcommand(
    args: argparse.Namespace, console: Console, commands: Mapping[str, Command]
) -> int:
    """Run the command that the arguments of add_subcommands name; returns its exit code."""
    command = commands[args.what]
    if command.is_foreign:
        code: int = import_module(command.module).main(args.rest)
        return code
    parser = Parser(prog=f"{args.prog} {args.what}", description=command.help)
    try:
        module = load(command)
    except UsageError as error:
        parser.error(str(error))
    module.add_arguments(parser)
    return module.run(parser.parse_args(args.rest), console)
