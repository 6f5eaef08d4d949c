"""`streamer bench speculation`: engines with and without, in turn, at several numbers of streams.

On edits of a given file, which repeat it but for a few lines; on text with nothing to repeat, where
it must cost nothing; and with a draft model. Of clients that each make one request, a batch whose
slowest answer decides, and of ones that make several, one after the other. Each pair of runs has
the same requests, and its answers are compared: speculation changes no token. models.py writes the
models that are missing.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from streamer.config import Config, SpeculativeConfig
from streamer.errors import ConfigError, StreamerError
from streamer.loadtest.inside.speculation.edits import edits, unrelated
from streamer.loadtest.inside.speculation.engine import Found, Job
from streamer.loadtest.table import markdown, number

if TYPE_CHECKING:
    from rich.console import Console

STREAMS = (1, 4, 16, 32, 64)
NUM_LINES = 120
REQUESTS = (1, 4)
TEXT_TOKENS = 128
QUESTIONS = (
    "Tell me a story about a {}.",
    "What is a {}?",
    "Write a short poem about a {}.",
    "Why does a {} matter?",
)
THINGS = ("fox", "river", "lamp", "garden", "bridge", "clock", "storm", "violin", "boat", "letter")


class Case(msgspec.Struct, frozen=True):
    """A model and a workload. speculation: of the engine that proposes."""

    name: str
    says: str
    model: str
    work: str
    speculation: SpeculativeConfig = SpeculativeConfig(method="suffix")


class Pair(msgspec.Struct, frozen=True):
    """The same requests without and with speculation."""

    off: Found
    on: Found

    @property
    def ratio(self) -> float:
        return self.off.took_s / self.on.took_s


CASES = (
    Case("edits", "a file edited, at the cost of `half`", "copier-dear", "edits"),
    Case("unrelated", "nothing to repeat, at the cost of `half`", "copier-dear", "unrelated"),
    Case("unrelated-tiny", "the same as it is", "copier", "unrelated"),
    Case("text", "chats of the bundled model, at the cost of `half`", "demo-dear", "text"),
    Case(
        "draft",
        "the same with the bundled draft model alone",
        "demo-dear",
        "text",
        SpeculativeConfig(method="draft_model", model="draft"),
    ),
    Case("demo", "the bundled model as it is", "demo", "text"),
    Case(
        "demo-draft",
        "the same with the bundled draft model alone",
        "demo",
        "text",
        SpeculativeConfig(method="draft_model", model="draft"),
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which cases, how often, and where the models are."""
    add = parser.add_argument
    names = ", ".join(case.name for case in CASES)
    add("--only", metavar="NAMES", help=f"only these cases, comma-separated: {names}")
    add("--streams", metavar="NUMBERS", help="numbers of streams (1,4,16,32,64)")
    add("--requests", metavar="NUMBERS", help="requests of each stream in turn (1,4)")
    add("--rounds", type=int, default=5, help="pairs of runs each; medians are shown (5)")
    default = Path.home() / ".cache/streamer/speculation"
    add("--models", type=Path, default=default, help=f"folder of the models ({default})")
    add("--json", type=Path, metavar="FILE", help="also write all figures to this file")


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure and print; 1 if answers differ."""
    streams, requests = _numbers(args.streams, STREAMS), _numbers(args.requests, REQUESTS)
    shapes = list(itertools.product(streams, requests))
    wanted = [case for case in CASES if not args.only or case.name in args.only.split(",")]
    if not wanted:
        raise ConfigError(f"--only: {args.only} is no case", param="only")
    results: dict[str, dict[str, list[Pair]]] = {}
    for case in wanted:
        folder = model_folder(args.models, case.model, console)
        draft = case.speculation.model and model_folder(
            args.models, case.speculation.model, console
        )
        asked = msgspec.structs.replace(case.speculation, model=str(draft) if draft else None)
        console.out(f"{case.name}: {case.says}")
        found = results[case.name] = {}
        for label, pairs in measure(case, str(folder), asked, shapes, args.rounds):
            lines = report({label: pairs}).splitlines()
            console.out("\n".join(lines[2:] if found else lines))
            found[label] = pairs
            if args.json is not None:
                args.json.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    every = [p for by in results.values() for each in by.values() for p in each]
    wrong = sum(p.off.digest != p.on.digest for p in every)
    console.out(f"{len(every)} pairs of runs, {wrong} with different answers")
    return 1 if wrong else 0


def _numbers(given: str | None, default: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(n) for n in given.split(",")) if given else default


def model_folder(models: Path, name: str, console: Console) -> Path:
    """The checkpoint, made first where it is not there."""
    from streamer.demo import CHECKPOINT, DRAFT
    from streamer.loadtest.compare.workload import MODELS
    from streamer.loadtest.inside.speculation.models import make_dear, train

    if name in ("demo", "draft"):
        return CHECKPOINT if name == "demo" else DRAFT
    folder = models / name
    if folder.is_dir():
        return folder
    part = folder.with_name(name + ".part")
    if name == "copier":
        console.out("training the model that copies with edits, for some minutes")
        train(part, lambda step, loss, right: console.out(f"{step}: {loss:.3f}, {right:.0%} right"))
    else:
        source = model_folder(models, name.removesuffix("-dear"), console)
        make_dear(source, part, MODELS["half"].step_bytes)
    part.rename(folder)
    return folder


def jobs(work: str, streams: int, requests: int, seed: int) -> Job:
    """The requests of one run; the same seed makes the same ones."""
    count = streams * requests
    if work == "edits":
        prompts = [e.prompt for e in islice(edits(seed, NUM_LINES), count)]
        return Job(list(prompts), NUM_LINES + 1, 0.0, False, seed, streams)
    if work == "unrelated":
        found = list(islice(unrelated(seed, NUM_LINES), count))
        return Job(list(found), TEXT_TOKENS, 1.0, True, seed, streams)
    texts = [
        QUESTIONS[i % len(QUESTIONS)].format(THINGS[(seed + i // len(QUESTIONS)) % len(THINGS)])
        for i in range(count)
    ]
    return Job(list(texts), TEXT_TOKENS, 0.7, False, 1000 * seed, streams)


def measure(
    case: Case,
    folder: str,
    asked: SpeculativeConfig,
    shapes: Sequence[tuple[int, int]],
    rounds: int,
) -> Iterator[tuple[str, list[Pair]]]:
    """Pairs of each (streams, requests of a stream), as soon as they are measured: the two engines
    take turns, the first changes with each pair."""
    configs = [
        Config(model=folder, load_progress=False, swap_space=0.0, speculative_config=each)
        for each in (SpeculativeConfig(method="none"), asked)
    ]
    with ExitStack() as stack:
        off, on = [stack.enter_context(engine(config)) for config in configs]
        seed = 0
        for streams, requests in shapes:
            for process in (off, on):  # warms up, and measures costs
                ask(process, jobs(case.work, streams, requests, 1_000_000 + streams))
            pairs: list[Pair] = []
            for i in range(rounds):
                seed += 1
                job = jobs(case.work, streams, requests, seed)
                pair = [ask(p, job) for p in ((off, on) if i % 2 else (on, off))]
                pairs.append(Pair(*(pair if i % 2 else pair[::-1])))
            yield f"{streams} x {requests}", pairs


Process = subprocess.Popen[bytes]


@contextmanager
def engine(config: Config) -> Iterator[Process]:
    """A process of engine.py that has loaded its model."""
    command = [sys.executable, "-m", "streamer.loadtest.inside.speculation.engine"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        try:
            _send(process, config)
            yield process
        finally:
            process.kill()


def ask(process: Process, job: Job) -> Found:
    """A job's result."""
    return _send(process, job)


def _send(process: Process, message: Config | Job) -> Found:
    if process.stdin is None or process.stdout is None:
        raise StreamerError("the engine's process has no pipes")
    process.stdin.write(msgspec.json.encode(message) + b"\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise StreamerError(f"the engine's process ended with {process.wait()}")
    found = msgspec.json.decode(line, type=Found)
    if found.error:
        raise StreamerError(found.error)
    return found


def report(found: dict[str, list[Pair]]) -> str:
    """A table of medians, by streams x requests of each."""
    heading = [
        "streams x requests",
        "tokens/s off",
        "on",
        "ratio",
        "lowest",
        "proposed a token",
        "accepted",
    ]
    rows = [heading]
    for label, pairs in found.items():
        rates = [
            statistics.median(f.num_tokens / f.took_s for f in each)
            for each in ([p.off for p in pairs], [p.on for p in pairs])
        ]
        ratios = [p.ratio for p in pairs]
        proposed = sum(p.on.proposed for p in pairs)
        accepted = sum(p.on.accepted for p in pairs)
        rows.append(
            [
                label,
                *map(number, rates),
                f"{statistics.median(ratios):.2f}",
                f"{min(ratios):.2f}",
                f"{proposed / sum(p.on.num_tokens for p in pairs):.2f}",
                f"{accepted / proposed:.0%}" if proposed else "–",
            ]
        )
    return markdown(rows)
