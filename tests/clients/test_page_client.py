"""The page's client under Node: its own tests, those against a real server among them, and types.

vitest runs web/test/; its output is shown when it fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.support.running import Running

WEB = Path(__file__).parents[2] / "web"
sys.path.append(str(WEB))
import build_page  # noqa: E402

LIMIT_S = 240


@pytest.fixture(scope="module")
def node() -> Path:
    """Node, with the page's packages installed."""
    return build_page.install()


def run(node: Path, script: str, *arguments: str, **environment: str) -> None:
    done = subprocess.run(
        [node, WEB / "node_modules" / script, *arguments],
        cwd=WEB,
        env={**os.environ, "NO_COLOR": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_its_types(node: Path) -> None:
    run(node, "typescript/bin/tsc", "--noEmit", "-p", "tsconfig.json")
    run(node, "typescript/bin/tsc", "--noEmit", "-p", "tsconfig.node.json")


def test_its_own_tests(node: Path) -> None:
    server = Running(model="fake:tokens_per_s=400").start()
    keyed = Running(model="fake", api_key=("the-key",)).start()
    try:
        run(
            node,
            "vitest/vitest.mjs",
            "run",
            PAGE_TEST_URL=server.url,
            PAGE_TEST_KEYED_URL=keyed.url,
            PAGE_TEST_KEY="the-key",
        )
        server.wait_idle()  # no request that a client left behind is still running
    finally:
        keyed.stop()
        server.stop()


def test_the_lock_file_names_no_host() -> None:
    """`npm ci` uses the registry that is configured on the machine."""
    lock = (WEB / "package-lock.json").read_text()
    assert '"integrity": "sha512-' in lock
    assert '"resolved"' not in lock
    assert '"version": "http' not in lock
