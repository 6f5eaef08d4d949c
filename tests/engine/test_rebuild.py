"""Steps that raise, through the engine: readers see a pause, and only what must end ends."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamer.core.plan import STEP_FAILED, Cancel, FinishReason, NoticeKind, Plan, StepResult
from streamer.core.recovery.trials import Verdict
from streamer.engine.core import MAX_REBUILDS, REBUILDS_S, InFlight, Rebuilds
from streamer.engine.engine import AsyncEngine
from streamer.engine.refusals import STEERED
from streamer.engine.stream import TokenStream
from streamer.errors import EngineDead, RequestFailed
from streamer.fake.model import FakeRunner
from tests.engine.helpers import (
    DEADLINE_S,
    Wrapped,
    all_deltas,
    assert_all_back,
    make_engine,
    request,
)

Fails = Callable[[Plan, set[str]], BaseException | None]


class Faulty(Wrapped):
    """Raises what `fails` returns for a plan and the requests in it, at its launch or collect."""

    def __init__(self, inner: FakeRunner, fails: Fails, *, is_late: bool) -> None:
        super().__init__(inner)
        self._fails, self._is_late = fails, is_late
        self._rows: dict[int, str] = {}
        self.num_faults = 0

    def reset(self, launched: int) -> None:
        self._rows = {}
        super().reset(launched)

    def launch(self, plan: Plan) -> InFlight:
        for row in plan.leaves:
            self._rows.pop(row, None)
        self._rows |= {join.row: join.request_id for join in plan.joins}
        error = self._fails(plan, {name for r, name in self._rows.items() if r not in plan.idle})
        if error is None:
            return super().launch(plan)
        self.num_faults += 1
        if not self._is_late:
            raise error
        super().launch(plan)

        class Lost:
            def collect(self) -> StepResult:
                raise error

        return Lost()


def faulty_engine(
    fails: Fails, *, depth: int = 0, is_late: bool = False, **settings: Any
) -> tuple[AsyncEngine, list[Faulty]]:
    runners: list[Faulty] = []

    def wrap(inner: FakeRunner) -> Faulty:
        runners.append(Faulty(inner, fails, is_late=is_late))
        return runners[0]

    return make_engine(wrap, depth=depth, **settings), runners


async def answers(streams: list[TokenStream]) -> list[str | BaseException]:
    async def answer(stream: TokenStream) -> str:
        await all_deltas(stream)
        finish = stream.finishes[0]
        if finish is not None and finish.detail is not None:
            raise RequestFailed(finish.detail)
        return stream.text()

    async with asyncio.timeout(DEADLINE_S):
        return await asyncio.gather(*map(answer, streams), return_exceptions=True)


WAYS = pytest.mark.parametrize(("depth", "is_late"), [(0, False), (0, True), (1, False), (1, True)])


@WAYS
async def test_one_poisoned_request_of_sixteen_fails_alone(
    depth: int, is_late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(plan: Plan, names: set[str]) -> Exception | None:
        return ValueError("a kernel's mistake") if "r5" in names else None

    engine, runners = faulty_engine(fails, depth=depth, is_late=is_late, max_num_seqs=16)
    async with engine:
        streams = [engine.submit(request(30 + i, request_id=f"r{i}")) for i in range(16)]
        found = await answers(streams)
        assert isinstance(found.pop(5), RequestFailed)
        whole = await answers([engine.submit(request(46))])
        assert isinstance(whole[0], str)
        assert all(isinstance(text, str) and whole[0].startswith(text) for text in found)
        assert 3 <= runners[0].num_faults <= 9
        await assert_all_back(engine)
    lines = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert len(lines) == engine.stats.rebuilds <= runners[0].num_faults
    assert all(line.exc_info and "a kernel's mistake" in str(line.exc_info[1]) for line in lines)
    assert lines[-1].getMessage().endswith("the request fails")


@WAYS
async def test_a_reader_sees_a_pause_and_no_error(depth: int, is_late: bool) -> None:
    def fails(plan: Plan, names: set[str]) -> Exception | None:
        return RuntimeError("once") if plan.number == 7 else None

    engine, _ = faulty_engine(fails, depth=depth, is_late=is_late)
    async with engine:
        stream = engine.submit(request(20))
        kinds: list[NoticeKind] = []
        text = ""
        async for items in stream.read(0):
            for item in items:
                if hasattr(item, "kind"):
                    kinds.append(item.kind)
                else:
                    text += item.text
        assert kinds[-2:] == [NoticeKind.PREEMPTED, NoticeKind.RUNNING]
        (whole,) = await answers([engine.submit(request(20))])
        assert text == whole
        assert stream.finishes[0] is not None


async def test_a_failure_keeps_its_reason_in_the_journal_and_out_of_it(tmp_path: Path) -> None:
    """Also where its client was about to cut it off."""

    def fails(plan: Plan, names: set[str]) -> Exception | None:
        return ValueError("odd") if "bad" in names else None

    engine, _ = faulty_engine(fails, journal=str(tmp_path))
    async with engine:
        streams = []
        for is_durable in (False, True):
            stream = engine.submit(request(9, request_id="bad", is_durable=is_durable))
            stream.cut_off_by = STEERED
            await asyncio.wait_for(stream.wait(), DEADLINE_S)
            streams.append(stream)
            engine.forget("bad")
    found = [(f.reason, f.detail) for s in streams for f in s.finishes if f is not None]
    assert found == [(FinishReason.FAILED, STEP_FAILED)] * 2


@WAYS
async def test_random_faults_in_random_lives(depth: int, is_late: bool) -> None:
    """A fault of no request, at a random step: a hundred of them in all."""
    rng = random.Random(7 * depth + is_late)
    due = num_faults = 0

    def fails(plan: Plan, names: set[str]) -> Exception | None:
        if plan.number != due:
            return None
        return MemoryError("no memory") if rng.random() < 0.5 else OSError("odd")

    for _ in range(28):
        blocks, due = rng.choice([24, 200]), rng.randint(1, 25)
        engine, runners = faulty_engine(
            fails, depth=depth, is_late=is_late, num_gpu_blocks_override=blocks
        )
        async with engine:
            streams = [
                engine.submit(request(rng.randint(3, 50), n=rng.choice([1, 1, 3])))
                for _ in range(rng.randint(3, 9))
            ]
            engine.cancel(streams.pop().request_id)
            found = await answers(streams)
            (whole,) = await answers([engine.submit(request(50))])
            assert isinstance(whole, str)
            for text in found:
                assert isinstance(text, str)
                assert whole.startswith(text)
            await assert_all_back(engine)
            num_faults += engine.stats.rebuilds
            assert engine.stats.rebuilds == runners[0].num_faults
    assert num_faults >= 25


async def test_a_runner_that_carries_out_nothing_is_the_engines_end() -> None:
    def fails(plan: Plan, names: set[str]) -> Exception | None:
        return RuntimeError("nothing works") if names else None

    engine, runners = faulty_engine(fails)
    async with engine:
        found = await answers([engine.submit(request(9)) for _ in range(8)])
        assert {type(each) for each in found} <= {EngineDead, RequestFailed}
        # one alone may have been taken to be at fault, before the probe failed as well
        assert [type(each) for each in found].count(EngineDead) >= 7
        assert isinstance(engine.death, EngineDead)
        assert str(engine.death.__cause__) == "nothing works"
    assert runners[0].num_faults < 20


async def test_a_step_that_fails_again_and_again_is_the_engines_end() -> None:
    """Each time after it went well for a while: no request is at fault."""

    def fails(plan: Plan, names: set[str]) -> Exception | None:
        return RuntimeError("now and then") if plan.number % 15 == 14 else None

    engine, runners = faulty_engine(fails)
    async with engine:
        found = await answers([engine.submit(request(500)) for _ in range(4)])
        assert [type(each) for each in found] == [EngineDead] * 4
    assert runners[0].num_faults == MAX_REBUILDS + 1


@WAYS
async def test_poisoned_requests_on_an_idle_server_fail_one_by_one(
    depth: int, is_late: bool
) -> None:
    """No other request shows that the runner works: a probe does."""

    def fails(plan: Plan, names: set[str]) -> Exception | None:
        return ValueError("odd") if any(name.startswith("bad") for name in names) else None

    engine, _ = faulty_engine(fails, depth=depth, is_late=is_late)
    async with engine:
        for i in range(6):
            found = await answers([engine.submit(request(9, request_id=f"bad{i}"))])
            assert [type(each) for each in found] == [RequestFailed]
        await assert_all_back(engine)
        (text,) = await answers([engine.submit(request(9))])
        assert isinstance(text, str)
        assert engine.stats.rebuilds == 12
        at_once = [request(9, request_id=f"bad at once {i}") for i in range(9)]
        found = await answers([engine.submit(each) for each in at_once])
        assert [type(each) for each in found] == [RequestFailed] * 9
        await assert_all_back(engine)


@WAYS
@pytest.mark.parametrize("is_alone", [True, False])
async def test_clients_that_leave_before_the_next_try_do_not_end_the_engine(
    depth: int, is_late: bool, is_alone: bool
) -> None:
    """What they asked for may be at fault, and is not there to be tried alone."""

    def fails(plan: Plan, names: set[str]) -> Exception | None:
        bad = [name for name in names if name.startswith("bad")]
        for name in bad:
            assert engine._thread is not None
            engine._thread._inbox.put(Cancel(name))
        return ValueError("odd") if bad else None

    engine, runners = faulty_engine(fails, depth=depth, is_late=is_late)
    async with engine:
        for i in range(3 * MAX_REBUILDS):
            streams = [engine.submit(request(9, request_id=f"bad{i}"))]
            streams += [] if is_alone else [engine.submit(request(30))]
            assert all(isinstance(text, str) for text in await answers(streams))
        await assert_all_back(engine)
    assert runners[0].num_faults >= 3 * MAX_REBUILDS


async def test_without_a_step_that_works_the_probe_ends_the_engine() -> None:
    engine, runners = faulty_engine(lambda plan, names: OSError("gone") if names else None)
    async with engine:
        await answers([engine.submit(request(9))])
        async with asyncio.timeout(DEADLINE_S):
            await engine._is_ended.wait()
        assert isinstance(engine.death, EngineDead)
    assert runners[0].num_faults == MAX_REBUILDS + 1


def test_faults_count_within_a_minute_unless_they_are_explained() -> None:
    rebuilds = Rebuilds()
    times = [0.0, 1.0, 2.0, REBUILDS_S + 0.5, REBUILDS_S + 0.6]
    assert [rebuilds.is_too_often(Verdict.RETRIED, t) for t in times] == [False] * 4 + [True]
    rebuilds = Rebuilds()
    for verdict in (Verdict.HALVED, Verdict.SHRUNK):
        assert not any(rebuilds.is_too_often(verdict, 0.0) for _ in range(99))
    for _ in range(20):  # requests found to be at fault, beside others that go well
        assert not rebuilds.is_too_often(Verdict.RETRIED, 0.0)
        assert not rebuilds.is_too_often(Verdict.HALVED, 0.0)
        rebuilds.worked()
        assert not rebuilds.is_too_often(Verdict.BLAMED, 0.0)
    for _ in range(20):  # and alone, with another request in between
        assert not rebuilds.is_too_often(Verdict.RETRIED, 0.0)
        assert not rebuilds.is_too_often(Verdict.BLAMED, 0.0)
        rebuilds.worked()
    for _ in range(20):  # and such as were cancelled before they could be tried
        assert not rebuilds.is_too_often(Verdict.RETRIED, 0.0, has_escaped=True)
        assert rebuilds.is_unproven
        rebuilds.worked()
    rebuilds = Rebuilds()  # but not where nothing works
    found = [rebuilds.is_too_often(Verdict.RETRIED, 0.0, has_escaped=True) for _ in range(4)]
    assert found == [False] * 3 + [True]
