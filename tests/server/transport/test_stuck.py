"""StuckWatch: a client that takes nothing is cut off, and no other."""

from __future__ import annotations

import asyncio
from typing import Any

from streamer.server.transport.stuck import ABORT, StuckWatch

LIMIT_S, DEADLINE_S = 0.05, 20.0


async def test_one_send_that_ends_does_not_hide_another_that_waits() -> None:
    """Two lanes of one socket: the first sends again before the second's send has ended."""
    stuck, aborted = asyncio.Event(), asyncio.Event()
    scope: Any = {"extensions": {ABORT: aborted.set}}
    with StuckWatch(scope, LIMIT_S, stuck.set) as watch:
        watch.began()
        watch.began()
        watch.ended()
        watch.began()
        watch.ended()
        assert watch.is_sending
        async with asyncio.timeout(DEADLINE_S):
            await stuck.wait()
        assert aborted.is_set()


async def test_a_slow_client_that_takes_something_now_and_then_stays() -> None:
    stuck, passed = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    with StuckWatch({"type": "http"}, 4 * LIMIT_S, stuck.set) as watch:
        for i in range(8):
            watch.began()
            loop.call_later((i + 1) * LIMIT_S, watch.ended)
        loop.call_later(8.5 * LIMIT_S, passed.set)
        async with asyncio.timeout(DEADLINE_S):
            await passed.wait()
    assert not stuck.is_set()
    assert not watch.is_sending
