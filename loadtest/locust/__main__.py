"""`streamer loadtest locust`: Locust with the locustfile beside this.

All of Locust's flags apply, and those of options.py. Runs as a module too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

try:
    from locust import main as program  # first: it patches sockets and threads
except ModuleNotFoundError as error:
    if error.name != "locust":
        raise
    sys.exit("Locust is not installed: pip install locust")


def main(words: Sequence[str]) -> int:
    """Locust with these flags, in this process; it leaves by SystemExit with its own exit code."""
    file = str(Path(__file__).resolve().with_name("locustfile.py"))
    sys.argv = ["locust", "-f", file, *words]
    program.main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
