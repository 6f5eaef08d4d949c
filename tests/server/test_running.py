"""The tests' own server: a failed test that leaves one running does not keep pytest from ending."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LEFT_ALIVE = """
from tests.server.support.running import Running

server = Running(model="fake:tokens_per_s=100").start()
engine = server.engine
print("started")
"""


def test_a_process_ends_although_the_server_was_not_stopped() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", LEFT_ALIVE], cwd=root, capture_output=True, text=True, timeout=30
    )
    assert (done.stdout, done.returncode) == ("started\n", 0), done.stderr
