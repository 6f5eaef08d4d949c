"""Flags, routes, fields of bodies and metrics that programs and people rely on still exist.

surface.json lists those of 2026-11-22, before the files were moved into rooms. Additions are free;
a removal needs a line in GONE that says why.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from streamer.server import openapi
from tests.server.support.running import Running

BEFORE: dict[str, Any] = json.loads(Path(__file__).with_name("surface.json").read_text())
# owner_of was in the schema of SchedulerView, and never sent
GONE = frozenset(["owner_of"])


def missing(before: list[str], now: set[str]) -> set[str]:
    return set(before) - now - GONE


@pytest.mark.parametrize("command", BEFORE["flags"])
def test_no_flag_is_gone(command: str) -> None:
    """In a subprocess: Locust patches the sockets of the process that asks for its help."""
    words = [sys.executable, "-m", "streamer", *command.split(), "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", done.stdout))
    assert not missing(BEFORE["flags"][command], flags)


def test_no_route_and_no_field_is_gone() -> None:
    schema = json.loads(openapi.document())
    routes = {f"{method.upper()} {path}" for path, ops in schema["paths"].items() for method in ops}
    assert not missing(BEFORE["routes"], routes)
    fields: dict[str, set[str]] = {}
    for name, body in schema["components"]["schemas"].items():
        fields.setdefault(name.rpartition(".")[2], set()).update(body.get("properties", ()))
    lost = {name: missing(had, fields.get(name, set())) for name, had in BEFORE["fields"].items()}
    assert not {name: names for name, names in lost.items() if names}


def test_no_metric_is_gone() -> None:
    server = Running().start()
    try:
        text = httpx.get(server.url + "/metrics").text
    finally:
        server.stop()
    metrics = {" ".join(found) for found in re.findall(r"^# TYPE (\S+) (\S+)", text, re.MULTILINE)}
    assert not missing(BEFORE["metrics"], metrics)
