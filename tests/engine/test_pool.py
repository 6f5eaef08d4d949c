"""Pool: hanging work is abandoned, its thread freed where that is possible; nothing else waits."""

from __future__ import annotations

import asyncio
import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from streamer.engine.pool import Pool
from streamer.errors import EngineDead, PoolHung, RequestFailed
from tests.engine.helpers import DEADLINE_S, fake_tokenizer, make_engine, request

LIMIT_S = 0.5


class Hanging:
    """Work in a foreign library: only the test can end it."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.num_begun = 0

    def __call__(self) -> str:
        self.num_begun += 1
        self.let_go.wait(DEADLINE_S)  # one call: no other thread can interrupt it
        return "late"


def spin() -> None:
    """Endless Python code, like a template's endless loop."""
    while True:
        pass


def pool_of(num_threads: int, limit_s: float = LIMIT_S) -> tuple[Pool, list[PoolHung]]:
    hung: list[PoolHung] = []
    return Pool(num_threads, limit_s, hung.append), hung


async def until(is_so: Callable[[], object]) -> None:
    """Threads have no asyncio event to wait for."""
    while not is_so():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


async def test_endless_loops_are_ended_and_the_threads_go_on() -> None:
    pool, hung = pool_of(2)
    async with asyncio.timeout(DEADLINE_S):
        spinning = [asyncio.create_task(pool.run(spin)) for _ in range(4)]
        after = [asyncio.create_task(pool.run(lambda: threading.current_thread()))]
        for task in spinning:
            with pytest.raises(RequestFailed, match=f"longer than {LIMIT_S} s") as raised:
                await task
            assert raised.value.code == "prompt_timeout"
        assert (await after[0]).name.startswith("streamer-encode")
        await until(lambda: pool._check is None)  # and then no timer runs
    assert hung == []
    pool.close(EngineDead("closed"))


async def test_an_interruption_that_a_finalizer_swallows_is_sent_again() -> None:
    """Python ignores errors in `__del__` and in callbacks of the garbage collector."""

    class Finalizer:
        def __del__(self) -> None:
            spin()

    def work() -> None:
        Finalizer()  # gone at once
        spin()

    pool, hung = pool_of(1)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(RequestFailed, match="longer than"):
            await pool.run(work)
        assert await pool.run(lambda: 7) == 7
    assert hung == []
    pool.close(EngineDead("closed"))


async def test_an_interruption_as_the_work_ends_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`on_free` is called nevertheless: what counts threads by it would wait for ever."""
    work, freed = Hanging(), asyncio.Event()
    interrupt = ctypes.pythonapi.PyThreadState_SetAsyncExc

    def interrupt_late(*args: object) -> None:
        work.let_go.set()
        time.sleep(LIMIT_S)  # the thread waits for the lock, its work done
        interrupt(*args)

    monkeypatch.setattr(ctypes.pythonapi, "PyThreadState_SetAsyncExc", interrupt_late)
    pool, hung = pool_of(1)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(RequestFailed, match="longer than"):
            await pool.run(work, freed.set)
        await freed.wait()
        assert await pool.run(lambda: 8) == 8
    assert hung == []
    pool.close(EngineDead("closed"))


async def test_a_call_waiting_for_a_thread_is_not_given_up() -> None:
    pool, _ = pool_of(1, 1.0)
    async with asyncio.timeout(DEADLINE_S):
        slow = [pool.run(lambda: time.sleep(0.3)) for _ in range(5)]
        await asyncio.gather(*slow)
    pool.close(EngineDead("closed"))


async def test_on_hung_is_called_when_no_thread_can_be_freed() -> None:
    pool, hung = pool_of(2)
    work = Hanging()
    async with asyncio.timeout(DEADLINE_S):
        tasks = [asyncio.create_task(pool.run(work)) for _ in range(2)]
        queued = asyncio.create_task(pool.run(lambda: 1))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(r) for r in results] == [RequestFailed] * 2
        await until(lambda: hung)
        pool.close(EngineDead("it died"))
        with pytest.raises(EngineDead, match="it died"):
            await queued
        with pytest.raises(EngineDead, match="it died"):
            await pool.run(lambda: 1)
    assert (len(hung), pool.is_hung, work.num_begun) == (1, True, 2)
    work.let_go.set()


async def test_one_thread_that_hangs_is_not_the_end() -> None:
    pool, hung = pool_of(2)
    work = Hanging()
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(RequestFailed):
            await pool.run(work)
        assert await pool.run(lambda: 3) == 3
        work.let_go.set()
        await until(lambda: pool._check is None)
        assert await asyncio.gather(*(pool.run(lambda: 4) for _ in range(8))) == [4] * 8
    assert hung == []
    pool.close(EngineDead("closed"))


async def test_cancelling_the_caller_does_not_free_a_hung_thread() -> None:
    """A caller that is cancelled leaves its work watched."""
    pool, _ = pool_of(1)
    async with asyncio.timeout(DEADLINE_S):
        task = asyncio.create_task(pool.run(spin))
        await until(lambda: pool._workers and pool._workers[0].call)
        task.cancel()
        assert await pool.run(lambda: 5) == 5
    pool.close(EngineDead("closed"))


class Panic(BaseException):
    """A broken Rust tokenizer raises this."""


@pytest.mark.parametrize("error", [Panic("index out of bounds"), StopIteration("x")])
async def test_a_panic_fails_its_request_alone(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise error

    pool, _ = pool_of(1)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(RequestFailed, match="the text could not be prepared"):
            await pool.run(broken)
        assert await pool.run(lambda: 6) == 6
    assert "in broken" in caplog.text
    pool.close(EngineDead("closed"))


# ---------------------------------------------------------------- through the engine


class Stuck:
    """A tokenizer whose encoding hangs."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._inner, self._work = fake_tokenizer(), work

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int = 0) -> list[int]:
        return self._work() if text == "hang" else list(text.encode())


async def test_an_engine_whose_every_thread_for_prompts_hangs_is_dead() -> None:
    work = Hanging()
    engine = make_engine(tokens_per_s=100, watchdog_s=1.0)  # its answer takes seconds
    engine._load_tokenizer = lambda: Stuck(work)  # type: ignore[assignment, return-value]
    async with asyncio.timeout(DEADLINE_S), engine:
        stream = engine.submit(request(max_tokens=None))
        results = await asyncio.gather(
            *(engine.encode("hang") for _ in range(2)), return_exceptions=True
        )
        assert [type(r) for r in results] == [RequestFailed] * 2
        with pytest.raises(EngineDead):
            await stream.wait()
        assert engine.death is not None
        assert isinstance(engine.death.__cause__, PoolHung)
        with pytest.raises(EngineDead):
            await engine.encode("anything")
    assert engine.is_hung
    work.let_go.set()


ABANDON = """
import asyncio
from streamer.engine.pool import Pool
from streamer.errors import EngineDead

def spin():
    while True: pass

async def main():
    pool = Pool(2, 0.0, print)
    with_ = [asyncio.create_task(pool.run(spin)) for _ in range(2)]
    while not all(w.call for w in pool._workers) or not pool._workers: await asyncio.sleep(0)

asyncio.run(main())
"""


def test_work_that_hangs_does_not_keep_a_program_from_ending() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ABANDON],
        cwd=Path(__file__).parents[2],
        timeout=DEADLINE_S,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


class SlowQueue(SimpleQueue[Any]):
    """The queue of a thread that is interrupted between taking a job and recording it."""

    def __init__(self) -> None:
        self.is_checked = threading.Event()

    def get(self, *args: Any, **kwargs: Any) -> Any:
        call = super().get(*args, **kwargs)
        self.is_checked.wait(DEADLINE_S)
        return call


async def test_a_call_that_was_just_taken_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, hung = pool_of(1)
    calls = SlowQueue()
    monkeypatch.setattr(pool, "_calls", calls)
    check = pool._check_calls

    def look() -> None:
        check()
        calls.is_checked.set()

    monkeypatch.setattr(pool, "_check_calls", look)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(RequestFailed):
            await pool.run(spin)
    pool.close(EngineDead("closed"))
    assert not hung
