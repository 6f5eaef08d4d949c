"""The command line's consoles, which are made only here, and what is safe to print on them: lines
wrap only on a terminal.

rich takes a file or a pipe for a terminal of 80 columns, which would cut the lines of logs.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

UNWRAPPED = 10_000  # columns


def new_console(*, stderr: bool = False) -> Console:
    """For standard output or error; COLUMNS sets the width where there is no terminal."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = UNWRAPPED
    return console


def printable(text: str) -> str:
    """Text of files and requests, whose control characters a terminal would obey: as escapes."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
