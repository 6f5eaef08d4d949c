"""Pace: limits the loop time of work that clients may repeat at will, such as replays.

Slices of such work run one after the other; after each, the loop is free for everything else for
REST times as long as the slice took. Before, one client that replayed an answer of 40,000 tokens
left a neighbour 2% of its tokens (a shared EPYC core, 2026-11-22). Made once by Service, used on
the loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

REST: Final = 3  # seconds of rest for each second of work: all replays together take a quarter
LARGE: Final = 1024  # entries of an answer; a larger one is no slice, but built in a thread
T = TypeVar("T")


class Pace:
    """The queue of slices; one at a time runs, or rests after it ran."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_taken = False  # a slice runs or rests

    async def turn(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises; runs after the earlier slices have run and rested."""
        loop = asyncio.get_running_loop()
        if self._is_taken:
            await self._wait(loop.create_future())
        self._is_taken = True
        began_s = time.perf_counter()
        try:
            return work()
        finally:
            loop.call_later(REST * (time.perf_counter() - began_s), self._pass_on)

    async def _wait(self, mine: asyncio.Future[None]) -> None:
        self._waiting.append(mine)
        try:
            await mine
        except BaseException:  # cancelled, or closed without running again
            if mine.done() and not mine.cancelled():
                self._pass_on()
            elif mine in self._waiting:
                self._waiting.remove(mine)
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)
                return
        self._is_taken = False
