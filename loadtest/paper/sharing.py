"""Sharing of blocks between a request's choices: what `n` saves, and what that is worth.

The same prompts twice: as requests with n choices, and as n separate requests without a prefix
cache. Counts the distinct blocks in the page tables after every step. As in the paper, the saving
is the blocks that sharing saved, of all blocks that there would be without it, on average.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from streamer.core.view import SchedulerView
from streamer.loadtest.paper.asks import TINY_SCALE, Ask, Kind, asks, page_tables
from streamer.loadtest.paper.report import Comparison, Plot, Series
from streamer.loadtest.paper.steps import MODEL, Steps, checkpoint, settings

CHOICES = (2, 4, 6)
BLOCK_SIZE = 16
COUNTS: dict[str, int] = {"Alpaca": 32, "ShareGPT": 24}
PUBLISHED = {
    ("Alpaca", 2): 6.1,
    ("Alpaca", 4): 8.5,
    ("Alpaca", 6): 9.8,
    ("ShareGPT", 2): 16.2,
    ("ShareGPT", 6): 30.5,
}


class Usage(msgspec.Struct, frozen=True):
    """A run: blocks held, and entries of all page tables, summed over its steps; its speed."""

    held: int
    listed: int
    peak: int
    tokens_per_s: float


class Case(msgspec.Struct, frozen=True):
    """One workload and n, with sharing and without."""

    kind: Kind
    n: int
    shared: Usage
    alone: Usage

    @property
    def saved(self) -> float:
        """Per cent of the blocks, on average over the steps of the two runs."""
        return saving(self.shared, self.alone)


def saving(shared: Usage, alone: Usage) -> float:
    """Per cent: blocks saved by sharing, of those without it."""
    return 100 * (1 - shared.held / alone.held)


def count_blocks(view: SchedulerView) -> tuple[int, int]:
    """(distinct blocks, entries) of all page tables."""
    tables = [blocks for _, blocks in page_tables(view)]
    return len({block for table in tables for block in table}), sum(map(len, tables))


def run(folder: Path, requests: Sequence[Ask], n: int, *, is_shared: bool, room: int) -> Usage:
    """Every request n times, all at once, in a pool of `room` blocks that holds them all."""
    config = settings(
        block_size=BLOCK_SIZE,
        max_num_seqs=len(requests) * n,
        num_gpu_blocks_override=room,
        max_model_len=max(len(ask.prompt) + ask.num_output for ask in requests),
        swap_space=0.01,
        enable_prefix_caching=is_shared,
    )
    each = (1, n) if is_shared else (n, 1)
    with Steps(folder, config) as steps:
        for i, ask in enumerate(requests):
            for j in range(each[0]):
                steps.add(f"{i} {j}", *ask, temperature=1.0, n=each[1])
        held = listed = peak = tokens = 0
        step_s = 0.0
        while True:
            began = time.perf_counter()
            output = steps.step()
            step_s += time.perf_counter() - began
            if output is None:
                break
            tokens += len(output.tokens)
            now_held, now_listed = count_blocks(steps.look())
            held, listed, peak = held + now_held, listed + now_listed, max(peak, now_held)
    return Usage(held, listed, peak, tokens / step_s)


def measure(progress: Callable[[str], None], *, tiny: bool = False) -> Comparison:
    """Both workloads with each n."""
    cases = []
    progress("writing the model")
    with checkpoint(tiny=tiny) as folder:
        first = asks("Alpaca", 2)
        run(folder, first, 2, is_shared=True, room=room_for(first, 2))  # the first is slower
        for kind in ("Alpaca", "ShareGPT"):
            requests = asks(kind, 3, scale=TINY_SCALE) if tiny else asks(kind, COUNTS[kind])
            for n in CHOICES:
                usage = []
                for is_shared in (True, False):
                    how = "shared" if is_shared else "alone"
                    progress(f"{kind}, n = {n}, {how}")
                    room = room_for(requests, n)
                    usage.append(run(folder, requests, n, is_shared=is_shared, room=room))
                cases.append(Case(kind, n, *usage))
    return _compare(cases)


def room_for(requests: Sequence[Ask], n: int) -> int:
    """Blocks in which all choices run at once without sharing, above the watermark."""
    blocks = sum(-(-(len(a.prompt) + a.num_output) // BLOCK_SIZE) for a in requests) * n
    return blocks + max(2, blocks // 16)


def _compare(cases: Sequence[Case]) -> Comparison:
    by_kind = {kind: [c for c in cases if c.kind == kind] for kind in ("Alpaca", "ShareGPT")}
    saved = {kind: [f"{c.saved:.1f}" for c in of] for kind, of in by_kind.items()}
    gains = [c.shared.tokens_per_s / c.alone.tokens_per_s for c in cases]
    counts = " and ".join(f"{count} of {kind}" for kind, count in COUNTS.items())
    rows = [
        (
            f"{c.kind}, n = {c.n}",
            _published(c),
            f"{c.saved:.1f} %",
            c.alone.peak,
            c.shared.peak,
            c.alone.tokens_per_s,
            c.shared.tokens_per_s,
        )
        for c in cases
    ]
    return Comparison(
        name="sharing",
        title="Blocks saved by sharing a prompt between n choices",
        published=(
            "n = 2, 4, 6 save 6.1, 8.5, 9.8 % of the blocks with Alpaca's prompts and 16.2 to "
            "30.5 % with ShareGPT's longer ones (OPT-13B, PagedAttention, section 6.3)."
        ),
        columns=(
            "", "published", "saved", "most blocks, alone", "shared", "tokens/s, alone", "shared",
        ),
        rows=tuple(rows),
        finding=(
            f"n = {', '.join(map(str, CHOICES))} save {', '.join(saved['Alpaca'])} % with Alpaca's "
            f"lengths and {', '.join(saved['ShareGPT'])} % with ShareGPT's, and make "
            f"{min(gains):.2f} to {max(gains):.2f} times the tokens a second, by prompts that are "
            "computed once."
        ),
        setting=(
            f"{MODEL} (42 million parameters, random weights), blocks of {BLOCK_SIZE}, "
            f"{counts}'s requests, all at once in a pool that holds "
            "them; temperature 1; page tables are read after every step. Alone: n requests of one "
            "choice without a prefix cache."
        ),
        plot=Plot(
            "bars",
            "choices a request",
            "blocks saved, %",
            (
                *(_series(f"here, {kind}", of) for kind, of in by_kind.items()),
                *(_published_series(kind) for kind in by_kind),
            ),
            tuple(f"n = {n}" for n in CHOICES),
        ),
    )  # fmt: skip


def _published(case: Case) -> str:
    known = PUBLISHED.get((case.kind, case.n))
    return f"{known} %" if known is not None else "between"


def _series(name: str, cases: Sequence[Case]) -> Series:
    return Series(name, tuple((float(i), c.saved) for i, c in enumerate(cases)))


def _published_series(kind: str) -> Series:
    points = [(float(i), PUBLISHED.get((kind, n))) for i, n in enumerate(CHOICES)]
    return Series(f"published, {kind}", tuple((x, y) for x, y in points if y is not None))
