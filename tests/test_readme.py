"""The README's claims that can be checked: commands, flags, defaults, packages, code and files."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

import streamer
from streamer.build import DEMO_NAME
from streamer.cli import COMMANDS
from streamer.config import Config, settings

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
COMMAND_LINES = [line for language, code in BLOCKS if not language for line in code.splitlines()]


def section(title: str) -> str:
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_column(text: str) -> list[str]:
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]
    return rows[2:]  # without the heading and its line


@pytest.mark.parametrize("code", PYTHON)
def test_python_examples_use_names_that_exist(code: str) -> None:
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "streamer":
            for alias in node.names:
                assert getattr(streamer, alias.name)
    compile(tree, "README.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_there_are_examples() -> None:
    assert len(PYTHON) >= 3
    assert "make serve" in COMMAND_LINES
    assert "make test" in COMMAND_LINES
    assert any(line.startswith("curl") for line in COMMAND_LINES)


def test_examples_go_where_the_server_listens() -> None:
    for port in re.findall(r"127\.0\.0\.1:(\d+)", README):
        assert int(port) == Config().port
    for model in re.findall(r"[\"']?model[\"']?[=:] ?\"([\w-]+)\"", README):
        assert model == DEMO_NAME


def test_every_command_is_told_and_exists() -> None:
    told = {row.split()[1].strip("`") for row in first_column(section("Commands"))}
    assert told == set(COMMANDS)


def test_flags_and_defaults_are_right() -> None:
    known = {setting.flag: setting for setting in settings()}
    for line in section("Settings").splitlines():
        flags = re.findall(r"`(--[a-z-]+)`", line.split("|")[1]) if line.startswith("|") else []
        defaults = [d.strip() for d in line.split("|")[2].split(",")] if flags else []
        for flag, told in zip(flags, defaults * len(flags), strict=False):
            default = known[flag].default
            assert told == str(default) or default in (None, ()), f"{flag}: {told}, is {default}"


def test_every_dependency_is_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    told = {
        name.strip()
        for row in first_column(section("What it depends on"))
        for name in row.split(",")
    }
    for requirement in project["dependencies"]:
        assert re.split(r"[^\w.-]", requirement)[0] in told


def test_the_rooms_are_where_it_says() -> None:
    for row in first_column(section("The rooms")):
        for place in re.findall(r"`([^`]+)`", row):
            beside = (ROOT / place, ROOT / "streamer" / place)
            assert any(path.exists() for path in beside), place
