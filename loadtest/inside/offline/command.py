"""`streamer bench offline`: the engine without a server: throughput, latency of a batch, answers
with a grammar beside free ones, swap.

`swap` runs the same requests with a pool that holds them all and with one that does not, and
compares the answers: swapped KV must come back unchanged. Each engine runs in its own process,
offline/engine.py; offline/report.py formats the results.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from streamer.errors import ConfigError, StreamerError
from streamer.loadtest.inside.offline.engine import (
    Assignment,
    BenchOptions,
    Doing,
    Failed,
    Found,
    Line,
    Step,
)
from streamer.loadtest.inside.offline.report import Pool, Results, Swap, now, report

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from streamer.config import Config

PARTS = ("throughput", "latency", "grammar", "swap")
HEADROOM = 1.125  # of a pool that holds everything: admission keeps a watermark free


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The workload's flags, with the names of `vllm bench`, and the engine's settings."""
    from streamer.cli.arguments import add_config_flags

    add, asked = parser.add_argument, BenchOptions()
    add("--only", metavar="NAMES", help=f"only these parts, comma-separated: {', '.join(PARTS)}")
    for flag, says in (
        ("input_len", "tokens per prompt"),
        ("output_len", "tokens per answer"),
        ("num_prompts", "requests of throughput and swap"),
        ("batch_size", "requests per iteration of latency"),
        ("num_iters", "iterations of latency"),
        ("num_iters_warmup", "warm-up iterations of latency"),
    ):
        default = getattr(asked, flag)
        add(f"--{flag.replace('_', '-')}", type=int, default=default, help=f"{says} ({default})")
    says = "swap's small pool, as a share of the blocks that all requests need at their ends (0.5)"
    add("--pool-share", type=float, default=asked.pool_share, help=says)
    add("--json", type=Path, metavar="FILE", help="also write all figures to this file")
    add_config_flags(parser, sections=("model", "scheduling and memory"), model=False)


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the chosen parts; 1 if answers differ between the pools."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from streamer.cli.arguments import config_from

    config = config_from(args)
    names = [name for name in BenchOptions.__struct_fields__ if name != "seed"]
    asked = BenchOptions(**{name: getattr(args, name) for name in names}, seed=config.seed or 0)
    parts = _parts(args.only)
    results = Results(date=now(), settings=msgspec.structs.asdict(asked))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        refresh_per_second=2,
    ) as bar:
        if plain := tuple(part for part in parts if part != "swap"):
            found = ask(Assignment(config, asked, plain), bar)
            _about(results, found)
            results.throughput, results.latency = found.throughput, found.latency
            results.grammar = found.grammar
        if "swap" in parts:
            results.swap = swap(config, asked, results, bar)
    console.out(report(results))
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    return 1 if results.swap is not None and results.swap.num_equal < asked.num_prompts else 0


def _parts(only: str | None) -> list[str]:
    """The chosen parts, in their order; ConfigError names an unknown one."""
    requested = [name.strip() for name in only.split(",")] if only else list(PARTS)
    for name in requested:
        if name not in PARTS:
            raise ConfigError(f"--only: {name!r} is not one of {', '.join(PARTS)}", param="only")
    return [part for part in PARTS if part in requested]


def swap(config: Config, asked: BenchOptions, results: Results, bar: Progress) -> Swap:
    """Run the same requests with both pools."""
    rows = min(asked.num_prompts, config.max_num_seqs)
    each = asked.blocks(config.block_size)
    large = math.ceil(HEADROOM * rows * each)
    small = max(each + 1, round(asked.pool_share * rows * each))
    pools: list[Pool] = []
    tokens = []
    for num_blocks in (large, small):
        sized = msgspec.structs.replace(config, num_gpu_blocks_override=num_blocks)
        found = ask(Assignment(sized, asked, ("pool",)), bar)
        _about(results, found)
        if found.pool is not None:
            pools.append(found.pool)
        tokens.append(found.tokens)
    num_equal = sum(one == other for one, other in zip(*tokens, strict=True))
    return Swap(large=pools[0], small=pools[1], num_equal=num_equal)


def _about(results: Results, found: Found) -> None:
    """Record the loaded model in the results."""
    results.model, results.dtype, results.device = found.model, found.dtype, found.device
    results.block_size = found.block_size


def ask(assignment: Assignment, bar: Progress) -> Found:
    """Run a job in its own process and return its results; StreamerError if it fails."""
    decoder = msgspec.json.Decoder(Line)
    command = [sys.executable, "-m", "streamer.loadtest.inside.offline.engine"]
    pipe, found, task = subprocess.PIPE, None, bar.add_task("loading", total=1)
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        try:
            if process.stdin is None or process.stdout is None:
                raise StreamerError("the engine's process has no pipes")
            process.stdin.write(msgspec.json.encode(assignment))
            process.stdin.close()
            for line in process.stdout:
                match decoder.decode(line):
                    case Doing(what, total):
                        task = bar.add_task(what, total=total)
                    case Step():
                        bar.advance(task)
                    case Failed(message):
                        raise StreamerError(message)
                    case Found() as result:
                        found = result
        except BaseException:
            process.kill()
            raise
    if found is None:
        raise StreamerError(f"the engine's process ended with {process.returncode}")
    return found
