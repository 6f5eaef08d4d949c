"""`streamer bench offline`: the engine in this process: throughput, latency of a batch, swap.

Prompts are random tokens, new ones each time so that no prefix is shared; answers are greedy and as
long as asked. Every part warms its engine up before it measures. `swap` runs the same requests with
a pool that holds them all and with one that does not, and compares the answers: what was set aside
must come back unchanged. What is found is said by offline_report.py.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from streamer.bench.offline_report import Latency, Pool, Results, Swap, Throughput, now, report
from streamer.core.sampling import SamplingParams
from streamer.errors import ConfigError, RequestFailed

if TYPE_CHECKING:
    from rich.console import Console

    from streamer.config import Config
    from streamer.engine.engine import AsyncEngine, TokenStream

PARTS = ("throughput", "latency", "swap")
WARM_TOKENS = 8  # of an answer while throughput warms up
HEADROOM = 1.125  # of a pool that holds everything: admission keeps a watermark free
Prompt = tuple[int, ...]
Done = Callable[[], None]
Shown = Callable[[str, int], Done]  # a bar: what goes on, and of how many


class Asked(msgspec.Struct, frozen=True):
    """Lengths in tokens. pool_share: of what all sequences need at their ends, for `swap`."""

    input_len: int = 128
    output_len: int = 128
    num_prompts: int = 64
    batch_size: int = 8
    num_iters: int = 10
    num_iters_warmup: int = 2
    pool_share: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "num_prompts", "batch_size", "num_iters"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is at least 1", param=name)
        if self.num_iters_warmup < 0:
            raise ConfigError("--num-iters-warmup is at least 0", param="num_iters_warmup")
        if not 0 < self.pool_share <= 1:
            raise ConfigError("--pool-share is above 0 and at most 1", param="pool_share")

    def blocks(self, block_size: int) -> int:
        """Of one sequence at its end."""
        return -(-(self.input_len + self.output_len) // block_size)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to ask, in the names of `vllm bench`, and the engine's settings."""
    from streamer.cli.arguments import add_config_flags

    add, asked = parser.add_argument, Asked()
    add("--only", metavar="NAMES", help=f"some parts, by commas: {', '.join(PARTS)}")
    for flag, says in (
        ("input_len", "tokens of a prompt"),
        ("output_len", "tokens of an answer"),
        ("num_prompts", "requests at once, of throughput and swap"),
        ("batch_size", "requests of an iteration of latency"),
        ("num_iters", "iterations of latency"),
        ("num_iters_warmup", "iterations before them that do not count"),
    ):
        default = getattr(asked, flag)
        add(f"--{flag.replace('_', '-')}", type=int, default=default, help=f"{says} ({default})")
    says = "of the blocks that all need at their ends: swap's small pool (0.5)"
    add("--pool-share", type=float, default=asked.pool_share, help=says)
    add("--json", type=Path, metavar="FILE", help="write every figure there too")
    add_config_flags(parser, sections=("model", "scheduling and memory"), model=False)


def run(args: argparse.Namespace, console: Console) -> int:
    """Every part that is asked for; 1 if answers differ between the pools."""
    from streamer.cli.arguments import config_from
    from streamer.cli.loop import new_runner
    from streamer.cli.serve import SWITCH_INTERVAL_S

    config = config_from(args)
    names = [name for name in Asked.__struct_fields__ if name != "seed"]
    asked = Asked(**{name: getattr(args, name) for name in names}, seed=config.seed or 0)
    parts = _parts(args.only)
    results = Results(date=now(), settings=msgspec.structs.asdict(asked))
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        with new_runner() as runner:
            runner.run(measure(parts, asked, config, results, console))
    finally:
        sys.setswitchinterval(switch_s)
    console.out(report(results))
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    return 1 if results.swap is not None and results.swap.num_equal < asked.num_prompts else 0


def _parts(only: str | None) -> list[str]:
    """The parts asked for, in their order; ConfigError names an unknown one."""
    wanted = [name.strip() for name in only.split(",")] if only else list(PARTS)
    for name in wanted:
        if name not in PARTS:
            raise ConfigError(f"--only: {name!r} is none of {', '.join(PARTS)}", param="only")
    return [part for part in PARTS if part in wanted]


async def measure(
    parts: list[str], asked: Asked, config: Config, results: Results, console: Console
) -> None:
    """Into `results`, with a bar that moves."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, TimeElapsedColumn(), console=console, refresh_per_second=2)

    def shown(what: str, total: int) -> Done:
        task = bar.add_task(what, total=total)
        return lambda: bar.advance(task)

    with bar:
        if "throughput" in parts or "latency" in parts:
            async with opened(config, asked, shown) as engine:
                results.about(engine.info)
                draw = Prompts(engine, asked)
                if "throughput" in parts:
                    results.throughput = await throughput(engine, asked, draw, shown)
                if "latency" in parts:
                    results.latency = await latency(engine, asked, draw, shown)
        if "swap" in parts:
            results.swap = await swap(config, asked, results, shown)


@asynccontextmanager
async def opened(
    config: Config, asked: Asked, shown: Shown, **changes: object
) -> AsyncIterator[AsyncEngine]:
    """An engine that takes all requests at once; the model is loaded anew."""
    from streamer.build import build_engine

    loaded = shown("loading", 1)
    queue = max(config.max_queue, asked.num_prompts, asked.batch_size)
    settings = msgspec.structs.replace(config, max_queue=queue, load_progress=False, **changes)
    async with build_engine(settings) as engine:
        loaded()
        yield engine


async def throughput(engine: AsyncEngine, asked: Asked, draw: Prompts, shown: Shown) -> Throughput:
    """All prompts at once, from the first one's submission to the last one's end."""
    await answers(engine, draw(asked.num_prompts), WARM_TOKENS, shown("warm-up", asked.num_prompts))
    prompts = draw(asked.num_prompts)
    done = shown("throughput", asked.num_prompts)
    took_s, _ = await answers(engine, prompts, asked.output_len, done)
    return Throughput.of(took_s, asked.num_prompts, asked.input_len, asked.output_len)


async def latency(engine: AsyncEngine, asked: Asked, draw: Prompts, shown: Shown) -> Latency:
    """Seconds of each iteration: a batch from its submission to the end of its last answer."""
    found = []
    done = shown("latency", asked.num_iters_warmup + asked.num_iters)
    for iteration in range(asked.num_iters_warmup + asked.num_iters):
        took_s, _ = await answers(engine, draw(asked.batch_size), asked.output_len)
        if iteration >= asked.num_iters_warmup:
            found.append(took_s)
        done()
    return Latency.of(found, asked.batch_size)


async def swap(config: Config, asked: Asked, results: Results, shown: Shown) -> Swap:
    """The same requests with both pools; the model is loaded once for each."""
    rows = min(asked.num_prompts, config.max_num_seqs)
    each = asked.blocks(config.block_size)
    large = math.ceil(HEADROOM * rows * each)
    small = max(each + 1, round(asked.pool_share * rows * each))
    pools, said = [], []
    for num_blocks in (large, small):
        async with opened(config, asked, shown, num_gpu_blocks_override=num_blocks) as engine:
            results.about(engine.info)
            pool, tokens = await _with_pool(engine, asked, shown)
        pools.append(pool)
        said.append(tokens)
    num_equal = sum(one == other for one, other in zip(*said, strict=True))
    return Swap(large=pools[0], small=pools[1], num_equal=num_equal)


async def _with_pool(
    engine: AsyncEngine, asked: Asked, shown: Shown
) -> tuple[Pool, list[tuple[int, ...]]]:
    """What one pool gives. The warm-up is a whole run: it touches the host pool too."""
    draw, num_blocks = Prompts(engine, asked), engine.info.num_blocks
    for what in (f"{num_blocks} blocks, warm-up", f"{num_blocks} blocks"):
        prompts, before = draw(asked.num_prompts), engine.snapshot().step
        done = shown(what, asked.num_prompts)
        took_s, tokens = await answers(engine, prompts, asked.output_len, done)
    after = engine.snapshot().step
    moved = after.swapped_out_blocks + after.swapped_in_blocks
    moved -= before.swapped_out_blocks + before.swapped_in_blocks
    pool = Pool(
        num_blocks=num_blocks,
        elapsed_time=took_s,
        output_tokens_per_second=asked.num_prompts * asked.output_len / took_s,
        preemptions_swap=after.preemptions_swap - before.preemptions_swap,
        preemptions_recompute=after.preemptions_recompute - before.preemptions_recompute,
        swapped_blocks=moved,
        swapped_bytes=moved * engine.info.block_bytes,
        swap_time=after.swap_s - before.swap_s,
    )
    return pool, tokens


class Prompts:
    """Draws random prompts, the same for the same seed and model; no special tokens."""

    def __init__(self, engine: AsyncEngine, asked: Asked) -> None:
        special = engine.tokenizer.special_ids
        vocabulary = min(engine.info.vocab_size, engine.tokenizer.vocab_size)
        self._ids = [token for token in range(vocabulary) if token not in special]
        self._source = random.Random(asked.seed)
        self._length = asked.input_len

    def __call__(self, count: int) -> list[Prompt]:
        """So many that were not drawn before."""
        return [tuple(self._source.choices(self._ids, k=self._length)) for _ in range(count)]


async def answers(
    engine: AsyncEngine, prompts: list[Prompt], output_len: int, done: Done | None = None
) -> tuple[float, list[tuple[int, ...]]]:
    """Seconds of all together, and each one's tokens: so many, greedily, past the model's end."""
    from streamer.engine.engine import GenerateRequest

    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)

    async def answer(stream: TokenStream) -> None:
        await stream.wait()
        if done is not None:
            done()

    began = time.perf_counter()
    streams = [engine.submit(GenerateRequest(prompt=prompt, params=params)) for prompt in prompts]
    try:
        async with asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(answer(stream))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    took_s = time.perf_counter() - began
    tokens = [stream.token_ids() for stream in streams]
    if short := sum(len(each) != output_len for each in tokens):
        raise RequestFailed(f"{short} of {len(tokens)} answers do not have {output_len} tokens")
    return took_s, tokens
