"""The GPU thread through the engine: permits, wake-ups, idleness, and death in every place."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from streamer.config import Config
from streamer.core.plan import Plan
from streamer.engine.core import InFlight
from streamer.engine.engine import AsyncEngine, TokenStream
from streamer.errors import ConfigError, EngineDead, ModelNotSupported, Overloaded
from streamer.fake.model import FakeRunner, fake_tokenizer
from tests.engine.helpers import (
    DEADLINE_S,
    GatedEngine,
    Wrapped,
    make_engine,
    request,
)

DIED = "the engine died of an internal error"  # of what is the log's, and a program's own, to know


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "streamer-gpu"]


# ---------------------------------------------------------------- permits and wake-ups


@pytest.mark.parametrize("depth", [0, 1])
async def test_exactly_one_wake_up_a_step(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    calls: list[str] = []
    numbers: list[int] = []
    original = loop.call_soon_threadsafe

    def counting(callback: Any, *args: Any, **kwargs: Any) -> asyncio.Handle:
        if threading.current_thread().name == "streamer-gpu":
            calls.append(callback.__name__)
            if callback.__name__ == "on_output":
                numbers.append(args[0].number)
        return original(callback, *args, **kwargs)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counting)
    async with asyncio.timeout(DEADLINE_S), make_engine(depth=depth) as engine:
        streams = [engine.submit(request(50, n=2)) for _ in range(20)]
        await asyncio.gather(*(s.wait() for s in streams))
    assert numbers == list(range(1, len(numbers) + 1))  # each step reported once
    assert len(numbers) >= 50
    assert calls == ["on_ready", *["on_output"] * len(numbers), "on_end"]  # and no other callback


async def test_a_blocked_loop_is_at_most_two_steps_behind() -> None:
    """Permits plus unread StepOutputs never exceed two."""
    async with asyncio.timeout(DEADLINE_S), GatedEngine() as gated:
        gated.engine.submit(request(1000))
        gated.gate.allow(10)
        for _ in range(2):
            gated.gate.waits.acquire(timeout=DEADLINE_S)  # blocks the loop, as a long callback does
        # The third step would wait at its gate at once, if it were begun.
        assert not gated.gate.waits.acquire(timeout=0.2)
        assert len(gated.gate.plans) == 2
        # Now the loop comes round, and it goes on.
        assert await asyncio.to_thread(gated.gate.waits.acquire, timeout=DEADLINE_S)


async def test_an_idle_engine_uses_no_cpu() -> None:
    async with asyncio.timeout(DEADLINE_S), make_engine() as engine:
        await engine.submit(request(10)).wait()
        passed = asyncio.Event()
        asyncio.get_running_loop().call_later(1.0, passed.set)
        (thread,) = threads()
        assert thread.ident is not None
        clock = time.pthread_getcpuclockid(thread.ident)
        before, thread_before = time.process_time(), time.clock_gettime(clock)
        await passed.wait()
        used_s, thread_s = time.process_time() - before, time.clock_gettime(clock) - thread_before
    assert thread_s < 0.001  # the rest of the last step, and nothing else
    assert used_s < 0.02


async def test_no_thread_is_left_after_closing() -> None:
    async with asyncio.timeout(DEADLINE_S):
        async with make_engine():
            assert len(threads()) == 1
        assert threads() == []


async def test_loading_happens_on_the_gpu_thread() -> None:
    names: list[str] = []

    def wrap(runner: FakeRunner) -> Wrapped:
        names.append(threading.current_thread().name)
        return Wrapped(runner)

    async with asyncio.timeout(DEADLINE_S), make_engine(wrap):
        pass
    assert names == ["streamer-gpu"]


# ---------------------------------------------------------------- death


class FailsAtPlan3(Wrapped):
    """Raises at plan 3, and can't be reset then."""

    def launch(self, plan: Plan) -> InFlight:
        if plan.number == 3:
            raise MemoryError("no memory left on the device")
        return super().launch(plan)

    def reset(self, launched: int) -> None:
        raise RuntimeError("device lost")


class FailsAtOnce(FailsAtPlan3):
    """Raises at once."""

    def launch(self, plan: Plan) -> InFlight:
        raise RuntimeError("device lost")


async def test_death_in_a_step_reaches_present_queued_and_future_requests() -> None:
    runners: list[FailsAtPlan3] = []

    def wrap(inner: FakeRunner) -> FailsAtPlan3:
        runners.append(FailsAtPlan3(inner))
        return runners[0]

    engine = make_engine(wrap, max_num_seqs=2)
    async with asyncio.timeout(DEADLINE_S), engine:
        streams = [engine.submit(request(100)) for _ in range(5)]  # two run, three wait
        late = engine.submit(request(100, detach_s=None))  # it has no reader yet
        results = await asyncio.gather(*(s.wait() for s in streams), return_exceptions=True)
        assert [type(r) for r in results] == [EngineDead] * 5
        assert {str(r) for r in results} == {DIED}
        assert all(isinstance(r.__cause__, MemoryError) for r in results if r is not None)
        with pytest.raises(EngineDead, match=DIED):
            await late.wait()
        with pytest.raises(EngineDead, match=DIED):
            engine.submit(request())
        with pytest.raises(EngineDead, match=DIED):
            await anext(engine.generate("hello"))
        assert engine.is_dead
        assert not engine.is_ready
        assert isinstance(engine.death, EngineDead)
        assert isinstance(engine.death.__cause__, MemoryError)
        assert engine.snapshot().state == "dead"
        assert engine.snapshot().live_streams == 0
        assert threads() == []
        assert runners[0].is_closed


async def test_a_death_is_logged_once_with_its_whole_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with asyncio.timeout(DEADLINE_S), make_engine(FailsAtPlan3) as engine:
        streams = [engine.submit(request(100)) for _ in range(3)]
        await asyncio.gather(*(s.wait() for s in streams), return_exceptions=True)
    (line,) = [r for r in caplog.records if r.name.startswith("streamer")]
    assert (line.levelname, line.getMessage()) == ("CRITICAL", "the engine died")
    assert "no memory left on the device" in caplog.text
    assert "in launch" in caplog.text  # where it happened


async def test_output_before_the_death_is_kept() -> None:
    async with asyncio.timeout(DEADLINE_S), make_engine(FailsAtPlan3) as engine:
        stream = engine.submit(request(100))
        with pytest.raises(EngineDead):
            await stream.wait()
        assert stream.text() == " 1 2"
        assert stream.finishes == [None]


async def test_a_request_sent_as_the_engine_dies_gets_the_error() -> None:
    """Submitted after the thread's end, before the loop was informed of it."""
    async with asyncio.timeout(DEADLINE_S), make_engine(FailsAtOnce) as engine:
        first = engine.submit(request(100))
        (thread,) = threads()
        thread.join(DEADLINE_S)  # the loop is blocked: no callback runs
        assert not thread.is_alive()
        second = engine.submit(request(100))
        for stream in (first, second):
            with pytest.raises(EngineDead, match=DIED):
                await stream.wait()


async def test_a_fault_on_the_loop_is_death_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that cannot be delivered ends the engine; else its reader would wait for ever."""
    async with asyncio.timeout(DEADLINE_S), make_engine() as engine:

        def push(self: TokenStream, *args: Any) -> None:
            raise ZeroDivisionError("a bug of ours")

        monkeypatch.setattr(TokenStream, "push", push)
        stream = engine.submit(request(1_000))
        with pytest.raises(EngineDead, match=DIED):
            await stream.wait()
        assert engine.is_dead
        with pytest.raises(EngineDead, match=DIED):
            engine.submit(request())
        await engine.aclose()
        assert threads() == []


async def test_death_while_loading_reaches_every_waiting_caller() -> None:
    def wrap(inner: FakeRunner) -> Wrapped:
        raise RuntimeError("a broken driver")

    engine = make_engine(wrap)
    async with asyncio.timeout(DEADLINE_S):
        results = await asyncio.gather(engine.start(), engine.start(), return_exceptions=True)
        assert [type(r) for r in results] == [EngineDead, EngineDead]
        assert str(results[0]) == DIED
        assert "a broken driver" in str(engine._load_error)
        assert engine.is_dead
        with pytest.raises(EngineDead, match=DIED):
            engine.submit(request())
        with pytest.raises(EngineDead, match=DIED):
            _ = engine.info
        await engine.aclose()


async def test_an_error_of_loading_is_raised_unchanged() -> None:
    def load(go_on: Any) -> Any:
        raise ModelNotSupported("no mamba here", param="model")

    engine = AsyncEngine(load, fake_tokenizer, Config(model="fake"))
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(ModelNotSupported, match="no mamba here"):
            async with engine:
                raise AssertionError("it must not start")
    assert engine.is_dead


async def test_each_caller_waiting_for_a_failed_load_gets_its_own_error() -> None:
    def load(go_on: Any) -> Any:
        raise ModelNotSupported("no mamba here", param="model")

    engine = AsyncEngine(load, fake_tokenizer, Config(model="fake"))
    async with asyncio.timeout(DEADLINE_S):
        one, other = await asyncio.gather(engine.start(), engine.start(), return_exceptions=True)
    assert isinstance(one, ModelNotSupported)
    assert (str(one), one.param, one is other) == ("no mamba here", "model", False)
    assert one.__cause__ is engine._load_error  # where it happened


async def test_a_tokenizer_that_can_not_be_loaded_is_a_refusal_too() -> None:
    def load_tokenizer() -> Any:
        raise ConfigError("no tokenizer", param="model")

    engine = AsyncEngine(lambda _: None, load_tokenizer, Config(model="fake"))  # type: ignore[arg-type, return-value]
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(ConfigError, match="no tokenizer"):
            await engine.start()


async def test_requests_are_refused_while_it_loads() -> None:
    go = threading.Event()

    def wrap(inner: FakeRunner) -> Wrapped:
        go.wait(DEADLINE_S)
        return Wrapped(inner)

    engine = make_engine(wrap)
    async with asyncio.timeout(DEADLINE_S):
        starting = asyncio.create_task(engine.start())
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as refusal:
            engine.submit(request())
        assert refusal.value.code == "model_loading"
        assert refusal.value.retry_after_s > 0
        assert not engine.is_ready
        go.set()
        await starting
        assert engine.is_ready
        await engine.aclose()


# ---------------------------------------------------------------- closing in every state


async def test_closing_before_the_start() -> None:
    engine = make_engine()
    async with asyncio.timeout(DEADLINE_S):
        await engine.aclose()
        await engine.aclose()
        with pytest.raises(EngineDead, match="closed"):
            await engine.start()
        with pytest.raises(EngineDead, match="closed"):
            engine.submit(request())
    assert not engine.is_dead


async def test_closing_while_it_loads_waits_for_the_load() -> None:
    go = threading.Event()
    runners: list[Wrapped] = []

    def wrap(inner: FakeRunner) -> Wrapped:
        go.wait(DEADLINE_S)
        runners.append(Wrapped(inner))
        return runners[0]

    engine = make_engine(wrap)
    async with asyncio.timeout(DEADLINE_S):
        starting = asyncio.create_task(engine.start())
        await asyncio.sleep(0)
        closing = asyncio.create_task(engine.aclose())
        await asyncio.sleep(0)
        go.set()
        await closing
        await asyncio.gather(starting, return_exceptions=True)
    assert runners[0].is_closed
    assert threads() == []


async def test_closing_twice_and_at_once() -> None:
    engine = make_engine()
    async with asyncio.timeout(DEADLINE_S):
        await engine.start()
        await asyncio.gather(engine.aclose(), engine.aclose())
        await engine.aclose()
    assert not engine.is_dead
    assert engine.snapshot().state == "closed"


async def test_closing_after_death() -> None:
    engine = make_engine(FailsAtPlan3)
    async with asyncio.timeout(DEADLINE_S):
        await engine.start()
        with pytest.raises(EngineDead):
            await engine.submit(request(100)).wait()
        await engine.aclose()
    assert engine.is_dead


@pytest.mark.parametrize("depth", [0, 1])
async def test_closing_under_load_ends_every_stream(depth: int) -> None:
    engine = make_engine(depth=depth, max_num_seqs=16)
    async with asyncio.timeout(DEADLINE_S):
        await engine.start()
        streams = [engine.submit(request(100_000 // 64, n=2)) for _ in range(40)]
        readers = [asyncio.create_task(s.wait()) for s in streams]
        async with aclosing(streams[0].read()) as reader:
            await anext(reader)  # it is running
        await engine.aclose()
        results = await asyncio.gather(*readers, return_exceptions=True)
    assert all(isinstance(r, EngineDead) and r.code == "engine_closed" for r in results)
    assert not engine.is_dead
    with pytest.raises(EngineDead, match="closed"):
        engine.submit(request())


async def test_a_closed_engine_is_freed_and_so_are_the_programs_own_cycles() -> None:
    """A running engine does not keep the program's own objects from the garbage collector."""

    class Cycle:
        me: Any

    frozen = gc.get_freeze_count()
    mine = Cycle()
    mine.me = mine
    async with asyncio.timeout(DEADLINE_S):
        async with make_engine() as engine:
            await engine.submit(request(5)).wait()
            assert gc.get_freeze_count() == frozen
        seen = [weakref.ref(engine), weakref.ref(engine._streams), weakref.ref(mine)]
        del engine, mine
        await asyncio.sleep(0)
        gc.collect()
        assert [ref() for ref in seen] == [None] * 3


ABANDON = """
import asyncio
from tests.engine.helpers import make_engine, request

async def main():
    engine = make_engine()
    await engine.start()
    await anext(engine.submit(request(1_000)).read())
    return engine

engine = asyncio.run(main())
"""


def test_a_program_that_never_closes_its_engine_can_end() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ABANDON],
        cwd=Path(__file__).parents[2],
        timeout=DEADLINE_S,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
