"""`streamer bench stream`: the streaming layer by itself, from the step's output to the socket.

The real server over the fake model in one process, a client that only counts bytes in another, each
on a core of its own where there are two. Every case runs twice: as fast as it goes, and with the
tokens at a set rate a little below that. loadtest/inside/README.md says how each figure is taken.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from streamer.errors import StreamerError
from streamer.loadtest.inside.stream import client as stream_client
from streamer.loadtest.inside.stream import plain as stream_plain
from streamer.loadtest.inside.stream import server as stream_server
from streamer.loadtest.inside.stream.client import TRANSPORTS, Began, Counted, Opened
from streamer.loadtest.inside.stream.server import Mark, Ready, Steps
from streamer.loadtest.table import terminal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MAX_TOKENS = 99_000  # of a stream: up to here the fake model's numbers are one token each
STEADY_S = 30.0  # maximum wait until every stream has a token a step
SETTLE_S = 0.5  # wait after that
ANSWER_S = 120.0  # a process without output for this time is killed
IDLE_RATE = 0.005  # tokens a second: no token is drawn while the memory is read
ACTIVE_RATE = 20.0
T = TypeVar("T")


class StreamCase(msgspec.Struct, frozen=True):
    """One case; a delta is an event of its own with the text of one token, or more if it is late.

    rate            tokens a second asked of each stream; 0: as fast as it goes
    has_journal     the server writes a journal, in a temporary folder
    tokens_per_s    of all streams, from the engine;  events_per_s  that arrived at the client
    loop_cpu_us, process_cpu_us   of the loop's thread and of the whole server, an event
    deliver_*_ms    from the step's end on the GPU thread to the client, of single tokens; None if
                    none was sampled while every stream had one a step
    lag_*_ms        from the step's end until the loop takes its output
    client_load     share of one core that the client used
    client_busy     share of the time in which it read, instead of polling in vain
    """

    transport: str
    num_streams: int
    rate: float
    tokens_per_s: float
    events_per_s: float
    loop_cpu_us: float
    process_cpu_us: float
    deliver_p50_ms: float | None
    deliver_p99_ms: float | None
    lag_p50_ms: float | None
    lag_p99_ms: float | None
    client_load: float
    client_busy: float
    num_samples: int
    has_journal: bool = False


class Yardstick(msgspec.Struct, frozen=True):
    """uvicorn alone, as fast as it goes: prebuilt events over as many sockets. As in StreamCase."""

    transport: str
    num_streams: int
    events_per_s: float
    loop_cpu_us: float
    client_load: float
    client_busy: float


class Memory(msgspec.Struct, frozen=True):
    """Resident KiB a stream: waiting for its first token, and after `num_tokens` of them."""

    transport: str
    num_streams: int
    idle_kib: float
    active_kib: float
    num_tokens: int


class Report(msgspec.Struct, frozen=True):
    """All that was measured.

    is_pinned  server and client had a core each
    num_stuck  clients that never read, beside the streams of every case
    """

    is_pinned: bool
    seconds: float
    cases: list[StreamCase]
    yardsticks: list[Yardstick]
    memory: list[Memory]
    num_stuck: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The cases and their duration."""
    parser.add_argument(
        "--streams",
        type=_numbers,
        default=(1, 16, 256, 1024),
        help="numbers of streams at once (1,16,256,1024)",
    )
    parser.add_argument(
        "--transports",
        type=_transports,
        default=tuple(TRANSPORTS),
        help="sse; ws: one socket per stream; ws16: 16 lanes per socket (all three)",
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of each run (3)")
    parser.add_argument(
        "--load",
        type=float,
        default=0.9,
        help="rate of the paced run, as a share of the maximum (0.9)",
    )
    parser.add_argument(
        "--rate",
        type=float,
        help="rate of the paced run in tokens per second of all streams, instead of --load",
    )
    parser.add_argument(
        "--slow-readers", type=_count, default=0, help="additional clients that never read (0)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write all figures to this file"
    )
    parser.add_argument(
        "--journal", action="store_true", help="run each case a second time, with a journal"
    )
    parser.add_argument(
        "--replicas",
        type=_count,
        default=0,
        help="engines in so many other processes, on other cores than the server (0: in its own)",
    )
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory")


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure every case; each row is printed at once."""
    from rich.live import Live

    cases: list[StreamCase] = []
    yardsticks: list[Yardstick] = []
    memory: list[Memory] = []
    with Live(_table(args.seconds, [], []), console=console, auto_refresh=False) as live:
        for transport in args.transports:
            for num_streams in args.streams:
                if num_streams % TRANSPORTS[transport]:
                    continue  # too few to fill a socket
                yardsticks.append(measure_uvicorn(transport, num_streams, args.seconds))
                for rate in (0.0, None):
                    if rate is None:
                        below = cases[-1 - args.journal].events_per_s * args.load
                        rate = (below if args.rate is None else args.rate) / num_streams
                    for has_journal in (False, True)[: 1 + args.journal]:
                        run = Run(
                            *(transport, num_streams, rate, args.slow_readers, has_journal),
                            num_replicas=args.replicas,
                        )
                        cases.append(measure(run, args.seconds))
                        live.update(_table(args.seconds, cases, yardsticks), refresh=True)
    if not args.no_memory:
        max_streams = max(args.streams)
        memory = [
            measure_memory(t, max_streams)
            for t in args.transports
            if not max_streams % TRANSPORTS[t]
        ]
        console.print("\n", _memory_table(memory))
    if args.json is not None:
        is_pinned = cores()[0] is not None
        report = Report(is_pinned, args.seconds, cases, yardsticks, memory, args.slow_readers)
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    return 0


def cores() -> tuple[int | None, int | None]:
    """A core for the server and one for the client, where there are two to choose from."""
    if sys.platform != "linux":
        return None, None
    allowed = sorted(os.sched_getaffinity(0))
    return (allowed[0], allowed[1]) if len(allowed) > 1 else (None, None)


class Run(NamedTuple):
    """A case to measure, beside `num_stuck` clients that never read."""

    transport: str
    num_streams: int
    rate: float
    num_stuck: int = 0
    has_journal: bool = False
    num_replicas: int = 0


def measure(run: Run, seconds: float) -> StreamCase:
    """One run of one case."""
    transport, num_streams, rate, num_stuck, has_journal, _ = run
    with (
        tempfile.TemporaryDirectory() as folder,
        _server(run, folder if has_journal else "") as (server, port),
        _client(port, transport, num_streams, num_stuck) as client,
    ):
        before = _settled(server)
        client.ask("begin", Began)
        time.sleep(seconds)
        after = server.ask("mark", Mark)
        counted = client.ask("end", Counted)  # the client reads nothing while it computes this
        steps = server.ask("steps", Steps)
    took_s = after.at - before.at
    events_per_s = counted.events / counted.took_s
    delays = sorted(_delays(steps, counted))
    lags = sorted(steps.lag_s[before.num_steps : after.num_steps])
    return StreamCase(
        transport=transport,
        num_streams=num_streams,
        rate=rate,
        has_journal=has_journal,
        tokens_per_s=(after.num_tokens - before.num_tokens) / took_s,
        events_per_s=events_per_s,
        loop_cpu_us=(after.loop_cpu_s - before.loop_cpu_s) / took_s / events_per_s * 1e6,
        process_cpu_us=(after.process_cpu_s - before.process_cpu_s) / took_s / events_per_s * 1e6,
        deliver_p50_ms=_share_ms(delays, 0.5),
        deliver_p99_ms=_share_ms(delays, 0.99),
        lag_p50_ms=_share_ms(lags, 0.5),
        lag_p99_ms=_share_ms(lags, 0.99),
        client_load=counted.cpu_s / counted.took_s,
        client_busy=1 - counted.idle_s / counted.took_s,
        num_samples=len(delays),
    )


def measure_uvicorn(transport: str, num_streams: int, seconds: float) -> Yardstick:
    """uvicorn alone over the sockets of one case."""
    order = stream_plain.Order(transport, cores()[0])
    with (
        contextlib.closing(Process(stream_plain.__name__, order)) as server,
        _client(server.wait(Ready).port, transport, num_streams) as client,
    ):
        time.sleep(SETTLE_S)
        before = server.ask("mark", Mark)
        client.ask("begin", Began)
        time.sleep(seconds)
        after = server.ask("mark", Mark)
        counted = client.ask("end", Counted)
    events_per_s = counted.events / counted.took_s
    return Yardstick(
        transport=transport,
        num_streams=num_streams,
        events_per_s=events_per_s,
        loop_cpu_us=(after.loop_cpu_s - before.loop_cpu_s)
        / (after.at - before.at)
        / events_per_s
        * 1e6,
        client_load=counted.cpu_s / counted.took_s,
        client_busy=1 - counted.idle_s / counted.took_s,
    )


def _settled(server: Process) -> Mark:
    """Counts, once every stream gets a token a step."""
    end = time.monotonic() + STEADY_S
    while not server.ask("mark", Mark).is_steady and time.monotonic() < end:
        time.sleep(SETTLE_S / 10)
    time.sleep(SETTLE_S)
    return server.ask("mark", Mark)


def measure_memory(transport: str, num_streams: int) -> Memory:
    """A stream's share of the server's resident memory, idle and active."""
    grown, num_tokens = [], 0
    for rate in (IDLE_RATE, ACTIVE_RATE):
        with _server(Run(transport, num_streams, rate)) as (server, port):
            with _client(port, transport, 1):
                pass  # memory that the first request allocates for good is not a stream's
            before = server.ask("mark", Mark)
            with _client(port, transport, num_streams):
                time.sleep(2 * SETTLE_S)
                after = server.ask("mark", Mark)
        grown.append((after.rss_bytes - before.rss_bytes) / num_streams / 1024)
        num_tokens = (after.num_tokens - before.num_tokens) // num_streams
    return Memory(transport, num_streams, grown[0], grown[1], num_tokens)


def _delays(steps: Steps, counted: Counted) -> Iterator[float]:
    """Seconds from the step that drew a sampled token to its arrival.

    Only of tokens drawn since every stream has one a step: there the step follows from the index.
    """
    if steps.steady_from < 0:
        return
    before = {_digits(name): count for name, count in steps.before.items()}
    for name, token, arrived in counted.samples:
        since = token - before[name]
        if since >= 0:
            yield arrived - steps.sent[steps.steady_from + since]


def _digits(request_id: str) -> str:
    """The id without its prefix, which each transport writes in its own way."""
    return request_id.replace("_", "-").rpartition("-")[2]


def _share_ms(ordered: list[float], share: float) -> float | None:
    return ordered[int(share * (len(ordered) - 1))] * 1e3 if ordered else None


# ---------------------------------------------------------------- the two processes


class Process:
    """A process that answers in lines of JSON."""

    def __init__(self, module: str, order: msgspec.Struct) -> None:
        self._name = module.rpartition(".")[2]
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, msgspec.json.encode(order).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(self, command: str, answer: type[T]) -> T:
        """Send a command and wait for its answer."""
        stdin = self._process.stdin
        if stdin is not None:
            stdin.write(command.encode() + b"\n")
            stdin.flush()
        return self.wait(answer)

    def wait(self, answer: type[T]) -> T:
        """The next line; StreamerError if the process ended or hangs instead."""
        stdout = self._process.stdout
        timer = threading.Timer(ANSWER_S, self._process.kill)
        timer.start()
        line = b"" if stdout is None else stdout.readline()
        timer.cancel()
        if not line:
            raise StreamerError(f"{self._name} ended; what it wrote above says why")
        return msgspec.json.decode(line, type=answer)

    def close(self) -> None:
        """Kill the process; nothing in it needs saving."""
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def _server(run: Run, journal: str = "") -> Iterator[tuple[Process, int]]:
    """The server and its port."""
    order = stream_server.Order(
        run.num_streams,
        MAX_TOKENS,
        run.rate,
        cores()[0],
        run.num_stuck,
        journal,
        run.num_replicas,
    )
    with contextlib.closing(Process(stream_server.__name__, order)) as process:
        yield process, process.wait(Ready).port


@contextlib.contextmanager
def _client(port: int, transport: str, num_streams: int, num_stuck: int = 0) -> Iterator[Process]:
    """The client, all streams open."""
    core = cores()[1]
    order = stream_client.Order(port, transport, num_streams, MAX_TOKENS, core, num_stuck)
    with contextlib.closing(Process(stream_client.__name__, order)) as process:
        process.wait(Opened)
        yield process


# ---------------------------------------------------------------- what is shown


HEADING = (
    *("over", "streams", "asked", "events/s", "uvicorn", "tokens", "loop"),
    *("deliver", "", "lag", "client"),
)


def _table(seconds: float, cases: Sequence[StreamCase], yardsticks: Sequence[Yardstick]) -> Table:
    title = (
        f"{seconds:g} s a run; events/s as a share of uvicorn's, tokens and loop's us an event; "
        f"delivery p50 and p99, lag p99 in ms; share of the client's time"
    )
    rows: list[tuple[str, ...]] = [HEADING]
    for y in yardsticks:
        rows.append(
            (
                *(y.transport, f"{y.num_streams:,}", "uvicorn", f"{y.events_per_s:,.0f}"),
                *("1.00", "-", f"{y.loop_cpu_us:.1f}", "-", "-", "-", f"{y.client_busy:.0%}"),
            )
        )
        same = (y.transport, y.num_streams)
        rows += [_cells(m, y) for m in cases if (m.transport, m.num_streams) == same]
    return terminal(rows, title)


def _cells(m: StreamCase, y: Yardstick) -> tuple[str, ...]:
    times = (m.deliver_p50_ms, m.deliver_p99_ms, m.lag_p99_ms)
    return (
        m.transport + " journal" * m.has_journal,
        f"{m.num_streams:,}",
        f"{m.rate * m.num_streams:,.0f}" if m.rate else "fastest",
        f"{m.events_per_s:,.0f}",
        f"{m.events_per_s / y.events_per_s:.2f}",
        f"{m.tokens_per_s / m.events_per_s:.2f}",
        f"{m.loop_cpu_us:.1f}",
        *("-" if t is None else f"{t:.2f}" for t in times),
        f"{m.client_busy:.0%}",
    )


def _memory_table(memory: Sequence[Memory]) -> Table:
    rows = [("transport", "streams", "idle", "active", "after tokens")]
    for m in memory:
        idle, active = f"{m.idle_kib:.1f}", f"{m.active_kib:.1f}"
        rows.append((m.transport, f"{m.num_streams:,}", idle, active, f"{m.num_tokens:,}"))
    return terminal(rows, "resident KiB a stream")


# ---------------------------------------------------------------- flags


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(_count(part) for part in text.split(","))
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"must be numbers above 0, not {text!r}")
    return numbers


def _count(text: str) -> int:
    if not text.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"must be whole numbers, not {text!r}")
    return int(text)


def _transports(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(TRANSPORTS):
        raise argparse.ArgumentTypeError(f"{text} is not one of {', '.join(TRANSPORTS)}")
    return names
