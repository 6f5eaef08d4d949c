"""EngineCore: the order of one step, and at depth 1 one plan ahead."""

from __future__ import annotations

import time
from typing import Any

import pytest

from streamer.config import Config
from streamer.constraints.grammars import Grammars
from streamer.core.blocks import BlockHasher
from streamer.core.plan import (
    Add,
    Cancel,
    Facts,
    FinishReason,
    NoticeKind,
    Plan,
    StepOutput,
    StepResult,
)
from streamer.core.sampling import SamplingParams
from streamer.core.scheduler import Scheduler, SchedulerConfig
from streamer.engine import core
from streamer.engine.core import EngineCore, Inbox, InFlight
from streamer.errors import InvariantViolated
from streamer.fake.model import fake_tokenizer, load_fake
from tests.engine.helpers import PROMPT


class Recorder:
    """A runner and scheduler in one log."""

    def __init__(self, depth: int) -> None:
        self.log: list[str] = []
        self.inner, self.info = load_fake(Config(model="fake"), depth=depth)
        self.on_collect = lambda number: None
        self.is_closed = False

    @property
    def depth(self) -> int:
        return self.inner.depth

    def constrain(self, grammars: Grammars) -> None:
        self.inner.constrain(grammars)

    def reset(self, launched: int) -> None:
        self.inner.reset(launched)

    def launch(self, plan: Plan) -> InFlight:
        self.log.append(f"launch {plan.number}")
        in_flight, recorder = self.inner.launch(plan), self

        class Logged:
            def collect(self) -> StepResult:
                recorder.log.append(f"collect {plan.number}")
                recorder.on_collect(plan.number)
                return in_flight.collect()

        return Logged()

    def facts(self) -> Facts:
        return self.inner.facts()

    def close(self) -> None:
        self.is_closed = True


class Rig:
    """An EngineCore on this thread."""

    def __init__(self, depth: int = 0) -> None:
        self.runner = Recorder(depth)
        info = self.runner.info
        sizes = SchedulerConfig(
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            num_host_blocks=info.num_host_blocks,
            block_bytes=info.block_bytes,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_model_len=1000,
            token_bytes=fake_tokenizer().token_bytes(),
        )
        self.inbox = Inbox()
        self.scheduler = Scheduler(sizes, BlockHasher(info.block_size, b"k" * 32))
        self.core = EngineCore(self.runner, self.scheduler, self.inbox)

    def add(self, request_id: str = "r", max_tokens: int = 4, **fields: Any) -> None:
        params = SamplingParams(max_tokens=max_tokens, seed=1, **fields)
        self.inbox.put(Add(request_id, PROMPT, params))

    def run(self) -> list[StepOutput]:
        outputs = []
        while (output := self.core.step()) is not None:
            outputs.append(output)
        return outputs


def test_an_idle_step_launches_nothing() -> None:
    rig = Rig()
    assert rig.core.step() is None
    assert rig.runner.log == []


def test_without_depth_a_plan_is_collected_before_the_next_is_launched() -> None:
    rig = Rig()
    rig.add(max_tokens=3)
    outputs = rig.run()
    assert [len(o.tokens) for o in outputs] == [1, 1, 1]
    expected = [f"{what} {n}" for n in (1, 2, 3) for what in ("launch", "collect")]
    assert rig.runner.log[:6] == expected


def test_with_depth_1_the_next_plan_is_launched_before_the_last_is_collected() -> None:
    rig = Rig(depth=1)
    rig.add(max_tokens=4)
    outputs = rig.run()
    assert sum(len(o.tokens) for o in outputs) == 4
    log = rig.runner.log
    for number in (1, 2, 3):
        assert log.index(f"launch {number + 1}") < log.index(f"collect {number}")
    for number in (1, 2):  # but never more than one ahead
        assert log.index(f"collect {number}") < log.index(f"launch {number + 2}")


@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_begins_when_its_step_is_planned(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its notice travels with the step's output: the first chunk was booked as time in the queue.

    With a plan ahead, that output is the one of the plan before, which was collected meanwhile."""
    rig, now = Rig(depth), 0.0

    def collected(number: int) -> None:
        nonlocal now
        now += 10.0
        if number == 1:
            rig.add("second", max_tokens=2)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    rig.runner.on_collect = collected
    rig.add("first", max_tokens=3)
    notices = [n for o in rig.run() for n in o.notices if n.kind is NoticeKind.RUNNING]
    assert [(n.request_id, n.age_s) for n in notices] == [("first", 10.0), ("second", 10.0)]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_that_cannot_be_taken_fails_alone(depth: int) -> None:
    rig = Rig(depth)
    rig.add("good", max_tokens=4)
    wrong = SamplingParams(n=2, max_tokens=3)
    rig.inbox.put(Add("bad", None, wrong))  # type: ignore[arg-type]
    outputs = rig.run()
    assert sum(len(o.tokens) for o in outputs) == 4
    failed = [f for o in outputs for f in o.finishes if f.reason is FinishReason.FAILED]
    assert [(f.request_id, f.choice) for f in failed] == [("bad", 0), ("bad", 1)]
    assert failed[0].detail is not None
    assert failed[0].detail.startswith("TypeError")


@pytest.mark.parametrize("depth", [0, 1])
def test_every_plan_is_collected_once_and_in_order(depth: int) -> None:
    rig = Rig(depth)
    for i in range(6):
        rig.add(f"r{i}", max_tokens=3 + i, n=1 + i % 3)
    rig.run()
    launched = [line.split()[1] for line in rig.runner.log if line.startswith("launch")]
    collected = [line.split()[1] for line in rig.runner.log if line.startswith("collect")]
    assert launched == collected == [str(n) for n in range(1, len(launched) + 1)]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_cancel_that_comes_while_a_plan_runs_gets_no_token_of_it(depth: int) -> None:
    rig = Rig(depth)
    rig.add(max_tokens=100)
    rig.runner.on_collect = lambda n: rig.inbox.put(Cancel("r")) if n == 3 else None
    outputs = rig.run()
    assert sum(len(o.tokens) for o in outputs) == 2
    finishes = [f for o in outputs for f in o.finishes]
    assert [(f.reason, f.num_tokens) for f in finishes] == [(FinishReason.CANCELLED, 2)]


def test_conservation_is_proved_once_each_time_the_work_is_done() -> None:
    rig = Rig()
    honest, checks = rig.scheduler.check, []
    rig.scheduler.check = lambda: checks.append(honest())  # type: ignore[method-assign]

    def work(request_id: str) -> int:
        rig.add(request_id)
        checks.clear()
        while rig.core.step() is not None:
            assert not checks, "checked in a step"
        assert rig.core.step() is None  # woken without a command
        return len(checks)

    assert [work("a"), work("b")] == [1, 1]
    rig.scheduler.state.kv.device.take(1)  # a leak
    rig.add("c")
    with pytest.raises(InvariantViolated, match="1 references, held by 0 tables"):
        rig.run()


def test_closing_lets_the_device_finish() -> None:
    rig = Rig(depth=1)
    rig.add(max_tokens=100)
    rig.core.step()
    assert rig.runner.log == ["launch 1", "launch 2", "collect 1"]
    rig.core.close()
    assert rig.runner.log[-1] == "collect 2"
    assert rig.runner.is_closed


def test_closing_frees_the_runner_even_if_the_device_fails() -> None:
    rig = Rig(depth=1)
    rig.add(max_tokens=100)
    rig.core.step()

    def fail(number: int) -> None:
        raise RuntimeError("device lost")

    rig.runner.on_collect = fail
    with pytest.raises(RuntimeError, match="device lost"):
        rig.core.close()
    assert rig.runner.is_closed


def test_the_inbox_sorts_what_comes() -> None:
    inbox = Inbox()
    inbox.permit()
    inbox.put(Cancel("a"))
    inbox.permit()
    inbox.put(Cancel("b"))
    inbox.stop()
    inbox.wait()
    assert (inbox.permits, inbox.is_stopped) == (1, False)
    assert inbox.take() == [Cancel("a"), Cancel("b")]
    assert (inbox.permits, inbox.is_stopped) == (2, True)
    assert inbox.take() == []


# ---------------------------------------------------------------- notices of positions


def position_notices(outputs: list[StepOutput]) -> list[list[tuple[str, int]]]:
    """(request, position) of every notice, step by step; steps without notices left out."""
    sent = [
        [(n.request_id, n.position) for n in o.notices if n.kind is NoticeKind.WAITING]
        for o in outputs
    ]
    return [each for each in sent if each]


def queue_up(rig: Rig, *sent: int | None) -> None:
    """Four requests that take all rows for ten steps, and these behind them."""
    for i in range(4):
        rig.add(f"first{i}", max_tokens=10 + i)
    for i, position in enumerate(sent):
        params = SamplingParams(max_tokens=2, seed=1)
        rig.inbox.put(Add(f"r{i}", PROMPT, params, queue_position=position))


@pytest.mark.parametrize("depth", [0, 1])
def test_position_notices_come_with_a_step(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "POSITIONS_S", 0.0)
    rig = Rig(depth)
    queue_up(rig, 4, 5, None)
    sent = position_notices(rig.run())
    assert sent == [[("r0", 0), ("r1", 1)], [("r1", 0)]]


def test_position_notices_are_made_at_a_minimum_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "POSITIONS_S", 1000.0)
    rig = Rig()
    queue_up(rig, 4, 5)
    assert position_notices(rig.run()) == [[("r0", 0), ("r1", 1)]]


def test_without_position_notices_the_queue_is_not_walked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(core, "POSITIONS_S", 0.0)
    rig = Rig()
    monkeypatch.setattr(Scheduler, "changed_positions", None)  # a call would fail
    queue_up(rig, None, None)
    assert position_notices(rig.run()) == []
