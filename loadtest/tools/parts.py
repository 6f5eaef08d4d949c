"""The description of a public tool: its packages, command lines and judgement.

Values only. A command runs in its own folder, which holds `model` (the folder of the served model:
its tokenizer, and the weights for lm-eval's comparison), the tasks and the locustfiles; so command
lines, and what tools print of them, have no path of this machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from ..compare.engines import Engine

MODEL = "model"


class Setting(msgspec.Struct, frozen=True):
    """The values in command lines.

    url        the server, without /v1
    model      its name in requests
    is_ours    the server was started here, so it has Streamer's extensions
    context    tokens that the model takes
    seconds    of each load
    """

    url: str
    model: str
    is_ours: bool
    context: int
    seconds: int


class Command(msgspec.Struct, frozen=True):
    """One run of a tool: a program of its environment, and the files it writes."""

    name: str
    says: str
    program: str
    flags: tuple[str, ...]

    @property
    def line(self) -> str:
        """The command line as typed in a shell."""
        return " ".join([self.program, *map(quoted, self.flags)])


class Verdict(msgspec.Struct, frozen=True):
    """A tool's result.

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
    shown      packages whose versions are reported
    server     flags of our server for this tool
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
        """Package -> the pinned version; "" for any."""
        words = [word.partition("==") for row in self.packages for word in row]
        return {name.partition("[")[0]: version for name, _, version in words}

    @property
    def engine(self) -> Engine:
        """The tool as an Engine, whose environment install.py can make."""
        return Engine(self.name, self.name, self.name)


def quoted(word: str) -> str:
    """The word, quoted for a shell where needed."""
    return f"'{word}'" if set(word) & set(' "{}[]()&;*?<>|$') else word


def read_json(file: Path) -> dict[str, object]:
    """A JSON object; {} if there is none."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def at(value: object, *path: str, default: object = None) -> object:
    """The value at a path of keys; `default` if a key is missing."""
    for step in path:
        if not isinstance(value, Mapping) or step not in value:
            return default
        value = value[step]
    return value
