"""The watchdog over steps: a hung step ends the engine, a slow one does not; idling is free."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from streamer.config import Config
from streamer.core.plan import Plan, StepResult
from streamer.core.sizes import ModelInfo
from streamer.engine import engine as engines
from streamer.engine import gpu_thread
from streamer.engine.core import InFlight, Owner, Runner
from streamer.engine.engine import AsyncEngine
from streamer.errors import EngineDead, Overloaded, StepHung
from streamer.fake.model import FakeRunner, fake_tokenizer
from tests.engine.helpers import DEADLINE_S, Wrapped, make_engine, request, until

WATCHDOG_S = 0.2


class Stuck(Wrapped):
    """From a given number on, steps hang in `collect` until the test releases them."""

    def __init__(self, inner: Runner, number: int) -> None:
        super().__init__(inner)
        self.number = number
        self.is_stuck, self.let_go = threading.Event(), threading.Event()

    def launch(self, plan: Plan) -> InFlight:
        return _Waiting(super().launch(plan), self if plan.number >= self.number else None)


class _Waiting:
    def __init__(self, inner: InFlight, at: Stuck | None) -> None:
        self._inner, self._at = inner, at

    def collect(self) -> StepResult:
        if self._at is not None:
            self._at.is_stuck.set()
            self._at.let_go.wait(DEADLINE_S)
        return self._inner.collect()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_thread, "MIN_CHECK_S", 0.02)


def stuck_at(number: int, made: list[Stuck]) -> Callable[[FakeRunner], Stuck]:
    def wrap(inner: FakeRunner) -> Stuck:
        made.append(Stuck(inner, number))
        return made[0]

    return wrap


async def test_a_hung_step_is_death_and_closing_does_not_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made: list[Stuck] = []
    engine = make_engine(stuck_at(5, made), watchdog_s=WATCHDOG_S)
    async with asyncio.timeout(DEADLINE_S):
        await engine.start()
        streams = [engine.submit(request(100)) for _ in range(3)]
        for stream in streams:
            with pytest.raises(EngineDead, match="internal error"):
                await stream.wait()
        assert engine.death is not None
        assert isinstance(engine.death.__cause__, StepHung)
        assert str(engine.death.__cause__) == "a step took longer than 0.2 s"
        with pytest.raises(EngineDead):
            engine.submit(request())
        await engine.aclose()  # although the thread still exists
    assert streams[0].num_output_tokens == 4
    assert "in collect" in caplog.text
    assert "test_watchdog.py" in caplog.text
    made[0].let_go.set()  # the step returns: nothing is delivered, and the thread ends
    thread = engine._thread
    assert thread is not None
    thread._thread.join(DEADLINE_S)
    assert not thread._thread.is_alive()
    await asyncio.sleep(0)
    assert made[0].is_closed


async def test_a_step_that_hangs_after_the_loop_was_late_is_death_too() -> None:
    """While the thread waits for a permit no step is under way, as when it is idle."""
    made: list[Stuck] = []
    engine = make_engine(stuck_at(1_000_000, made), watchdog_s=WATCHDOG_S)
    async with asyncio.timeout(DEADLINE_S):
        await engine.start()
        stream = engine.submit(request(2000, detach_s=None))
        await until(engine, running=1)
        thread = engine._thread
        assert thread is not None
        time.sleep(WATCHDOG_S)  # noqa: ASYNC251 - the loop is late: the permits are used
        while thread._check is not None:
            thread._check.cancel()
            thread._check_step()
        made[0].number = 0
        with pytest.raises(EngineDead):
            await stream.wait()
        await engine.aclose()
    made[0].let_go.set()


async def test_the_first_step_may_warm_up() -> None:
    made: list[Stuck] = []
    engine = make_engine(stuck_at(1, made), watchdog_s=WATCHDOG_S)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(DEADLINE_S), engine:
        stream = engine.submit(request(3))
        await asyncio.to_thread(made[0].is_stuck.wait)
        loop.call_later(3 * WATCHDOG_S, made[0].let_go.set)
        await stream.wait()
    assert engine.death is None


async def test_a_hang_in_the_first_step_is_death_too() -> None:
    made: list[Stuck] = []
    engine = make_engine(stuck_at(1, made), watchdog_s=WATCHDOG_S)
    async with asyncio.timeout(DEADLINE_S):
        await engine.start()
        with pytest.raises(EngineDead):
            await engine.submit(request(3)).wait()
        await engine.aclose()
    assert engine.is_hung
    made[0].let_go.set()


async def test_closing_and_draining_leave_a_hung_step_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a watchdog the step never ends; every wait has a deadline all the same."""
    monkeypatch.setattr(engines, "CANCEL_S", 0.05)
    made: list[Stuck] = []
    engine = make_engine(stuck_at(3, made), watchdog_s=0.0)
    async with asyncio.timeout(DEADLINE_S):
        await engine.start()
        stream = engine.submit(request(100))
        await asyncio.to_thread(made[0].is_stuck.wait)
        await engine.drain(0.05)
        with pytest.raises(Overloaded) as raised:
            await stream.wait()
        assert raised.value.code == "server_shutdown"
        assert not engine.is_hung
        await engine.aclose(0.05)
        assert (engine.is_hung, engine.is_dead) == (True, False)
        assert engine.snapshot().state == "closed"
    assert "in collect" in caplog.text  # where it hangs
    made[0].let_go.set()


async def test_closing_leaves_a_load_behind_that_does_not_end() -> None:
    let_go = threading.Event()

    def load(owner: Owner) -> tuple[Runner, ModelInfo]:
        let_go.wait(DEADLINE_S)
        raise RuntimeError("too late")

    engine = AsyncEngine(load, fake_tokenizer, Config(model="fake"))
    async with asyncio.timeout(DEADLINE_S):
        starting = asyncio.create_task(engine.start())
        await asyncio.sleep(0)
        await engine.aclose(0.05)
        with pytest.raises(EngineDead, match="closed"):
            await starting
    assert engine.is_hung
    let_go.set()


async def test_closing_ends_a_load_between_two_layers() -> None:
    has_begun, num_layers = threading.Event(), 0

    def load(owner: Owner) -> tuple[Runner, ModelInfo]:
        nonlocal num_layers
        has_begun.set()
        for _ in range(int(DEADLINE_S / 0.01)):
            owner.check_stop()
            num_layers += 1
            time.sleep(0.01)  # a layer
        raise RuntimeError("never asked to end")

    engine = AsyncEngine(load, fake_tokenizer, Config(model="fake"))
    async with asyncio.timeout(DEADLINE_S):
        starting = asyncio.create_task(engine.start())
        await asyncio.to_thread(has_begun.wait, DEADLINE_S)
        await engine.aclose(DEADLINE_S / 2)
        with pytest.raises(EngineDead, match="closed"):
            await starting
    assert (engine.is_hung, engine.is_dead) == (False, False)
    assert engine.snapshot().state == "closed"


async def test_many_slow_steps_are_no_hung_one() -> None:
    async with (
        asyncio.timeout(DEADLINE_S),
        make_engine(tokens_per_s=20, watchdog_s=1.0) as engine,
    ):
        await engine.submit(request(30)).wait()  # 1.5 s of steps of 0.05
        assert engine.death is None


@pytest.mark.parametrize("watchdog_s", [0.0, WATCHDOG_S])
async def test_no_timer_is_left_when_nothing_runs(watchdog_s: float) -> None:
    async with asyncio.timeout(DEADLINE_S), make_engine(watchdog_s=watchdog_s) as engine:
        await engine.submit(request(5)).wait()
        thread = engine._thread
        assert thread is not None
        # the last timer finds no step and sets no other: there is no event to wait for
        while thread._check is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not thread.is_hung
        await engine.submit(request(5)).wait()
        assert (thread._check is None) is (watchdog_s == 0)


async def test_bundled_a_hung_step_is_death_and_earlier_output_stays() -> None:
    made: list[Stuck] = []
    engine = AsyncEngine.from_config(Config(model=None, num_gpu_blocks_override=64, watchdog_s=1.0))
    load = engine._load

    def load_stuck(owner: Owner) -> tuple[Runner, ModelInfo]:
        runner, info = load(owner)
        made.append(Stuck(runner, 8))
        return made[0], info

    engine._load = load_stuck
    async with asyncio.timeout(DEADLINE_S):
        await engine.start()
        streams = [engine.submit(request(100, ignore_eos=True)) for _ in range(2)]
        for stream in streams:
            with pytest.raises(EngineDead, match="internal error"):
                await stream.wait()
        await engine.aclose()
    assert streams[0].num_output_tokens == 7
    assert streams[1].num_output_tokens in (6, 7)  # it may have joined a step later
    assert streams[0].text()
    made[0].let_go.set()
