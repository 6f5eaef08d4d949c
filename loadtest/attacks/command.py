"""`streamer loadtest attacks`: how many of its tokens a neighbour keeps during an attack.

Each attack has a fresh server. A neighbour streams answers from it, first alone and then beside the
attack, which runs in its own process (attackers.py). Prints the neighbour's share of its tokens a
second alone, its longest wait for a token, the server's memory, and what was refused or closed.
`--beside` shows an earlier run's values before the new ones.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec
from rich.console import Console

from .. import table
from ..open_loop.served import percentile
from ..processes import EngineFailed, Server, free_port
from ..sse import BadAnswer, events, started
from ..target import Target
from .attackers import PLANS, Tally
from .attackers import run as attack

OK, UNUSABLE = 0, 2
MIB = 1 << 20
SETTLE_S = 1.0  # that the neighbour streams before tokens are counted
AGAIN_S = 0.02  # between two answers of a stream
LOOK_S = 0.05  # between two readings of the server's memory
NUM_STREAMS, ANSWER_TOKENS = 4, 2000
KEYS = ("neighbour", "attacker")
SERVE = f"{sys.executable} -m streamer serve fake:tokens_per_s=200 --log-level error"


class IdChoice(msgspec.Struct):
    token_ids: list[int] | None = None


class IdChunk(msgspec.Struct):
    """The part of a completion's chunk that is needed to count tokens."""

    choices: list[IdChoice] = []


CHUNK = msgspec.json.Decoder(IdChunk)
HEADING = (
    "attack",
    "neighbour keeps",
    "max wait, s",
    "memory grows, MiB",
    "refused",
    "closed",
    "after, s (p99)",
)


class Found(msgspec.Struct, frozen=True):
    """One attack's results. share: of the tokens a second that the neighbour has alone.

    longest_s  the neighbour's longest wait for a token
    """

    name: str
    tokens_s: float
    share: float
    longest_s: float
    before_bytes: int
    peak_bytes: int
    tally: Tally


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    add = parser.add_argument
    add(
        "names",
        nargs="*",
        metavar="ATTACK",
        help=f"attacks to run; default: all of {', '.join(PLANS)}",
    )
    add("--serve", default=SERVE, metavar="COMMAND", help="command that starts the server")
    add("--seconds", type=float, default=10.0, help="duration of each attack")
    add("--out", type=Path, metavar="JSON", help="write the results to this file, for --beside")
    add("--beside", type=Path, metavar="JSON", help="results of an earlier run to compare with")
    add("--markdown", action="store_true", help="print the table as Markdown")


def run(args: argparse.Namespace, console: Console) -> int:
    """Carry out the named attacks; 2 where no server can be measured."""
    try:
        unknown = [name for name in args.names if name not in PLANS]
        if unknown:
            raise ValueError(f"unknown attack {unknown[0]!r}; choose from {', '.join(PLANS)}")
        read = msgspec.json.Decoder(list[Found]).decode
        beside = read(args.beside.read_bytes()) if args.beside else []
        found = []
        for name in args.names or PLANS:
            plan = PLANS[name]
            command, seconds = f"{args.serve} {plan.serve}", max(args.seconds, plan.seconds)
            found.append(measure(name, command, seconds))
            console.out(f"{name}: {cells(found[-1])}", highlight=False)
            if args.out:
                args.out.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    except (EngineFailed, BadAnswer, OSError, ValueError) as error:
        console.out(f"Can't go on: {error}", highlight=False)
        return UNUSABLE
    made = rows(found, {each.name: each for each in beside})
    console.out("\n" + (table.markdown if args.markdown else table.plain)(made), highlight=False)
    return OK


def measure(name: str, command: str, seconds: float) -> Found:
    """One attack on a server of its own."""
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(1, spawn) as pool,
        serving(command, Path(folder)) as (target, server),
        streaming(target) as neighbour,
    ):
        pool.submit(time.perf_counter).result()  # starts the process before counting
        time.sleep(SETTLE_S)
        alone_s, _ = neighbour.count(seconds / 2)
        if not alone_s:
            raise BadAnswer(f"{name}: the neighbour has no token before the attack begins")
        before = peak = server.resident_bytes()
        attacker = msgspec.structs.replace(target, key=KEYS[1])
        neighbour.count(0.0)
        began, work = time.monotonic(), pool.submit(attack, name, attacker, seconds)
        while time.monotonic() < began + seconds:
            peak = max(peak, server.resident_bytes())
            time.sleep(LOOK_S)
        tokens_s, longest_s = neighbour.count(0.0)
        if not server.is_running:
            raise server.failure(f"{name} ended the server")
        return Found(name, tokens_s, tokens_s / alone_s, longest_s, before, peak, work.result())


@contextlib.contextmanager
def serving(command: str, folder: Path) -> Iterator[tuple[Target, Server]]:
    """A server that accepts KEYS, and its process, which ends with the context."""
    port = free_port()
    words = [*shlex.split(command), "--host", "127.0.0.1", "--port", str(port)]
    words += ["--api-key", ",".join(KEYS)]
    with Server(words, port, dict(os.environ), folder / "log") as server:
        server.wait("/ready")
        yield Target.of(f"http://127.0.0.1:{port}", KEYS[0]), server


@contextlib.contextmanager
def streaming(target: Target) -> Iterator[Neighbour]:
    """A neighbour that streams until the context ends."""
    neighbour = Neighbour(target, target.first_model())
    for _ in range(NUM_STREAMS):
        threading.Thread(target=neighbour.stream, daemon=True).start()
    try:
        yield neighbour
    finally:
        neighbour.stop()


class Neighbour:
    """A well-behaved client: streams several answers at once and counts their tokens."""

    def __init__(self, target: Target, model: str) -> None:
        context = target.max_model_len(model) or 2 * ANSWER_TOKENS
        tokens = min(ANSWER_TOKENS, context // 2)
        body = {"model": model, "prompt": "count", "max_tokens": tokens, "stream": True}
        body |= {"ignore_eos": True, "return_token_ids": True}
        self._target = target
        self._request = target.request("POST", "/v1/completions", body)
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._since = self._last = time.monotonic()
        self._num_tokens, self._longest_s = 0, 0.0

    def stop(self) -> None:
        """Request no more answers."""
        self._is_over.set()

    def stream(self) -> None:
        """Stream one answer after the other, also after a failure."""
        while not self._is_over.wait(AGAIN_S):
            with contextlib.suppress(BadAnswer, OSError):
                _, bodies = started(self._target.read(self._request))
                for _, data in events(bodies):
                    chunk = CHUNK.decode(data)
                    self._came(sum(len(choice.token_ids or ()) for choice in chunk.choices))
                    if self._is_over.is_set():
                        return

    def count(self, seconds: float) -> tuple[float, float]:
        """Tokens a second and the longest wait for one, from the last count, after `seconds`."""
        time.sleep(seconds)
        with self._lock:
            now = time.monotonic()
            found = self._num_tokens / (now - self._since), max(self._longest_s, now - self._last)
            self._num_tokens, self._longest_s, self._since, self._last = 0, 0.0, now, now
        return found

    def _came(self, num_tokens: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._num_tokens += num_tokens
            self._longest_s = max(self._longest_s, now - self._last)
            self._last = now


def rows(found: list[Found], earlier: dict[str, Found]) -> table.Rows:
    """The table; an earlier run's value stands before the new one's."""
    made = [list(HEADING)]
    for each in found:
        was = earlier.get(each.name)
        now = cells(each)
        if was is not None:
            now = [f"{a} -> {b}" for a, b in zip(cells(was), now, strict=True)]
        made.append([f"{each.name}: {PLANS[each.name].says}", *now])
    return made


def cells(found: Found) -> list[str]:
    """One attack's values."""
    tally = found.tally
    after = f"{percentile(tally.after_s, 99):.2f}" if tally.after_s else "-"
    return [
        f"{found.share:.0%}",
        f"{found.longest_s:.2f}",
        f"{(found.peak_bytes - found.before_bytes) / MIB:.0f}",
        str(tally.refused),
        str(tally.closed),
        after,
    ]
