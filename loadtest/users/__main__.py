"""`streamer loadtest locust`: Locust with the locustfile beside this.

All of Locust's flags apply, and those of options.py. Runs as a module too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

try:
    from locust import events  # first: it patches sockets and threads
    from locust import main as program
except ModuleNotFoundError as error:
    if error.name != "locust":
        raise
    sys.exit("Locust is not installed: pip install 'streamer-llm[loadtest]'")

from . import options


def main(words: Sequence[str]) -> int:
    """Locust with these flags, in this process; it leaves by SystemExit with its own exit code."""
    file = str(Path(__file__).resolve().with_name("locustfile.py"))
    sys.argv = ["locust", "-f", file, *words]
    if {"-h", "--help"} & set(words):  # Locust answers before it reads the file
        events.init_command_line_parser.add_listener(options.add)
    program.main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
