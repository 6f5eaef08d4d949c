"""The first rank's side: starts the other ranks, lets them in, and notices when one is gone.

Those of this host are processes that it starts, those of other hosts connect by themselves
(node.py). Each sends a beat every second; one that is silent, ends or fails is an engine death that
names it, within seconds also while nothing runs. Called by runner.py.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec
import torch

from streamer.config import SECRET
from streamer.errors import ConfigError, RankFailed
from streamer.handshake import challenge, read_secret
from streamer.model.ranks import processes, wire
from streamer.model.ranks.group import LOOPBACK, Group, Seat
from streamer.model.ranks.reception import Reception
from streamer.model.ranks.store import FirstStore
from streamer.model.ranks.worker import BEAT_S

if TYPE_CHECKING:
    from streamer.config import Config

log = logging.getLogger(__name__)

SILENT_S = 5.0  # without a beat
CONNECT_S = 60.0  # to import torch and connect, on a busy machine
HOSTS_S = 1800.0  # that other hosts may take to begin, which are started one by one
TELL_S = 30.0  # between two lines of the log about ranks that are missing
REASON_S = 1.0  # after a failed sum, until the watch has seen which rank it was


class Other(msgspec.Struct, kw_only=True):
    """Another rank, as this one knows it.

    process  of this host; None: it runs on another one
    layers   that it has loaded
    weights  the digest of its checkpoint, when it has loaded
    stumbled what its last step failed of, until the ranks have met again
    """

    index: int
    channel: wire.Channel
    who: str
    process: subprocess.Popen[bytes] | None
    heard: float = 0.0
    plan: int = 0
    layers: int = 0
    weights: bytes | None = None
    is_ready: bool = False
    stumbled: wire.Stumbled | None = None

    @property
    def name(self) -> str:
        return f"rank {self.index} ({self.who})"


class Leader:
    """The other ranks. `failure`: what ended one of them, and so all.

    died  called, from any thread, when another rank is gone
    """

    def __init__(self, config: Config, died: Callable[[Exception], None]) -> None:
        self._config = config
        self._died = died
        self._count = config.tensor_parallel_size
        self._on_host = self._count // config.nnodes
        self._processes: list[subprocess.Popen[bytes]] = []
        self._others: list[Other] = []
        self._changed = threading.Condition()
        self._is_closed = False
        self._watch: threading.Thread | None = None
        self._store = FirstStore(CONNECT_S)
        self._meetings = 0
        self._group: Group | None = None
        self.failure: RankFailed | None = None

    @property
    def layers(self) -> dict[int, int]:
        """How many layers each other rank has loaded."""
        return {other.index: other.layers for other in self._others}

    def start(self, device: torch.device, weights: bytes, go_on: Callable[[int], None]) -> Group:
        """Start the ranks and the watch; this rank's group, in which `meet` waits until all have
        loaded.

        weights  the digest of the checkpoint, which is every rank's
        go_on    called now and then, also while the others load; may raise to end that
        """
        address, port, secret = self._where()
        try:
            reception = Reception(address, port, secret)
        except OSError as error:
            where = f"{address}:{port}: {error.strerror}"
            raise ConfigError(f"master_addr: {where}", param="master_addr") from error
        with reception:
            for index in range(1, self._on_host):
                self._processes.append(
                    processes.start(
                        processes.Rendezvous(
                            index=index,
                            on_host=self._on_host,
                            address=address,
                            port=reception.port,
                            secret=secret,
                        )
                    )
                )
            self._let_in(reception, go_on)
        plain = msgspec.to_builtins(self._config)
        settings = {name: value for name, value in plain.items() if name not in SECRET}
        self.send(wire.Setup(settings))
        self._watch = threading.Thread(target=self._run, name="streamer-ranks", daemon=True)
        self._watch.start()
        seat = Seat(0, self._count, self._on_host, address, device)
        try:
            self._group = group = Group(seat, self._store)
        except Exception as error:
            raise self.reason(error) from error
        group.meet = lambda: self._meet(weights, go_on)
        return group

    def send(self, message: wire.Message) -> None:
        """To every other rank; OSError where one has gone."""
        if not self._others:
            return
        data = self._others[0].channel.encode(message)
        for other in self._others:
            other.channel.send_encoded(data)

    def wait_ready(self, go_on: Callable[[int], None]) -> None:
        """Wait until every rank waits for plans; RankFailed where one can't."""
        self._wait(lambda: all(other.is_ready for other in self._others), go_on)

    def reason(self, error: Exception) -> Exception:
        """Why a sum failed here, or a message could not be sent: the rank that is gone, stumbled or
        is furthest behind."""
        with self._changed:
            self._changed.wait_for(self._is_clear, REASON_S)
            if self.failure is None and not self._is_clear():
                standing = [other for other in self._others if other.stumbled is None]
                last = min(standing, key=lambda other: other.plan)
                self._fail(f"{last.name} hangs in plan {last.plan}")
            if self.failure is not None:
                return self.failure
            for other in self._others:
                if other.stumbled is not None and not other.stumbled.is_other:
                    kind = MemoryError if other.stumbled.is_memory else RuntimeError
                    return kind(f"{other.name}: {other.stumbled.error}")
        return RuntimeError(f"a connection between two ranks broke: {error}")

    def meet_again(self, launched: int) -> None:
        """Let all ranks forget what they had and meet anew; RankFailed where one can't."""
        self._meetings += 1
        for other in self._others:
            other.is_ready = False
        try:
            self.send(wire.Reset(launched, self._meetings))
            if self._group is not None:
                self._group.meet_again(self._meetings)
        except Exception as error:
            raise self.reason(error) from error
        self.wait_ready(lambda _: None)

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
            other.channel.cut()
        processes.end(self._processes)
        if self._watch is not None:
            self._watch.join()
        for other in self._others:
            other.channel.close()

    # ------------------------------------------------------------ starting

    def _where(self) -> tuple[str, int, bytes]:
        """Address and port to listen at, and the secret; ConfigError where they can't be found."""
        config = self._config
        if config.nnodes == 1:
            return LOOPBACK, 0, challenge()
        return (*resolve(config), read_secret(config.ranks_secret_file or "", "ranks_secret_file"))

    def _let_in(self, reception: Reception, go_on: Callable[[int], None]) -> None:
        began = told = time.monotonic()
        while missing := set(range(1, self._count)) - {other.index for other in self._others}:
            go_on(0)
            for index, process in enumerate(self._processes, 1):
                if process.poll() is not None:
                    raise RankFailed(f"rank {index} ended with code {process.returncode}")
            now = time.monotonic()
            is_slow = min(missing) < self._on_host and now - began > CONNECT_S
            if is_slow or now - began > HOSTS_S:
                raise RankFailed(f"{_named(missing)} did not connect within {now - began:.0f} s")
            if now - told > TELL_S:
                told = now
                log.info("waiting for %s", _named(missing))
            for index, connection in reception.arrivals(0.1):
                self._welcome(index, connection)

    def _welcome(self, index: int, connection: socket.socket) -> None:
        if not 0 < index < self._count:
            connection.close()
            return
        for before in [other for other in self._others if other.index == index]:
            log.warning("%s came again", before.name)  # its host was started again meanwhile
            before.channel.close()
            self._others.remove(before)
        channel = wire.Channel(connection, SILENT_S)
        process = self._processes[index - 1] if index < self._on_host else None
        try:
            joined = channel.expect(wire.Joined)
        except (OSError, msgspec.MsgspecError) as error:
            channel.close()
            log.warning("rank %d has gone again: %s", index, error)
            return
        who = f"process {joined.process}" + ("" if process else f" on {joined.host}")
        other = Other(index=index, channel=channel, who=who, process=process)
        self._others.append(other)
        if joined.dialect != wire.dialect():
            raise RankFailed(f"{other.name} runs another version of this program")

    def _meet(self, weights: bytes, go_on: Callable[[int], None]) -> None:
        """Wait until every rank has loaded the same weights; RankFailed where one can't."""
        self._wait(lambda: all(other.weights is not None for other in self._others), go_on)
        for other in self._others:
            if other.weights != weights:
                raise RankFailed(f"{other.name} has another checkpoint than the first rank")
        self.send(wire.Begin())

    def _wait(self, is_done: Callable[[], bool], go_on: Callable[[int], None]) -> None:
        with self._changed:
            while self.failure is None and not is_done():
                self._changed.wait(0.1)
                go_on(0)
        if self.failure is not None:
            raise self.failure

    # ------------------------------------------------------------ the watch, a thread of its own

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for other in self._others:
                selector.register(other.channel, selectors.EVENT_READ, other)
            looked = time.monotonic()
            for other in self._others:
                other.heard = looked  # it may have waited long for other hosts
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

    def _receive(self, other: Other, now: float) -> None:
        try:
            message = other.channel.receive()
            if isinstance(message, wire.Put):
                self._store.put(message.key, message.value)
            elif isinstance(message, wire.Ask):
                channel = other.channel
                self._store.ask(message.key, lambda value: channel.send(wire.Value(value)))
        except (OSError, msgspec.MsgspecError):
            self._fail(f"{other.name} {_how_it_ended(other.process)}")
            return
        with self._changed:
            other.heard = now
            self._heard(other, message)
            self._changed.notify_all()
        if isinstance(message, wire.Failed):
            self._fail(f"{other.name}: {message.error}")

    def _heard(self, other: Other, message: wire.Message) -> None:
        if isinstance(message, wire.Beat):
            other.plan = message.plan
        elif isinstance(message, wire.Loading):
            other.layers = message.layers
        elif isinstance(message, wire.Loaded):
            other.weights = message.weights
            log.info("%s has loaded its part in %.1f s", other.name, message.seconds)
        elif isinstance(message, wire.Stumbled):
            other.stumbled = message
        elif isinstance(message, wire.Ready):
            other.is_ready, other.stumbled = True, None

    def _is_clear(self) -> bool:
        """Whether it is known which rank a failed sum was due to."""
        stumbled = [other.stumbled for other in self._others]
        return (
            self.failure is not None or all(stumbled) or any(s and not s.is_other for s in stumbled)
        )

    def _fail(self, why: str) -> None:
        """The first failure counts. All ranks end, so that a sum that waits for them does, too."""
        with self._changed:
            if self.failure is not None or self._is_closed:
                return
            self.failure = RankFailed(why)
            self._changed.notify_all()
        self._store.end()
        for process in self._processes:
            process.kill()
        for other in self._others:
            other.channel.cut()
        if self._group is not None and not self._group.can_meet_again:
            self._group.leave()  # else the device would wait for ever
        self._died(self.failure)


def resolve(config: Config) -> tuple[str, int]:
    """The address and port at which the first rank listens for other hosts."""
    name = config.master_addr or ""
    try:
        found = socket.getaddrinfo(name, config.master_port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"master_addr: {name}: {error}", param="master_addr") from error
    return str(found[0][4][0]), config.master_port


def _named(indices: Iterable[int]) -> str:
    """rank 3, or: ranks 4, 5."""
    numbers = sorted(indices)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _how_it_ended(process: subprocess.Popen[bytes] | None) -> str:
    if process is None:
        return "closed its connection"
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
    code = process.returncode
    return "closed its connection" if code is None else f"ended with code {code}"
