"""The cost of clients that never read for those that do: with flow control and without.

`streamer serve` runs in its own process with a real model; the clients here use real sockets. Some
(the stuck ones) request long answers and read nothing; the fast ones read without pause and send
the next request at each answer's end. Without flow control (`--stream-window 0`) no request is ever
paused.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import selectors
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from streamer.errors import StreamerError
from streamer.loadtest.paper.comparison import LAST_ID, Comparison, Plot, Series, checkpoint, prompt
from streamer.loadtest.paper.scheduling import share
from streamer.loadtest.sse import DONE, Lines

PUBLISHED = (
    "None: neither paper has it; this is our own design. Closest: a reader's lag reaches no other "
    "engine's scheduler; vLLM's Rust front end queued a slow reader's output without bound, and "
    "a change proposed in 2026 aborts its request at 256 queued outputs (vllm-project/vllm#56094)."
)
READ_BYTES = 1 << 16
STUCK_BYTES = 4096  # else the kernel buffers megabytes for a client that does not read
NONE = "no token came"
EVENT = b'"text":'
START_S = 120.0
WINDOW = 64  # tokens a reader may lag, where there is flow control
Body = dict[str, Any]


class Case(msgspec.Struct, frozen=True):
    """Clients that never read, their window (0: no flow control), and the pool in tokens."""

    name: str
    num_stuck: int
    window: int
    pool: int


FAKE = "fake:tokens_per_s=500"  # the model of --tiny: its answers may have any length


class Work(msgspec.Struct, frozen=True):
    """Readers, and their answers' and prompts' tokens; `stuck` tokens for those that never read.

    settle_s, measure_s  from the stuck ones' start to the readers', and the readers' duration
    """

    cases: tuple[Case, ...]
    num_fast: int = 8
    last_id: int = LAST_ID
    prompt: int = 128
    output: int = 256
    stuck: int = 3800
    settle_s: float = 8.0
    measure_s: float = 12.0


def _cases(num_stuck: int, pools: Mapping[str, int]) -> tuple[Case, ...]:
    return tuple(
        Case(f"{says}{what}", stuck, window, pool)
        for says, pool in pools.items()
        for what, stuck, window in (
            ("no slow reader", 0, WINDOW),
            ("flow control", num_stuck, WINDOW),
            ("no flow control", num_stuck, 0),
        )
    )


FULL = Work(_cases(16, {"": 72_000, "small pool, ": 12_000}))
TINY = Work(_cases(2, {"": 1 << 16}), 2, 1000, 8, 16, 20_000, 0.1, 0.3)


class Run(msgspec.Struct, frozen=True):
    """One case, over the time that the fast ones read.

    speed           output tokens a second of the fast ones, from the engine
    gaps_ms         between arrivals of one answer on a socket, and from the last to the end
    first_ms        to each answer's first event, or to the end if none came
    stuck_tokens    KV tokens that the stuck ones hold on the device at the end
    stuck_speed     tokens a second computed for the stuck ones
    grown_bytes     growth of the server's peak resident memory since before the stuck ones
    """

    speed: float
    gaps_ms: list[float]
    first_ms: list[float]
    stuck_tokens: int
    stuck_speed: float
    grown_bytes: int


def measure(progress: Callable[[str], None], *, tiny: bool = False) -> Comparison:
    """Measure every case on its own server."""
    work = TINY if tiny else FULL
    progress("making the model")
    runs = {}
    with contextlib.nullcontext(FAKE) if tiny else checkpoint(tiny=False) as model:
        for case in work.cases:
            progress(case.name)
            runs[case.name] = run_case(str(model), work, case)
    return compare(work, runs)


# ---------------------------------------------------------------- one case


def run_case(model: str, work: Work, case: Case) -> Run:
    """Start the stuck ones, then measure the fast ones beside them for `measure_s`."""
    with _serving(model, case) as (port, peak_bytes):
        warm = Readers(port, work.num_fast, work, "warm")
        warm.read(min(2.0, work.measure_s))
        warm.close()
        peak = peak_bytes()
        with contextlib.ExitStack() as stack:
            for i in range(case.num_stuck):
                sock = stack.enter_context(socket.socket())
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, STUCK_BYTES)
                sock.connect(("127.0.0.1", port))
                sock.sendall(request(prompt(work.prompt, f"stuck {i}", work.last_id), work.stuck))
            time.sleep(work.settle_s if case.num_stuck else 0.0)
            readers = Readers(port, work.num_fast, work, "fast")
            before = counts(engine(port), work.stuck, case.num_stuck)
            began = time.perf_counter()
            readers.read(work.measure_s)
            took_s = time.perf_counter() - began
            after = counts(engine(port), work.stuck, case.num_stuck)
            readers.close()
            grown = peak_bytes() - peak
    speed = (after.others - before.others) / took_s
    stuck = (after.stuck - before.stuck) / took_s
    return Run(speed, readers.gaps_ms, readers.first_ms, after.held, stuck, grown)


@contextlib.contextmanager
def _serving(model: str, case: Case) -> Iterator[tuple[int, Callable[[], int]]]:
    """The server's port, and a function that returns its peak resident memory in bytes."""
    from streamer.loadtest.processes import Server, free_port

    port = free_port()
    flags = {
        "model": model,
        "device": "cpu",
        "port": port,
        "stream-window": case.window,
        "pause-timeout": 600,
        "max-num-seqs": 32,
        "max-num-batched-tokens": 512,
        "num-gpu-blocks-override": case.pool // 16,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    root = str(Path(__file__).absolute().parents[3])
    environment = {**os.environ, "PYTHONPATH": root}  # the server starts in its log's folder
    command = [sys.executable, "-m", "streamer", "serve", *words]
    with (
        tempfile.TemporaryDirectory() as place,
        Server(command, port, environment, Path(place) / "server.log") as server,
    ):
        server.wait("/ready", START_S)
        yield port, server.peak_bytes


class Counts(msgspec.Struct, frozen=True):
    """Output tokens so far of the stuck and of all others, and the KV tokens of the stuck."""

    stuck: int
    others: int
    held: int


def engine(port: int) -> Body:
    """GET /v1/engine's part of the scheduler."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/v1/engine")
    body: Body = msgspec.json.decode(connection.getresponse().read())
    connection.close()
    scheduler: Body = body["scheduler"]
    return scheduler


def counts(scheduler: Body, stuck_tokens: int, num_stuck: int) -> Counts:
    """Counts; stuck requests are known by their max_tokens. StreamerError if one has ended."""
    found = [one for one in scheduler["requests"] if one["max_tokens"] == stuck_tokens]
    if len(found) != num_stuck:
        raise StreamerError(f"{len(found)} of {num_stuck} unread answers were found")
    stuck = held = 0
    for one in found:
        stuck += sum(s["tokens"] - one["prompt_tokens"] for s in one["sequences"])
        held += sum(s["num_blocks"] for s in one["sequences"]) * scheduler["block_size"]
    return Counts(stuck, scheduler["stats"]["generated_tokens"] - stuck, held)


def request(ids: list[int], max_tokens: int) -> bytes:
    """A streamed completion over HTTP/1.1, kept alive."""
    fields = {"prompt": ids, "max_tokens": max_tokens, "temperature": 0.0}
    body = msgspec.json.encode(fields | {"stream": True, "ignore_eos": True})
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    )


class Reader:
    """One socket that sends the next request when an answer ends, and records event times."""

    def __init__(self, port: int, work: Work, seed: str) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.gaps_ms: list[float] = []
        self.first_ms: list[float] = []
        self._work = work
        self._seed = seed
        self._number = 0
        self._lines = Lines()
        self._ask()

    def _ask(self) -> None:
        self._number += 1
        ids = prompt(self._work.prompt, f"{self._seed} {self._number}", self._work.last_id)
        self.socket.sendall(request(ids, self._work.output))
        self._asked = time.perf_counter()
        self._seen = 0.0  # nothing of this answer yet

    def take(self, data: bytes, now: float) -> None:
        """Process the bytes of a read."""
        events = self._lines.feed(data)
        if any(EVENT in event for event in events):
            self._note(now)
        if DONE in events:
            self._ask()

    def _note(self, now: float) -> None:
        if self._seen:
            self.gaps_ms.append((now - self._seen) * 1e3)
        else:
            self.first_ms.append((now - self._asked) * 1e3)
        self._seen = now

    def end(self, now: float) -> None:
        """Count the pending wait (for a first event or the next) up to `now`."""
        self._note(now)
        self.socket.close()


class Readers:
    """All fast clients, read by this thread."""

    def __init__(self, port: int, count: int, work: Work, seed: str) -> None:
        self._readers = [Reader(port, work, f"{seed} {i}") for i in range(count)]

    def read(self, seconds: float) -> None:
        """Read and send requests for `seconds`."""
        with selectors.DefaultSelector() as selector:
            for reader in self._readers:
                selector.register(reader.socket, selectors.EVENT_READ, reader)
            end = time.perf_counter() + seconds
            while (left := end - time.perf_counter()) > 0:
                for key, _ in selector.select(left):
                    data = key.data.socket.recv(READ_BYTES)
                    if not data:
                        raise StreamerError("the server closed a stream")
                    key.data.take(data, time.perf_counter())

    def close(self) -> None:
        """Close all sockets."""
        for reader in self._readers:
            reader.end(time.perf_counter())

    @property
    def gaps_ms(self) -> list[float]:
        return [gap for reader in self._readers for gap in reader.gaps_ms]

    @property
    def first_ms(self) -> list[float]:
        return [first for reader in self._readers for first in reader.first_ms]


# ---------------------------------------------------------------- what is shown


def compare(work: Work, runs: dict[str, Run]) -> Comparison:
    """The table and its finding."""
    rows = [
        (
            name,
            run.speed,
            *(_part(run.gaps_ms, part) for part in (0.5, 0.99, 1.0)),
            *(_part(run.first_ms, part) for part in (0.5, 1.0)),
            run.stuck_speed,
            run.stuck_tokens,
            run.grown_bytes / (1 << 20),
        )
        for name, run in runs.items()
    ]
    return Comparison(
        name="flow",
        title="Flow control: fast readers beside slow ones",
        published=PUBLISHED,
        columns=(
            "beside the fast readers",
            "their tokens/s",
            "between arrivals: p50, ms",
            "p99, ms",
            "longest, ms",
            "first token: p50, ms",
            "longest, ms",
            "tokens/s computed for slow ones",
            "tokens of KV the slow hold",
            "server's peak memory grew, MiB",
        ),
        rows=tuple(rows),
        finding=_finding(runs),
        setting=_setting(work),
        plot=_plot(work, runs),
    )


def _plot(work: Work, runs: Mapping[str, Run]) -> Plot:
    """A group of bars per pool; the first pool's cases name the bars."""
    pools: dict[int, list[Case]] = {}
    for case in work.cases:
        pools.setdefault(case.pool, []).append(case)
    by_kind = list(zip(*pools.values(), strict=True))
    series = tuple(
        Series(cases[0].name, tuple((i, runs[c.name].speed) for i, c in enumerate(cases)))
        for cases in by_kind
    )
    ticks = tuple(f"{pool:,} tokens" for pool in pools)
    return Plot("bars", "KV pool", "tokens/s of the fast readers", series, ticks)


def _part(values: list[float], part: float) -> float | str:
    return share(values, part) if values else NONE


def _ms(values: list[float], part: float) -> str:
    return f"{share(values, part):,.0f} ms" if values else NONE


def _finding(runs: dict[str, Run]) -> str:
    names = list(runs)
    parts = []
    for i in range(0, len(names), 3):
        alone, on, off = (runs[name] for name in names[i : i + 3])
        where = names[i].removesuffix("no slow reader") or "a pool with room for all: "
        parts.append(
            f"{where.replace(', ', ': ')}with flow control fast readers keep "
            f"{on.speed / alone.speed:.0%} of the tokens/s they have alone, without it "
            f"{off.speed / alone.speed:.0%}; p99 between arrivals is {_ms(on.gaps_ms, 0.99)} and "
            f"{_ms(off.gaps_ms, 0.99)} (alone {_ms(alone.gaps_ms, 0.99)}), the longest wait for a "
            f"first token {_ms(on.first_ms, 1.0)} and {_ms(off.first_ms, 1.0)}"
        )
    text = ". ".join(part[0].upper() + part[1:] for part in parts)
    return f"{text}."


def _setting(work: Work) -> str:
    slow = max(case.num_stuck for case in work.cases)
    pools = " and ".join(f"{pool:,}" for pool in dict.fromkeys(case.pool for case in work.cases))
    return (
        f"The model is `small` (8 layers, hidden 512, random weights, bfloat16) behind `streamer "
        f"serve`, completions over SSE. {slow} clients ask for {work.stuck} tokens each and never "
        f"read; {work.settle_s:g} s later {work.num_fast} readers, {work.prompt} prompt tokens and "
        f"{work.output} of output an answer, one after the other for {work.measure_s:g} s. Pools "
        f"for {pools} tokens; a window of {WINDOW} tokens, or 0: no flow control. One run a case."
    )
