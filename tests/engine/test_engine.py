"""AsyncEngine over the fake model: answers, flow control, failing rows, drain."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from streamer.core.plan import FinishReason, Plan, StepResult
from streamer.core.sampling import SamplingParams
from streamer.engine.core import InFlight
from streamer.engine.engine import AsyncEngine, TokenStream
from streamer.engine.stream import Delta
from streamer.errors import EngineDead, Overloaded, RequestFailed
from streamer.fake.model import FakeRunner, expected_text, expected_tokens
from tests.engine.helpers import (
    DEADLINE_S,
    PROMPT,
    Wrapped,
    assert_all_back,
    make_engine,
    reasons,
    request,
    until,
)

# ---------------------------------------------------------------- answers


@pytest.mark.parametrize("depth", [0, 1])
async def test_200_streams_at_once_each_prove_themselves(depth: int) -> None:
    async def answer(engine: AsyncEngine, i: int) -> None:
        prompt, count = PROMPT * (1 + i % 5) + (i % 256,), 20 + i % 60
        text, ids = "", []
        async for delta in engine.generate(prompt, SamplingParams(max_tokens=count)):
            assert delta.start == len(ids)
            ids += delta.token_ids
            text += delta.text
        assert ids == expected_tokens(0, count)
        assert text == expected_text(count)

    async with asyncio.timeout(DEADLINE_S):
        settings: dict[str, Any] = {"max_num_seqs": 64, "num_gpu_blocks_override": 300}
        async with make_engine(depth=depth, **settings) as engine:
            await asyncio.gather(*(answer(engine, i) for i in range(200)))
            await assert_all_back(engine)
            snapshot = engine.snapshot()
    assert (snapshot.submitted, snapshot.finished, snapshot.live_streams) == (200, 200, 0)
    assert snapshot.step.generated_tokens >= sum(20 + i % 60 for i in range(200))


@pytest.mark.parametrize("depth", [0, 1])
async def test_a_small_pool_preempts_and_nothing_is_lost(depth: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        settings: dict[str, Any] = {"max_num_seqs": 16, "num_gpu_blocks_override": 24}
        async with make_engine(depth=depth, **settings) as engine:
            streams = [engine.submit(request(150)) for _ in range(16)]
            await asyncio.gather(*(s.wait() for s in streams))
            stats = engine.stats
            assert stats.preemptions_swap + stats.preemptions_recompute > 0
            assert all(s.text() == expected_text(150) for s in streams)
            await assert_all_back(engine)


async def test_n_choices_come_from_one_prompt() -> None:
    async with asyncio.timeout(DEADLINE_S), make_engine() as engine:
        stream = engine.submit(request(10, n=5))
        await stream.wait()
        assert [stream.text(c) for c in range(5)] == [expected_text(10)] * 5
        assert stream.num_output_tokens == 50
        # four of five choices copied the prompt's last block before they wrote into it
        assert stream.copied_tokens == 4 * (len(PROMPT) % engine.config.block_size) > 0
        assert reasons(stream) == [FinishReason.LENGTH] * 5


async def test_text_prompts_and_chats_are_encoded_off_the_loop() -> None:
    async with asyncio.timeout(DEADLINE_S), make_engine() as engine:
        text = "".join([d.text async for d in engine.generate("count to 7")])
        assert text == expected_text(7)
        ids = await engine.encode_chat([{"role": "user", "content": "count to 3"}])
        text = "".join([d.text async for d in engine.generate(ids)])
        assert text == expected_text(3)


async def test_an_end_token_ends_unless_it_is_ignored() -> None:
    async with asyncio.timeout(DEADLINE_S), make_engine() as engine:
        prompt = tuple(b"count to 3")
        stream = engine.submit(request(20, prompt=prompt))
        await stream.wait()
        assert (stream.text(), reasons(stream)) == (expected_text(3), [FinishReason.STOP])
        assert len(stream.token_ids()) == 4  # the end token counts
        stream = engine.submit(request(20, prompt=prompt, ignore_eos=True))
        await stream.wait()
        assert stream.text() == expected_text(20)


async def test_stop_strings_and_stop_ids() -> None:
    async with asyncio.timeout(DEADLINE_S), make_engine() as engine:
        stream = engine.submit(request(50, stop=("1 12", " 9 10")))
        await stream.wait()
        assert stream.text() == " 1 2 3 4 5 6 7 8"
        assert stream.finishes[0] is not None
        assert stream.finishes[0].stop == " 9 10"
        stop_id = expected_tokens(4, 1)[0]
        stream = engine.submit(request(50, stop_token_ids=(stop_id,)))
        await stream.wait()
        assert (stream.text(), stream.token_ids()[-1]) == (" 1 2 3 4", stop_id)


async def test_special_tokens_are_in_the_text_on_request() -> None:
    async with asyncio.timeout(DEADLINE_S), make_engine() as engine:
        fields: dict[str, Any] = {"prompt": tuple(b"count to 2"), "skip_special_tokens": False}
        stream = engine.submit(request(5, **fields))
        await stream.wait()
        assert stream.text() == " 1 2"  # the token that ended it is not in the text


async def test_logprobs_reach_the_reader() -> None:
    async with asyncio.timeout(DEADLINE_S), make_engine() as engine:
        params = SamplingParams(max_tokens=6, logprobs=2)
        values = [
            value
            async for delta in engine.generate(PROMPT, params)
            for value in delta.logprobs or ()
        ]
    assert [v.token_id for v in values] == expected_tokens(0, 6)
    assert all(len(v.top) == 2 for v in values)


async def test_the_prefix_of_an_earlier_prompt_is_cached_unless_salted() -> None:
    prompt = PROMPT * 10
    async with asyncio.timeout(DEADLINE_S), make_engine() as engine:

        async def cached(salt: str) -> int:
            stream = engine.submit(request(4, prompt=prompt, cache_salt=salt))
            await stream.wait()
            return stream.cached_tokens

        assert await cached("") == 0
        assert await cached("") == 128  # eight full blocks of 130 tokens
        assert await cached("other") == 0


# ---------------------------------------------------------------- flow control


async def test_a_slow_reader_pauses_only_its_own_sequence() -> None:
    async with asyncio.timeout(DEADLINE_S), make_engine() as engine:
        slow = engine.submit(request(2000, window=64))
        async with aclosing(slow.read()) as reader:
            await anext(reader)  # and then it does not ask again
            other = engine.submit(request(600, window=64))
            await other.wait()
            assert other.text() == expected_text(600)
            await until(engine, paused=1, running=0)
            assert slow.is_paused
            assert slow.num_output_tokens < 64 + 16  # the window, and the steps that were running
            async for _ in reader:
                pass
        assert slow.text() == expected_text(2000)
        await assert_all_back(engine)


async def test_two_readers_of_one_stream_read_the_same() -> None:
    async def read(stream: TokenStream) -> str:
        return "".join(
            [i.text async for items in stream.read() for i in items if isinstance(i, Delta)]
        )

    async with asyncio.timeout(DEADLINE_S), make_engine() as engine:
        stream = engine.submit(request(300))
        assert await asyncio.gather(read(stream), read(stream)) == [expected_text(300)] * 2
        assert await read(stream) == expected_text(300)  # and one that comes late


# ---------------------------------------------------------------- failing, draining


class OneBadRow(Wrapped):
    """The row of the first request is not finite in plan 3."""

    def launch(self, plan: Plan) -> InFlight:
        in_flight = super().launch(plan)
        if plan.number != 3:
            return in_flight

        class Bad:
            def collect(self) -> StepResult:
                result = in_flight.collect()
                row, *rows = result.rows
                return StepResult(
                    result.number, tuple(rows), result.tokens[1:], {}, {row: "row is not finite"}
                )

        return Bad()


async def test_a_failed_request_is_not_a_dead_engine() -> None:
    async def text(engine: AsyncEngine) -> str:
        params = SamplingParams(max_tokens=20)
        return "".join([d.text async for d in engine.generate(PROMPT, params)])

    async with asyncio.timeout(DEADLINE_S), make_engine(OneBadRow) as engine:
        results = await asyncio.gather(text(engine), text(engine), return_exceptions=True)
        assert isinstance(results[0], RequestFailed)
        assert "row is not finite" in str(results[0])
        assert results[1] == expected_text(20)
        assert await text(engine) == expected_text(20)
        await assert_all_back(engine)
        assert engine.snapshot().failed == 1


async def test_drain_lets_running_requests_finish_and_takes_no_new_ones() -> None:
    async with asyncio.timeout(DEADLINE_S), make_engine() as engine:
        streams = [engine.submit(request(200, detach_s=None)) for _ in range(20)]
        draining = asyncio.create_task(engine.drain(DEADLINE_S))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as refusal:
            engine.submit(request())
        assert refusal.value.code == "draining"
        assert engine.snapshot().state == "draining"
        await draining
        assert all(s.text() == expected_text(200) for s in streams)


async def test_drain_cancels_what_is_left_at_the_deadline() -> None:
    async with asyncio.timeout(DEADLINE_S), make_engine(tokens_per_s=1000) as engine:
        streams = [engine.submit(request(4000, detach_s=None)) for _ in range(3)]
        await engine.drain(0.05)
        assert all(reasons(s) == [FinishReason.CANCELLED] for s in streams)
        await assert_all_back(engine)


async def test_drain_of_an_idle_or_dead_engine_returns() -> None:
    def wrap(inner: FakeRunner) -> Wrapped:
        raise RuntimeError("no")

    async with asyncio.timeout(DEADLINE_S):
        async with make_engine() as engine:
            await engine.drain(5.0)
        dead = make_engine(wrap)
        with pytest.raises(EngineDead):
            await dead.start()
        await dead.drain(5.0)
        await dead.aclose()


async def test_a_load_that_ends_after_it_was_given_up_opens_nothing() -> None:
    """The report of it may be on its way to the loop when the engine is closed."""
    async with asyncio.timeout(DEADLINE_S):
        engine = make_engine()
        await engine.start()
        await engine.aclose()
        engine.on_ready()
        assert not engine.is_ready
        with pytest.raises(EngineDead):
            engine.submit(request())
