"""The files that a run leaves in results/tools/: a heading, then each tool's own output.

The files name the machine's hardware only: paths, host names and progress bars are removed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from .parts import Command, Verdict

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
HOST = re.compile(r"\] [^\s/]+/(?=(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)/)")


class About(msgspec.Struct, frozen=True):
    """The heading: date, machine, versions and command lines."""

    date: str
    device: str
    server: str
    versions: dict[str, str]
    commands: list[str]

    @classmethod
    def of(
        cls, head: Mapping[str, str], versions: dict[str, str], commands: Sequence[Command]
    ) -> About:
        """`head`: date, device and server, the same for all tools."""
        return cls(**head, versions=versions, commands=[command.line for command in commands])

    @property
    def text(self) -> str:
        """The heading's lines, as comments."""
        named = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines = [f"{self.date}, {self.device}", f"server: {self.server}", f"versions: {named}"]
        return "\n".join(f"# {line}" for line in [*lines, *self.commands])


def cleaned(output: str, places: Mapping[str, str]) -> str:
    """The output without colours, bars and hosts; `places`: path -> replacement, longest first."""
    text = ESCAPES.sub("", output)
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    text = HOST.sub("] ", "\n".join(lines))
    for path in sorted(places, key=len, reverse=True):
        text = text.replace(path, places[path])
    return text


def write(folder: Path, name: str, about: About, verdict: Verdict) -> None:
    """NAME.txt, and NAME.json where there are data."""
    folder.mkdir(parents=True, exist_ok=True)
    failed = "".join(f"FAILED: {failure}\n" for failure in verdict.failures)
    parts = [f"== {heading}\n\n{text.strip()}\n" for heading, text in verdict.parts]
    text = "\n".join([about.text, f"# {verdict.line}\n{failed}", *parts])
    (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    if verdict.data is not None:
        data = msgspec.json.encode({"about": about, "found": verdict.data})
        (folder / f"{name}.json").write_bytes(msgspec.json.format(data, indent=1) + b"\n")
