"""A rank that is not the first: a process that carries out the plans it is sent.

Started by leader.py, or on another host by node.py; processes.py says what it is told. Draws what
every other rank draws and drops it. Ends when the first rank does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec
import torch
from msgspec.structs import replace

from streamer.config import Config
from streamer.constraints.grammars import Grammars
from streamer.core.sizes import ModelInfo
from streamer.errors import InvariantViolated, StreamerError
from streamer.model.inspect import Recognized
from streamer.model.ranks import processes, wire
from streamer.model.ranks.group import Group, OtherLeft, Seat
from streamer.model.ranks.store import RankStore
from streamer.model.runner.cpu import CpuRunner, Done
from streamer.model.runner.cuda import CudaInFlight, CudaRunner
from streamer.model.runner.load import Place, load_runner

BEAT_S = 1.0
RETRY_S = 0.5  # between two tries to reach another host

log = logging.getLogger(__name__)

# The grammars of a loaded model, which need its tokenizer.
MakeGrammars = Callable[[Config, ModelInfo], Grammars]


def main(make_grammars: MakeGrammars) -> int:
    """Serve as a rank until the first one is gone; the process's exit code."""
    given = processes.rendezvous()
    logging.basicConfig(level=logging.WARNING, format=f"rank {given.index}: %(message)s")
    try:
        connection = _connect(given)
        wire.greet(connection, given.index, given.secret)
    except OSError as error:
        where = f"{given.address}:{given.port}"
        log.critical("the first rank, at %s, did not let this one in: %s", where, error)
        return 1
    address = connection.getsockname()[0]
    rank = Rank(given, wire.Channel(connection), address, make_grammars)
    try:
        rank.run()
    except OSError:  # the first rank has ended
        return 0
    except Exception as error:
        return rank.fail(error)
    return 0


def _connect(given: processes.Rendezvous) -> socket.socket:
    """A connection to the first rank; for as long as it takes, if that is on another host."""
    while True:
        try:
            return socket.create_connection((given.address, given.port), timeout=10.0)
        except OSError:
            if not given.is_far:
                raise
        time.sleep(RETRY_S)


class Rank:
    """What `main` runs. `address`: of the interface on which it is connected."""

    def __init__(
        self,
        given: processes.Rendezvous,
        channel: wire.Channel,
        address: str,
        make_grammars: MakeGrammars,
    ) -> None:
        self._given = given
        self._channel = channel
        self._address = address
        self._make_grammars = make_grammars
        self._plan = 0
        self._layers = 0
        self._group: Group | None = None

    def run(self) -> None:
        """Load, then carry out plans for ever; OSError when the first rank has gone."""
        channel, given = self._channel, self._given
        channel.send(wire.Joined(os.getpid(), socket.gethostname(), wire.dialect()))
        threading.Thread(target=self._beat, name="streamer-beat", daemon=True).start()
        config = self._config(channel.expect(wire.Setup))
        count = config.tensor_parallel_size
        began = time.monotonic()

        def join(known: Recognized, device: torch.device) -> Group:
            seat = Seat(given.index, count, given.on_host, self._address, device)
            self._group = group = Group(seat, RankStore(channel))

            def meet() -> None:
                channel.send(wire.Loaded(time.monotonic() - began, known.digest))
                channel.expect(wire.Begin)

            group.meet = meet
            return group

        place = Place(given.index % given.on_host, count, join)
        runner, info = load_runner(config, go_on=self._has_layer, place=place)
        runner.constrain(self._make_grammars(config, info))
        channel.send(wire.Ready())
        self._carry_out(runner)

    def fail(self, error: Exception) -> int:
        """Tell the first rank why this one ends."""
        log.critical("ends", exc_info=error)
        with contextlib.suppress(OSError):
            self._channel.send(wire.Failed(_text(error)))
        return 1

    def _config(self, setup: wire.Setup) -> Config:
        """The first rank's, with the checkpoints of this host."""
        given = self._given
        config = msgspec.convert({**setup.config, "load_progress": False}, Config)
        if given.model is None:
            return config
        settings = config.speculative_config
        if settings.model is not None:
            settings = replace(settings, model=given.draft_model)
        draft = config.speculative_model and given.draft_model
        return replace(
            config, model=given.model, speculative_model=draft, speculative_config=settings
        )

    def _beat(self) -> None:
        """Tell the first rank that this one is alive, until it has gone."""
        try:
            while True:
                self._channel.send(wire.Beat(self._plan))
                time.sleep(BEAT_S)
        except OSError:
            return

    def _has_layer(self) -> None:
        self._layers += 1
        self._channel.send(wire.Loading(self._layers))

    # ------------------------------------------------------------ plans

    def _carry_out(self, runner: CpuRunner | CudaRunner) -> None:
        plans = Plans(runner)
        while True:
            message = self._channel.receive()
            if isinstance(message, wire.Reset):
                plans = self._begin_anew(runner, message)
            elif not isinstance(message, wire.Launch):
                raise InvariantViolated(f"{type(message).__name__} came instead of a plan")
            elif not plans.has_failed:
                self._plan = message.plan.number
                try:
                    plans.launch(message)
                except InvariantViolated:
                    raise
                except Exception as error:
                    plans.has_failed = True
                    self._stumble(error)

    def _stumble(self, error: Exception) -> None:
        """Leave the sums that others may wait in, and say why; what follows is a Reset."""
        if self._group is None or not self._group.can_meet_again:
            raise error
        log.error("step %d failed", self._plan, exc_info=error)
        self._group.leave()
        is_memory, is_other = isinstance(error, MemoryError), isinstance(error, OtherLeft)
        self._channel.send(wire.Stumbled(str(error)[:1000], is_memory, is_other))

    def _begin_anew(self, runner: CpuRunner | CudaRunner, reset: wire.Reset) -> Plans:
        runner.reset(reset.launched)
        if self._group is not None:
            self._group.meet_again(reset.meeting)
        self._channel.send(wire.Ready())
        return Plans(runner)


class Plans:
    """The plans that a runner was given since it began, or began anew."""

    def __init__(self, runner: CpuRunner | CudaRunner) -> None:
        self._runner = runner
        self._launched: deque[Done | CudaInFlight] = deque()
        self._drawn = wire.Checksum()
        self.has_failed = False

    def launch(self, message: wire.Launch) -> None:
        """Carry a plan out, after a comparison of what was drawn before."""
        while self._launched and self._drawn.plan != message.drawn.plan:
            self._collect()
        if message.drawn != self._drawn:
            raise InvariantViolated(f"drew other tokens than the first rank: {self._drawn}")
        self._runner.await_copies(message.copies_done)
        self._launched.append(self._runner.launch(message.plan))
        while len(self._launched) > self._runner.depth:
            self._collect()

    def _collect(self) -> None:
        self._drawn = wire.Checksum.of(self._launched.popleft().collect())


def _text(error: Exception) -> str:
    said = error.message if isinstance(error, StreamerError) else error
    return f"{type(error).__name__}: {said}"[:1000]
