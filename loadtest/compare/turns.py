"""One turn of one engine: start it, warm it, give it the round's workloads, end it.

In process through a runner, or over HTTP through its own server; streams always over HTTP. Yields
each sample at once, so that samples before a failure are kept.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Any, BinaryIO, TypeVar, cast

import msgspec

from ..processes import ANSWER_S, LOAD_S, EngineFailed, Process, Server, free_port
from ..sse import BadAnswer
from .clients import Ask, Round
from .clients import run as run_clients
from .engines import (
    ENGINES,
    OURS,
    Engine,
    Places,
    environment,
    served_name,
    server_command,
    setup,
    version,
)
from .machine import read_now_gb_s
from .results import ONE, Peak, Sample, Start, percentile
from .workload import Model, Work, prompts

WARM_PROMPTS, WARM_TOKENS = 32, 8
ONE_TIMES = 3  # a single request is made in a round
LAUNCH = (
    "import runpy, sys; sys.path.append(sys.argv[1]); "
    "runpy.run_module('peers.' + sys.argv[2], run_name='__main__')"
)


class Runner(Process):
    """A runner of peers/ in an engine's interpreter; jobs and answers are lines of JSON."""

    def __init__(self, python: Path, module: str, environment: dict[str, str], log: Path) -> None:
        command = [str(python), "-c", LAUNCH, str(Path(__file__).resolve().parent), module]
        super().__init__(command, environment, log, is_asked=True)
        self._pending = b""

    def ask(self, value: Any, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """Send a line, wait for the answer; EngineFailed if none comes."""
        stdin = cast("BinaryIO", self._process.stdin)
        try:
            stdin.write(json.dumps(value).encode() + b"\n")
        except BrokenPipeError:
            raise self.failure("it ended") from None
        return cast("dict[str, Any]", json.loads(self._line(timeout_s)))

    def _line(self, timeout_s: float) -> bytes:
        stdout = cast("BinaryIO", self._process.stdout)
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([stdout], [], [], left)[0]:
                raise self.failure(f"no answer in {timeout_s:.0f} s")
            data = os.read(stdout.fileno(), 1 << 16)
            if not data:
                raise self.failure("it ended")
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return line


class Turn(msgspec.Struct, frozen=True):
    """An engine, a model, a round, and the workloads of one process.

    is_served  whether they go over HTTP
    """

    engine: Engine
    model: Model
    round: int
    works: tuple[Work, ...]
    is_served: bool

    def prompts(self, work: Work, again: int = 0) -> list[list[int]]:
        """This round's prompts as token ids, the same for every engine, new each time."""
        seed = f"{work.name} {self.round}" + (f" {again}" if again else "")
        return prompts(self.model, work.num_prompts, seed, work.prompt_tokens)

    @property
    def warm_prompts(self) -> list[list[int]]:
        return prompts(self.model, WARM_PROMPTS, f"warm {self.round}")


Outcome = Sample | Peak | Start | str  # a str: the engine's version
ReadNow = Callable[[], float | None]
T = TypeVar("T")


def run(turn: Turn, places: Places, threads: int, logs: Path) -> Iterator[Outcome]:
    """The turn's outcomes; EngineFailed or BadAnswer ends it."""
    log = logs / f"{turn.engine.name}-{turn.model.name}-{turn.round}-{turn.is_served:d}.log"
    read_now = partial(read_now_gb_s, threads, environment(ENGINES[OURS], places, threads))
    measured = _served if turn.is_served else _in_process
    yield from measured(turn, places, threads, log, read_now)


def _measure(
    work: Work, read_now: ReadNow, measure: Callable[[int], T]
) -> tuple[list[T], float | None]:
    """What `measure` gives; a single request ONE_TIMES, with memory's mean rate of before, between
    and after, since it changes within seconds and bounds the request."""
    if work.name != ONE:
        return [measure(0)], None
    measured, rates = [], [read_now()]
    for i in range(ONE_TIMES):
        measured.append(measure(i))
        rates.append(read_now())
    known = [rate for rate in rates if rate is not None]
    return measured, mean(known) if known else None


def _in_process(
    turn: Turn, places: Places, threads: int, log: Path, read_now: ReadNow
) -> Iterator[Outcome]:
    engine = turn.engine
    env = environment(engine, places, threads)
    with Runner(places.python(engine), engine.runner, env, log) as runner:
        loaded = runner.ask(setup(engine, turn.model, places, threads)._asdict(), LOAD_S)
        yield str(loaded["version"])
        warm = turn.warm_prompts
        runner.ask({"prompts": warm, "lengths": [WARM_TOKENS] * len(warm)})
        for work in turn.works:
            answers, rate = _measure(work, read_now, partial(_ask_runner, turn, work, runner))
            yield _sample(turn, work, [answer["seconds"] for answer in answers], rate)
        yield _peak(turn, runner.peak_bytes())


def _served(
    turn: Turn, places: Places, threads: int, log: Path, read_now: ReadNow
) -> Iterator[Outcome]:
    engine, port = turn.engine, free_port()
    command = server_command(engine, turn.model, places, threads, port)
    begin = time.perf_counter()
    with Server(command, port, environment(engine, places, threads), log) as server:
        server.wait(engine.ready)
        seconds = time.perf_counter() - begin
        yield Start(engine.name, turn.model.name, turn.round, seconds)
        if found := version(engine, places):
            yield found
        try:
            run_clients(port, _warm_asks(turn, places))
            for work in turn.works:
                asks = partial(_ask_server, turn, work, places, port)
                measured, rate = _measure(work, read_now, asks)
                yield _served_sample(turn, work, measured, rate)
        except (BadAnswer, OSError, ValueError) as error:  # msgspec's and int's are ValueErrors
            raise server.failure(f"{type(error).__name__}: {error}") from None
        yield _peak(turn, server.peak_bytes())


def _ask_runner(turn: Turn, work: Work, runner: Runner, again: int) -> dict[str, Any]:
    answer = runner.ask({"prompts": turn.prompts(work, again), "lengths": list(work.lengths)})
    _check(answer["tokens"], work)
    return answer


def _ask_server(turn: Turn, work: Work, places: Places, port: int, again: int) -> Round:
    measured = run_clients(port, asks_of(turn, work, places, again))
    _check(measured.tokens, work)
    return measured


def _warm_asks(turn: Turn, places: Places) -> list[list[Ask]]:
    asks = [_ask(turn, prompt, WARM_TOKENS, True, places) for prompt in turn.warm_prompts]
    return [asks[i::16] for i in range(16)]


def asks_of(turn: Turn, work: Work, places: Places, again: int = 0) -> list[list[Ask]]:
    """Each client's requests, in order."""
    texts, num_clients = turn.prompts(work, again), len(work.lengths)
    return [
        [_ask(turn, text, length, work.is_stream, places) for text in texts[i::num_clients]]
        for i, length in enumerate(work.lengths)
    ]


def _ask(turn: Turn, prompt: list[int], length: int, stream: bool, places: Places) -> Ask:
    name = served_name(turn.engine, turn.model, places)
    if turn.engine.is_plain:
        text = as_text(places.checkpoint(turn.model), prompt)
        return Ask(name, text, length, stream, ignore_eos=msgspec.UNSET)
    return Ask(name, prompt, length, stream)


def as_text(checkpoint: str, prompt: Sequence[int]) -> str:
    """A prompt as text, for a server that takes no token ids; about as many tokens."""
    return _decoder(checkpoint)(list(prompt))


@cache
def _decoder(checkpoint: str) -> Callable[[list[int]], str]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(checkpoint) / "tokenizer.json"))
    return cast("Callable[[list[int]], str]", tokenizer.decode)


def _check(tokens: int, work: Work) -> None:
    if tokens != work.num_tokens:
        raise EngineFailed(f"{work.name}: {tokens} tokens instead of {work.num_tokens}")


def _sample(turn: Turn, work: Work, seconds: list[float], read_gb_s: float | None) -> Sample:
    name, model, rate = turn.engine.name, turn.model.name, work.rated_tokens / mean(seconds)
    return Sample(name, model, work.name, turn.round, rate, read_gb_s=read_gb_s)


def _served_sample(turn: Turn, work: Work, rounds: list[Round], read_gb_s: float | None) -> Sample:
    sample = _sample(turn, work, [r.seconds for r in rounds], read_gb_s)
    if not work.is_stream:
        return sample
    times = {"first": rounds[0].first_s, "gap": rounds[0].gaps_s}
    found = {
        f"{name}_p{share}_ms": value * 1e3
        for name, values in times.items()
        for share in (50, 99)
        if (value := percentile(values, share / 100)) is not None
    }
    return msgspec.structs.replace(sample, **found)


def _peak(turn: Turn, peak_bytes: int) -> Peak:
    name, model = turn.engine.name, turn.model.name
    return Peak(name, model, turn.round, turn.is_served, peak_bytes)
