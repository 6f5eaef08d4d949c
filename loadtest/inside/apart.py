"""Apart: a command in a process of its own, with a time limit. Called by the benches that run their
parts so, since a part that hangs or dies must not take the others along.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Sequence


def run_apart(
    command: Sequence[str], limit_s: float, say: Callable[[str], None] | None = None
) -> str:
    """Why it failed, "" if it did not; it is killed after so many seconds.

    Each line it prints goes to `say`; without one it shares this process's terminal.
    """
    output = None if say is None else subprocess.PIPE
    process = subprocess.Popen(command, stdout=output, text=True)
    timer = threading.Timer(limit_s, process.kill)
    timer.start()
    try:
        if say is not None:
            for line in process.stdout or ():
                say(line.strip())
        code = process.wait()
    finally:
        is_late = not timer.is_alive()
        timer.cancel()
        process.kill()
        process.communicate()
    if is_late:
        return f"killed after {limit_s:g} s"
    return f"its process ended with {code}" if code else ""
