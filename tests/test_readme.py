"""What README and docs/ say and can be checked: links, commands, flags, defaults, code, files."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
import tomllib
from pathlib import Path

import pytest

import streamer
from streamer.build import DEMO_NAME
from streamer.cli import COMMANDS
from streamer.cli.commands import load
from streamer.config import Config, load_config, settings

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
README = TEXTS["README.md"]
FENCED = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = [(page, *block) for page, text in TEXTS.items() for block in FENCED.findall(text)]
PYTHON = [(page, code) for page, language, code in BLOCKS if language == "python"]
SHELL = [
    (page, line)
    for page, language, code in BLOCKS
    if language in ("", "sh")
    for line in code.replace("\\\n", " ").splitlines()
]
COMMAND_LINES = [line for page, line in SHELL if page == "README.md"]
LINKS = [
    (page.name, link)
    for page in PAGES
    for link in re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", TEXTS[page.name])
]
OTHERS_FLAGS = {"--headless", "--host", "--web-host", "--csv", "--processes", "--tags"}  # Locust's


def section(title: str, page: str = "README.md") -> str:
    return TEXTS[page].split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_column(text: str) -> list[str]:
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]
    return rows[2:]  # without the heading and its line


@pytest.mark.parametrize(("page", "code"), PYTHON)
def test_python_examples_use_names_that_exist(page: str, code: str) -> None:
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "streamer":
            for alias in node.names:
                assert getattr(streamer, alias.name)
    compile(tree, page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_readme_is_short() -> None:
    assert len(README.encode()) < 9000


def test_there_are_examples() -> None:
    assert len([page for page, _ in PYTHON if page == "README.md"]) >= 1
    assert "make serve" in COMMAND_LINES
    assert "make test" in COMMAND_LINES
    assert any(line.startswith("curl") for line in COMMAND_LINES)


@pytest.mark.parametrize("page", TEXTS)
def test_examples_go_where_the_server_listens(page: str) -> None:
    for port in re.findall(r"127\.0\.0\.1:(\d+)", TEXTS[page]):
        assert int(port) == Config().port
    for model in re.findall(r"[\"']?model[\"']?[=:] ?\"([\w-]+)\"", TEXTS[page]):
        assert model in (DEMO_NAME, "fake")


def slugs(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub writes them."""
    titles = re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {title.replace(" ", "-") for title in plain}


@pytest.mark.parametrize(("page", "link"), [(p, a or b) for p, (a, b) in LINKS])
def test_links_lead_somewhere(page: str, link: str) -> None:
    if link.startswith(("http://127.0.0.1", "https://", "http://localhost")):
        return
    place, _, anchor = link.partition("#")
    folder = ROOT if page == "README.md" else ROOT / "docs"
    target = (folder / place).resolve() if place else folder / page
    assert target.exists(), link
    if anchor:
        assert anchor in slugs(target.read_text(encoding="utf-8")), link


def parser_of(words: list[str]) -> argparse.ArgumentParser | None:
    """The parser of `streamer WORDS`; None where the flags are another program's."""
    command, parser = COMMANDS[words[0]], argparse.ArgumentParser()
    module = load(command)
    module.add_arguments(parser)
    for action in parser._actions:
        if action.dest == "what" and isinstance(action.choices, dict):
            command = action.choices[words[1]]
            if command.is_foreign:
                return None
            parser = argparse.ArgumentParser()
            load(command).add_arguments(parser)
    return parser


@pytest.mark.parametrize(("page", "line"), [s for s in SHELL if s[1].startswith("streamer ")])
def test_commands_have_the_flags_they_are_given(page: str, line: str) -> None:
    words = shlex.split(line.partition(" #")[0])[1:]
    parser = parser_of(words)
    if parser is None:
        return
    known = {flag for action in parser._actions for flag in action.option_strings}
    given = {w.partition("=")[0] for w in words if w.startswith("--")}
    assert given <= known, given - known


def test_make_targets_in_the_text_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    asked = [line.split()[1] for _, line in SHELL if line.startswith("make ")]
    assert {"serve", "test"} <= {*asked} <= {*targets}


@pytest.mark.parametrize("page", TEXTS)
def test_flags_in_the_text_exist(page: str) -> None:
    """A server flag may be named alone; another command's flag stands in a command line."""
    known = {setting.flag for setting in settings()} | {"--config", "--help"} | OTHERS_FLAGS
    lines = " ".join(line for _, line in SHELL)
    for flag in re.findall(r"`(--[a-z][a-z-]+)", FENCED.sub("", TEXTS[page])):
        assert flag in known or f"{flag} " in f"{lines} " or is_a_flag_of_ours(flag), flag


def is_a_flag_of_ours(flag: str) -> bool:
    """Whether any command has the flag."""
    quoted = f'"{flag}"'
    folders = (ROOT / "streamer", ROOT / "loadtest")
    files = [file for folder in folders for file in folder.rglob("*.py")]
    return any(quoted in file.read_text(encoding="utf-8") for file in files)


def test_every_command_is_documented_and_exists() -> None:
    documented = {
        row.split()[1].strip("`") for row in first_column(section("Commands", "operations.md"))
    }
    assert documented == set(COMMANDS)


def test_every_setting_is_documented_with_its_default() -> None:
    known = {setting.flag: setting for setting in settings()}
    found = set()
    for line in section("Settings", "operations.md").splitlines():
        flags = re.findall(r"`(--[a-z-]+)`", line.split("|")[1]) if line.startswith("|") else []
        found |= {*flags}
        defaults = [d.strip() for d in line.split("|")[2].split(",")] if flags else []
        for flag, documented in zip(flags, defaults * len(flags), strict=False):
            default = known[flag].default
            is_shown = default not in (None, (), "") and known[flag].kind != "table"
            assert documented == str(default) or not is_shown, f"{flag}: {documented}"
    assert found == known.keys()


def test_a_settings_file_can_be_read(tmp_path: Path) -> None:
    files = [code for page, language, code in BLOCKS if language == "toml" and page != "clients.md"]
    assert files
    for code in files:
        path = tmp_path / "streamer.toml"
        path.write_text(code, encoding="utf-8")
        load_config({}, {}, path)


def test_every_dependency_is_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    documented = {
        name.split()[0]
        for row in first_column(section("What it depends on", "architecture.md"))
        for name in row.split(",")
    }
    extras = project["optional-dependencies"].values()
    for requirement in [*project["dependencies"], *(each for extra in extras for each in extra)]:
        assert re.split(r"[^\w.-]", requirement)[0] in documented


def test_the_rooms_are_where_it_says() -> None:
    for row in first_column(section("The rooms")):
        for place in re.findall(r"`([^`]+)`", row):
            beside = (ROOT / place, ROOT / "streamer" / place)
            assert any(path.exists() for path in beside), place


ARCHITECTURE = TEXTS["architecture.md"]


def test_files_of_the_architecture_exist() -> None:
    named = set(re.findall(r"`([\w/]+(?:\.(?:py|c|md)|/))`", FENCED.sub("", ARCHITECTURE)))
    assert len(named) > 40
    missing = [p for p in named if not any((r / p).exists() for r in (ROOT / "streamer", ROOT))]
    assert missing == []


def test_files_of_the_changes_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("## Eight changes")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+/[\w/]*(?:\.(?:py|c|md))?)`", table))
    assert len(named) > 20
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_names_in_the_architecture_exist() -> None:
    rows = [r.split("|") for r in section("Where things are", "architecture.md").splitlines()]
    found = [(r[2].strip(" `"), r[3].strip(" `")) for r in rows if len(r) == 5 and "`" in r[2]]
    assert len(found) > 20
    for file, name in found:
        source = (ROOT / "streamer" / file).read_text(encoding="utf-8")
        assert re.search(
            rf"^\s*(?:async )?(?:def|class) {name}\b|^{name}\b|raise {name}\(", source, re.MULTILINE
        ), f"{file}: {name}"


def test_functions_of_the_architecture_exist() -> None:
    for file, name in re.findall(r"`([\w/]+\.py)` \(`(\w+)`", ARCHITECTURE):
        source = (ROOT / "streamer" / file).read_text(encoding="utf-8")
        assert re.search(rf"(?:def|class) {name}\b", source), f"{file}: {name}"
