"""RankedRunner: the engine's Runner of a model that ranks share; sends every plan to all of them.

`load_ranked` makes it. Every rank has a runner, which knows nothing of the others but the sums in
its model. Called by build.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace

from streamer.core.plan import Facts, Plan, StepResult
from streamer.errors import RankFailed
from streamer.model.inspect import Recognized
from streamer.model.loader import progress_bars
from streamer.model.ranks import wire
from streamer.model.ranks.group import Group, OtherLeft
from streamer.model.ranks.leader import Leader
from streamer.model.runner.cpu import CpuRunner, Done
from streamer.model.runner.cuda import CudaInFlight, CudaRunner
from streamer.model.runner.load import Place, load_runner

if TYPE_CHECKING:
    from streamer.config import Config
    from streamer.constraints.grammars import Grammars
    from streamer.core.sizes import ModelInfo


def load_ranked(
    config: Config, go_on: Callable[[], None], died: Callable[[Exception], None]
) -> tuple[RankedRunner, ModelInfo]:
    """Load config.model on tensor_parallel_size processes, of which this is the first.

    go_on  called now and then, may raise to end the loading
    died   called, from any thread, when another rank is gone later

    Raises what load_runner does here, and RankFailed where another rank can't. Shows a progress bar
    for each rank.
    """
    leader = Leader(config, died)
    count, layers = config.tensor_parallel_size, 0
    groups: list[Group] = []
    advances: list[Callable[[int], None]] = []

    def join(known: Recognized, device: torch.device) -> Group:
        what = known.checkpoint.path.name
        names = [f"Loading {what}, rank {index}" for index in range(count)]
        shown = bars.enter_context(
            progress_bars(names, known.num_layers, "layers", config.load_progress)
        )

        def advance(by: int) -> None:
            nonlocal layers
            layers += by
            for index, done in {0: layers, **leader.layers}.items():
                shown(index, min(done, known.num_layers))  # a draft model's come after them
            go_on()

        advances.append(advance)
        groups.append(leader.start(device, known.digest, advance))
        return groups[0]

    place = Place(0, count, join)
    try:
        with ExitStack() as bars:
            quiet = replace(config, load_progress=False)
            runner, info = load_runner(quiet, go_on=lambda: advances[0](1), place=place)
            leader.wait_ready(advances[0])
    except BaseException as error:
        leader.close()
        failure = leader.failure
        if failure is not None and failure is not error and isinstance(error, Exception):
            raise failure from error
        raise
    return RankedRunner(runner, groups[0], leader), info


class RankedRunner:
    """The Runner of the first rank, which sends every plan to the others as well."""

    def __init__(self, runner: CpuRunner | CudaRunner, group: Group, leader: Leader) -> None:
        self._runner = runner
        self._group = group
        self._leader = leader
        self._drawn = wire.Checksum()
        self._copies_done = 0

    @property
    def depth(self) -> int:
        return self._runner.depth

    @property
    def sums_s(self) -> float:
        """Seconds in which this rank waited for sums over all ranks, and copied them."""
        return self._group.seconds

    def constrain(self, grammars: Grammars) -> None:
        """See engine.core.Runner; the other ranks make their own, of the same tokenizer."""
        self._runner.constrain(grammars)

    def launch(self, plan: Plan) -> _InFlight:
        """See engine.core.Runner; RankFailed where another rank can't go on."""
        try:
            self._leader.send(wire.Launch(plan, self._drawn, self._copies_done))
            return _InFlight(self._runner.launch(plan), self)
        except (OtherLeft, OSError) as error:
            raise self._leader.reason(error) from error

    def collect(self, in_flight: Done | CudaInFlight) -> StepResult:
        """The result of a launched plan."""
        try:
            result = in_flight.collect()
        except OtherLeft as error:
            raise self._leader.reason(error) from error
        self._drawn = wire.Checksum.of(result)
        return result

    def facts(self) -> Facts:
        """This rank's; the others compute as much, and wait for their copies by these."""
        found = self._runner.facts()
        self._copies_done = found.copies_done
        return found

    def reset(self, launched: int) -> None:
        """See engine.core.Runner; RankFailed where a rank is gone, and on GPUs, where work that
        waits for another rank can't be taken back."""
        if self._leader.failure is not None:
            raise self._leader.failure
        if not self._group.can_meet_again:
            raise RankFailed(f"plan {launched} failed, and ranks on GPUs can't begin anew")
        self._runner.reset(launched)
        self._leader.meet_again(launched)
        self._drawn = wire.Checksum()

    def close(self) -> None:
        """See engine.core.Runner."""
        self._leader.close()
        self._runner.close()
        self._group.leave()


class _InFlight:
    """A plan that every rank carries out."""

    __slots__ = ("_in_flight", "_runner")

    def __init__(self, in_flight: Done | CudaInFlight, runner: RankedRunner) -> None:
        self._in_flight = in_flight
        self._runner = runner

    def collect(self) -> StepResult:
        """See engine.core.InFlight; RankFailed as `launch`."""
        return self._runner.collect(self._in_flight)
