"""What a public tool is here: its packages, the command lines it is run with, how it is judged.

Values only. A command runs in a folder of its own, which holds `model` (the folder of the served
model: its tokenizer, and the weights for who compares), the tasks and the locustfiles; so command
lines, and what tools print of them, name no place on this machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from ..compare.engines import Engine

MODEL = "model"


class Setting(msgspec.Struct, frozen=True):
    """What command lines are made of.

    url        the server, without /v1
    model      what requests call it
    is_ours    it was started here, so it has what only Streamer has
    context    tokens that the model takes
    seconds    of each load
    """

    url: str
    model: str
    is_ours: bool
    context: int
    seconds: int


class Command(msgspec.Struct, frozen=True):
    """One run of a tool: a program of its environment, and what it writes beside its output."""

    name: str
    says: str
    program: str
    flags: tuple[str, ...]

    @property
    def line(self) -> str:
        """As one types it."""
        return " ".join([self.program, *map(quoted, self.flags)])


class Verdict(msgspec.Struct, frozen=True):
    """What a tool found.

    failures  in words; none where everything worked
    parts     heading and text, for the kept output
    data      for the kept JSON; None where there is none
    line      the figures in one line
    """

    failures: tuple[str, ...]
    parts: tuple[tuple[str, str], ...]
    data: object
    line: str


class Tool(msgspec.Struct, frozen=True):
    """A public tool.

    packages   rows of pip's arguments, in order
    shown      packages whose versions are told
    server     flags that our server gets for it
    commands   its runs
    judge      reads the folder of the runs, and their outputs by command name
    variables  of its environment
    """

    name: str
    packages: tuple[tuple[str, ...], ...]
    shown: tuple[str, ...]
    server: tuple[str, ...]
    commands: Callable[[Setting], list[Command]]
    judge: Callable[[Path, Mapping[str, str]], Verdict]
    variables: dict[str, str] = {}

    @property
    def pins(self) -> dict[str, str]:
        """Package -> the version that is wanted; "" for any."""
        words = [word.partition("==") for row in self.packages for word in row]
        return {name.partition("[")[0]: version for name, _, version in words}

    @property
    def engine(self) -> Engine:
        """The place of its environment."""
        return Engine(self.name, self.name, self.name)


def quoted(word: str) -> str:
    """For a shell, where it must be."""
    return f"'{word}'" if set(word) & set(' "{}[]()&;*?<>|$') else word


def read_json(file: Path) -> dict[str, object]:
    """A JSON object; {} if there is none."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def at(value: object, *path: str, default: object = None) -> object:
    """What lies at the end of a path of keys; `default` if it breaks off."""
    for step in path:
        if not isinstance(value, Mapping) or step not in value:
            return default
        value = value[step]
    return value
