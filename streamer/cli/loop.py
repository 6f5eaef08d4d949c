"""The event loop of a command: uvloop where it exists, asyncio's own elsewhere.

The only place in the command line that chooses a loop.
"""

from __future__ import annotations

import asyncio

# How long a thread waits for the GIL before it requests it. A loop that releases the GIL more often
# than that, for a microsecond each time, keeps it: at 0.5 ms the engine's thread starved beside a
# saturated loop (loadtest/inside/README.md).
SWITCH_INTERVAL_S = 0.00005


def new_runner() -> asyncio.Runner:
    """An asyncio.Runner; its first Ctrl-C cancels what runs, its second interrupts."""
    try:
        import uvloop
    except ImportError:  # Windows
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)
