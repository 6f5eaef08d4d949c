"""What chunked prefill does for those who are reading: gaps between tokens beside long prompts.

Some streams run; long prompts come at given tokens of theirs, so that every token budget has the
same work. A budget that holds a whole prompt beside all streams is no chunking: Orca's iterations,
which the Sarathi-Serve paper calls hybrid batching. Called by paper/command.py.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from streamer.loadtest.paper.report import Comparison, Plot, Series
from streamer.loadtest.paper.steps import Steps, checkpoint, prompt, settings

PUBLISHED = (
    "Chunks beside decodes instead of whole prompts beside decodes: p99 between tokens 4.9 and 8.1 "
    "times shorter (0.68 to 0.14 s, 1.38 to 0.17 s), p50 to the first token 1.4 and 1.03 times as "
    "long (Sarathi-Serve, OSDI 2024, table 4: Yi-34B on two A100s, budget 1024, two data sets); "
    "chunks of 512 make a prefill up to about 25% slower (section 5.4.1)."
)
WHOLE = "whole prompts"
NONE = "no long prompts"


class Work(msgspec.Struct, frozen=True):
    """Streams of `output` tokens, and long prompts that come when every stream has had `first`,
    `first + every`, ... tokens.

    budgets  tokens computed in a step;  rounds  of all budgets; medians count
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


TINY = Work((32,), 2, 24, 1, 128, 4, 8, 1)
SHORT = 16  # tokens of a stream's prompt


class Run(msgspec.Struct, frozen=True):
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


def measure(progress: Callable[[str], None], *, tiny: bool = False) -> Comparison:
    """Every budget in rounds that take turns."""
    work = TINY if tiny else Work()
    names = {WHOLE: work.whole} | {f"budget {n}": n for n in reversed(work.budgets)}
    runs: dict[str, list[Run]] = {NONE: [], **{name: [] for name in names}}
    progress("making the model")
    with checkpoint(tiny=tiny) as folder:
        for number in range(work.rounds):
            progress(f"round {number + 1}, {NONE}")
            runs[NONE].append(run_budget(folder, work, work.whole, num_long=0))
            for name, budget in names.items():
                progress(f"round {number + 1}, {name}")
                runs[name].append(run_budget(folder, work, budget, num_long=work.num_long))
    return compare(work, {name: summary(rounds) for name, rounds in runs.items()})


def run_budget(folder: Path, work: Work, budget: int, *, num_long: int) -> Run:
    """The streams, and so many long prompts beside them."""
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


def _run(steps: Steps, work: Work, num_long: int) -> Run:
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
    return Run(gaps_ms, first_ms, speed)


def summary(runs: Sequence[Run]) -> Case:
    """Medians over the rounds of each round's figures."""
    return Case(
        p50_ms=statistics.median(share(run.gaps_ms, 0.5) for run in runs),
        p99_ms=statistics.median(share(run.gaps_ms, 0.99) for run in runs),
        worst_ms=statistics.median(max(run.gaps_ms) for run in runs),
        first_ms=statistics.median(statistics.median(run.first_ms or [0.0]) for run in runs),
        speed=statistics.median(run.speed for run in runs),
    )


def share(values: Sequence[float], part: float) -> float:
    """The smallest value that so large a part of them does not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)]


# ---------------------------------------------------------------- what is shown


def compare(work: Work, cases: dict[str, Case]) -> Comparison:
    """The table and what it says."""
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
        published=PUBLISHED,
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
        finding=_finding(whole, chunked),
        setting=_setting(work),
        plot=Plot("lines", "token budget of a step", "ms", series, ticks),
    )


def _ascending(cases: dict[str, Case]) -> list[str]:
    """The budgets from the smallest, whole prompts last."""
    return sorted(cases, key=lambda name: math.inf if name == WHOLE else int(name.split()[1]))


def _line(cases: dict[str, Case], field: str) -> tuple[tuple[float, float], ...]:
    return tuple((i, getattr(cases[name], field)) for i, name in enumerate(_ascending(cases)))


def _finding(whole: Case, chunked: dict[str, Case]) -> str:
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


def _setting(work: Work) -> str:
    return (
        f"The model is `small` (8 layers, hidden 512, random weights, bfloat16). "
        f"{work.num_streams} greedy streams of {work.output} tokens; {work.num_long} prompts of "
        f"{work.long} random tokens, one every {work.every} tokens of the streams. Times are at "
        f"the end of the engine's steps; median of {work.rounds} rounds that take turns."
    )
