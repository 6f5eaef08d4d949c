"""The consoles of the command line, the only place that makes them: lines wrap on a terminal alone.

rich takes what is no terminal for one of 80 columns, which would cut the lines of logs and pipes.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

UNWRAPPED = 10_000  # columns


def new_console(*, stderr: bool = False) -> Console:
    """For standard output or error; COLUMNS says how wide where there is no terminal."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = UNWRAPPED
    return console
