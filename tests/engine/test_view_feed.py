"""ViewFeed: one query for all callers, steps only while there is a follower, the end."""

from __future__ import annotations

import asyncio
import traceback
from contextlib import AsyncExitStack, aclosing

import pytest

from streamer.core.view import ViewQuery
from streamer.engine import view_feed
from streamer.engine.engine import AsyncEngine
from streamer.errors import EngineDead, Overloaded, StreamerError
from tests.engine.helpers import DEADLINE_S, GatedEngine, make_engine, request


@pytest.fixture(autouse=True)
def short_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_feed, "INTERVAL_S", 0.001)


def record_asks(engine: AsyncEngine) -> list[ViewQuery]:
    """Commands that reach the GPU thread from here on."""
    asks: list[ViewQuery] = []
    original = engine.view_feed._send_query

    def ask(query: ViewQuery) -> None:
        asks.append(query)
        original(query)

    engine.view_feed._send_query = ask  # type: ignore[method-assign]
    return asks


async def test_a_view_shows_running_requests_and_an_idle_engine_answers_too() -> None:
    async with make_engine() as engine:
        idle = await engine.view_feed.next()
        assert (idle.requests, idle.steps, idle.step) == ((), (), 0)
        stream = engine.submit(request(max_tokens=None, ignore_eos=True, cache_salt="x"))
        async with aclosing(stream.read()) as batches:
            await anext(batches)
            (shown,) = (await engine.view_feed.next()).requests
            assert shown.request_id == stream.request_id
            assert shown.sequences[0].num_blocks > 0
            other = await engine.view_feed.next("another")
            assert (other.requests, other.unlisted) == ((), {shown.status: 1})


async def test_a_follower_gets_every_step_once_and_then_nothing_is_recorded() -> None:
    async with make_engine() as engine:
        numbers: list[int] = []
        asks = record_asks(engine)
        async with asyncio.timeout(DEADLINE_S):
            async with aclosing(engine.view_feed.follow()) as views:
                await anext(views)
                stream = engine.submit(request(max_tokens=9))
                while len(numbers) < 9:
                    numbers += [s.number for s in (await anext(views)).steps]
            assert numbers == list(range(1, 10))
            assert stream.is_finished
            assert asks[-1] == ViewQuery()
            engine.submit(request(max_tokens=5))
            assert (await engine.view_feed.next()).steps == ()
        num_asks = len(asks)
        async for _ in engine.generate("count on"):
            pass
        assert len(asks) == num_asks, "queries go on without a reader"


async def test_many_callers_share_one_query() -> None:
    async with make_engine() as engine:
        asks = record_asks(engine)
        views = await asyncio.gather(*(engine.view_feed.next(o) for o in ("a", "b", "a") * 5))
        assert asks == [ViewQuery((b"a", b"b"))]
        assert len({id(v) for v in views}) == 2


async def test_cancelling_one_caller_leaves_the_others_waiting() -> None:
    async with make_engine() as engine:
        leaving = asyncio.create_task(engine.view_feed.next())
        staying = asyncio.create_task(engine.view_feed.next())
        await asyncio.sleep(0)
        leaving.cancel()
        assert (await staying).step == 0


async def test_followers_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_feed, "MAX_FOLLOWERS", 1)
    async with make_engine() as engine:
        async with aclosing(engine.view_feed.follow()) as views:
            await anext(views)
            with pytest.raises(Overloaded, match="follow"):
                await anext(engine.view_feed.follow())
        async with aclosing(engine.view_feed.follow()) as views:
            await anext(views)


async def test_callers_get_an_error_when_the_engine_ends() -> None:
    async with GatedEngine() as gated:
        engine = gated.engine
        engine.submit(request())
        await asyncio.to_thread(gated.gate.waits.acquire)  # the thread is inside a step
        waiting = asyncio.create_task(engine.view_feed.next())
        closing = asyncio.create_task(engine.aclose())
        await asyncio.sleep(0.01)
        gated.gate.open()
        await closing
        with pytest.raises(EngineDead):
            await waiting
        with pytest.raises(EngineDead):
            await engine.view_feed.next()


async def test_each_call_after_the_end_raises_its_own_error() -> None:
    """An exception that is raised repeatedly collects the frames of all its callers."""
    engine = make_engine()
    async with engine:
        pass
    errors = []
    for _ in range(3):
        with pytest.raises(EngineDead, match="closed") as raised:
            await engine.view_feed.next()
        errors.append(raised.value)
    assert len({id(e) for e in errors}) == 3
    depths = [len(list(traceback.walk_tb(e.__traceback__))) for e in errors]
    assert depths == depths[:1] * 3


async def test_before_the_start_it_is_overloaded() -> None:
    with pytest.raises(StreamerError, match="loading"):
        await make_engine().view_feed.next()


async def test_a_key_gets_at_most_as_many_followers_as_stay_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(view_feed, "MAX_FOLLOWERS", 8)
    async with asyncio.timeout(DEADLINE_S), make_engine() as engine:
        async with AsyncExitStack() as followers:

            async def fill(owner: str) -> int:
                count = 0
                while True:
                    views = engine.view_feed.follow(owner)
                    try:
                        await anext(views)
                    except Overloaded:
                        return count
                    followers.push_async_callback(views.aclose)
                    count += 1

            assert [await fill(owner) for owner in ("one:", "two:", "three:")] == [4, 2, 1]
            assert await fill("") == 1
        assert engine.view_feed.num_followers == 0
