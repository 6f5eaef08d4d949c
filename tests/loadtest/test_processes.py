"""Commands with a time limit: what they leave behind."""

from __future__ import annotations

import time
from pathlib import Path

from streamer.loadtest.processes import kept, run_apart


def test_what_a_command_started_ends_with_it(tmp_path: Path) -> None:
    """In a session of its own too, as engines are."""
    file = tmp_path / "pid"
    script = f"setsid sleep 600 & echo $! > {file}.new; mv {file}.new {file}; wait"
    assert run_apart(["sh", "-c", script], 1.0) == "killed after 1 s"
    pid = int(file.read_text())
    ends = time.monotonic() + 10
    while kept(pid, "VmHWM:") and time.monotonic() < ends:
        time.sleep(0.01)
    assert kept(pid, "VmHWM:") == 0
