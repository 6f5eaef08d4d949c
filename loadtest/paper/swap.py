"""What a preemption costs by swap and by recompute, by block size: figure 19 of PagedAttention.

First the two by themselves: one sequence's blocks copied out and back, and its tokens computed
again, by the real runner. Then requests whose blocks do not fit, with every preemption one way,
the other way, and as the engine chooses from measured costs; their answers must not differ. Called
by paper/command.py.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from streamer.core.plan import Chunk, Plan, RowJoin
from streamer.core.sampling import SamplingParams
from streamer.loadtest.paper.report import Comparison, Plot, Series
from streamer.loadtest.paper.steps import Steps, checkpoint, load, prompt, settings

if TYPE_CHECKING:
    from streamer.engine.core import Runner

PUBLISHED = (
    "Swap is far slower at small blocks (many small copies over PCIe) and better at large ones; "
    'recompute is the same at all of them and "never higher than 20% of swapping\'s latency"; at '
    "16 to 64 the two are even end to end (PagedAttention, SOSP 2023, section 7.3, figure 19; "
    "A100)."
)
# How each way is made the cheaper one: by what the engine believes that a prefilled token costs.
WAYS: dict[str, dict[str, float]] = {
    "swap": {"prefill_s": 1e6},
    "recompute": {"prefill_s": 0.0},
    "own choice": {},
}


class Work(msgspec.Struct, frozen=True):
    """Requests of `prompt` and `output` tokens, and what share of their KV the pool holds.

    length  of the one sequence that is swapped and computed again by itself;  tries  of each
    rounds  of all block sizes and ways; medians count
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
        """That one request has at its end."""
        return self.prompt + self.output


TINY = Work((8, 32), 64, 2, 6, 32, 64, 0.4, 1)


class Alone(msgspec.Struct, frozen=True):
    """Milliseconds for one sequence, each the median of its tries."""

    out_ms: float
    in_ms: float
    recompute_ms: float


class Run(msgspec.Struct, frozen=True):
    """All requests once: output tokens a second, how they were preempted, what they were told."""

    speed: float
    num_swaps: int
    num_recomputes: int
    answers: dict[str, list[int]]


def measure(progress: Callable[[str], None], *, tiny: bool = False) -> Comparison:
    """Every block size by itself, then in every way, in rounds that take turns."""
    work = TINY if tiny else Work()
    progress("making the model")
    with checkpoint(tiny=tiny) as folder:
        progress("one sequence")
        alone = [measure_alone(folder, work, size) for size in work.block_sizes * work.rounds]
        progress("all requests in a pool that holds them")
        roomy = [run_all(folder, work, 16, {}, share=1.2) for _ in range(work.rounds)]
        runs: dict[tuple[int, str], list[Run]] = {}
        for number in range(work.rounds):
            for size in work.block_sizes:
                for way, costs in WAYS.items():
                    progress(f"round {number + 1}, blocks of {size}, {way}")
                    runs.setdefault((size, way), []).append(run_all(folder, work, size, costs))
    return compare(work, medians(work, alone), roomy, runs)


# ---------------------------------------------------------------- one sequence


def measure_alone(folder: Path, work: Work, block_size: int) -> Alone:
    """Copies and a prefill through the runner, the blocks in no order, as in a used pool."""
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


def medians(work: Work, alone: list[Alone]) -> dict[int, Alone]:
    """By block size, of what was measured in rounds of all sizes."""
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
        params=SamplingParams(temperature=0.0, seed=0),
    )
    chunk = Chunk(0, 0, len(tokens), sample=True)
    return Plan(
        number, joins=(join,), chunks=(chunk,), num_rows=1, num_tokens=len(tokens), num_samples=1
    )


def _seconds(runner: Runner, plan: Plan) -> float:
    began = time.perf_counter()
    runner.launch(plan).collect()
    return time.perf_counter() - began


# ---------------------------------------------------------------- all requests


def run_all(
    folder: Path, work: Work, block_size: int, costs: dict[str, float], share: float = 0.0
) -> Run:
    """All requests at once, to their ends; `share`: of their KV that fits, if not the work's."""
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
    return Run(speed, stats.preemptions_swap, stats.preemptions_recompute, steps.answers)


# ---------------------------------------------------------------- what is shown


def compare(
    work: Work,
    alone: dict[int, Alone],
    roomy: list[Run],
    runs: dict[tuple[int, str], list[Run]],
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
        published=PUBLISHED,
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
        finding=_finding(alone, speeds, runs, roomy),
        setting=_setting(work),
        plot=_plot(work, speeds),
    )


def num_changed(expected: dict[str, list[int]], runs: Iterable[Run]) -> int:
    """Answers of all runs that are not those of the run without preemption."""
    return sum(run.answers.get(name) != expected[name] for run in runs for name in expected)


def _finding(
    alone: dict[int, Alone],
    speeds: dict[tuple[int, str], float],
    runs: dict[tuple[int, str], list[Run]],
    roomy: list[Run],
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


def _equal(roomy: list[Run], runs: dict[tuple[int, str], list[Run]]) -> str:
    every = [run for rounds in runs.values() for run in rounds]
    expected = roomy[0].answers
    changed = num_changed(expected, every)
    if not changed:
        return "All answers are equal, token for token."
    return f"{changed} of {len(expected) * len(every)} answers differ: their prefill is rounded."


def _preemptions(run: Run) -> int:
    return run.num_swaps + run.num_recomputes


def _setting(work: Work) -> str:
    return (
        f"The model is `small` (8 layers, hidden 512, random weights, bfloat16). By itself: one "
        f"sequence of {work.length} tokens, its blocks scattered, median of {work.rounds} "
        f"rounds of {work.tries}. End to "
        f"end: {work.num_requests} greedy requests at once, {work.prompt} random prompt tokens and "
        f"{work.output} of output each, a pool for {work.share:.0%} of their KV, 512 tokens a "
        f"step, median of {work.rounds} rounds that take turns. Swap and recompute are forced by "
        f"the cost of a prefilled token that the scheduler is told."
    )


def _plot(work: Work, speeds: dict[tuple[int, str], float]) -> Plot:
    series = tuple(
        Series(way, tuple((i, speeds[s, way]) for i, s in enumerate(work.block_sizes)))
        for way in reversed(WAYS)
    )
    ticks = tuple(map(str, work.block_sizes))
    return Plot("lines", "tokens in a block", "output tokens/s", series, ticks)
