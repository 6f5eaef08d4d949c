"""What a process that serves sets up for itself: its event loop (uvloop where it exists), the GIL's
interval, and what garbage collections leave out.

The only place in the command line that chooses a loop. Nothing here suits a program that has other
work beside the engine: its heap and its collections are its own.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
from typing import Final

# How long a thread waits for the GIL before it requests it. A loop that releases the GIL more often
# than that, for a microsecond each time, keeps it: at 0.5 ms the engine's thread starved beside a
# saturated loop (loadtest/inside/README.md).
SWITCH_INTERVAL_S: Final = 0.00005
# While serving, garbage is collected after so many more objects than were freed, and so many
# smaller collections. By Python's (700, 10, 10), 1,024 joining streams take 374 collections, the
# longest of 36 ms; so they take 25, the longest of 16 (a shared EPYC core, 2026-11-22). A request
# that has ended leaves no cycles (tests/server/test_garbage.py), so nothing waits for these.
COLLECT_AFTER: Final = (10_000, 5, 5)


def new_runner() -> asyncio.Runner:
    """An asyncio.Runner; its first Ctrl-C cancels what runs, its second interrupts."""
    try:
        import uvloop
    except ImportError:  # Windows
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def freeze_heap() -> None:
    """Leave what loading made out of garbage collections: for 1.2 M objects one takes 116 ms."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else Triton's modules report leaks
    gc.set_threshold(*COLLECT_AFTER)
