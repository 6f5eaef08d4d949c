"""How many users a shape has when, and the rounding of times; in a process that imports Locust."""

from __future__ import annotations

import subprocess
import sys

from tests.loadtest.locusts import ROOT

SCRIPT = """
from streamer.loadtest.locust.shapes import users_at
shares = [i / 10 for i in range(10)]
for shape in ("steps", "spike", "soak"):
    print(shape, *(users_at(shape, share, 10) for share in shares), users_at(shape, 0.0, 1))
"""


def test_shapes_over_time() -> None:
    """Locust patches sockets and threads where it is imported, so not here."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "steps 2 2 4 4 6 6 8 8 10 10 1",
        "spike 2 2 2 2 10 10 2 2 2 2 1",
        "soak 1 10 10 10 10 10 10 10 10 10 1",
    ], done.stderr


def test_times_keep_two_digits() -> None:
    from streamer.loadtest.locust.meter import bucket

    given = (0.0, 0.04567, 0.4567, 4.567, 45.67, 456.7, 4567.0)
    assert [bucket(ms) for ms in given] == [0, 0.046, 0.46, 4.6, 46, 460, 4600]
