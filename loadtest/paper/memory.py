"""Use of the KV cache: paged beside contiguous allocation, and blocks that choices share.

Allocation: paged is the real engine, whose block tables are read after every step while it runs.
Contiguous is a model of the systems that the PagedAttention paper compared with: each request
reserves one piece of the same pool, found by a buddy allocator, for the longest possible answer
(Max), for the next power of two of its answer (Pow2), or for just its answer (Oracle); one token a
step, first come first served, none ever preempted.

Sharing: the same prompts twice, as requests with n choices, and as n separate requests without a
prefix cache. Counts the distinct blocks in the block tables after every step. As in the paper, the
saving is the average share of the blocks without sharing that sharing saved. Of beam searches it is
the share of the block tables' entries that name a block another entry names too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from streamer.core.view import SchedulerView
from streamer.loadtest.paper.comparison import (
    CONTEXT,
    MODEL,
    TINY_SCALE,
    Ask,
    Comparison,
    Kind,
    Plot,
    Series,
    Steps,
    asks,
    checkpoint,
    page_tables,
    settings,
)

BLOCK_SIZES = (8, 16, 32)
# In tokens. The paper's OPT-13B has 15,700 (table 1); a SchedulerView lists at most 256 requests,
# so short ones get less.
POOLS: dict[Kind, int] = {"ShareGPT": 8 * CONTEXT, "Alpaca": 2 * CONTEXT}
NUM_REQUESTS: dict[Kind, int] = {"ShareGPT": 128, "Alpaca": 192}


class Moment(msgspec.Struct, frozen=True):
    """One step: tokens written and tokens held by running requests, their number, any waiting."""

    used: int
    held: int
    running: int
    has_waiting: bool


class Occupancy(msgspec.Struct, frozen=True):
    """A run: per cent of held memory without a token, of the pool with one; requests at once.

    `filled` and the numbers running are of steps with requests waiting: the pool limits those.
    """

    wasted: float
    filled: float
    mean_running: float
    peak_running: int


def summed(moments: Sequence[Moment], pool_tokens: int) -> Occupancy:
    """The averages over a run's steps."""
    full = [m for m in moments if m.has_waiting] or moments
    return Occupancy(
        wasted=100 * (1 - sum(m.used for m in moments) / sum(m.held for m in moments)),
        filled=100 * sum(m.used for m in full) / (len(full) * pool_tokens),
        mean_running=sum(m.running for m in full) / len(full),
        peak_running=max(m.running for m in moments),
    )


# ---------------------------------------------------------------- allocation: paged, the engine


def paged(
    folder: Path, requests: Sequence[Ask], block_size: int, pool_tokens: int, context: int
) -> Occupancy:
    """The engine on a pool of `pool_tokens`, all requests waiting at the start."""
    moments = []
    config = settings(
        block_size=block_size,
        max_num_seqs=len(requests),
        num_gpu_blocks_override=pool_tokens // block_size,
        max_model_len=context,
    )
    with Steps(folder, config) as steps:
        for i, ask in enumerate(requests):
            steps.add(str(i), *ask)
        while steps.step() is not None:
            view = steps.look()
            if any(seq.blocks for request in view.requests for seq in request.sequences):
                moments.append(moment_of(view))
    return summed(moments, pool_tokens)


def moment_of(view: SchedulerView) -> Moment:
    """A step's Moment from the block tables; a shared block counts once."""
    if view.unlisted.get("running"):
        raise RuntimeError(f"the snapshot does not list all running requests, but {view.unlisted}")
    fill: dict[int, int] = {}
    tables = page_tables(view)
    for computed, blocks in tables:
        for i, block in enumerate(blocks):
            used = min(max(computed - i * view.block_size, 0), view.block_size)
            fill[block] = max(fill.get(block, 0), used)
    stats = view.stats
    has_waiting = bool(stats.waiting or stats.preempted or stats.swapped)
    return Moment(sum(fill.values()), len(fill) * view.block_size, len(tables), has_waiting)


# ---------------------------------------------------------------- allocation: contiguous, a model


class Buddies:
    """A buddy allocator (Knuth, volume 1, 2.5) over a power of two of tokens."""

    def __init__(self, size: int) -> None:
        self._free: dict[int, set[int]] = {size: {0}}

    def take(self, num_tokens: int) -> tuple[int, int] | None:
        """(start, size) of a piece of at least `num_tokens`; None if there is none."""
        target = 1 << (num_tokens - 1).bit_length()
        sizes = [size for size, starts in self._free.items() if starts and size >= target]
        if not sizes:
            return None
        size = min(sizes)
        start = min(self._free[size])
        self._free[size].remove(start)
        while size > target:
            size //= 2
            self._free.setdefault(size, set()).add(start + size)
        return start, size

    def give_back(self, start: int, size: int) -> None:
        """Free a piece and join it with its buddy for as long as the buddy is free."""
        while start ^ size in self._free.get(size, ()):
            self._free[size].remove(start ^ size)
            start, size = min(start, start ^ size), 2 * size
        self._free.setdefault(size, set()).add(start)


def reserve_longest(ask: Ask, context: int) -> int:
    """Tokens for the longest possible answer: the paper's Orca (Max)."""
    return context


def reserve_power(ask: Ask, context: int) -> int:
    """Tokens for the answer, rounded up to a power of two: the paper's Orca (Pow2)."""
    return len(ask.prompt) + (1 << (ask.num_output - 1).bit_length())


def reserve_known(ask: Ask, context: int) -> int:
    """Tokens for the answer, as if its length were known: the paper's Orca (Oracle)."""
    return len(ask.prompt) + ask.num_output


POLICIES: dict[str, Callable[[Ask, int], int]] = {
    "Max": reserve_longest,
    "Pow2": reserve_power,
    "Oracle": reserve_known,
}


def contiguous(
    requests: Sequence[Ask], reserve: Callable[[Ask, int], int], pool_tokens: int, context: int
) -> Occupancy:
    """Each request in one piece until it ends; its prompt is written in its first step."""
    pool = Buddies(pool_tokens)
    running: list[list[int]] = []  # [tokens written, tokens at its end, start, size]
    moments, num_begun = [], 0
    while running or num_begun < len(requests):
        while num_begun < len(requests):
            ask = requests[num_begun]
            piece = pool.take(min(reserve(ask, context), pool_tokens))
            if piece is None:
                break
            # the last token drawn is never written
            written = len(ask.prompt)
            running.append([written, written + ask.num_output - 1, *piece])
            num_begun += 1
        moments.append(
            Moment(
                sum(r[0] for r in running),
                sum(r[3] for r in running),
                len(running),
                num_begun < len(requests),
            )
        )
        for ended in [r for r in running if r[0] >= r[1]]:
            running.remove(ended)
            pool.give_back(ended[2], ended[3])
        for one in running:
            one[0] += 1
    return summed(moments, pool_tokens)


# ---------------------------------------------------------------- allocation: what is shown


def measure_allocation(progress: Callable[[str], None], *, tiny: bool = False) -> Comparison:
    """Measure both workloads under every policy and block size."""
    found: dict[Kind, dict[str, Occupancy]] = {}
    progress("writing the model")
    with checkpoint(tiny=tiny) as folder:
        for kind in NUM_REQUESTS:
            count, scale = (8, TINY_SCALE) if tiny else (NUM_REQUESTS[kind], 1)
            pool, context = (512, 128) if tiny else (POOLS[kind], CONTEXT)
            requests = asks(kind, count, scale=scale, context=context)
            usages = {
                name: contiguous(requests, policy, pool, context)
                for name, policy in POLICIES.items()
            }
            for size in BLOCK_SIZES:
                progress(f"{kind}, blocks of {size}")
                usages[f"blocks of {size}"] = paged(folder, requests, size, pool, context)
            found[kind] = usages
    return _compare_allocation(found)


def _compare_allocation(found: dict[Kind, dict[str, Occupancy]]) -> Comparison:
    published = {
        ("ShareGPT", "Max"): "7.0",
        ("ShareGPT", "Pow2"): "9.8",
        ("ShareGPT", "Oracle"): "13.6",
        ("ShareGPT", "blocks of 16"): "30.4",
    }
    rows = [
        (
            f"{kind}, {name}",
            f"{usage.wasted:.1f} %",
            f"{usage.filled:.1f} %",
            f"{usage.mean_running:.1f}",
            usage.peak_running,
            published.get((kind, name), ""),
        )
        for kind, usages in found.items()
        for name, usage in usages.items()
    ]
    names = [*POLICIES, *(f"blocks of {size}" for size in BLOCK_SIZES)]
    return Comparison(
        name="allocation",
        title="Paged memory beside contiguous memory",
        published=(
            "20.4 to 38.2 % of contiguous KV memory holds tokens, 96.3 % of paged (PagedAttention, "
            "figure 2; 60 to 80 % and under 4 % are wasted, says vLLM's launch post, 2023); 30.4 "
            "requests at once instead of 7.0 (Max) to 13.6 (Oracle) with OPT-13B at 2 requests a "
            "second of ShareGPT (section 6.2)."
        ),
        columns=(
            "", "held without a token", "pool with tokens", "requests at once", "at most",
            "published, at once",
        ),
        rows=tuple(rows),
        finding=_allocation_finding(found),
        setting=_allocation_setting(),
        plot=Plot(
            "bars",
            "",
            "of the memory that is held: without a token, %",
            tuple(
                Series(
                    kind,
                    tuple((float(i), found[kind][name].wasted) for i, name in enumerate(names)),
                )
                for kind in found
            ),
            tuple(names),
        ),
    )  # fmt: skip


def _allocation_finding(found: dict[Kind, dict[str, Occupancy]]) -> str:
    share, small = found["ShareGPT"], found["Alpaca"]
    contiguous = [share[name].wasted for name in POLICIES]
    ours, reserved, known = share["blocks of 16"], share["Max"], share["Oracle"]
    return (
        f"With ShareGPT's lengths blocks of 16 waste {ours.wasted:.1f} % of what they hold, "
        f"contiguous pieces {min(contiguous):.0f} to {max(contiguous):.0f} %; the pool serves "
        f"{ours.mean_running:.1f} requests at once instead of {reserved.mean_running:.1f} (Max) "
        f"to {known.mean_running:.1f} (Oracle). Alpaca's short answers waste "
        f"{small['blocks of 16'].wasted:.1f} %, {small['blocks of 8'].wasted:.1f} % with blocks of "
        f"8 and {small['blocks of 32'].wasted:.1f} % with 32."
    )


def _allocation_setting() -> str:
    counts = " and ".join(
        f"{NUM_REQUESTS[kind]} requests of {kind}'s lengths on a pool of {POOLS[kind]:,} tokens"
        for kind in NUM_REQUESTS
    )
    return (
        f"{MODEL} (42 million parameters, random weights); {counts}; context {CONTEXT:,}, all "
        "there from the start. "
        "Pool with tokens and requests at once are means over the steps in which others wait. "
        "Contiguous is computed (buddy allocator, a token a step); paged is read from the "
        "engine's page tables after every step, preemption included."
    )


# ---------------------------------------------------------------- sharing


CHOICES = (2, 4, 6)
WIDTHS = (2, 4, 6)
NUM_SEARCHES: dict[Kind, int] = {"Alpaca": 16, "ShareGPT": 8}
BEAM_CONTEXT = 1024  # the bundled model's
PUBLISHED_BEAMS = {"Alpaca": "37.6 to 55.2 %", "ShareGPT": "44.3 to 66.3 %"}
BLOCK_SIZE = 16
NUM_PROMPTS: dict[str, int] = {"Alpaca": 32, "ShareGPT": 24}
PUBLISHED_SAVED = {
    ("Alpaca", 2): 6.1,
    ("Alpaca", 4): 8.5,
    ("Alpaca", 6): 9.8,
    ("ShareGPT", 2): 16.2,
    ("ShareGPT", 6): 30.5,
}


class Blocks(msgspec.Struct, frozen=True):
    """A run: blocks held, and entries of all block tables, summed over its steps; its speed."""

    held: int
    listed: int
    peak: int
    tokens_per_s: float


class Sharing(msgspec.Struct, frozen=True):
    """One workload and n, with sharing and without."""

    kind: Kind
    n: int
    shared: Blocks
    alone: Blocks

    @property
    def saved(self) -> float:
        """Per cent of blocks saved, on average over the steps of the two runs."""
        return saving(self.shared, self.alone)


def saving(shared: Blocks, alone: Blocks) -> float:
    """Blocks saved by sharing, in per cent of those without it."""
    return 100 * (1 - shared.held / alone.held)


def count_blocks(view: SchedulerView) -> tuple[int, int]:
    """(distinct blocks, entries) of all block tables."""
    tables = [blocks for _, blocks in page_tables(view)]
    return len({block for table in tables for block in table}), sum(map(len, tables))


def run_choices(
    folder: Path, requests: Sequence[Ask], n: int, *, is_shared: bool, room: int
) -> Blocks:
    """Run every request n times, all at once, in a pool of `room` blocks that holds them all."""
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
        return _run(steps)


def _run(steps: Steps) -> Blocks:
    """Count the blocks of all tables after every step, to the end."""
    held = listed = peak = tokens = 0
    step_s = 0.0
    while True:
        began = time.perf_counter()
        output = steps.step()
        step_s += time.perf_counter() - began
        if output is None:
            return Blocks(held, listed, peak, tokens / step_s)
        tokens += len(output.tokens)
        now_held, now_listed = count_blocks(steps.look())
        held, listed, peak = held + now_held, listed + now_listed, max(peak, now_held)


def run_beams(folder: Path, requests: Sequence[Ask], width: int, *, room: int) -> Blocks:
    """Run every request as a beam search, all at once; `listed`: blocks without sharing."""
    config = settings(
        block_size=BLOCK_SIZE,
        max_num_seqs=len(requests) * width,
        num_gpu_blocks_override=room,
        max_model_len=max(len(ask.prompt) + ask.num_output for ask in requests),
        swap_space=0.01,
    )
    with Steps(folder, config) as steps:
        for i, ask in enumerate(requests):
            steps.add(str(i), *ask, beam_width=width)
        return _run(steps)


def measure_beams(progress: Callable[[str], None], *, tiny: bool = False) -> Comparison:
    """Measure both workloads with each width, on the bundled model."""
    from streamer.demo import CHECKPOINT

    found: dict[str, list[Blocks]] = {}
    for kind in ("Alpaca", "ShareGPT"):
        count, scale = (3, TINY_SCALE) if tiny else (NUM_SEARCHES[kind], 1)
        requests = asks(kind, count, scale=scale, context=BEAM_CONTEXT)
        for width in WIDTHS:
            progress(f"{kind}, width {width}")
            room = room_for(requests, width)
            found.setdefault(kind, []).append(run_beams(CHECKPOINT, requests, width, room=room))
    return _compare_beams(found)


def saved_by_beams(blocks: Blocks) -> float:
    """Per cent of the entries of all block tables that need no block of their own."""
    return 100 * (1 - blocks.held / blocks.listed)


def _compare_beams(found: Mapping[str, Sequence[Blocks]]) -> Comparison:
    saved = {kind: [saved_by_beams(b) for b in of] for kind, of in found.items()}
    texts = {kind: ", ".join(f"{value:.1f}" for value in of) for kind, of in saved.items()}
    counts = " and ".join(f"{count} of {kind}" for kind, count in NUM_SEARCHES.items())
    return Comparison(
        name="beams",
        title="Blocks saved by sharing between the hypotheses of a beam search",
        published=(
            "Widths of 2 to 6 save 37.6 to 55.2 % of the blocks with Alpaca's prompts and 44.3 to "
            "66.3 % with ShareGPT's (OPT-13B, PagedAttention, section 6.3)."
        ),
        columns=("", "published", "saved", "blocks held at once"),
        rows=tuple(
            (
                f"{kind}, width {width}",
                PUBLISHED_BEAMS[kind],
                f"{value:.1f} %",
                b.peak,
            )
            for kind, of in found.items()
            for width, value, b in zip(WIDTHS, saved[kind], of, strict=True)
        ),
        finding=(
            f"Widths of {', '.join(map(str, WIDTHS))} save {texts['Alpaca']} % with Alpaca's "
            f"lengths and {texts['ShareGPT']} % with ShareGPT's."
        ),
        setting=(
            f"The bundled model, blocks of {BLOCK_SIZE}, {counts}'s requests with random prompts "
            f"of these lengths within its context of {BEAM_CONTEXT:,} tokens, all at once in a "
            "pool that holds them; page tables are read after every step, and what is saved is "
            "their entries beyond the blocks that are held."
        ),
        plot=Plot(
            "bars",
            "beam width",
            "blocks saved, %",
            tuple(
                Series(f"here, {kind}", tuple((float(i), value) for i, value in enumerate(of)))
                for kind, of in saved.items()
            ),
            tuple(f"width {width}" for width in WIDTHS),
        ),
    )


def measure_sharing(progress: Callable[[str], None], *, tiny: bool = False) -> Comparison:
    """Measure both workloads with each n."""
    cases = []
    progress("writing the model")
    with checkpoint(tiny=tiny) as folder:
        first = asks("Alpaca", 2)
        room = room_for(first, 2)
        run_choices(folder, first, 2, is_shared=True, room=room)  # the first is slower
        for kind in ("Alpaca", "ShareGPT"):
            requests = asks(kind, 3, scale=TINY_SCALE) if tiny else asks(kind, NUM_PROMPTS[kind])
            for n in CHOICES:
                usage = []
                for is_shared in (True, False):
                    how = "shared" if is_shared else "alone"
                    progress(f"{kind}, n = {n}, {how}")
                    room = room_for(requests, n)
                    usage.append(run_choices(folder, requests, n, is_shared=is_shared, room=room))
                cases.append(Sharing(kind, n, *usage))
    return _compare_sharing(cases)


def room_for(requests: Sequence[Ask], n: int) -> int:
    """Blocks with which all choices run at once without sharing, above the watermark."""
    blocks = sum(-(-(len(a.prompt) + a.num_output) // BLOCK_SIZE) for a in requests) * n
    return blocks + max(2, blocks // 16)


def _compare_sharing(cases: Sequence[Sharing]) -> Comparison:
    by_kind = {kind: [c for c in cases if c.kind == kind] for kind in ("Alpaca", "ShareGPT")}
    saved = {kind: [f"{c.saved:.1f}" for c in of] for kind, of in by_kind.items()}
    gains = [c.shared.tokens_per_s / c.alone.tokens_per_s for c in cases]
    counts = " and ".join(f"{count} of {kind}" for kind, count in NUM_PROMPTS.items())
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
            "", "published", "saved", "peak blocks, alone", "shared", "tokens/s, alone", "shared",
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


def _published(case: Sharing) -> str:
    known = PUBLISHED_SAVED.get((case.kind, case.n))
    return f"{known} %" if known is not None else "between"


def _series(name: str, cases: Sequence[Sharing]) -> Series:
    return Series(name, tuple((float(i), c.saved) for i, c in enumerate(cases)))


def _published_series(kind: str) -> Series:
    points = [(float(i), PUBLISHED_SAVED.get((kind, n))) for i, n in enumerate(CHOICES)]
    return Series(f"published, {kind}", tuple((x, y) for x, y in points if y is not None))
