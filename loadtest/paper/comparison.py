"""The parts of comparisons: their values, requests, and an engine that is stepped by hand.

Each module here makes a Comparison. Requests have the lengths of the papers' data sets and random
token ids, so no two share a prefix. The real scheduler and runner run a synthetic checkpoint, made
in a temporary folder, without event loop and sockets.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from streamer.config import Config
from streamer.core.blocks import BlockHasher
from streamer.core.plan import Add, Facts, Plan, StepOutput, StepStats
from streamer.core.sampling import SamplingParams
from streamer.core.scheduler import Scheduler
from streamer.core.sizes import sizes_of
from streamer.core.view import SchedulerView, ViewQuery

if TYPE_CHECKING:
    from streamer.constraints.grammars import Grammars
    from streamer.core.sizes import ModelInfo
    from streamer.engine.core import InFlight, Runner


class Series(msgspec.Struct, frozen=True):
    """A line, or one bar of every group. points: (x, y); of bars x is the group's number from 0."""

    name: str
    points: tuple[tuple[float, float], ...]


class Plot(msgspec.Struct, frozen=True):
    """A chart.

    x, y   what the axes show, with units
    series this engine's first: it has the green that our charts give it
    ticks  names of x = 0, 1, ...: of bars' groups, or of points on lines
    """

    kind: Literal["bars", "lines"]
    x: str
    y: str
    series: tuple[Series, ...]
    ticks: tuple[str, ...] = ()


class Comparison(msgspec.Struct, frozen=True):
    """One thing that a paper measured, measured here.

    published      the paper's figures in a sentence, with the source (paper, section)
    columns, rows  the table; numbers are shown as `table.number` does
    finding        the result here, in a sentence or two, computed from the rows
    setting        model, lengths, pools, seeds
    """

    name: str
    title: str
    published: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float, ...], ...]
    finding: str
    setting: str
    plot: Plot


# ---------------------------------------------------------------- requests


CONTEXT = 2048  # tokens, as the paper's models have
TINY_SCALE = 8

Kind = Literal["ShareGPT", "Alpaca"]


class Ask(NamedTuple):
    """A request: token ids, and the number of output tokens."""

    prompt: tuple[int, ...]
    num_output: int


def asks(kind: Kind, count: int, *, scale: int = 1, context: int = CONTEXT) -> list[Ask]:
    """Requests with the lengths that jobs.py gives these data sets, within the context.

    scale  lengths are divided by it
    """
    from streamer.loadtest.open_loop.jobs import ALPACA, SHAREGPT, SIGMAS, draw_length

    means = {"ShareGPT": SHAREGPT, "Alpaca": ALPACA}[kind]
    source = random.Random(kind)
    found = []
    for _ in range(count):
        drawn = [draw_length(source, mean, SIGMAS[means]) for mean in means]
        num_prompt, num_output = (max(1, n // scale) for n in drawn)
        num_prompt = min(num_prompt, context // 2)
        prompt = tuple(source.randrange(FIRST_ID, LAST_ID) for _ in range(num_prompt))
        found.append(Ask(prompt, min(num_output, context - num_prompt)))
    return found


def page_tables(view: SchedulerView) -> list[tuple[int, memoryview]]:
    """(tokens whose KV is there, device block ids) of each sequence that has any."""
    return [
        (seq.computed, memoryview(seq.blocks).cast("I"))
        for request in view.requests
        for seq in request.sequences
        if seq.blocks
    ]


# ---------------------------------------------------------------- the engine


MODEL = "small"  # of loadtest/compare/workload.py: 8 layers, 25 million parameters in its layers
FIRST_ID, LAST_ID = 100, 4000
EVERYTHING = ViewQuery((b"",))


@contextlib.contextmanager
def checkpoint(*, tiny: bool) -> Iterator[Path]:
    """A temporary folder with MODEL; with `tiny` the bundled model."""
    if tiny:
        from streamer.demo import CHECKPOINT

        yield CHECKPOINT
        return
    with tempfile.TemporaryDirectory() as folder:
        # In another process: torch used on this thread first would slow the runner's thread later.
        command = [sys.executable, "-m", "streamer.loadtest.compare.models", folder, MODEL]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        yield Path(folder) / f"{MODEL}-bf16"


class Priced:
    """A runner whose measured costs are replaced by those given, fields of Facts by name."""

    def __init__(self, inner: Runner, costs: Mapping[str, float]) -> None:
        self._inner = inner
        self._costs = dict(costs)

    @property
    def depth(self) -> int:
        return self._inner.depth

    def constrain(self, grammars: Grammars) -> None:
        self._inner.constrain(grammars)

    def reset(self, launched: int) -> None:
        self._inner.reset(launched)

    def launch(self, plan: Plan) -> InFlight:
        return self._inner.launch(plan)

    def facts(self) -> Facts:
        """The measured facts, with the given costs in place of theirs."""
        return msgspec.structs.replace(self._inner.facts(), **self._costs)

    def close(self) -> None:
        self._inner.close()


def settings(**given: Any) -> Config:
    """A quiet Config for the CPU."""
    return Config(device="cpu", load_progress=False, **given)


def load(folder: Path, config: Config) -> tuple[Runner, ModelInfo]:
    """The checkpoint's runner, and the model's info."""
    from streamer.model.runner.load import load_runner

    return load_runner(msgspec.structs.replace(config, model=str(folder)))


class Steps:
    """An engine on one checkpoint, run one step at a time; answers have their full length.

    answers  request id -> its tokens so far, of all its choices;  stats  as of the last step
    """

    def __init__(
        self, folder: Path, config: Config, costs: Mapping[str, float] | None = None
    ) -> None:
        from streamer.engine.core import EngineCore, Inbox

        runner, info = load(folder, config)
        self._scheduler = Scheduler(
            sizes_of(config, info, ()), BlockHasher(info.block_size, b"paper" * 4)
        )
        self._inbox = Inbox()
        self._core = EngineCore(Priced(runner, costs or {}), self._scheduler, self._inbox)
        self.answers: dict[str, list[int]] = {}
        self.stats = StepStats()

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        temperature: float = 0.0,
        n: int = 1,
        beam_width: int | None = None,
    ) -> None:
        """Add a request, which has its own seed for sampling, or is a beam search."""
        self.answers[name] = []
        params = SamplingParams(
            temperature=temperature,
            seed=len(self.answers),
            max_tokens=max_tokens,
            n=n,
            use_beam_search=beam_width is not None,
            beam_width=beam_width,
            ignore_eos=True,
            speculation=False,  # the papers' engines had none
        )
        self._inbox.put(Add(name, tuple(prompt), params))

    def step(self) -> StepOutput | None:
        """One step of the engine; None when all requests have ended."""
        output = self._core.step()
        if output is not None:
            self.stats = output.stats
            for name, token in zip(output.request_ids, output.tokens, strict=True):
                self.answers[name].append(token)
        return output

    def run(self) -> None:
        """Step until every request has ended."""
        while self.step() is not None:
            pass

    def look(self) -> SchedulerView:
        """Pools and page tables now."""
        return self._scheduler.snapshot(EVERYTHING)

    def close(self) -> None:
        """Free pools and weights."""
        self._core.close()

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def prompt(length: int, seed: str, last: int = LAST_ID) -> list[int]:
    """Random token ids from FIRST_ID up to `last`, exclusive; none is special in these models."""
    source = random.Random(seed)
    return [source.randrange(FIRST_ID, last) for _ in range(length)]
