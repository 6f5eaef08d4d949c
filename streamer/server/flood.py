"""EventBudget: how many events one socket may send, as a bucket that refills.

An event costs the loop from 13 us (an ack) to 90 us (one that is refused, with its answer; a shared
EPYC core, 2026-11-21): at the limit one socket takes a fifth of it at worst. websocket.py closes a
socket that goes beyond.
"""

from __future__ import annotations

from typing import Final

EVENTS_PER_S: Final = 2000
EVENT_BURST: Final = 10_000  # at once, after a silence: acks of many lanes that were held up


class EventBudget:
    """One socket's; `now` is in seconds of one clock, rising."""

    __slots__ = ("_level", "_since")

    def __init__(self, now: float) -> None:
        self._level = float(EVENT_BURST)
        self._since = now

    def take(self, now: float) -> bool:
        """Whether one more event is within the budget."""
        self._level = min(EVENT_BURST, self._level + (now - self._since) * EVENTS_PER_S) - 1
        self._since = now
        return self._level >= 0
