"""FrameBudget: what one socket may send, as a bucket that refills, counted in events.

An event costs the loop from 13 us (an ack) to 90 us (one that is refused, with its answer; a shared
EPYC core, 2026-11-21), a frame alone 8 us: at the limit one socket takes a fifth of it at worst.
transport/websocket.py closes a socket that goes beyond, while its frames are taken apart.
"""

from __future__ import annotations

from typing import Final

EVENTS_PER_S: Final = 2000
EVENT_BURST: Final = 10_000  # at once, after a silence: acks of many lanes that were held up
EVENT_BYTES: Final = 4096  # an event counts once more for each of these that it has
BARE_COST: Final = 10  # events that a ping, a pong or a fragment counts: a client needs few


class FrameBudget:
    """One socket's; `now` is in seconds of one clock, rising."""

    __slots__ = ("_level", "_since")

    def __init__(self, now: float) -> None:
        self._level = float(EVENT_BURST)
        self._since = now

    def take(self, now: float, num_bytes: int = 0, *, is_event: bool = True) -> bool:
        """Whether one more frame is within the budget."""
        cost = (1 if is_event else BARE_COST) + num_bytes // EVENT_BYTES
        self._level = min(EVENT_BURST, self._level + (now - self._since) * EVENTS_PER_S) - cost
        self._since = now
        return self._level >= 0
