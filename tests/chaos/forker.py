"""A program that starts servers as its children, in a quarter of a second each.

Each line of its input is the arguments of one `streamer` command, as JSON; it answers with the pid.
A number before them is the step of its restoring at which the command kills itself.
Everything heavy is imported before, once; no thread has been started by then. A child before it is
waited for first: its port and its files are free.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from typing import Any

from streamer.cli import main
from streamer.engine.journal.restoring import Restoring


def die_while_restoring(at: int) -> None:
    """Have SIGKILL come before the request number `at` that the journal has is read or goes on."""
    num_left = at

    def counted(inner: Any) -> Any:
        def step(*args: Any) -> Any:
            nonlocal num_left
            if not num_left:
                os.kill(os.getpid(), signal.SIGKILL)
            num_left -= 1
            return inner(*args)

        return step

    for name in ("_request", "_restore"):
        setattr(Restoring, name, counted(getattr(Restoring, name)))


def run() -> None:
    child = 0
    for line in sys.stdin:
        if child:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)
        child = os.fork()
        if not child:
            code = 1
            try:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(2, 1)  # what it prints is no answer of ours
                given = json.loads(line)
                if isinstance(given[0], int):
                    die_while_restoring(given.pop(0))
                code = main(given)
            finally:
                os._exit(code)
        print(child, flush=True)


if __name__ == "__main__":
    run()
