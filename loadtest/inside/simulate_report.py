"""The simulation's table and picture: what simulate.py found, for people.

Formats only; static batching and contiguous allocation are computed here from their definitions,
with the same lengths. Called by simulate.run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from streamer.loadtest.inside.simulate import Outcome, Workload

COLOURS = {
    "decode": "#2f9e6e",
    "prefill": "#e0a11b",
    "swapped": "#7a6ff0",
    "preempted": "#d9534f",
    "waiting": "#d5d9e0",
}
WIDTH, MARGIN, CHART = 900, 56, 150


def static_batching(work: Workload) -> tuple[int, float]:
    """(steps, slot efficiency) when a batch runs until its longest member ends."""
    lengths = [n for n in work.lengths for _ in range(work.n)]
    batches = [lengths[i : i + work.max_rows] for i in range(0, len(lengths), work.max_rows)]
    slots = sum(max(batch) * len(batch) for batch in batches)
    return sum(max(batch) for batch in batches), sum(lengths) / slots


def contiguous(work: Workload) -> tuple[int, float]:
    """(blocks reserved at once, share of all wasted) when each sequence reserves the longest."""
    prompt = work.prompt + work.shared_prefix
    room = work.worst_blocks * work.block_size * work.num_choices
    used = sum(prompt + n for n in work.lengths) * work.n
    return work.worst_blocks * min(work.max_rows, work.num_choices), 1 - used / room


def paged_waste(outcome: Outcome, block_size: int) -> float:
    """Share of the blocks' room without a token, over all steps."""
    room = sum(s.held for s in outcome.steps) * block_size
    return 1 - sum(s.tokens for s in outcome.steps) / room if room else 0.0


def print_report(work: Workload, outcome: Outcome, console: Console) -> None:
    """The comparison, a line a fact."""
    from rich.table import Table

    static_steps, static_share = static_batching(work)
    reserved, wasted = contiguous(work)
    decode_steps = sum(1 for s in outcome.steps if s.samples)
    table = Table(title=f"{len(work.lengths)} requests, {outcome.samples} output tokens")
    for name in ("", "static, contiguous", "streamer"):
        table.add_column(name, justify="left" if not name else "right")
    table.add_row("steps that draw tokens", f"{static_steps}", f"{decode_steps}")
    table.add_row("slot efficiency", f"{static_share:.1%}", f"{outcome.slot_efficiency:.1%}")
    table.add_row("KV blocks, at most", f"{reserved}", f"{outcome.peak_held} of {outcome.pool}")
    table.add_row(
        "of their room wasted", f"{wasted:.1%}", f"{paged_waste(outcome, work.block_size):.1%}"
    )
    table.add_row("blocks saved by sharing, at most", "0", f"{outcome.saved}")
    table.add_row("prompt tokens found in the cache", "0", f"{outcome.prefix_hit_tokens}")
    table.add_row("tokens computed", "", f"{outcome.computed_tokens}")
    table.add_row("preemptions by swap", "", f"{outcome.preemptions_swap}")
    table.add_row("preemptions by recompute", "", f"{outcome.preemptions_recompute}")
    table.add_row("blocks swapped out", "", f"{outcome.swapped_blocks}")
    table.add_row("blocks copied on write", "", f"{outcome.copied_blocks}")
    console.print(table)
    console.print(
        "Slot efficiency: of the row-steps a batch occupies, those that draw a token. A static "
        "batch holds all its rows until its longest request ends, and reserves the longest "
        "request's memory for each.",
        style="dim",
    )


def svg(work: Workload, outcome: Outcome) -> str:
    """Two pictures over the steps: who did what, and how many blocks were held."""
    num_steps, num_rows = max(len(outcome.steps), 1), len(work.lengths)
    bar = max(2.0, min(16.0, 400 / num_rows))
    top, scale = 64.0, (WIDTH - 2 * MARGIN) / num_steps
    bottom = top + num_rows * bar + 48
    height = bottom + CHART + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#222">',
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="#fff"/>',
        f'<text x="{MARGIN}" y="24" font-size="15">{num_rows} requests over '
        f"{len(outcome.steps)} steps</text>",
        *_legend(),
        *_bars(outcome, num_rows, top, bar, scale),
        *_blocks(outcome, bottom, scale),
        f'<text x="{WIDTH / 2:.0f}" y="{height - 10:.0f}" text-anchor="middle">step</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _legend() -> list[str]:
    parts, x = [], float(MARGIN)
    for name, colour in COLOURS.items():
        parts.append(f'<rect x="{x:.0f}" y="38" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17:.0f}" y="48">{name}</text>')
        x += 34 + 7 * len(name)
    return parts


def _bars(outcome: Outcome, num_rows: int, top: float, bar: float, scale: float) -> list[str]:
    """A line a request; equal states in a row are one rectangle."""
    parts = []
    for request in range(num_rows):
        y, begin, state = top + request * bar, 0, ""
        states = [s.states.get(request, "") for s in outcome.steps]
        for i, now in enumerate([*states, None]):
            if now == state:
                continue
            if state:
                x, width = MARGIN + begin * scale, (i - begin) * scale
                parts.append(
                    f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
                    f'height="{bar * 0.86:.1f}" fill="{COLOURS[state]}"/>'
                )
            begin, state = i, now or ""
        if bar >= 10:
            parts.append(
                f'<text x="{MARGIN - 8}" y="{y + bar * 0.7:.1f}" text-anchor="end">{request}</text>'
            )
    return parts


def _blocks(outcome: Outcome, top: float, scale: float) -> list[str]:
    """Blocks held, as an area, and the size of the pool above it."""
    most = max(outcome.peak_held, 1)
    limit = max(most, outcome.pool) if outcome.pool <= 2 * most else most
    points = " ".join(
        f"{MARGIN + (i + edge) * scale:.1f},{top + CHART * (1 - s.held / limit):.1f}"
        for i, s in enumerate(outcome.steps)
        for edge in (0, 1)
    )
    base, right = top + CHART, MARGIN + len(outcome.steps) * scale
    parts = [
        f'<text x="{MARGIN}" y="{top - 10:.0f}">blocks held, {most} at most, '
        f"{outcome.pool} in the pool</text>",
        f'<polygon points="{MARGIN},{base:.1f} {points} {right:.1f},{base:.1f}" '
        'fill="#9ec5e8" stroke="#2b6ca3"/>',
    ]
    if limit == outcome.pool:
        parts.append(
            f'<line x1="{MARGIN}" y1="{top:.1f}" x2="{right:.1f}" y2="{top:.1f}" stroke="#d9534f" '
            'stroke-dasharray="4 3"/>'
        )
    return parts
