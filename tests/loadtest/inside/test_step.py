"""bench step: every case runs, and its figures belong to the case."""

from __future__ import annotations

import asyncio
import io

from rich.console import Console

from streamer.demo import CHECKPOINT
from streamer.loadtest.inside.step import NUM_CALLS, Case, measure, report

DEADLINE_S = 60.0


async def test_calls_make_steps_longer_and_a_busy_loop_writes() -> None:
    async with asyncio.timeout(DEADLINE_S):
        plain = await measure(Case(), False, 4, 0.2)
        busy = await measure(Case(num_calls=NUM_CALLS), True, 4, 0.2)
    assert (plain.runner, plain.loop, plain.frames_per_s) == ("fake", "idle", 0.0)
    assert (busy.runner, busy.loop) == (f"{NUM_CALLS} calls", "busy")
    assert plain.num_steps > 10
    assert busy.num_steps > 10
    assert busy.frames_per_s > 1000
    assert 0 < plain.step_p50_ms <= plain.step_p99_ms
    assert plain.step_p50_ms < busy.step_p50_ms


async def test_the_report_has_a_row_a_case() -> None:
    text = io.StringIO()
    async with asyncio.timeout(DEADLINE_S):
        await report(Console(file=text, width=120), 2, 0.1, [Case(), Case(num_calls=3)])
    counts = [text.getvalue().count(word) for word in ("idle", "busy", "fake", "3 calls")]
    assert counts == [2, 2, 2, 2]


async def test_ranks_report_their_time_in_sums() -> None:
    case, seconds = Case(model=str(CHECKPOINT), ranks=2), 0.3
    async with asyncio.timeout(DEADLINE_S):
        # Two spinning ranks beside other tests may take a second for a step.
        while (shared := await measure(case, False, 2, seconds)).num_steps < 4:
            seconds *= 4
    assert shared.runner == "checkpoint, 2 ranks"
    assert 0.05 < shared.sums_share < 1.0
