"""A rank that is not the first: a process that carries out the plans it is sent.

Started by leader.py, which it finds by what is on its standard input. Draws what every other rank
draws and drops it. Ends when the first rank does.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from streamer.config import Config
from streamer.constraints.grammars import Grammars
from streamer.core.sizes import ModelInfo
from streamer.errors import InvariantViolated
from streamer.model.ranks import wire
from streamer.model.ranks.group import LOOPBACK, Group
from streamer.model.runner.cpu import CpuRunner, Done
from streamer.model.runner.cuda import CudaInFlight, CudaRunner
from streamer.model.runner.load import load_runner

BEAT_S = 1.0


class Rendezvous(msgspec.Struct, frozen=True):
    """Which rank a process is, and where the first one listens."""

    index: int
    port: int
    secret: bytes


# The grammars of a loaded model, which need its tokenizer.
MakeGrammars = Callable[[Config, ModelInfo], Grammars]


def main(make_grammars: MakeGrammars) -> int:
    """Serve as a rank until the first one is gone; the process's exit code."""
    rendezvous = msgspec.json.decode(sys.stdin.buffer.read(), type=Rendezvous)
    logging.basicConfig(level=logging.WARNING, format=f"rank {rendezvous.index}: %(message)s")
    connection = socket.create_connection((LOOPBACK, rendezvous.port))
    wire.greet(connection, rendezvous.index, rendezvous.secret)
    rank = Rank(rendezvous.index, wire.Channel(connection), make_grammars)
    threading.Thread(target=rank.beat, name="streamer-beat", daemon=True).start()
    try:
        rank.run()
    except OSError:  # the first rank has ended
        return 0
    except Exception as error:
        return rank.fail(error)
    return 0


class Rank:
    """What `main` runs."""

    def __init__(self, index: int, channel: wire.Channel, make_grammars: MakeGrammars) -> None:
        self._index = index
        self._channel = channel
        self._make_grammars = make_grammars
        self._plan = 0

    def run(self) -> None:
        """Load, then carry out plans for ever; OSError when the first rank has gone."""
        setup = self._receive(wire.Setup)
        config = msgspec.convert({**setup.config, "load_progress": False}, Config)
        group = Group.on_one_host(Path(setup.file), self._index, setup.count)
        began = time.monotonic()

        def meet() -> None:
            self._channel.send(wire.Loaded(time.monotonic() - began))
            self._receive(wire.Begin)

        group.meet = meet
        runner, info = load_runner(config, group=group)
        runner.constrain(self._make_grammars(config, info))
        self._carry_out(runner)

    def beat(self) -> None:
        """Tell the first rank that this one is alive, until it has gone."""
        try:
            while True:
                self._channel.send(wire.Beat(self._plan))
                time.sleep(BEAT_S)
        except OSError:
            return

    def fail(self, error: Exception) -> int:
        """Tell the first rank why this one ends."""
        logging.getLogger(__name__).critical("ends", exc_info=error)
        text = f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            self._channel.send(wire.Failed(text[:1000]))
        return 1

    def _carry_out(self, runner: CpuRunner | CudaRunner) -> None:
        launched: deque[Done | CudaInFlight] = deque()
        drawn = wire.Checksum()
        while True:
            message = self._receive(wire.Launch)
            if message.drawn != drawn:
                raise InvariantViolated(f"drew other tokens than the first rank: {drawn}")
            self._plan = message.plan.number
            launched.append(runner.launch(message.plan))
            while len(launched) > runner.depth:
                drawn = wire.Checksum.of(launched.popleft().collect())

    def _receive(self, kind: type[wire.M]) -> wire.M:
        message = self._channel.receive()
        if not isinstance(message, kind):
            raise InvariantViolated(f"{type(message).__name__} came instead of {kind.__name__}")
        return message
