"""Locust's own command line: with the users of loadtest/users, and with a plain HttpUser.

Its exit code and its CSV report failures; the CSV also shows whether any request was made.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from ..users.options import USERS as ALL
from .parts import Command, Setting, Tool, Verdict

USERS, PLAIN = "locust_users", "locust_plain"
NUM_USERS = 8
EVERYWHERE = ("SseChat", "MultiTurn")  # chat completions are all that they need
Row = dict[str, str]


def commands(setting: Setting) -> list[Command]:
    """Both runs."""
    users = ALL if setting.is_ours else EVERYWHERE
    return [
        command(USERS, "users of this repository", setting, ("--slo", "slo.toml", *users)),
        command(PLAIN, "a plain HttpUser", setting, ()),
    ]


def command(name: str, says: str, setting: Setting, more: tuple[str, ...]) -> Command:
    """A headless run of `setting.seconds`."""
    load = ("-u", str(NUM_USERS), "-r", str(NUM_USERS), "-t", f"{setting.seconds}s")
    flags = ("-f", f"{name}.py", "--host", setting.url, "--headless", *load)
    return Command(name, says, "locust", (*flags, "--only-summary", "--csv", name, *more))


def judge(folder: Path, outputs: Mapping[str, str]) -> Verdict:
    """Every kind of request must have been answered, and none may have failed."""
    failures: list[str] = []
    parts: list[tuple[str, str]] = []
    lines = []
    for name, output in outputs.items():
        file = folder / f"{name}_stats.csv"
        rows = read_rows(file)
        asked = [row for row in rows if row["Name"] != "Aggregated"]
        if not asked:
            failures.append(f"{name}: no request was made")
        failures += [
            f"{name}: {row['Failure Count']} of {row['Request Count']} failed: "
            f"{row['Type']} {row['Name']}"
            for row in asked
            if row["Failure Count"] != "0"
        ]
        num = sum(int(row["Request Count"]) for row in asked if row["Type"] in ("E2E", "POST"))
        lines.append(f"{name}: {num} answers")
        parts += [(name, summary(output)), (f"{name}: {file.name}", text_of(file))]
    return Verdict(tuple(failures), tuple(parts), None, "; ".join(lines))


def read_rows(file: Path) -> list[Row]:
    """Locust's CSV."""
    return list(csv.DictReader(text_of(file).splitlines()))


def text_of(file: Path) -> str:
    """A file's text, or "" if it is missing; Locust's carriage returns are removed."""
    return file.read_text(encoding="utf-8").replace("\r", "") if file.exists() else ""


def summary(output: str) -> str:
    """Locust's output without its start and end times."""
    return "\n".join(line for line in output.splitlines() if "INFO" not in line).strip()


TOOL = Tool(
    name="locust",
    packages=(("locust==2.47.0", "msgspec", "websockets", "rich"),),
    shown=("locust", "gevent", "requests"),
    server=(),
    commands=commands,
    judge=judge,
)
