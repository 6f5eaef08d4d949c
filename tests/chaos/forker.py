"""A program that starts servers as its children, in a quarter of a second each.

Each line of its input is the arguments of one `streamer` command, as JSON; it answers with the pid.
Everything heavy is imported before, once; no thread has been started by then. A child before it is
waited for first: its port and its files are free.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys

from streamer.cli import main


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
                code = main(json.loads(line))
            finally:
                os._exit(code)
        print(child, flush=True)


if __name__ == "__main__":
    run()
