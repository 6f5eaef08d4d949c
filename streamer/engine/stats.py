"""Snapshot and Timing: what engine and stream say of themselves at one moment, as frozen values.

Made by AsyncEngine.snapshot and TokenStream.timing on the loop; scheduler counts are those of the
last step.
"""

from __future__ import annotations

import msgspec

from streamer.core.plan import StepStats


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


class Timing(msgspec.Struct, frozen=True):
    """Seconds of one request's life; None: it has not come so far.

    queue_s        from submission until it first ran;  prefill_s from then to the first token
    first_token_s  from submission to the first token
    per_token_s    mean gap between tokens of the whole request after the first
    total_s        from submission to the last finish
    """

    queue_s: float | None = None
    prefill_s: float | None = None
    first_token_s: float | None = None
    per_token_s: float | None = None
    total_s: float | None = None
