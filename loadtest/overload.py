"""`streamer loadtest overload`: ten times the requests that a server can answer, for two minutes.

Measures the most answers a second with clients that wait for each other, then sends requests at ten
times that rate whether or not they are answered, then a tenth of it. Prints the share of answers
that is left, how refusals look and how soon they come, and when the server is as before; exit code
1 where a goal is missed. The server is started here, or is one at `--url`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from rich.console import Console

from . import table
from .open_loop.served import percentile
from .processes import EngineFailed, Server, free_port
from .replies import read_reply
from .sse import BadAnswer, Head, Read, split, whole
from .target import Target

OK, FAILED, UNUSABLE = 0, 1, 2
T = TypeVar("T")
SERVE = f"{sys.executable} -m streamer serve fake:tokens_per_s=200 --max-num-seqs 8"
FACTOR, AFTER_S, WARMUP_S = 10, 10.0, 3.0
AGAIN_S = 0.05  # after a refusal, while the best rate is measured
SHOW_S = 10.0
# The goals: of the best rate; of refusals (p99); after the last request.
GOOD_SHARE, REFUSED_S, RECOVERY_S = 0.9, 0.05, 5.0
CALM = 3.0  # times the median answer at the best rate: a server as before


class Outcome(msgspec.Struct, frozen=True):
    """A request's: seconds on time.perf_counter, `why` where it is wrong."""

    kind: Literal["answered", "refused", "wrong"]
    asked_s: float
    ended_s: float
    why: str = ""

    @property
    def took_s(self) -> float:
        return self.ended_s - self.asked_s


class Refusal(msgspec.Struct):
    """The part of an error's body that every client of OpenAI's API reads."""

    message: str
    type: str
    code: str


class RefusalBody(msgspec.Struct):
    error: Refusal


class Found(msgspec.Struct, frozen=True):
    """The results. best: answers a second; share: of it, under overload; worst: of its parts.

    sent        requests under overload;  late_s  how late they were sent (p99)
    refused_s   (p50, p99);  recovery_s  None: not within AFTER_S
    """

    best: float
    share: float
    worst: float
    sent: int
    late_s: float
    answer_s: float
    refused: int
    refused_s: tuple[float, float]
    wrong: list[str]
    recovery_s: float | None

    @property
    def missed(self) -> list[str]:
        """The goals that were missed."""
        is_slow = self.recovery_s is None or self.recovery_s > RECOVERY_S
        found = {
            f"goodput below {GOOD_SHARE:.0%}": self.share < GOOD_SHARE,
            f"refusals above {REFUSED_S * 1e3:g} ms": self.refused_s[1] > REFUSED_S,
            f"{len(self.wrong)} requests neither answered nor refused": bool(self.wrong),
            f"no recovery within {RECOVERY_S:g} s": is_slow,
        }
        return [goal for goal, is_missed in found.items() if is_missed]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    add = parser.add_argument
    add("--url", default="", help="base URL of a server that runs; default: one is started")
    add("--serve", default=SERVE, metavar="COMMAND", help="command that starts the server")
    add("--seconds", type=float, default=120.0, help="duration of the overload")
    add("--best-seconds", type=float, default=15.0, help="duration of the measurement before it")
    add("--clients", type=int, default=32, help="clients that wait for each answer, before it")
    add("--tokens", type=int, default=64, help="tokens of an answer")
    add("--patience", type=float, default=30.0, help="seconds after which a client gives up")


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure; 1 where a goal is missed, 2 where there is no server."""
    try:
        with serving(args.url, args.serve) as target:
            clients = Clients(target, target.first_model(), args.tokens, args.patience)
            found = run_loop(measure(clients, args, lambda text: console.out(text)))
    except (EngineFailed, BadAnswer, OSError, ValueError, LookupError) as error:
        console.out(f"Can't go on: {error}", highlight=False)
        return UNUSABLE
    console.out("\n" + table.markdown(rows(found)), highlight=False)
    for why in sorted(set(found.wrong))[:3]:
        console.out(f"e.g. {why}", highlight=False)
    console.out("Missed: " + "; ".join(found.missed) if found.missed else "All goals are met.")
    return FAILED if found.missed else OK


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run, on uvloop where it exists: a connection costs the client half as much."""
    try:
        import uvloop
    except ImportError:  # Windows
        return asyncio.run(main)
    return uvloop.run(main)


@contextlib.contextmanager
def serving(url: str, command: str) -> Iterator[Target]:
    """A server that is ready."""
    if url:
        yield Target.of(url)
        return
    port = free_port()
    words = [*shlex.split(command), "--host", "127.0.0.1", "--port", str(port)]
    words += ["--log-level", "error"]
    with (
        tempfile.TemporaryDirectory() as folder,
        Server(words, port, dict(os.environ), Path(folder) / "log") as server,
    ):
        server.wait("/ready")
        yield Target.of(f"http://127.0.0.1:{port}")


class Clients:
    """Sends requests, each with a prompt of its own on a connection of its own."""

    def __init__(self, target: Target, model: str, num_tokens: int, patience_s: float) -> None:
        self._target, self._patience_s = target, patience_s
        self._num_tokens = num_tokens
        self._numbers = itertools.count()
        self._body = {"model": model, "max_tokens": num_tokens, "ignore_eos": True}
        self._body |= {"stream": True, "stream_options": {"include_usage": True}}

    async def ask(self) -> Outcome:
        """One request, answered, refused or neither."""
        body = {**self._body, "prompt": f"{next(self._numbers)}: "}
        request = self._target.request("POST", "/v1/completions", body)
        asked_s = time.perf_counter()
        kind: Literal["answered", "refused", "wrong"] = "wrong"
        why = ""
        reads: list[Read] = []
        try:
            async with asyncio.timeout(self._patience_s):
                reads = await self._target.aread(request)
            head, bodies = split(iter(reads))
            if head.status == 200:
                num_tokens = read_reply(iter(reads)).num_tokens
                kind = "answered" if num_tokens == self._num_tokens else "wrong"
                why = f"an answer of {num_tokens} tokens"
            else:
                why = fault(head, whole(bodies))
                kind = "wrong" if why else "refused"
        except TimeoutError:
            why = f"no answer within {self._patience_s:g} s"
        except (BadAnswer, OSError, ValueError) as error:
            why = f"{type(error).__name__}: {error}"
        return Outcome(kind, asked_s, reads[-1][0] if reads else time.perf_counter(), why)

    async def wait_in_turn(self, count: int, seconds: float) -> list[Outcome]:
        """`count` clients, each with its next request after the answer to the one before."""
        outcomes: list[Outcome] = []
        end_s = time.perf_counter() + seconds

        async def client() -> None:
            while time.perf_counter() < end_s:
                outcomes.append(await self.ask())
                if outcomes[-1].kind != "answered":
                    await asyncio.sleep(AGAIN_S)

        await asyncio.gather(*(client() for _ in range(count)))
        return outcomes

    async def send(
        self, rate: float, seconds: float, show: Callable[[str], None]
    ) -> tuple[list[Outcome], float]:
        """Requests at this rate, whatever becomes of them, and how late they were sent (p99)."""
        began, shown = time.perf_counter(), 0.0
        outcomes: list[Outcome] = []
        lates = []
        async with asyncio.TaskGroup() as group:
            for i in range(int(rate * seconds)):
                await asyncio.sleep(began + i / rate - time.perf_counter())
                now = time.perf_counter()
                lates.append(now - began - i / rate)
                group.create_task(self.ask()).add_done_callback(
                    lambda task: outcomes.append(task.result())
                )
                if now - began > shown + SHOW_S:
                    shown += SHOW_S
                    counts = {k: sum(o.kind == k for o in outcomes) for k in KINDS}
                    show(f"{shown:3.0f} s: " + ", ".join(f"{n} {k}" for k, n in counts.items()))
        return outcomes, percentile(lates, 99)


KINDS = ("answered", "refused", "wrong")


@lru_cache(1024)  # refusals of the same second are mostly the same bytes
def fault(head: Head, body: bytes) -> str:
    """What is wrong with a refusal; "" where nothing is."""
    if head.status not in (429, 503):
        return f"status {head.status}: {body[:200].decode(errors='replace')}"
    fields = {
        name.strip(): value.strip()
        for name, _, value in (line.partition(b":") for line in head.text.split(b"\r\n")[1:])
    }
    wait = fields.get(b"retry-after", b"")
    if not wait.isdigit() or int(wait) < 1:
        return f"a {head.status} with retry-after {wait!r}"
    try:
        msgspec.json.decode(body, type=RefusalBody)
    except msgspec.DecodeError as error:
        return f"a {head.status} whose body is no error: {error}"
    return ""


async def measure(clients: Clients, args: argparse.Namespace, show: Callable[[str], None]) -> Found:
    """The three parts."""
    await clients.wait_in_turn(args.clients, WARMUP_S)
    began = time.perf_counter()
    before = await clients.wait_in_turn(args.clients, args.best_seconds)
    best = rate_of(before, began, began + args.best_seconds)
    if not best:
        why = before[0].why or "all were refused"
        raise BadAnswer(f"no request is answered without overload: {why}")
    answer_s = percentile([o.took_s for o in before if o.kind == "answered"], 50)
    show(f"best: {best:.3g} answers a second, {answer_s * 1e3:.0f} ms each (median)")
    began = time.perf_counter()
    load = asyncio.create_task(clients.send(FACTOR * best, args.seconds, show))
    await asyncio.sleep(args.seconds)
    over = time.perf_counter()
    after, _ = await clients.send(max(2.0, best / FACTOR), AFTER_S, lambda _: None)
    outcomes, late_s = await load
    begin = min(began + answer_s, over)
    parts = [part for part in spans(begin, over) if part[1] - part[0] > SHOW_S / 2]
    refused = [o.took_s for o in outcomes if o.kind == "refused"]
    return Found(
        best=best,
        share=rate_of(outcomes, begin, over) / best,
        worst=min((rate_of(outcomes, *part) for part in parts), default=0.0) / best,
        sent=len(outcomes),
        late_s=late_s,
        answer_s=percentile([o.took_s for o in outcomes if o.kind == "answered"], 99),
        refused=len(refused),
        refused_s=(percentile(refused, 50), percentile(refused, 99)),
        wrong=[o.why for o in outcomes if o.kind == "wrong"],
        recovery_s=recovery(after, over, CALM * answer_s),
    )


def spans(begin: float, end: float) -> list[tuple[float, float]]:
    """The time in parts of SHOW_S."""
    count = max(1, int((end - begin) / SHOW_S))
    edges = [begin + i * (end - begin) / count for i in range(count + 1)]
    return list(itertools.pairwise(edges))


def rate_of(outcomes: Sequence[Outcome], begin: float, end: float) -> float:
    """Answers a second that ended between two times."""
    count = sum(o.kind == "answered" and begin <= o.ended_s < end for o in outcomes)
    return count / max(1e-9, end - begin)


def recovery(after: Sequence[Outcome], over: float, limit_s: float) -> float | None:
    """Seconds from the overload's end until every request is answered within `limit_s`."""
    bad = [o.asked_s for o in after if o.kind != "answered" or o.took_s > limit_s]
    good = [o.asked_s for o in after if o.asked_s > max(bad, default=0.0)]
    return min(good) - over if good else None


def rows(found: Found) -> table.Rows:
    """The table."""
    recovered = "not" if found.recovery_s is None else f"{found.recovery_s:.1f}"
    return [
        ["", "found", "goal"],
        ["best, answers/s", f"{found.best:.3g}", ""],
        [f"answered at {FACTOR} times the rate", f"{found.share:.0%}", f"{GOOD_SHARE:.0%}"],
        ["in the worst 10 s", f"{found.worst:.0%}", ""],
        ["requests sent", f"{found.sent:,}", ""],
        ["sent late, ms (p99)", f"{found.late_s * 1e3:.1f}", ""],
        ["answers, s (p99)", f"{found.answer_s:.1f}", ""],
        ["refused", f"{found.refused:,}", ""],
        ["refusals, ms (p50)", f"{found.refused_s[0] * 1e3:.1f}", ""],
        ["refusals, ms (p99)", f"{found.refused_s[1] * 1e3:.1f}", f"{REFUSED_S * 1e3:g}"],
        ["neither answered nor refused", f"{len(found.wrong)}", "0"],
        ["recovers in, s", recovered, f"{RECOVERY_S:g}"],
    ]
