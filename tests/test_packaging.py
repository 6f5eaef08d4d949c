"""What an sdist and a wheel hold, built by the hooks that pip calls, from a copy of the tree."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import streamer
from streamer.cli.doctor import DISTRIBUTION
from tests.test_architecture import imports_of

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 240
CALL = "import sys, backend; print(getattr(backend, sys.argv[1])(sys.argv[2]))"


def call(source: Path, hook: str, out: Path, **environment: str) -> Path:
    """A hook's call as pip makes it, in an environment that has all that the hook requires."""
    done = subprocess.run(
        [sys.executable, "-c", CALL, hook, str(out)],
        cwd=source,
        env={**os.environ, "PYTHONPATH": str(source / "web"), **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made from what git knows, with the npm packages that are here already."""
    out, tree = tmp_path_factory.mktemp("sdist"), tmp_path_factory.mktemp("tree")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists() or (ROOT / name).is_symlink():  # it may have been removed since
            shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
    (tree / "web" / "node_modules").symlink_to(ROOT / "web" / "node_modules")
    return call(tree, "build_sdist", out)


@pytest.fixture(scope="module")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree in the sdist."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as tar:
        tar.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return source


@pytest.fixture(scope="module")
def installed(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the wheel that the sdist makes on a machine that has no Node."""
    path = call(unpacked, "build_wheel", tmp_path_factory.mktemp("wheel"), PATH="/nowhere")
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(path) as file:
        file.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def wheel(installed: Path) -> set[str]:
    """The names in that wheel."""
    return {p.relative_to(installed).as_posix() for p in installed.rglob("*") if p.is_file()}


def page_in(names: set[str]) -> set[str]:
    return {name for name in names if name.startswith("streamer/web/")}


def test_an_sdist_has_the_built_page_and_what_builds_a_wheel_of_it(unpacked: Path) -> None:
    names = {str(p.relative_to(unpacked)) for p in unpacked.rglob("*") if p.is_file()}
    assert {"pyproject.toml", "README.md", "LICENSE"} <= names
    assert {"web/backend.py", "web/build_page.py", "streamer/web/index.html"} <= names
    assert "web/package.json" not in names  # without package.json the backend does not build
    assert not [name for name in names if "node_modules" in name]


def test_a_wheel_has_the_page_and_everything_that_index_names(wheel: set[str]) -> None:
    page = page_in(wheel)
    for suffix in ("", ".br", ".gz"):
        assert f"streamer/web/index.html{suffix}" in page
        for kind in ("js", "css"):
            pattern = rf"streamer/web/assets/index-[\w-]+\.{kind}{re.escape(suffix)}"
            assert [name for name in page if re.fullmatch(pattern, name)], (kind, suffix)


# Files that are used in a checkout alone.
LEFT_OUT = (
    "streamer/demo/draft/",
    "streamer/demo/training",  # the folder, and what the training noted in a file
    "streamer/loadtest/compare/",
    "streamer/loadtest/inside/accuracy/",
    "streamer/loadtest/inside/page/",
    "streamer/loadtest/inside/README.md",
    "streamer/loadtest/inside/speculation/",
    "streamer/loadtest/paper/",
    "streamer/loadtest/results/",
    "streamer/loadtest/tools/",
)
COMMANDS_LEFT_OUT = {"bench": {"accuracy", "page", "paper", "speculation"}, "loadtest": {"compare"}}


def test_a_wheel_has_the_product_and_nothing_else(wheel: set[str]) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "streamer", "kernels", "loadtest"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    files = {
        name if name.startswith("streamer/") else f"streamer/{name}"
        for name in listed
        if (ROOT / name).is_file()
    }
    for part in LEFT_OUT:
        assert any(name.startswith(part) for name in files), part
    expected = {name for name in files if not name.startswith(LEFT_OUT)}
    found = {name for name in wheel - page_in(wheel) if ".dist-info/" not in name}
    assert found == expected
    assert "streamer/demo/checkpoint/model.safetensors" in expected


def test_an_sdist_s_page_is_the_wheel_s(wheel: set[str], unpacked: Path) -> None:
    assert page_in(wheel) == {
        f"streamer/web/{p.relative_to(unpacked / 'streamer' / 'web')}"
        for p in (unpacked / "streamer" / "web").rglob("*")
        if p.is_file()
    }


def test_a_wheel_imports_nothing_that_it_lacks(installed: Path) -> None:
    """Imports inside functions count too."""
    sources = list((installed / "streamer").rglob("*.py"))
    names = {".".join(path.relative_to(installed).with_suffix("").parts) for path in sources}
    modules = names | {name.removesuffix(".__init__") for name in names}
    missing = []
    for path in sources:
        module = ".".join(path.relative_to(installed).with_suffix("").parts)
        for one in imports_of(ast.parse(path.read_text(encoding="utf-8")), module):
            if one.name.startswith("streamer.loadtest.") or one.name.startswith("streamer.demo."):
                home = one.name if one.name in modules else one.name.rpartition(".")[0]
                missing += [f"{module}: {one.name}"] if home not in modules else []
    assert not missing


def test_every_command_of_a_wheel_works_or_says_that_it_needs_a_checkout(installed: Path) -> None:
    code = """
import json, sys
from streamer.cli import bench, loadtest, main
codes = {}
for name, door in (("bench", bench.BENCHES), ("loadtest", loadtest.PROGRAMS)):
    for what, command in door.items():
        if not command.is_foreign:  # Locust's flags are Locust's
            codes[f"{name} {what}"] = main([name, what, "--help"])
print(json.dumps(codes), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=installed,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    *lines, last = done.stderr.splitlines() or [""]
    codes = json.loads(last)
    refused = {name for name, code in codes.items() if code}
    assert refused == {f"{n} {what}" for n, all_ in COMMANDS_LEFT_OUT.items() for what in all_}
    assert {codes[name] for name in refused} == {2}
    assert "\n".join(lines).count("it needs a checkout: run `pip install -e") == len(refused)


def test_no_text_installs_an_unrelated_package() -> None:
    """The distribution is streamer-llm: on an index, `streamer` is another program."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == DISTRIBUTION == "streamer-llm"
    assert metadata.version(DISTRIBUTION) == streamer.__version__ == project["version"]
    listed = subprocess.run(
        [
            "git",
            "grep",
            "-nIE",
            r"(pip[3x]? install|uv (add|pip|tool))[^`]* ['\"]?streamer(\[|['\"`= ]|$)",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not listed.stdout
