"""`streamer simulate`: the real scheduler over a fake model, beside older methods.

Runs the requests that the flags describe through core.Scheduler, step by step, and prints the same
work under static batching and contiguous allocation. No torch, no clock: a run repeats exactly.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from streamer.loadtest import plots
from streamer.loadtest.table import terminal

if TYPE_CHECKING:
    from rich.console import Console

    from streamer.core.plan import Facts, Plan
    from streamer.core.scheduler import Scheduler, SchedulerConfig

MAX_REQUESTS = 4096
MAX_LENGTH = 1 << 20


class Workload(msgspec.Struct, frozen=True):
    """The simulated work: lengths in tokens, pools in blocks; 0 rows or blocks: enough for all."""

    lengths: tuple[int, ...]
    prompt: int = 16
    shared_prefix: int = 0
    n: int = 1
    rows: int = 0
    pool: int = 0
    host_pool: int = 0
    block_size: int = 16
    budget: int = 2048

    @property
    def num_choices(self) -> int:
        """Total number of sequences."""
        return len(self.lengths) * self.n

    @property
    def max_rows(self) -> int:
        """Sequences that may run at once."""
        return self.rows or self.num_choices

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)

    @property
    def worst_blocks(self) -> int:
        """Blocks of the longest sequence."""
        return self.blocks_for(self.prompt + self.shared_prefix + max(self.lengths))


class Step(msgspec.Struct, frozen=True):
    """One step's state.

    states  request -> "prefill", "decode", "swapped", "preempted" or "waiting"
    held    distinct blocks in block tables; listed: entries of all tables
    tokens  tokens whose KV is in those blocks, shared ones counted once
    rows    rows the batch occupies; samples: tokens it draws
    """

    states: dict[int, str]
    held: int
    listed: int
    tokens: int
    rows: int
    samples: int


class Outcome(msgspec.Struct, frozen=True):
    """A whole run."""

    steps: tuple[Step, ...]
    pool: int
    preemptions_swap: int
    preemptions_recompute: int
    swapped_blocks: int
    copied_blocks: int
    prefix_hit_tokens: int
    computed_tokens: int

    @property
    def samples(self) -> int:
        """Tokens drawn."""
        return sum(s.samples for s in self.steps)

    @property
    def slot_efficiency(self) -> float:
        """Tokens drawn per occupied row and step, prefill steps included."""
        return self.samples / max(sum(s.rows for s in self.steps), 1)

    @property
    def peak_held(self) -> int:
        """Maximum blocks in use at once."""
        return max((s.held for s in self.steps), default=0)

    @property
    def saved(self) -> int:
        """Maximum blocks that sharing saved at once."""
        return max((s.listed - s.held for s in self.steps), default=0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The workload and the sizes."""
    parser.add_argument(
        "--lengths", required=True, metavar="N,N,...", help="output tokens of each request"
    )
    parser.add_argument(
        "--prompt", type=int, default=16, help="prompt tokens of each request, not shared [16]"
    )
    parser.add_argument(
        "--shared-prefix", type=int, default=0, help="prompt tokens that all requests share [0]"
    )
    parser.add_argument("--n", type=int, default=1, help="choices per request [1]")
    parser.add_argument("--rows", type=int, default=0, help="max_num_seqs [all at once]")
    parser.add_argument("--pool", type=int, default=0, help="device blocks [enough for all]")
    parser.add_argument("--host-pool", type=int, default=0, help="host blocks [as many as --pool]")
    parser.add_argument("--block-size", type=int, default=16, help="tokens per block [16]")
    parser.add_argument("--budget", type=int, default=2048, help="tokens per step [2048]")
    parser.add_argument("--block-mib", type=float, default=2.0, help="size of a block [2.0]")
    parser.add_argument(
        "--prefill-us", type=float, default=30.0, help="time to prefill one token [30]"
    )
    parser.add_argument("--swap-gbps", type=float, default=45.0, help="bandwidth in GB/s [45]")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw slots and blocks over time")


def workload_from(args: argparse.Namespace) -> Workload:
    """The flags as a Workload; UsageError names a flag that can't be simulated."""
    from streamer.cli.arguments import UsageError

    try:
        lengths = tuple(int(word) for word in args.lengths.split(","))
    except ValueError:
        raise UsageError(f"--lengths must be numbers and commas, not {args.lengths!r}") from None
    if not 0 < len(lengths) <= MAX_REQUESTS or not all(0 < n <= MAX_LENGTH for n in lengths):
        raise UsageError(f"--lengths must be 1 to {MAX_REQUESTS} numbers from 1 to {MAX_LENGTH}")
    lowest = {"prompt": 1, "n": 1, "block_size": 1, "budget": 1}
    for name in (
        "prompt",
        "shared_prefix",
        "n",
        "rows",
        "pool",
        "host_pool",
        "block_size",
        "budget",
    ):
        value, low = getattr(args, name), lowest.get(name, 0)
        if not low <= value <= MAX_LENGTH:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} must be from {low} to {MAX_LENGTH}, got {value}")
    names = [f.name for f in msgspec.structs.fields(Workload) if f.name != "lengths"]
    work = Workload(lengths=lengths, **{name: getattr(args, name) for name in names})
    if work.budget < work.max_rows:
        raise UsageError(
            f"--budget {work.budget} is below the {work.max_rows} rows that decode at once; "
            "raise it, or lower --rows"
        )
    return work


def run(args: argparse.Namespace, console: Console) -> int:
    """Simulate, print the comparison, draw the plot."""
    from streamer.cli.arguments import UsageError
    from streamer.core.plan import Facts

    if min(args.block_mib, args.prefill_us, args.swap_gbps) <= 0:
        raise UsageError("--block-mib, --prefill-us and --swap-gbps must be above 0")
    work = workload_from(args)
    costs = Facts(prefill_s=args.prefill_us * 1e-6, swap_bytes_per_s=args.swap_gbps * 1e9)
    outcome = simulate(work, costs, block_bytes=int(args.block_mib * (1 << 20)))

    print_report(work, outcome, console)
    if args.plot:
        try:
            Path(args.plot).write_text(svg(work, outcome), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--plot {args.plot}: {error.strerror}") from error
        console.print(f"drawn to {args.plot}", markup=False)
    return 0


def scheduler_config(work: Workload, block_bytes: int) -> SchedulerConfig:
    """The real scheduler's sizes for this workload."""
    from streamer.core.scheduler import SchedulerConfig

    pool = work.pool or work.worst_blocks * work.num_choices + max(1, work.num_choices // 16)
    return SchedulerConfig(
        block_size=work.block_size,
        num_blocks=pool,
        num_host_blocks=work.host_pool or pool,
        block_bytes=block_bytes,
        max_num_seqs=work.max_rows,
        max_num_batched_tokens=work.budget,
        max_model_len=work.prompt + work.shared_prefix + max(work.lengths),
    )


def simulate(work: Workload, costs: Facts, block_bytes: int) -> Outcome:
    """Run every request to its length."""
    from streamer.core.blocks import BlockHasher
    from streamer.core.plan import Add
    from streamer.core.sampling import SamplingParams
    from streamer.core.scheduler import Scheduler
    from streamer.fake.runner import FakeRunner

    config = scheduler_config(work, block_bytes)
    scheduler = Scheduler(config, BlockHasher(work.block_size, b"simulate" * 4))
    runner = FakeRunner(
        block_size=work.block_size,
        num_blocks=config.num_blocks,
        num_host_blocks=config.num_host_blocks,
    )
    for i, length in enumerate(work.lengths):
        # A distinct token per request keeps prompts apart; the fake model ignores ids.
        prompt = (300,) * work.shared_prefix + (301 + i,) * work.prompt
        params = SamplingParams(max_tokens=length, n=work.n, seed=0, ignore_eos=True)
        scheduler.command(Add(str(i), prompt, params))
    steps: list[Step] = []
    while True:
        facts = msgspec.structs.replace(costs, copies_done=runner.facts().copies_done)
        plan = scheduler.schedule(facts)
        if plan is None:
            break
        steps.append(_look(scheduler, plan))
        scheduler.apply(plan, runner.launch(plan).collect())
    stats = scheduler.stats()
    return Outcome(
        steps=tuple(steps),
        pool=config.num_blocks,
        preemptions_swap=stats.preemptions_swap,
        preemptions_recompute=stats.preemptions_recompute,
        swapped_blocks=stats.swapped_out_blocks,
        copied_blocks=stats.copied_blocks,
        prefix_hit_tokens=stats.prefix_hit_tokens,
        computed_tokens=stats.computed_tokens,
    )


def _look(scheduler: Scheduler, plan: Plan) -> Step:
    """The step just planned."""
    from streamer.core.request import Status

    names: dict[Any, str] = {
        Status.SWAPPING_OUT: "swapped",
        Status.SWAPPED: "swapped",
        Status.SWAPPING_IN: "swapped",
        Status.PREEMPTED: "preempted",
        Status.WAITING: "waiting",
    }
    size = scheduler.config.block_size
    states: dict[int, str] = {}
    fill: dict[int, int] = {}
    listed = 0
    for request in scheduler.state.requests.by_id.values():
        is_drawing = any(s.num_pending for s in request.sequences)
        running = "decode" if is_drawing else "prefill"
        states[int(request.request_id)] = names.get(request.status, running)
        for seq in request.sequences:
            listed += len(seq.blocks)
            for i, block in enumerate(seq.blocks):
                used = min(max(seq.num_computed - i * size, 0), size)
                fill[block] = max(fill.get(block, 0), used)
    return Step(states, len(fill), listed, sum(fill.values()), plan.num_rows, plan.num_samples)


# ---------------------------------------------------------------- the report

KINDS = {"decode": "s0", "prefill": "s2", "swapped": "s3", "preempted": "s5", "waiting": "s1"}
MARGIN, CHART = 56, 150  # pixels beside the pictures; the height of the lower one


def static_batching(work: Workload) -> tuple[int, float]:
    """(steps, slot efficiency) when a batch runs until its longest member ends."""
    lengths = [n for n in work.lengths for _ in range(work.n)]
    batches = [lengths[i : i + work.max_rows] for i in range(0, len(lengths), work.max_rows)]
    slots = sum(max(batch) * len(batch) for batch in batches)
    return sum(max(batch) for batch in batches), sum(lengths) / slots


def contiguous(work: Workload) -> tuple[int, float]:
    """(blocks reserved at once, wasted share) when each sequence reserves the longest's blocks."""
    prompt = work.prompt + work.shared_prefix
    room = work.worst_blocks * work.block_size * work.num_choices
    used = sum(prompt + n for n in work.lengths) * work.n
    return work.worst_blocks * min(work.max_rows, work.num_choices), 1 - used / room


def paged_waste(outcome: Outcome, block_size: int) -> float:
    """Share of the held blocks' token slots that are empty, over all steps."""
    room = sum(s.held for s in outcome.steps) * block_size
    return 1 - sum(s.tokens for s in outcome.steps) / room if room else 0.0


def print_report(work: Workload, outcome: Outcome, console: Console) -> None:
    """The comparison, a line a fact."""
    static_steps, static_share = static_batching(work)
    reserved, wasted = contiguous(work)
    decode_steps = sum(1 for s in outcome.steps if s.samples)
    paged = paged_waste(outcome, work.block_size)
    rows = [
        ("", "static, contiguous", "streamer"),
        ("steps that draw tokens", f"{static_steps}", f"{decode_steps}"),
        ("slot efficiency", f"{static_share:.1%}", f"{outcome.slot_efficiency:.1%}"),
        ("KV blocks, at most", f"{reserved}", f"{outcome.peak_held} of {outcome.pool}"),
        ("of their room wasted", f"{wasted:.1%}", f"{paged:.1%}"),
        ("blocks saved by sharing, at most", "0", f"{outcome.saved}"),
        ("prompt tokens found in the cache", "0", f"{outcome.prefix_hit_tokens}"),
        ("tokens computed", "", f"{outcome.computed_tokens}"),
        ("preemptions by swap", "", f"{outcome.preemptions_swap}"),
        ("preemptions by recompute", "", f"{outcome.preemptions_recompute}"),
        ("blocks swapped out", "", f"{outcome.swapped_blocks}"),
        ("blocks copied on write", "", f"{outcome.copied_blocks}"),
    ]
    title = f"{len(work.lengths)} requests, {outcome.samples} output tokens"
    console.print(terminal(rows, title))
    console.print(
        "Slot efficiency: of the row-steps a batch occupies, those that draw a token. A static "
        "batch holds all its rows until its longest request ends, and reserves the longest "
        "request's memory for each.",
        style="dim",
    )


def svg(work: Workload, outcome: Outcome) -> str:
    """Two pictures over the steps: each request's state, and the blocks held."""
    num_rows, pool = len(work.lengths), outcome.pool
    right, top = plots.WIDTH - MARGIN, 64.0
    rows = plots.Frame(MARGIN, top, right, top + num_rows * max(2.0, min(16.0, 400 / num_rows)))
    below = plots.Frame(MARGIN, rows.bottom + 48, right, rows.bottom + 48 + CHART)
    peak = max(outcome.peak_held, 1)
    high = pool if peak <= pool <= 2 * peak else peak
    blocks = plots.Axis(0, high, [0, high])
    steps = plots.Axis(0, max(1, len(outcome.steps)), [0, len(outcome.steps)])
    states = [[s.states.get(row, "") for s in outcome.steps] for row in range(num_rows)]
    title = f"{num_rows} requests over {len(outcome.steps)} steps"
    parts = [
        plots.text(plots.MARGIN, 24, title, "title"),
        *plots.legend([(kind, name) for name, kind in KINDS.items()], 48),
        *plots.timeline(rows, states, KINDS),
        plots.text(MARGIN, below.top - 10, f"blocks held, {peak} at peak, {pool} in the pool"),
        *plots.grid(below, steps, blocks),
        plots.area(below, [s.held for s in outcome.steps], blocks, "s4"),
        *([plots.limit(below, 1.0)] if high == pool else []),
        plots.text((MARGIN + right) / 2, below.bottom + 30, "step", "note", "middle"),
    ]
    return plots.document(title, below.bottom + 44, parts)
