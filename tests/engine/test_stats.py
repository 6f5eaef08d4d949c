"""The engine's statistics: a maximum over a window, which reading does not change."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

from streamer.engine.stats import RecentMax
from tests.engine.helpers import DEADLINE_S, make_engine, request


def test_the_maximum_is_of_the_last_seconds_only() -> None:
    seen = RecentMax(3)
    assert seen.read(10.0) == 0.0
    for now, value in ((10.1, 5.0), (10.9, 2.0), (12.5, 3.0), (13.0, 1.0)):
        seen.observe(value, now)
    assert [seen.read(now) for now in (13.9, 14.0, 15.9, 16.0, 17.0)] == [5.0, 3.0, 3.0, 1.0, 0.0]


def test_it_keeps_a_value_a_second_however_many_come() -> None:
    seen = RecentMax(3)
    for i in range(10_000):
        seen.observe(float(i % 100), i / 100)
    assert seen.read(100.0) == 99.0
    assert len(seen._seconds) == 4


async def test_reading_the_loops_lag_does_not_reset_it() -> None:
    async with asyncio.timeout(DEADLINE_S), make_engine(tokens_per_s=100.0) as engine:
        stream = engine.submit(request(20))
        async with aclosing(stream.read()) as reader:
            await anext(reader)
            time.sleep(0.3)  # noqa: ASYNC251 - that is the point
            await stream.wait()
        first, second = engine.snapshot(), engine.snapshot()
    assert first.max_loop_lag_s > 0.1
    assert second.max_loop_lag_s == first.max_loop_lag_s
