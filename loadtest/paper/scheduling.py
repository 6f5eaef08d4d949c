"""Effects of chunked prefill, and of preemption by swap or recompute.

Chunks: some streams run; long prompts arrive when the streams have given numbers of tokens, so that
every token budget has the same work. A budget that holds a whole prompt beside all streams is no
chunking: Orca's iterations, which the Sarathi-Serve paper calls hybrid batching.

Preemption, by block size: figure 19 of PagedAttention. First each way by itself on the real runner:
one sequence's blocks copied out and back, and its tokens recomputed. Then requests whose blocks do
not fit, with every preemption by swap, by recompute, and as the engine chooses from measured costs;
their answers must not differ.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from streamer.core.plan import Chunk, Plan, RowJoin
from streamer.core.sampling import SamplingParams
from streamer.loadtest.paper.comparison import (
    Comparison,
    Plot,
    Series,
    Steps,
    checkpoint,
    load,
    prompt,
    settings,
)

if TYPE_CHECKING:
    from streamer.engine.core import Runner


# ---------------------------------------------------------------- chunks


CHUNKS_PUBLISHED = (
    "Chunks beside decodes instead of whole prompts beside decodes: p99 between tokens 4.9 and 8.1 "
    "times shorter (0.68 to 0.14 s, 1.38 to 0.17 s), p50 to the first token 1.4 and 1.03 times as "
    "long (Sarathi-Serve, OSDI 2024, table 4: Yi-34B on two A100s, budget 1024, two data sets); "
    "chunks of 512 make a prefill up to about 25% slower (section 5.4.1)."
)
WHOLE = "whole prompts"
NONE = "no long prompts"


class ChunkWork(msgspec.Struct, frozen=True):
    """Streams of `output` tokens, and long prompts that arrive when every stream has `first`,
    `first + every`, ... tokens.

    budgets  tokens computed in a step;  rounds  of all budgets, of which medians are taken
    """

    budgets: tuple[int, ...] = (64, 128, 256, 512, 1024)
    num_streams: int = 8
    output: int = 400
    num_long: int = 6
    long: int = 2048
    first: int = 30
    every: int = 60
    rounds: int = 3

    @property
    def whole(self) -> int:
        """The budget that never cuts a prompt."""
        return self.long + self.num_streams


TINY_CHUNKS = ChunkWork((32,), 2, 24, 1, 128, 4, 8, 1)
SHORT = 16  # tokens of a stream's prompt


class ChunkRun(msgspec.Struct, frozen=True):
    """One run: milliseconds between tokens of a stream, and to each long prompt's first token.

    speed  tokens a second, of prompts and output, from the streams' first tokens to the end
    """

    gaps_ms: list[float]
    first_ms: list[float]
    speed: float


class Case(msgspec.Struct, frozen=True):
    """One budget: medians over its rounds. first_ms is 0 without long prompts."""

    p50_ms: float
    p99_ms: float
    worst_ms: float
    first_ms: float
    speed: float


def measure_chunks(progress: Callable[[str], None], *, tiny: bool = False) -> Comparison:
    """Measure every budget, in rounds over all of them."""
    work = TINY_CHUNKS if tiny else ChunkWork()
    names = {WHOLE: work.whole} | {f"budget {n}": n for n in reversed(work.budgets)}
    runs: dict[str, list[ChunkRun]] = {NONE: [], **{name: [] for name in names}}
    progress("making the model")
    with checkpoint(tiny=tiny) as folder:
        for number in range(work.rounds):
            progress(f"round {number + 1}, {NONE}")
            runs[NONE].append(run_budget(folder, work, work.whole, num_long=0))
            for name, budget in names.items():
                progress(f"round {number + 1}, {name}")
                runs[name].append(run_budget(folder, work, budget, num_long=work.num_long))
    return compare_chunks(work, {name: summary(rounds) for name, rounds in runs.items()})


def run_budget(folder: Path, work: ChunkWork, budget: int, *, num_long: int) -> ChunkRun:
    """Run the streams, and `num_long` long prompts beside them."""
    num_blocks = (work.num_streams * (work.output + SHORT) + 2 * work.long) // 16 * 2
    config = settings(
        max_num_seqs=work.num_streams + 2,
        max_num_batched_tokens=budget,
        max_model_len=max(work.long, work.output + SHORT) + 2,
        num_gpu_blocks_override=num_blocks,
    )
    steps = Steps(folder, config)
    try:
        return _run(steps, work, num_long)
    finally:
        steps.close()


def _run(steps: Steps, work: ChunkWork, num_long: int) -> ChunkRun:
    names = [f"stream {i}" for i in range(work.num_streams)]
    for name in names:
        steps.add(name, prompt(SHORT, name), work.output)
    while not all(steps.answers[name] for name in names):
        steps.step()
    seen = [time.perf_counter()]  # the end of each step: every stream has a token of it
    due = [work.first + i * work.every for i in range(num_long)]
    asked: dict[str, float] = {}
    first_ms: list[float] = []
    before = steps.stats.computed_tokens
    while True:
        if due and len(steps.answers[names[0]]) >= due[0]:
            name = f"long {due.pop(0)}"
            asked[name] = time.perf_counter()
            steps.add(name, prompt(work.long, name), 1)
        output = steps.step()
        if output is None:
            break
        now = time.perf_counter()
        if names[0] in output.request_ids:
            seen.append(now)
        first_ms += [(now - asked[n]) * 1e3 for n in output.request_ids if n in asked]
    took_s = time.perf_counter() - seen[0]
    gaps_ms = [(b - a) * 1e3 for a, b in pairwise(seen)]
    speed = (steps.stats.computed_tokens - before) / took_s
    return ChunkRun(gaps_ms, first_ms, speed)


def summary(runs: Sequence[ChunkRun]) -> Case:
    """Medians over the rounds of each round's figures."""
    return Case(
        p50_ms=statistics.median(share(run.gaps_ms, 0.5) for run in runs),
        p99_ms=statistics.median(share(run.gaps_ms, 0.99) for run in runs),
        worst_ms=statistics.median(max(run.gaps_ms) for run in runs),
        first_ms=statistics.median(statistics.median(run.first_ms or [0.0]) for run in runs),
        speed=statistics.median(run.speed for run in runs),
    )


def share(values: Sequence[float], part: float) -> float:
    """The smallest value that `part` of the values do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)]


# ---------------------------------------------------------------- chunks: what is shown


def compare_chunks(work: ChunkWork, cases: dict[str, Case]) -> Comparison:
    """The table and its finding."""
    whole = cases[WHOLE]
    rows = []
    for name, it in cases.items():
        has_long = name != NONE
        first = (it.first_ms, it.first_ms / whole.first_ms) if has_long else ("", "")
        p99 = whole.p99_ms / it.p99_ms if has_long else ""
        rows.append((name, it.p50_ms, it.p99_ms, it.worst_ms, p99, *first, it.speed))
    chunked = {name: it for name, it in cases.items() if name not in (WHOLE, NONE)}
    series = (
        Series("p99 between tokens", _line(chunked | {WHOLE: whole}, "p99_ms")),
        Series("long prompt's first token", _line(chunked | {WHOLE: whole}, "first_ms")),
    )
    ticks = tuple(name.removeprefix("budget ") for name in _ascending(chunked | {WHOLE: whole}))
    return Comparison(
        name="chunks",
        title="Chunked prefill and the gaps between tokens",
        published=CHUNKS_PUBLISHED,
        columns=(
            "tokens in a step",
            "between tokens: p50, ms",
            "p99, ms",
            "longest, ms",
            "p99 shorter, times",
            "first token of a long prompt, ms",
            "longer, times",
            "all tokens/s",
        ),
        rows=tuple(rows),
        finding=_chunks_finding(whole, chunked),
        setting=_chunks_setting(work),
        plot=Plot("lines", "token budget of a step", "ms", series, ticks),
    )


def _ascending(cases: dict[str, Case]) -> list[str]:
    """The budgets from the smallest, whole prompts last."""
    return sorted(cases, key=lambda name: math.inf if name == WHOLE else int(name.split()[1]))


def _line(cases: dict[str, Case], field: str) -> tuple[tuple[float, float], ...]:
    return tuple((i, getattr(cases[name], field)) for i, name in enumerate(_ascending(cases)))


def _chunks_finding(whole: Case, chunked: dict[str, Case]) -> str:
    shorter = [whole.p99_ms / it.p99_ms for it in chunked.values()]
    later = [it.first_ms / whole.first_ms for it in chunked.values()]
    faster = [100 * (it.speed / whole.speed - 1) for it in chunked.values()]
    budgets = [name.removeprefix("budget ") for name in _ascending(chunked)]
    return (
        f"Beside whole prompts a stream waits {whole.p99_ms:,.0f} ms (p99) where its median gap is "
        f"{whole.p50_ms:.1f} ms. Budgets of {budgets[-1]} to {budgets[0]} make that "
        f"{min(shorter):.1f} to {max(shorter):.1f} times shorter and the long prompt's first token "
        f"{min(later):.2f} to {max(later):.2f} times as late, and change all tokens/s by "
        f"{min(faster):+.0f}% to {max(faster):+.0f}%."
    )


def _chunks_setting(work: ChunkWork) -> str:
    return (
        f"The model is `small` (8 layers, hidden 512, random weights, bfloat16). "
        f"{work.num_streams} greedy streams of {work.output} tokens; {work.num_long} prompts of "
        f"{work.long} random tokens, one every {work.every} tokens of the streams. Times are at "
        f"the end of the engine's steps; median of {work.rounds} rounds that take turns."
    )


# ---------------------------------------------------------------- preemption


SWAP_PUBLISHED = (
    "Swap is far slower at small blocks (many small copies over PCIe) and better at large ones; "
    'recompute is the same at all of them and "never higher than 20% of swapping\'s latency"; at '
    "16 to 64 the two are even end to end (PagedAttention, SOSP 2023, section 7.3, figure 19; "
    "A100)."
)
# Each way is made the cheaper one by the cost of a prefilled token that the engine is given.
WAYS: dict[str, dict[str, float]] = {
    "swap": {"prefill_s": 1e6},
    "recompute": {"prefill_s": 0.0},
    "own choice": {},
}


class SwapWork(msgspec.Struct, frozen=True):
    """Requests of `prompt` and `output` tokens, and the share of their KV that the pool holds.

    length  of the one sequence that is swapped and recomputed by itself;  tries  of each
    rounds  of all block sizes and ways, of which medians are taken
    """

    block_sizes: tuple[int, ...] = (1, 4, 16, 32, 64, 128)
    length: int = 512
    tries: int = 5
    num_requests: int = 24
    prompt: int = 128
    output: int = 256
    share: float = 0.4
    rounds: int = 3

    @property
    def num_tokens(self) -> int:
        """Tokens of one request at its end."""
        return self.prompt + self.output


TINY_SWAP = SwapWork((8, 32), 64, 2, 6, 32, 64, 0.4, 1)


class Alone(msgspec.Struct, frozen=True):
    """Milliseconds for one sequence, each the median of its tries."""

    out_ms: float
    in_ms: float
    recompute_ms: float


class SwapRun(msgspec.Struct, frozen=True):
    """One run of all requests: output tokens a second, preemptions by kind, the answers."""

    speed: float
    num_swaps: int
    num_recomputes: int
    answers: dict[str, list[int]]


def measure_swap(progress: Callable[[str], None], *, tiny: bool = False) -> Comparison:
    """Measure one sequence with every block size, then all requests in every way, in rounds."""
    work = TINY_SWAP if tiny else SwapWork()
    progress("making the model")
    with checkpoint(tiny=tiny) as folder:
        progress("one sequence")
        alone = [measure_alone(folder, work, size) for size in work.block_sizes * work.rounds]
        progress("all requests in a pool that holds them")
        roomy = [run_all(folder, work, 16, {}, share=1.2) for _ in range(work.rounds)]
        runs: dict[tuple[int, str], list[SwapRun]] = {}
        for number in range(work.rounds):
            for size in work.block_sizes:
                for way, costs in WAYS.items():
                    progress(f"round {number + 1}, blocks of {size}, {way}")
                    runs.setdefault((size, way), []).append(run_all(folder, work, size, costs))
    return compare_swaps(work, medians(work, alone), roomy, runs)


# ---------------------------------------------------------------- preemption: one sequence


def measure_alone(folder: Path, work: SwapWork, block_size: int) -> Alone:
    """Copies and a prefill through the runner; block ids are shuffled, as in a used pool."""
    num_blocks = -(-work.length // block_size)
    config = settings(
        max_num_seqs=1,
        max_num_batched_tokens=work.length,
        max_model_len=work.length + 1,
        block_size=block_size,
        num_gpu_blocks_override=2 * num_blocks + 2,
        swap_space=0.1,
    )
    runner, info = load(folder, config)
    source = random.Random(block_size)
    blocks = source.sample(range(info.num_blocks), num_blocks)
    host = source.sample(range(min(info.num_host_blocks, 2 * num_blocks)), num_blocks)
    out = tuple(zip(blocks, host, strict=True))
    back = tuple(zip(host, blocks, strict=True))
    seconds: dict[str, list[float]] = {"out": [], "in": [], "again": []}
    number = 0
    try:
        for _ in range(work.tries + 1):  # the first one touches all memory
            tokens = tuple(prompt(work.length, str(number)))
            plans = (
                ("again", _prefill(number + 1, tokens, tuple(blocks))),
                ("out", Plan(number + 2, leaves=(0,), swap_out=out)),
                ("in", Plan(number + 3, swap_in=back)),
            )
            for name, plan in plans:
                seconds[name].append(_seconds(runner, plan))
            number += len(plans)
    finally:
        runner.close()
    out_s, in_s, again_s = (statistics.median(times[1:]) for times in seconds.values())
    return Alone(out_s * 1e3, in_s * 1e3, again_s * 1e3)


def medians(work: SwapWork, alone: list[Alone]) -> dict[int, Alone]:
    """Medians over the rounds, by block size."""
    found = {}
    for i, size in enumerate(work.block_sizes):
        rounds = alone[i :: len(work.block_sizes)]
        fields = Alone.__struct_fields__
        found[size] = Alone(
            *(statistics.median(getattr(r, name) for r in rounds) for name in fields)
        )
    return found


def _prefill(number: int, tokens: tuple[int, ...], blocks: tuple[int, ...]) -> Plan:
    """All of a sequence in one step, as after a preemption that dropped its blocks."""
    join = RowJoin(
        row=0,
        request_id=str(number),
        choice=0,
        tokens=tokens,
        num_prompt=len(tokens),
        num_computed=0,
        blocks=blocks,
        params=SamplingParams(temperature=0.0, seed=0, speculation=False),
    )
    chunk = Chunk(0, 0, len(tokens), num_draws=1)
    return Plan(
        number, joins=(join,), chunks=(chunk,), num_rows=1, num_tokens=len(tokens), num_samples=1
    )


def _seconds(runner: Runner, plan: Plan) -> float:
    began = time.perf_counter()
    runner.launch(plan).collect()
    return time.perf_counter() - began


# ---------------------------------------------------------------- preemption: all requests


def run_all(
    folder: Path, work: SwapWork, block_size: int, costs: dict[str, float], share: float = 0.0
) -> SwapRun:
    """Run all requests at once; `share` of their KV that fits overrides the work's."""
    needed = work.num_requests * -(-work.num_tokens // block_size)
    config = settings(
        max_num_seqs=work.num_requests,
        max_num_batched_tokens=512,
        max_model_len=work.num_tokens + 1,
        block_size=block_size,
        num_gpu_blocks_override=int(needed * (share or work.share)),
        swap_space=0.25,
    )
    steps = Steps(folder, config, costs)
    try:
        for i in range(work.num_requests):
            steps.add(str(i), prompt(work.prompt, f"request {i}"), work.output)
        began = time.perf_counter()
        steps.run()
        took_s = time.perf_counter() - began
    finally:
        steps.close()
    stats, speed = steps.stats, work.num_requests * work.output / took_s
    return SwapRun(speed, stats.preemptions_swap, stats.preemptions_recompute, steps.answers)


# ---------------------------------------------------------------- preemption: what is shown


def compare_swaps(
    work: SwapWork,
    alone: dict[int, Alone],
    roomy: list[SwapRun],
    runs: dict[tuple[int, str], list[SwapRun]],
) -> Comparison:
    """The table and what it says."""
    speeds = {key: statistics.median(r.speed for r in rounds) for key, rounds in runs.items()}
    rows: list[tuple[str | float, ...]] = []
    for size, it in alone.items():
        both_ms = it.out_ms + it.in_ms
        own = runs[size, "own choice"]
        chosen = f"{sum(r.num_swaps for r in own)}, {sum(r.num_recomputes for r in own)}"
        cells = [size, it.out_ms, it.in_ms, both_ms, it.recompute_ms, it.recompute_ms / both_ms]
        rows.append((*cells, *(speeds[size, way] for way in WAYS), chosen))
    return Comparison(
        name="swap",
        title="Preemption by swap and by recompute",
        published=SWAP_PUBLISHED,
        columns=(
            "block size",
            "out, ms",
            "in, ms",
            "swap, ms",
            "recompute, ms",
            "recompute / swap",
            *(f"{way}, tokens/s" for way in WAYS),
            "chosen: swaps, recomputes",
        ),
        rows=tuple(rows),
        finding=_swap_finding(alone, speeds, runs, roomy),
        setting=_swap_setting(work),
        plot=_swap_plot(work, speeds),
    )


def num_changed(expected: dict[str, list[int]], runs: Iterable[SwapRun]) -> int:
    """Number of answers that differ from those of the run without preemption."""
    return sum(run.answers.get(name) != expected[name] for run in runs for name in expected)


def _swap_finding(
    alone: dict[int, Alone],
    speeds: dict[tuple[int, str], float],
    runs: dict[tuple[int, str], list[SwapRun]],
    roomy: list[SwapRun],
) -> str:
    ratios = [it.recompute_ms / (it.out_ms + it.in_ms) for it in alone.values()]
    gains = [100 * (speeds[s, "swap"] / speeds[s, "recompute"] - 1) for s in alone]
    own = [100 * (speeds[s, "own choice"] / speeds[s, "swap"] - 1) for s in alone]
    counts = [_preemptions(r) for rounds in runs.values() for r in rounds]
    by_itself = [r for (_, way), rounds in runs.items() if way == "own choice" for r in rounds]
    share = sum(r.num_swaps for r in by_itself) / max(1, sum(_preemptions(r) for r in by_itself))
    chosen = "swap every time" if share == 1 else f"swap in {share:.0%} of them"
    base = statistics.median(run.speed for run in roomy)
    return (
        f"Recompute takes {min(ratios):.0f} to {max(ratios):.0f} times as long as the swap of the "
        f"same sequence: both pools are the same memory here, so a swap is a copy without PCIe, "
        f"and a token costs a CPU more than a GPU. End to end ({min(counts)} to {max(counts)} "
        f"preemptions a run) swap has {min(gains):+.0f}% to {max(gains):+.0f}% of recompute's "
        f"tokens/s; the engine chose {chosen}, {min(own):+.0f}% to {max(own):+.0f}% beside the "
        f"forced ones, and with room for all it is {base:,.0f} tokens/s. {_equal(roomy, runs)}"
    )


def _equal(roomy: list[SwapRun], runs: dict[tuple[int, str], list[SwapRun]]) -> str:
    every = [run for rounds in runs.values() for run in rounds]
    expected = roomy[0].answers
    changed = num_changed(expected, every)
    if not changed:
        return "All answers are equal, token for token."
    return f"{changed} of {len(expected) * len(every)} answers differ: their prefill is rounded."


def _preemptions(run: SwapRun) -> int:
    return run.num_swaps + run.num_recomputes


def _swap_setting(work: SwapWork) -> str:
    return (
        f"The model is `small` (8 layers, hidden 512, random weights, bfloat16). By itself: one "
        f"sequence of {work.length} tokens, its blocks scattered, median of {work.rounds} "
        f"rounds of {work.tries}. End to "
        f"end: {work.num_requests} greedy requests at once, {work.prompt} random prompt tokens and "
        f"{work.output} of output each, a pool for {work.share:.0%} of their KV, 512 tokens a "
        f"step, median of {work.rounds} rounds that take turns. Swap and recompute are forced by "
        f"the cost of a prefilled token that the scheduler is given."
    )


def _swap_plot(work: SwapWork, speeds: dict[tuple[int, str], float]) -> Plot:
    series = tuple(
        Series(way, tuple((i, speeds[s, way]) for i, s in enumerate(work.block_sizes)))
        for way in reversed(WAYS)
    )
    ticks = tuple(map(str, work.block_sizes))
    return Plot("lines", "tokens in a block", "output tokens/s", series, ticks)
