"""The first rank's side: starts the other ranks, sends them plans, and notices when one is gone.

Each is a process that connects back over the loopback interface and proves that it was started
here. It sends a beat every second; one that is silent, ends or fails is an engine death that names
it, within seconds also while nothing runs. Called by build.py; `RankedRunner` is the engine's
Runner, of which every rank has one.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from streamer.core.plan import Facts, Plan, StepResult
from streamer.errors import RankFailed
from streamer.model.ranks import wire
from streamer.model.ranks.group import LOOPBACK, Group
from streamer.model.ranks.worker import BEAT_S, Rendezvous
from streamer.model.runner.cpu import CpuRunner, Done
from streamer.model.runner.cuda import CudaInFlight, CudaRunner
from streamer.model.runner.load import check_shared, load_runner

if TYPE_CHECKING:
    from streamer.config import Config
    from streamer.constraints.grammars import Grammars
    from streamer.core.sizes import ModelInfo

log = logging.getLogger(__name__)

SILENT_S = 5.0  # without a beat
CONNECT_S = 60.0  # to import torch and connect, on a busy machine
NAME_S = 2.0  # after a failed step, until the watch has seen which rank it was
END_S = 5.0
PROGRAM = "import sys; from streamer.build import run_rank; sys.exit(run_rank())"
SECRETS = ("api_key", "key_limits", "metrics_key")  # which no other rank has a use for


def load_ranked(
    config: Config, go_on: Callable[[], None], died: Callable[[Exception], None]
) -> tuple[RankedRunner, ModelInfo]:
    """Load config.model on tensor_parallel_size processes, of which this is the first.

    go_on  called now and then, may raise to end the loading
    died   called, from any thread, when another rank is gone later

    Raises what load_runner does here, and RankFailed where another rank can't.
    """
    check_shared(config)
    leader = Leader(config, died)
    try:
        group = leader.start(go_on)
        runner, info = load_runner(config, go_on=go_on, group=group)
    except BaseException as error:
        failure = leader.failure
        leader.close()
        if failure is not None and isinstance(error, Exception):
            raise failure from error
        raise
    return RankedRunner(runner, group, leader), info


class RankedRunner:
    """The Runner of the first rank, which sends every plan to the others as well."""

    def __init__(self, runner: CpuRunner | CudaRunner, group: Group, leader: Leader) -> None:
        self._runner = runner
        self._group = group
        self._leader = leader
        self._drawn = wire.Checksum()

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
            self._leader.send(wire.Launch(plan, self._drawn))
            return _InFlight(self._runner.launch(plan), self)
        except Exception as error:
            raise self._leader.failure_of(error) from error

    def collect(self, in_flight: Done | CudaInFlight) -> StepResult:
        """The result of a launched plan."""
        try:
            result = in_flight.collect()
        except Exception as error:
            raise self._leader.failure_of(error) from error
        self._drawn = wire.Checksum.of(result)
        return result

    def facts(self) -> Facts:
        """This rank's; the others compute as much."""
        return self._runner.facts()

    def reset(self, launched: int) -> None:
        """Always raises: after a step that failed here the others may wait in its collectives."""
        raise RankFailed(f"plan {launched} failed, and ranks can't begin anew")

    def close(self) -> None:
        """See engine.core.Runner."""
        self._leader.close()
        self._runner.close()
        self._group.close()


class _InFlight:
    """A plan that every rank carries out."""

    __slots__ = ("_in_flight", "_runner")

    def __init__(self, in_flight: Done | CudaInFlight, runner: RankedRunner) -> None:
        self._in_flight = in_flight
        self._runner = runner

    def collect(self) -> StepResult:
        """See engine.core.InFlight; RankFailed as `launch`."""
        return self._runner.collect(self._in_flight)


class _Other(msgspec.Struct, kw_only=True):
    """Another rank, as this one knows it."""

    index: int
    process: subprocess.Popen[bytes]
    channel: wire.Channel
    heard: float
    plan: int = 0
    is_loaded: bool = False

    @property
    def name(self) -> str:
        return f"rank {self.index} (process {self.process.pid})"


class Leader:
    """The other ranks' processes. `failure`: what ended one of them, and so all."""

    def __init__(self, config: Config, died: Callable[[Exception], None]) -> None:
        self._config = config
        self._died = died
        self._count = config.tensor_parallel_size
        self._folder = tempfile.TemporaryDirectory(prefix="streamer-ranks-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._others: list[_Other] = []
        self._changed = threading.Condition()
        self._is_closed = False
        self._watch: threading.Thread | None = None
        self.failure: RankFailed | None = None

    def start(self, go_on: Callable[[], None]) -> Group:
        """Start the processes and the watch; returns this rank's place among them, in which
        `meet` waits until all have loaded."""
        secret = secrets.token_bytes(32)
        with socket.create_server((LOOPBACK, 0)) as listener:
            port = listener.getsockname()[1]
            for index in range(1, self._count):
                self._processes.append(_start(Rendezvous(index, port, secret)))
            self._accept_all(listener, secret, go_on)
        setup = wire.Setup(self._settings(), self._count, str(self._file))
        for other in self._others:
            other.channel.send(setup)
        self._watch = threading.Thread(target=self._run, name="streamer-ranks", daemon=True)
        self._watch.start()
        try:
            group = Group.on_one_host(self._file, 0, self._count)
        except Exception as error:
            raise self.failure_of(error) from error
        group.meet = lambda: self._meet(go_on)
        return group

    def send(self, message: wire.Message) -> None:
        """To every other rank; OSError where one has gone."""
        data = self._others[0].channel.encode(message)
        for other in self._others:
            other.channel.send_encoded(data)

    def failure_of(self, error: Exception) -> Exception:
        """Why a step failed here: the rank that is gone or furthest behind, or `error` itself."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None, NAME_S)
            if self.failure is None and "timed out" in str(error).lower():
                last = min(self._others, key=lambda other: other.plan)
                self._fail(f"{last.name} hangs in plan {last.plan}")
        return self.failure or error

    def close(self) -> None:
        """End the other ranks: those that do not end by themselves are killed, and at once those
        that have not connected yet."""
        with self._changed:
            self._is_closed = True
        connected = [other.process for other in self._others]
        for process in self._processes:
            if process not in connected:
                process.kill()
        for other in self._others:
            other.channel.close()
        deadline = time.monotonic() + END_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._watch is not None:
            self._watch.join()
        self._folder.cleanup()

    # ------------------------------------------------------------ starting

    @property
    def _file(self) -> Path:
        return Path(self._folder.name, "meeting")

    def _settings(self) -> dict[str, object]:
        plain: dict[str, object] = msgspec.to_builtins(self._config)
        return {name: value for name, value in plain.items() if name not in SECRETS}

    def _accept_all(
        self, listener: socket.socket, secret: bytes, go_on: Callable[[], None]
    ) -> None:
        deadline = time.monotonic() + CONNECT_S
        listener.settimeout(0.1)
        while len(self._others) < self._count - 1:
            go_on()
            for index, process in enumerate(self._processes, 1):
                if process.poll() is not None:
                    raise RankFailed(f"rank {index} ended with code {process.returncode}")
            if time.monotonic() > deadline:
                raise RankFailed(f"not all ranks connected within {CONNECT_S:g} s")
            with contextlib.suppress(OSError):
                self._accept(listener.accept()[0], secret)

    def _accept(self, connection: socket.socket, secret: bytes) -> None:
        """A connection of one of the ranks; any other is closed."""
        connection.settimeout(1.0)
        try:
            index = wire.admit(connection, secret)
        except OSError:
            index = None
        if index is None or index in (other.index for other in self._others):
            connection.close()
            return
        channel, process = wire.Channel(connection), self._processes[index - 1]
        now = time.monotonic()
        self._others.append(_Other(index=index, process=process, channel=channel, heard=now))

    def _meet(self, go_on: Callable[[], None]) -> None:
        """Wait until every rank has loaded; RankFailed where one can't."""
        with self._changed:
            while self.failure is None and not all(o.is_loaded for o in self._others):
                self._changed.wait(0.1)
                go_on()
        if self.failure is not None:
            raise self.failure
        self.send(wire.Begin())

    # ------------------------------------------------------------ the watch, a thread of its own

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for other in self._others:
                selector.register(other.channel, selectors.EVENT_READ, other)
            looked = time.monotonic()
            while self.failure is None and not self._is_closed:
                ready = selector.select(BEAT_S / 2)
                now = time.monotonic()
                was_stopped = now - looked > SILENT_S / 2  # all of them, perhaps
                looked = now
                for key, _ in ready:
                    self._receive(key.data, now)
                for other in self._others:
                    if was_stopped:
                        other.heard = now
                    if now - other.heard > SILENT_S:
                        self._fail(f"{other.name} has been silent for {SILENT_S:g} s")

    def _receive(self, other: _Other, now: float) -> None:
        try:
            message = other.channel.receive()
        except (OSError, msgspec.MsgspecError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                other.process.wait(1.0)
            code = other.process.returncode
            how = "closed its connection" if code is None else f"ended with code {code}"
            self._fail(f"{other.name} {how}")
            return
        with self._changed:
            other.heard = now
            if isinstance(message, wire.Beat):
                other.plan = message.plan
            elif isinstance(message, wire.Loaded):
                other.is_loaded = True
                log.info("%s has loaded its part in %.1f s", other.name, message.seconds)
                self._changed.notify_all()
        if isinstance(message, wire.Failed):
            self._fail(f"{other.name}: {message.error}")

    def _fail(self, why: str) -> None:
        """The first failure counts. All ranks end, so that a sum that waits for them does, too."""
        with self._changed:
            if self.failure is not None or self._is_closed:
                return
            self.failure = RankFailed(why)
            self._changed.notify_all()
        for process in self._processes:
            process.kill()
        self._died(self.failure)


def _start(rendezvous: Rendezvous) -> subprocess.Popen[bytes]:
    """The process of a rank, which gets no signal that is meant for this one."""
    command = [sys.executable, "-c", PROGRAM]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    if process.stdin is not None:
        with contextlib.suppress(OSError), process.stdin:
            process.stdin.write(msgspec.json.encode(rendezvous))
    return process
