"""Looks from the loop: one clock for all callers, steps only while there is a follower, the end."""

from __future__ import annotations

import asyncio
import traceback
from contextlib import AsyncExitStack, aclosing

import pytest

from streamer.core.view import Wanted
from streamer.engine import watch
from streamer.engine.engine import AsyncEngine
from streamer.errors import EngineDead, Overloaded, StreamerError
from tests.engine.helpers import DEADLINE_S, GatedEngine, make_engine, request


@pytest.fixture(autouse=True)
def short_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "INTERVAL_S", 0.001)


def record_asks(engine: AsyncEngine) -> list[Wanted]:
    """Commands that reach the GPU thread from here on."""
    asks: list[Wanted] = []
    original = engine.watch._ask

    def ask(wanted: Wanted) -> None:
        asks.append(wanted)
        original(wanted)

    engine.watch._ask = ask  # type: ignore[method-assign]
    return asks


async def test_a_look_shows_what_runs_and_an_idle_engine_answers_too() -> None:
    async with make_engine() as engine:
        idle = await engine.watch.look()
        assert (idle.requests, idle.steps, idle.step) == ((), (), 0)
        stream = engine.submit(request(max_tokens=None, ignore_eos=True, cache_salt="x"))
        async with aclosing(stream.read()) as batches:
            await anext(batches)
            (shown,) = (await engine.watch.look()).requests
            assert shown.request_id == stream.request_id
            assert shown.sequences[0].num_blocks > 0
            other = await engine.watch.look("somebody")
            assert (other.requests, other.unlisted) == ((), {shown.status: 1})


async def test_a_follower_gets_every_step_once_and_then_nothing_is_recorded() -> None:
    async with make_engine() as engine:
        numbers: list[int] = []
        asks = record_asks(engine)
        async with asyncio.timeout(DEADLINE_S):
            async with aclosing(engine.watch.follow()) as views:
                await anext(views)
                stream = engine.submit(request(max_tokens=9))
                while len(numbers) < 9:
                    numbers += [s.number for s in (await anext(views)).steps]
            assert numbers == list(range(1, 10))
            assert stream.is_finished
            assert asks[-1] == Wanted()
            engine.submit(request(max_tokens=5))
            assert (await engine.watch.look()).steps == ()
        num_asks = len(asks)
        async for _ in engine.generate("count on"):
            pass
        assert len(asks) == num_asks, "nobody looks, but looks go on"


async def test_many_who_look_are_answered_by_one_look() -> None:
    async with make_engine() as engine:
        asks = record_asks(engine)
        views = await asyncio.gather(*(engine.watch.look(o) for o in ("a", "b", "a") * 5))
        assert asks == [Wanted((b"a", b"b"))]
        assert len({id(v) for v in views}) == 2


async def test_who_leaves_while_waiting_takes_nobody_along() -> None:
    async with make_engine() as engine:
        leaving = asyncio.create_task(engine.watch.look())
        staying = asyncio.create_task(engine.watch.look())
        await asyncio.sleep(0)
        leaving.cancel()
        assert (await staying).step == 0


async def test_followers_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MAX_FOLLOWERS", 1)
    async with make_engine() as engine:
        async with aclosing(engine.watch.follow()) as views:
            await anext(views)
            with pytest.raises(Overloaded, match="follow"):
                await anext(engine.watch.follow())
        async with aclosing(engine.watch.follow()) as views:
            await anext(views)


async def test_the_end_of_the_engine_is_told_to_who_looks() -> None:
    async with GatedEngine() as gated:
        engine = gated.engine
        engine.submit(request())
        await asyncio.to_thread(gated.gate.waits.acquire)  # the thread is inside a step
        waiting = asyncio.create_task(engine.watch.look())
        closing = asyncio.create_task(engine.aclose())
        await asyncio.sleep(0.01)
        gated.gate.open()
        await closing
        with pytest.raises(EngineDead):
            await waiting
        with pytest.raises(EngineDead):
            await engine.watch.look()


async def test_each_look_after_the_end_raises_an_error_of_its_own() -> None:
    """An exception that is raised repeatedly collects the frames of all its callers."""
    engine = make_engine()
    async with engine:
        pass
    errors = []
    for _ in range(3):
        with pytest.raises(EngineDead, match="closed") as told:
            await engine.watch.look()
        errors.append(told.value)
    assert len({id(e) for e in errors}) == 3
    depths = [len(list(traceback.walk_tb(e.__traceback__))) for e in errors]
    assert depths == depths[:1] * 3


async def test_before_the_start_there_is_nothing_to_see() -> None:
    with pytest.raises(StreamerError, match="loading"):
        await make_engine().watch.look()


async def test_a_key_takes_of_the_places_at_most_as_many_as_it_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "MAX_FOLLOWERS", 8)
    async with asyncio.timeout(DEADLINE_S), make_engine() as engine:
        async with AsyncExitStack() as followers:

            async def fill(owner: str) -> int:
                count = 0
                while True:
                    views = engine.watch.follow(owner)
                    try:
                        await anext(views)
                    except Overloaded:
                        return count
                    followers.push_async_callback(views.aclose)
                    count += 1

            assert [await fill(owner) for owner in ("one:", "two:", "three:")] == [4, 2, 1]
            assert await fill("") == 1
        assert engine.watch.num_followers == 0
