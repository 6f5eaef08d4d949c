"""What ranks on GPUs do, as far as it can be tested without any."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from streamer.core.plan import Plan, StepResult
from streamer.errors import ConfigError, InvariantViolated
from streamer.model.ranks import group as tested
from streamer.model.ranks.group import LOOPBACK, Group, OtherLeft, Seat
from streamer.model.ranks.store import FirstStore
from streamer.model.ranks.wire import Checksum, Launch
from streamer.model.ranks.worker import Plans
from streamer.model.runner.device import choose_device
from streamer.model.runner.swaps import Swaps


class Options:
    _timeout: Any = None


class Nccl:
    """A ProcessGroupNCCL that was made."""

    Options = Options

    def __init__(self, store: Any, index: int, count: int, options: Options) -> None:
        self.made_of = (index, count, options._timeout.total_seconds())
        self.is_aborted = False
        store.set("key", b"value")

    def abort(self) -> None:
        self.is_aborted = True


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices that were chosen as current ones."""
    found: list[torch.device] = []
    monkeypatch.setattr(tested.c10d, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    return found


def test_a_rank_on_a_gpu_joins_by_nccl_on_its_own_device(devices: list[torch.device]) -> None:
    where, store = torch.device("cuda", 3), FirstStore(1.0)
    group = Group(Seat(3, 8, 4, LOOPBACK, where), store)
    nccl: Any = group._group
    assert isinstance(nccl, Nccl)
    assert nccl.made_of == (3, 8, tested.NCCL_TIMEOUT_S)
    assert devices == [where]
    assert store.get("meeting0/key") == b"value"  # through our own store
    assert not group.can_meet_again
    group.leave()
    assert nccl.is_aborted
    group.leave()
    with pytest.raises(OtherLeft, match="this rank has left"):
        group._timed(lambda nccl: nccl)


def test_each_rank_of_a_host_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto", 1) == torch.device("cuda", 1)
    assert choose_device("cpu", 5).type == "cpu"
    with pytest.raises(ConfigError, match="each rank needs a GPU of its own, and this host has 2"):
        choose_device("cuda", 2)


def test_who_waits_for_a_rank_that_is_gone_is_told() -> None:
    store = FirstStore(60.0)
    store.end()
    with pytest.raises(TimeoutError, match="no rank has left 0/1"):
        store.get("0/1")
    answers: list[bytes] = []
    store.ask("late", answers.append)
    store.put("late", b"x")
    store.ask("late", answers.append)
    assert answers == [b"x", b"x"]


class Ahead:
    """A runner that is a plan ahead; `log` has what it was asked."""

    depth = 1

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []

    def await_copies(self, number: int) -> None:
        self.log.append(("copies", number))

    def launch(self, plan: Plan) -> Any:
        self.log.append(("launch", plan.number))
        flight = types.SimpleNamespace()
        flight.collect = lambda: result(plan.number)
        return flight


def result(number: int) -> StepResult:
    return StepResult(number, rows=(1,), tokens=(number * 7,))


def launch(number: int, drawn: int, copies_done: int = 0) -> Launch:
    checksum = Checksum.of(result(drawn)) if drawn else Checksum()
    return Launch(Plan(number), checksum, copies_done)


def test_a_rank_a_plan_ahead_compares_what_the_first_one_had_read() -> None:
    """Also after a pause, when the first rank has read more than usual."""
    runner = Ahead()
    plans = Plans(runner)  # type: ignore[arg-type]
    for message in (launch(1, 0), launch(2, 0), launch(3, 1, 2), launch(4, 3, 3), launch(5, 4)):
        plans.launch(message)
    assert runner.log[4:8] == [("copies", 2), ("launch", 3), ("copies", 3), ("launch", 4)]
    wrong = Launch(Plan(6), Checksum(5, 1), 0)
    with pytest.raises(InvariantViolated, match="drew other tokens than the first rank"):
        plans.launch(wrong)


def test_copies_that_are_done_elsewhere_are_waited_for() -> None:
    waited: list[int] = []

    def copy(number: int) -> Any:
        done = types.SimpleNamespace(wait=lambda: waited.append(number))
        return types.SimpleNamespace(number=number, done=done)

    swaps = Swaps(*[None] * 5)  # type: ignore[arg-type]
    swaps._pending = [copy(3), copy(4), copy(8)]
    swaps.await_all(2)
    assert waited == []
    swaps.await_all(5)
    assert waited == [3, 4]
    swaps.await_all(5)
    assert waited == [3, 4]
