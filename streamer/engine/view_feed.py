"""ViewFeed: views of the scheduler for the loop, shared by all callers.

Owns the interval of the queries: at most one every INTERVAL_S for any number of callers, and none
without callers. The GPU thread answers each with one SchedulerView; every caller gets the part of
its own key. Made by AsyncEngine, called on the loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from typing import Final

from streamer.core.view import MAX_STEPS, SchedulerView, ViewQuery, seen_by
from streamer.engine.refusals import fresh_copy
from streamer.errors import Overloaded, StreamerError

INTERVAL_S: Final = 0.25
MAX_FOLLOWERS: Final = 32


class ViewFeed:
    """One query at a time.

    send_query  sends a ViewQuery to the GPU thread; the answers come to `on_view` in the same order
    """

    def __init__(self, send_query: Callable[[ViewQuery], None]) -> None:
        self._send_query = send_query
        self._unanswered: deque[asyncio.Future[SchedulerView]] = deque()
        self._waiting: dict[bytes, asyncio.Future[SchedulerView]] = {}  # by owner
        self._ticking: asyncio.Task[None] | None = None
        self._next_s = 0.0
        self._followers: Counter[str] = Counter()  # by owner
        self._end: StreamerError | None = None

    @property
    def num_followers(self) -> int:
        """Readers in `follow` now."""
        return self._followers.total()

    async def next(self, owner: str = "") -> SchedulerView:
        """The scheduler at the next tick; steps are in it while a reader follows.

        owner  prefix of the caller's salts: others' requests are counted, not listed

        Raises Overloaded before the engine is started, EngineDead when it has ended or does so now.
        """
        if self._end is not None:
            raise fresh_copy(self._end)
        key = owner.encode()
        future = self._waiting.get(key)
        if future is None:
            future = self._waiting[key] = asyncio.get_running_loop().create_future()
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick())
        try:
            return await asyncio.shield(future)  # cancelling one caller leaves the others
        except StreamerError as e:  # each caller has a traceback of its own
            raise fresh_copy(e) from e.__cause__

    async def follow(self, owner: str = "") -> AsyncGenerator[SchedulerView, None]:
        """A view a tick, each with the steps since the one before; to be closed (`aclosing`).

        A late reader misses steps, which shows in their numbers. Raises Overloaded if too many
        follow: a key's readers take at most as many places as they leave free.
        """
        free, own = MAX_FOLLOWERS - self.num_followers, self._followers[owner]
        if not free or (owner and own >= free):
            readers = f"{own} readers of this key" if free else f"{MAX_FOLLOWERS} readers"
            raise Overloaded(f"{readers} follow the engine already")
        self._followers[owner] += 1
        try:
            while True:
                yield await self.next(owner)
        finally:
            self._followers -= Counter({owner: 1})
            if not self._followers:
                self.send(ViewQuery())  # record no more

    def on_view(self, view: SchedulerView) -> None:
        """The GPU thread's answer to the oldest query."""
        future = self._unanswered.popleft()
        if not future.done():
            future.set_result(view)

    def close(self, error: StreamerError) -> None:
        """No more answers: all waiting callers get the error."""
        self._end = error
        unanswered, self._unanswered = self._unanswered, deque()
        for future in (*unanswered, *self._waiting.values()):
            if not future.done():
                future.set_exception(error)
                future.exception()  # marked as seen, in case no caller waits any more
        self._waiting.clear()

    def send(self, query: ViewQuery) -> asyncio.Future[SchedulerView]:
        """Send one query of the caller's own; its answer has no part of any owner removed."""
        self._send_query(query)
        future: asyncio.Future[SchedulerView] = asyncio.get_running_loop().create_future()
        self._unanswered.append(future)
        return future

    async def _tick(self) -> None:
        """Ask while a caller waits, then end."""
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                await asyncio.sleep(self._next_s - loop.time())
                self._next_s = loop.time() + INTERVAL_S
                waiting, self._waiting = self._waiting, {}
                num_steps = MAX_STEPS if self._followers else 0
                await self._answer(waiting, ViewQuery(tuple(waiting), num_steps))
        finally:
            self._ticking = None

    async def _answer(
        self, waiting: dict[bytes, asyncio.Future[SchedulerView]], query: ViewQuery
    ) -> None:
        try:
            view = await self.send(query)
        except StreamerError as e:
            for future in waiting.values():
                future.set_exception(e)
                future.exception()
            return
        for owner, future in waiting.items():
            future.set_result(seen_by(view, owner))
            future.exception()
