"""submit: every possible refusal comes before anything is queued."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from streamer.core.sampling import SamplingParams
from streamer.engine.engine import AsyncEngine
from streamer.engine.prompts import INLINE_TOKENS
from streamer.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
)
from streamer.fake.model import expected_text
from tests.engine.helpers import DEADLINE_S, PROMPT, GatedEngine, make_engine, request, until

VOCAB = 10**7


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ()}, "prompt"),
        ({"prompt": (1, VOCAB)}, "prompt"),
        ({"prompt": (-1,)}, "prompt"),
        ({"stop_token_ids": (VOCAB,)}, "stop_token_ids"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"n": 9}, "n"),
        ({"priority": 1 << 40}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"prompt": (1, 2.5)}, "prompt[1]"),
        ({"prompt": "text"}, "prompt"),
        ({"prompt": np.array(PROMPT)}, "prompt"),
        ({"request_id": 7}, "request_id"),
        ({"cache_salt": "\ud800"}, "cache_salt"),
        ({"tenant": None}, "tenant"),
        ({"share_with": b"r"}, "share_with"),
        ({"window": 0.5}, "window"),
        ({"detach_s": float("nan")}, "detach_s"),
        ({"deadline_s": "1"}, "deadline_s"),
        ({"deadline_s": 10**400}, "deadline_s"),  # no timer takes it
        ({"sends_position": 1}, "sends_position"),
        ({"max_tokens": None, "min_tokens": 10**6}, "min_tokens"),
    ],
)
async def test_an_invalid_request_is_refused_by_name_and_not_queued(
    fields: dict[str, Any], param: str
) -> None:
    async with asyncio.timeout(DEADLINE_S), make_engine(max_num_seqs=8) as engine:
        with pytest.raises(InvalidRequest) as refusal:
            engine.submit(request(**fields))
        assert refusal.value.param == param
        assert engine.snapshot().submitted == 0


async def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    settings = {"num_gpu_blocks_override": 8, "max_model_len": 100}
    async with asyncio.timeout(DEADLINE_S), make_engine(**settings) as engine:
        for fields, number in (
            ({"max_tokens": 99}, "100"),
            ({"prompt": PROMPT * 9}, "117"),
            ({"max_tokens": 60, "n": 4}, "n=4"),
        ):
            with pytest.raises(ContextLengthExceeded, match=number):
                engine.submit(request(**fields))


async def test_absent_max_tokens_are_clamped_to_the_context() -> None:
    async with asyncio.timeout(DEADLINE_S), make_engine(max_model_len=100) as engine:
        stream = engine.submit(request(None))
        assert stream.params.max_tokens == 100 - len(PROMPT)
        await stream.wait()
        assert stream.text() == expected_text(100 - len(PROMPT))


async def test_an_id_is_taken_while_it_is_live_and_while_it_is_retained() -> None:
    async with asyncio.timeout(DEADLINE_S), make_engine() as engine:
        stream = engine.submit(request(request_id="mine"))
        assert engine.get("mine") is stream
        with pytest.raises(InvalidRequest) as refusal:
            engine.submit(request(request_id="mine"))
        assert refusal.value.param == "request_id"
        await stream.wait()
        with pytest.raises(InvalidRequest):
            engine.submit(request(request_id="mine"))
        assert engine.get("mine") is stream


async def test_without_retention_a_finished_stream_is_gone() -> None:
    async with asyncio.timeout(DEADLINE_S), make_engine(retain_s=0.0) as engine:
        stream = engine.submit(request(request_id="mine"))
        await stream.wait()
        assert engine.get("mine") is None
        await engine.submit(request(request_id="mine")).wait()


async def test_tenants_of_generate_share_fairly() -> None:
    order: list[str] = []

    async def answer(engine: AsyncEngine, tenant: str) -> None:
        params = SamplingParams(max_tokens=20)
        async for _ in engine.generate(PROMPT, params, tenant=tenant):
            pass
        order.append(tenant)

    async with asyncio.timeout(DEADLINE_S), make_engine(max_num_seqs=1) as engine:
        await asyncio.gather(*(answer(engine, t) for t in ("many", "many", "many", "one")))
    assert order == ["many", "one", "many", "many"]


async def test_retention_keeps_the_newest_within_its_bytes() -> None:
    async with asyncio.timeout(DEADLINE_S), make_engine(retain_bytes=3 * 3000) as engine:
        for i in range(5):
            await engine.submit(request(request_id=f"r{i}")).wait()
        assert [i for i in range(5) if engine.get(f"r{i}") is not None] == [2, 3, 4]
        snapshot = engine.snapshot()
        assert snapshot.retained_streams == 3
        assert 0 < snapshot.retained_bytes <= 3 * 3000


async def test_one_keys_streams_do_not_evict_those_retained_for_another() -> None:
    async with asyncio.timeout(DEADLINE_S), make_engine(retain_bytes=5 * 3000) as engine:
        await engine.submit(request(request_id="theirs", tenant="few")).wait()
        for i in range(20):
            await engine.submit(request(request_id=f"r{i}", tenant="many")).wait()
        assert engine.get("theirs") is not None
        assert engine.get("r19") is not None
        assert engine.get("r0") is None
        assert engine.snapshot().retained_bytes <= 5 * 3000
        engine.forget("theirs")
        assert engine.get("theirs") is None
        for i in range(20, 30):
            await engine.submit(request(request_id=f"r{i}", tenant="many")).wait()
        assert engine.snapshot().retained_streams >= 4


async def test_the_queue_is_bounded_and_idle_rows_are_no_queue() -> None:
    async with asyncio.timeout(DEADLINE_S):
        async with GatedEngine(max_num_seqs=2, max_queue=3) as gated:
            streams = [gated.engine.submit(request(5)) for _ in range(5)]  # two run, three wait
            with pytest.raises(Overloaded) as refusal:
                gated.engine.submit(request(5))
            assert (refusal.value.status, refusal.value.code) == (503, "server_overloaded")
            assert refusal.value.retry_after_s >= 1.0
            gated.gate.open()
            await asyncio.gather(*(s.wait() for s in streams))
            await gated.engine.submit(request(5)).wait()  # there is room again


async def test_a_request_cancelled_while_it_waits_leaves_the_queue() -> None:
    async with asyncio.timeout(DEADLINE_S):
        async with GatedEngine(max_num_seqs=1, max_queue=1) as gated:
            gated.engine.submit(request(500))
            waiting = gated.engine.submit(request(5))
            with pytest.raises(Overloaded):
                gated.engine.submit(request(5))
            gated.engine.cancel(waiting.request_id)
            gated.gate.allow(2)
            await waiting.wait()
            gated.engine.submit(request(5))
            with pytest.raises(Overloaded):
                gated.engine.submit(request(5))


async def test_no_queue_at_all_still_serves_idle_rows() -> None:
    async with asyncio.timeout(DEADLINE_S):
        async with GatedEngine(max_num_seqs=1, max_queue=0) as gated:
            stream = gated.engine.submit(request(5))
            with pytest.raises(Overloaded):
                gated.engine.submit(request(5))
            gated.gate.open()
            await stream.wait()
            await gated.engine.submit(request(5)).wait()


async def test_paused_requests_leave_their_rows_to_others() -> None:
    async with asyncio.timeout(DEADLINE_S), make_engine(max_num_seqs=1, max_queue=0) as engine:
        held = engine.submit(request(3000))
        await until(engine, running=1)
        with pytest.raises(Overloaded):
            engine.submit(request(5))
        engine.pause(held.request_id)
        await until(engine, running=0)
        await engine.submit(request(5)).wait()
        engine.cancel(held.request_id)
        await held.wait()
        await engine.submit(request(5)).wait()


async def test_a_paused_request_that_lost_its_blocks_leaves_its_rows_to_others() -> None:
    settings: dict[str, Any] = {"max_num_seqs": 1, "max_queue": 0, "num_gpu_blocks_override": 8}
    async with asyncio.timeout(DEADLINE_S), make_engine(**settings) as engine:
        held = engine.submit(request(60, prompt=tuple(range(64)), detach_s=None))
        await until(engine, running=1)
        engine.pause(held.request_id)
        await until(engine, running=0, paused=1)
        await engine.submit(request(99)).wait()  # more than half of the blocks, too
        assert engine.stats.preemptions_swap + engine.stats.preemptions_recompute == 1
        await engine.submit(request(5)).wait()  # the engine is idle: it has room
        engine.resume(held.request_id)
        with pytest.raises(Overloaded):
            engine.submit(request(5))
        await held.wait()
        await engine.submit(request(5)).wait()


async def test_seeds_are_kept_drawn_and_repeatable() -> None:
    async with asyncio.timeout(DEADLINE_S):

        async def seeds(**settings: Any) -> list[int]:
            async with make_engine(**settings) as engine:
                return [engine.submit(request()).seed for _ in range(3)]

        async with make_engine() as engine:
            assert engine.submit(request(seed=0)).seed == 0
            assert engine.submit(request(seed=-7)).seed == -7
        drawn = await seeds() + await seeds()
        assert len(set(drawn)) == 6
        assert all(0 <= s < 1 << 53 for s in drawn)  # exact in JSON
        assert await seeds(seed=42) == await seeds(seed=42) != await seeds(seed=43)


async def test_default_params_come_from_the_model() -> None:
    from msgspec.structs import replace

    async with asyncio.timeout(DEADLINE_S), make_engine() as engine:
        defaults = {"temperature": 0.6, "top_k": 20.0, "not_ours": 1.0}
        engine._info = replace(engine.info, generation_defaults=defaults)
        params = engine.default_params(max_tokens=3)
    assert (params.temperature, params.top_k, params.max_tokens) == (0.6, 20, 3)
    assert isinstance(params.top_k, int)


async def test_a_long_prompts_hashes_are_made_in_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """encode hashes the prompt off the loop; submit hashes only what has no hash yet."""
    import threading

    from streamer.core.blocks import BlockHasher

    hashed: list[tuple[str, int]] = []
    original = BlockHasher.hash_blocks

    def recording(self: BlockHasher, tokens: Any, salt: bytes) -> tuple[bytes, ...]:
        hashed.append((threading.current_thread().name[:15], len(tokens)))
        return original(self, tokens, salt)

    monkeypatch.setattr(BlockHasher, "hash_blocks", recording)
    long = INLINE_TOKENS + 10
    settings = {"num_gpu_blocks_override": 2000}
    async with asyncio.timeout(DEADLINE_S), make_engine(**settings) as engine:
        ids = tuple(await engine.encode("x" * long, add_special_tokens=False))
        assert hashed == [("streamer-encode", long)]
        # What the pool hashed without a salt: a salted prompt must not be found by it.
        salted = engine.submit(request(2, prompt=ids, cache_salt="tenant"))
        await salted.wait()
        assert hashed[1:] == [("MainThread", long)]
        first = engine.submit(request(2, prompt=ids))
        await first.wait()
        assert len(hashed) == 2
        second = engine.submit(request(2, prompt=ids))
        await second.wait()
        hashed.clear()
        await engine.encode("x" * long, add_special_tokens=False, cache_salt="tenant")
        for salt in ("tenant", "other"):
            await engine.submit(request(2, prompt=ids, cache_salt=salt)).wait()
        # the first was hashed in the pool, under its own salt alone
        assert hashed == [("streamer-encode", long), ("MainThread", long)]
    assert first.cached_tokens == salted.cached_tokens == 0
    assert second.cached_tokens >= long - 32


async def test_a_request_takes_as_much_of_the_queue_as_it_has_choices() -> None:
    async with asyncio.timeout(DEADLINE_S):
        async with GatedEngine(max_num_seqs=4, max_queue=4) as gated:
            streams = [gated.engine.submit(request(5, n=4)) for _ in range(2)]
            for n in (4, 1):
                with pytest.raises(Overloaded, match=f"and {n} more"):
                    gated.engine.submit(request(5, n=n))
            gated.gate.open()
            await asyncio.gather(*(s.wait() for s in streams))
            await gated.engine.submit(request(5, n=4)).wait()


async def test_a_key_gets_at_most_as_much_of_the_queue_as_stays_free() -> None:
    async with asyncio.timeout(DEADLINE_S):
        async with GatedEngine(max_num_seqs=1, max_queue=8) as gated:
            engine = gated.engine

            def fill(tenant: str) -> int:
                count = 0
                while True:
                    try:
                        engine.submit(request(1, tenant=tenant))
                    except Overloaded:
                        return count
                    count += 1

            streams = [engine.submit(request(1))]
            await until(engine, running=0)
            assert [fill("many"), fill("more"), fill("most")] == [4, 2, 1]
            assert fill("") == 1  # without a key there is no share: the queue's bound alone
            gated.gate.open()
            await asyncio.gather(*(s.wait() for s in streams))


async def test_a_request_that_would_wait_too_long_is_refused_with_a_retry_time() -> None:
    async with asyncio.timeout(DEADLINE_S), make_engine(max_num_seqs=1, tokens_per_s=100) as engine:
        await engine.submit(request(20)).wait()  # 0.2 s
        running, *_ = [engine.submit(request(20)) for _ in range(10)]
        with pytest.raises(Overloaded, match="choices are waiting") as refusal:
            engine.submit(request(20, max_wait_s=0.5))
        assert refusal.value.retry_after_s >= 1.0
        with pytest.raises(Overloaded):  # it would begin after its own deadline
            engine.submit(request(20, deadline_s=0.5))
        other = engine.submit(request(20, max_wait_s=1.0, tenant="few"))  # after one of the ten
        await other.wait()
        assert engine.snapshot().waiting >= 5
        assert running.is_finished


async def test_a_request_ends_at_its_deadline_wherever_it_is() -> None:
    async with asyncio.timeout(DEADLINE_S), make_engine(max_num_seqs=1, tokens_per_s=100) as engine:
        running = engine.submit(request(3000, ignore_eos=True, deadline_s=2.0))
        await until(engine, running=1)
        waiting = engine.submit(request(5, deadline_s=0.2))
        for stream, says in ((waiting, "had not begun"), (running, "was not complete")):
            with pytest.raises(DeadlineExceeded, match=says):
                await stream.wait()
        await engine.submit(request(5, deadline_s=10.0)).wait()  # both have left the engine
        await until(engine, running=0, waiting=0)


async def test_at_eight_times_capacity_accepted_requests_are_answered() -> None:
    """Clients come at eight times the rate of 20/s. At most so many answers end between the
    acceptance of a request and its own as half a second allows, on a slow machine too; without a
    bound on the wait it would be hundreds. `streamer loadtest overload` measures the seconds."""
    answered = refused = 0
    passed: list[int] = []
    seconds = 3.0

    async def ask(engine: AsyncEngine) -> None:
        nonlocal answered, refused
        try:
            stream = engine.submit(request(20, max_wait_s=0.5, ignore_eos=True))
        except Overloaded:
            refused += 1
            return
        before = answered
        await stream.wait()
        passed.append(answered - before)
        answered += 1

    async with asyncio.timeout(DEADLINE_S), make_engine(max_num_seqs=4, tokens_per_s=100) as engine:
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with asyncio.TaskGroup() as clients:
            for i in range(int(seconds * 160)):
                await asyncio.sleep(began + i / 160 - loop.time())
                clients.create_task(ask(engine))
    assert max(passed) <= 40  # 21 on an idle machine
    assert answered >= 0.5 * 20 * seconds
    assert refused == seconds * 160 - answered


async def test_requests_paused_before_they_ran_cause_no_refusals() -> None:
    """Paused in the queue, or between its first step and the report of it."""
    async with asyncio.timeout(DEADLINE_S), GatedEngine(max_num_seqs=1) as gated:
        engine, gate = gated.engine, gated.gate
        first = engine.submit(request(max_tokens=4))
        second = engine.submit(request(max_tokens=4))
        await asyncio.to_thread(gate.waits.acquire)
        engine.pause(second.request_id)
        engine.pause(first.request_id)  # its first step is running
        gate.open()
        third = engine.submit(request(max_tokens=4))
        await third.wait()
        assert engine.snapshot().waiting == 1
        assert engine.snapshot().live_streams == 2
        for _ in range(20):
            await engine.submit(request(max_tokens=1, max_wait_s=0.0)).wait()
        for stream in (first, second):
            engine.resume(stream.request_id)
            await stream.wait()


@pytest.mark.parametrize("n", [1, 2])
async def test_an_id_is_taken_until_the_scheduler_has_ended_its_expired_request(n: int) -> None:
    """A late finish would end another request of that id, whose Add then fails the engine."""
    settings = {"max_num_seqs": 2, "retain_s": 0.0}
    async with asyncio.timeout(DEADLINE_S), GatedEngine(**settings) as gated:
        engine, gate = gated.engine, gated.gate
        first = engine.submit(request(n=n, request_id="mine", deadline_s=0.01))
        await asyncio.to_thread(gate.waits.acquire)  # a step of it is running, its finish far off
        with pytest.raises(DeadlineExceeded):
            await first.wait()
        assert engine.get("mine") is None
        with pytest.raises(InvalidRequest, match="exists"):
            engine.submit(request(request_id="mine"))
        gate.open()
        await engine.submit(request()).wait()  # steps after it
        again = engine.submit(request(n=n, request_id="mine"))
        await again.wait()
        assert again.text() == expected_text(8)


async def test_numbers_of_numpy_become_pythons_own_in_a_prompt() -> None:
    async with asyncio.timeout(DEADLINE_S), make_engine() as engine:
        for kind in (np.uint8, np.int64):
            given: Any = [kind(token) for token in PROMPT]
            stream = engine.submit(request(prompt=given))
            assert stream.prompt == PROMPT
            assert {type(token) for token in stream.prompt} == {int}
            await stream.wait()
            assert stream.text() == expected_text(8)


async def test_long_answers_of_low_priority_refuse_no_urgent_request() -> None:
    """It would begin at once in one of their rows, so that it has nothing to wait for."""
    async with asyncio.timeout(DEADLINE_S), GatedEngine(max_num_seqs=2) as gated:
        engine, gate = gated.engine, gated.gate
        engine._streams._load._mean_s = 600.0  # mean of earlier answers
        low = [engine.submit(request(max_tokens=40, priority=5)) for _ in range(4)]
        for _ in range(8):
            gate.allow()
            await asyncio.to_thread(gate.waits.acquire)
        assert engine.snapshot().waiting == 2
        urgent = engine.submit(request(priority=0, max_wait_s=4.0))
        gate.open()
        for stream in (urgent, *low):
            await stream.wait()
            assert stream.finishes[0] is not None
