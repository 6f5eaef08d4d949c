"""One turn of one engine: start it, warm it, give it the round's workloads, end it.

In process through a runner where the engine has one, else over HTTP through its own server; streams
always over HTTP. Yields each sample at once, so that samples before a failure are kept.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO, cast

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
from .results import ONE, Peak, Sample, percentile
from .workload import Model, Work, prompts

WARM_PROMPTS, WARM_TOKENS = 32, 8
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
    """An engine, a model, a round, and the workloads of one process."""

    engine: Engine
    model: Model
    round: int
    works: tuple[Work, ...]
    is_stream: bool

    @property
    def is_served(self) -> bool:
        """Whether the turn goes over HTTP."""
        return self.is_stream or not self.engine.runner

    def prompts(self, work: Work) -> list[list[int]]:
        """This round's prompts as token ids, the same for every engine."""
        return prompts(self.model, work.num_prompts, f"{work.name} {self.round}")

    @property
    def warm_prompts(self) -> list[list[int]]:
        return prompts(self.model, WARM_PROMPTS, f"warm {self.round}")


Outcome = Sample | Peak | str  # a str: the engine's version


def run(turn: Turn, places: Places, threads: int, logs: Path) -> Iterator[Outcome]:
    """The turn's outcomes; EngineFailed or BadAnswer ends it."""
    log = logs / f"{turn.engine.name}-{turn.model.name}-{turn.round}-{turn.is_stream:d}.log"
    if turn.is_served:
        yield from _served(turn, places, threads, log)
    else:
        yield from _in_process(turn, places, threads, log)


def _in_process(turn: Turn, places: Places, threads: int, log: Path) -> Iterator[Outcome]:
    engine = turn.engine
    env = environment(engine, places, threads)
    read_now = partial(read_now_gb_s, threads, environment(ENGINES[OURS], places, threads))
    with Runner(places.python(engine), engine.runner, env, log) as runner:
        loaded = runner.ask(setup(engine, turn.model, places, threads)._asdict(), LOAD_S)
        yield str(loaded["version"])
        warm = turn.warm_prompts
        runner.ask({"prompts": warm, "lengths": [WARM_TOKENS] * len(warm)})
        for work in turn.works:
            asked = {"prompts": turn.prompts(work), "lengths": list(work.lengths)}
            rates = [read_now()] if work.name == ONE else []
            answer = runner.ask(asked)
            _check(answer["tokens"], work)
            rates += [read_now()] if work.name == ONE else []
            beside = max((rate for rate in rates if rate is not None), default=None)
            sample = _sample(turn, work, answer["tokens"] / answer["seconds"])
            yield msgspec.structs.replace(sample, read_gb_s=beside)
        yield _peak(turn, runner.peak_bytes())


def _served(turn: Turn, places: Places, threads: int, log: Path) -> Iterator[Outcome]:
    engine, port = turn.engine, free_port()
    command = server_command(engine, turn.model, places, threads, port)
    with Server(command, port, environment(engine, places, threads), log) as server:
        server.wait(engine.ready)
        if found := version(engine, places):
            yield found
        try:
            run_clients(port, _warm_asks(turn, places))
            for work in turn.works:
                measured = run_clients(port, asks_of(turn, work, places))
                _check(measured.tokens, work)
                yield _stream_sample(turn, work, measured)
        except (BadAnswer, OSError, ValueError) as error:  # msgspec's and int's are ValueErrors
            raise server.failure(f"{type(error).__name__}: {error}") from None
        yield _peak(turn, server.peak_bytes())


def _warm_asks(turn: Turn, places: Places) -> list[list[Ask]]:
    asks = [_ask(turn, prompt, WARM_TOKENS, True, places) for prompt in turn.warm_prompts]
    return [asks[i::16] for i in range(16)]


def asks_of(turn: Turn, work: Work, places: Places) -> list[list[Ask]]:
    """Each client's requests, in order."""
    texts, num_clients = turn.prompts(work), len(work.lengths)
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


def _sample(turn: Turn, work: Work, tokens_s: float) -> Sample:
    return Sample(turn.engine.name, turn.model.name, work.name, turn.round, tokens_s)


def _stream_sample(turn: Turn, work: Work, measured: Round) -> Sample:
    sample = _sample(turn, work, measured.tokens / measured.seconds)
    if not work.is_stream:
        return sample
    times = {"first": measured.first_s, "gap": measured.gaps_s}
    found = {
        f"{name}_p{share}_ms": value * 1e3
        for name, values in times.items()
        for share in (50, 99)
        if (value := percentile(values, share / 100)) is not None
    }
    return msgspec.structs.replace(sample, **found)


def _peak(turn: Turn, peak_bytes: int) -> Peak:
    name, model = turn.engine.name, turn.model.name
    return Peak(name, model, turn.round, turn.is_stream, peak_bytes)
