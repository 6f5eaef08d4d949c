"""The event loop of a command: uvloop where it exists, asyncio's own elsewhere.

The only place in the command line that chooses a loop.
"""

from __future__ import annotations

import asyncio


def new_runner() -> asyncio.Runner:
    """An asyncio.Runner; its first Ctrl-C cancels what runs, its second interrupts."""
    try:
        import uvloop
    except ImportError:  # Windows
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)
