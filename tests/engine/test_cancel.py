"""Cancelling through the engine, in every phase: one finish a choice, all blocks free again."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from streamer.core.plan import FinishReason, Notice, NoticeKind
from streamer.core.sampling import SamplingParams
from streamer.engine.engine import AsyncEngine, TokenStream
from streamer.fake.model import expected_text
from tests.engine.helpers import (
    DEADLINE_S,
    PROMPT,
    GatedEngine,
    assert_all_back,
    make_engine,
    reasons,
    request,
    until,
)


async def test_leaving_generate_cancels() -> None:
    async with asyncio.timeout(DEADLINE_S), make_engine() as engine:
        async with aclosing(engine.generate(PROMPT, SamplingParams(max_tokens=3000))) as deltas:
            assert (await anext(deltas)).text.startswith(" 1")
        await assert_all_back(engine)
        assert engine.snapshot().cancelled == 1


async def test_cancelling_the_task_that_generates_cancels() -> None:
    started = asyncio.Event()

    async def consume(engine: AsyncEngine) -> None:
        async for _ in engine.generate(PROMPT, SamplingParams(max_tokens=3000)):
            started.set()

    async with asyncio.timeout(DEADLINE_S), make_engine() as engine:
        task = asyncio.create_task(consume(engine))
        await started.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await assert_all_back(engine)


async def cancel_and_settle(gated: GatedEngine, stream: TokenStream) -> None:
    """Cancel it, let the engine go on, and check that no other request was cancelled."""
    gated.engine.cancel(stream.request_id)
    gated.gate.open()
    await stream.wait()
    assert reasons(stream) == [FinishReason.CANCELLED] * stream.params.n


async def test_cancel_while_waiting() -> None:
    async with asyncio.timeout(DEADLINE_S), GatedEngine(max_num_seqs=1) as gated:
        first, second = gated.engine.submit(request(30)), gated.engine.submit(request(30))
        await cancel_and_settle(gated, second)
        await first.wait()
        assert first.text() == expected_text(30)
        assert not second.is_started
        await assert_all_back(gated.engine)


async def test_cancel_while_prefilling() -> None:
    settings: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16}
    async with asyncio.timeout(DEADLINE_S), GatedEngine(**settings) as gated:
        stream = gated.engine.submit(request(30, prompt=PROMPT * 20, n=2))
        async with aclosing(stream.read()) as reader:
            gated.gate.allow(2)
            while not any(
                isinstance(i, Notice) and i.kind is NoticeKind.PREFILL for i in await anext(reader)
            ):
                pass
            assert stream.num_output_tokens == 0
            await cancel_and_settle(gated, stream)
        await assert_all_back(gated.engine)


@pytest.mark.parametrize("depth", [0, 1])
async def test_cancel_while_decoding(depth: int) -> None:
    async with asyncio.timeout(DEADLINE_S), GatedEngine(depth=depth) as gated:
        stream, other = gated.engine.submit(request(1000, n=3)), gated.engine.submit(request(40))
        async with aclosing(stream.read()) as reader:
            gated.gate.allow(3)
            while stream.num_output_tokens < 6:
                await anext(reader)
            await cancel_and_settle(gated, stream)
        await other.wait()
        assert other.text() == expected_text(40)
        await assert_all_back(gated.engine)


async def test_pause_before_it_ran_and_resume() -> None:
    async with asyncio.timeout(DEADLINE_S), make_engine() as engine:
        stream = engine.submit(request(20))
        engine.pause(stream.request_id)
        await engine.submit(request(200)).wait()
        assert not stream.is_started
        assert engine.stats.waiting == 1
        engine.resume(stream.request_id)
        await stream.wait()
        assert stream.text() == expected_text(20)


async def test_cancel_while_paused() -> None:
    async with asyncio.timeout(DEADLINE_S), make_engine() as engine:
        stream = engine.submit(request(3000))
        await until(engine, running=1)
        engine.pause(stream.request_id)
        await until(engine, paused=1, running=0)
        engine.cancel(stream.request_id)
        await stream.wait()
        assert reasons(stream) == [FinishReason.CANCELLED]
        await assert_all_back(engine)


@pytest.mark.parametrize("swap_space", [0.0, 0.25])
async def test_cancel_while_preempted(swap_space: float) -> None:
    """Swapped with a host pool, dropped without one."""
    notices = []
    settings: dict[str, Any] = {"num_gpu_blocks_override": 16, "swap_space": swap_space}
    async with asyncio.timeout(DEADLINE_S), make_engine(tokens_per_s=2000, **settings) as engine:
        # Together they exceed the pool: the younger is preempted, and stays out for long.
        older = engine.submit(request(220))
        younger = engine.submit(request(220))
        async with aclosing(younger.read()) as reader:
            async for items in reader:
                notices = [
                    i for i in items if isinstance(i, Notice) and i.kind is NoticeKind.PREEMPTED
                ]
                if notices:
                    break
            engine.cancel(younger.request_id)
            await younger.wait()
        await older.wait()
        assert older.text() == expected_text(220)
        assert reasons(younger) == [FinishReason.CANCELLED]
        assert younger.text() == expected_text(len(younger.token_ids()))
        await assert_all_back(engine)
    assert [n.how for n in notices] == ["swap" if swap_space else "recompute"]


async def test_cancelling_an_unknown_request_is_harmless() -> None:
    async with asyncio.timeout(DEADLINE_S), make_engine() as engine:
        engine.cancel("absent")
        engine.pause("absent")
        engine.resume("absent")
        stream = engine.submit(request(3))
        await stream.wait()
        engine.cancel(stream.request_id)
        engine.pause(stream.request_id)
        assert reasons(stream) == [FinishReason.LENGTH]
