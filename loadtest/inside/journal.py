"""`streamer bench journal`: an engine with its journal and without it, in many short pairs.

It is one engine, since two of a process need not be equally fast. The order changes from pair to
pair, so that what disturbs the machine for seconds disturbs both. Streams make one answer after the
other. Compared are tokens a second and the gaps between deltas as a reader gets them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from streamer.config import Config
from streamer.core.sampling import SamplingParams
from streamer.errors import ConfigError, StreamerError
from streamer.loadtest.open_loop.served import percentile
from streamer.loadtest.table import markdown

if TYPE_CHECKING:
    from rich.console import Console

    from streamer.engine.engine import AsyncEngine
    from streamer.engine.requests import GenerateRequest

PROMPT_TOKENS = 24
SETTLE_S = 0.5  # in which the streams of a run fill the batch
CONFIDENCE_Z = 1.96


class Side(msgspec.Struct, frozen=True):
    """One run: tokens a second, and its gaps between deltas (p50, p99)."""

    tokens_s: float
    gap_s: float
    worst_gap_s: float


class Asked(msgspec.Struct, frozen=True):
    """The flags."""

    pairs: int
    seconds: float
    streams: int
    tokens: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    from streamer.cli.arguments import add_config_flags

    add = parser.add_argument
    add("--pairs", type=int, default=20, help="runs with the journal, and without (20)")
    add("--seconds", type=float, default=3.5, help="seconds of a run (3.5)")
    add("--streams", type=int, default=32, help="streams at once (32)")
    add("--tokens", type=int, default=256, help="tokens of an answer (256)")
    add_config_flags(parser, sections=("model", "scheduling and memory"), model=True)


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure and print the table."""
    from streamer.cli.arguments import config_from

    asked = Asked(args.pairs, args.seconds, args.streams, args.tokens)
    try:
        with tempfile.TemporaryDirectory() as folder:
            pairs = asyncio.run(measure(config_from(args), asked, folder))
    except (ConfigError, StreamerError) as error:
        console.out(f"Can't go on: {error}", highlight=False)
        return 2
    console.out(markdown(rows(pairs)), highlight=False)
    return 0


async def measure(config: Config, asked: Asked, folder: str) -> list[tuple[Side, Side]]:
    """Of each pair, the run without a journal and the one with it."""
    from streamer.engine.engine import AsyncEngine

    engine = AsyncEngine.from_config(replace(config, journal=folder))
    numbers = itertools.count()
    pairs: list[tuple[Side, Side]] = []
    async with engine:
        journal = engine.journal

        async def side(has_journal: int) -> Side:
            """A run; no request is left from the one before."""
            engine.journal = engine._streams.journal = journal if has_journal else None
            try:
                return await one_run(engine, asked, numbers)
            finally:
                engine.journal = engine._streams.journal = journal

        for k in (0, 1):
            await side(k)  # warms up
        for i in range(asked.pairs):
            order = (0, 1) if i % 2 == 0 else (1, 0)
            found = {k: await side(k) for k in order}
            pairs.append((found[0], found[1]))
        if journal is None or journal.failure is not None:
            raise ConfigError("the journal failed meanwhile", param="journal")
    return pairs


async def one_run(engine: AsyncEngine, asked: Asked, numbers: itertools.count[int]) -> Side:
    """Streams that make one answer after the other, until the time is over."""
    from streamer.engine.stream import Delta

    begin = time.perf_counter() + SETTLE_S
    end = begin + asked.seconds
    gaps: list[float] = []
    num_tokens = 0

    async def stream() -> None:
        nonlocal num_tokens
        while time.perf_counter() < end:
            made = engine.submit(request(engine, asked.tokens, next(numbers)))
            if engine.journal is not None:
                await engine.journal.recorded()
            last = 0.0
            async with aclosing(made.read()) as batches:
                async for items in batches:
                    now = time.perf_counter()
                    count = sum(len(d.token_ids) for d in items if isinstance(d, Delta))
                    if count and begin <= now < end:
                        num_tokens += count
                        if last:
                            gaps.append(now - last)
                    last = now
                    if now >= end:
                        break
            engine.cancel(made.request_id)
            await made.wait()
            engine.forget(made.request_id)

    await asyncio.gather(*(stream() for _ in range(asked.streams)))
    if not gaps:
        raise ConfigError("no tokens came within a run: give it more --seconds", param="seconds")
    return Side(num_tokens / asked.seconds, percentile(gaps, 50), percentile(gaps, 99))


def request(engine: AsyncEngine, num_tokens: int, number: int) -> GenerateRequest:
    """A request with a prompt of its own."""
    from streamer.engine.requests import GenerateRequest

    vocab_size = engine.info.vocab_size
    prompt = tuple((7 * number + i * i) % vocab_size for i in range(PROMPT_TOKENS))
    params = SamplingParams(max_tokens=num_tokens, temperature=1.0, seed=number, ignore_eos=True)
    return GenerateRequest(prompt=prompt, params=params, detach_s=None, is_durable=True)


def median_and_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median and the order statistics around it that hold it with 95% confidence."""
    ordered, n = sorted(values), len(values)
    half = CONFIDENCE_Z * math.sqrt(n) / 2
    low = max(0, math.floor(n / 2 - half))
    high = min(n - 1, math.ceil(n / 2 + half) - 1)
    return statistics.median(ordered), ordered[low], ordered[high]


def rows(pairs: Sequence[tuple[Side, Side]]) -> list[list[str]]:
    """The table."""
    found = [["", "without", "with a journal", "ratio", "95%"]]
    for name, field, factor in (
        ("tokens/s", "tokens_s", 1.0),
        ("gap, ms (p50)", "gap_s", 1e3),
        ("gap, ms (p99)", "worst_gap_s", 1e3),
    ):
        sides = [[getattr(side, field) * factor for side in pair] for pair in pairs]
        ratio, low, high = median_and_interval([b / a for a, b in sides])
        medians = [statistics.median(values) for values in zip(*sides, strict=True)]
        found.append(
            [name, *(f"{m:,.4g}" for m in medians), f"{ratio:.3f}", f"{low:.3f} to {high:.3f}"]
        )
    return found
