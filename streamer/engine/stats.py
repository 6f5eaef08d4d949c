"""Snapshot: what the engine says of itself at one moment, as one frozen value.

Made by AsyncEngine.snapshot on the loop; scheduler counts are those of the last step.
"""

from __future__ import annotations

import msgspec

from streamer.core.plan import FinishReason, StepStats
from streamer.engine.registry import Registry


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The engine now.

    state            "new", "loading", "ready", "draining", "dead" or "closed"
    step             the scheduler's counts after the last step
    live_streams     requests that have not ended;  waiting those of them that never ran
    paused_streams   held because their reader is behind, or by `pause`
    retained_streams finished ones kept for late readers, retained_bytes in all
    submitted, finished, cancelled, failed   requests since the start
    uptime_s         since loading was done
    loop_lag_s       from a step's wake-up to the loop's turn: the last, and the largest since the
                     previous snapshot
    """

    state: str
    step: StepStats
    live_streams: int
    waiting: int
    paused_streams: int
    retained_streams: int
    retained_bytes: int
    submitted: int
    finished: int
    cancelled: int
    failed: int
    uptime_s: float
    loop_lag_s: float
    max_loop_lag_s: float


def take_snapshot(
    streams: Registry,
    *,
    state: str,
    step: StepStats,
    uptime_s: float,
    loop_lag_s: float,
    max_loop_lag_s: float,
) -> Snapshot:
    """What the engine says, with the counts of its streams."""
    ended = streams.num_ended
    return Snapshot(
        state=state,
        step=step,
        live_streams=streams.num_live,
        waiting=streams.num_waiting,
        paused_streams=sum(s.is_paused for s in streams.live()),
        retained_streams=streams.num_retained,
        retained_bytes=streams.retained_bytes,
        submitted=streams.num_submitted,
        finished=ended[FinishReason.STOP] + ended[FinishReason.LENGTH],
        cancelled=ended[FinishReason.CANCELLED],
        failed=ended[FinishReason.FAILED],
        uptime_s=uptime_s,
        loop_lag_s=loop_lag_s,
        max_loop_lag_s=max_loop_lag_s,
    )
