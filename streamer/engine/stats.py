"""The engine's counts: a Snapshot of one moment, and tallies.

Snapshots are made by AsyncEngine.snapshot on the loop, with the scheduler's counts after the last
step. A Tally is a histogram's counts without name, lock or label; server/telemetry exposes it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import msgspec

from streamer.core.plan import FinishReason, StepStats, StepTimes

if TYPE_CHECKING:
    from streamer.engine.registry import Registry

LAG_WINDOW_S = 10
PHASES = ("schedule", "launch", "collect", "apply")
PHASE_S = (
    *(0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01),
    *(0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
)


class Tally:
    """Observations by bucket, and their sum; 0.2 us each, a sixth of prometheus_client's own.

    counts  values up to each bound (above the one before), then those above the last bound
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class RecentMax:
    """The maximum of the values of the last `window_s` seconds, to a second; 0.2 us a value.

    Times are seconds of one clock, rising. Reading changes nothing, so any number may read.
    """

    __slots__ = ("_seconds", "_window_s")

    def __init__(self, window_s: int) -> None:
        self._window_s = window_s
        self._seconds: deque[tuple[int, float]] = deque(maxlen=window_s + 1)  # each with its max

    def observe(self, value: float, now: float) -> None:
        """Record one value, seen at `now`."""
        second = int(now)
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, value))
        elif value > self._seconds[-1][1]:
            self._seconds[-1] = (second, value)

    def read(self, now: float) -> float:
        """The maximum; 0 without a value."""
        first = int(now) - self._window_s
        return max((value for second, value in self._seconds if second >= first), default=0.0)


def total(counts: Iterable[StepStats]) -> StepStats:
    """The sums of several schedulers' counts."""
    found = list(counts)
    if len(found) == 1:
        return found[0]
    sums: dict[str, Any] = {}
    for name in StepStats.__struct_fields__:
        values = [getattr(each, name) for each in found]
        if name in ("proposed_at", "accepted_at"):
            sums[name] = tuple(map(sum, zip_longest(*values, fillvalue=0)))
        else:
            sums[name] = sum(values)
    return StepStats(**sums)


class PhaseTallies:
    """Seconds of each phase of a step, over all steps so far."""

    __slots__ = ("by_phase",)

    def __init__(self) -> None:
        self.by_phase = {phase: Tally(PHASE_S) for phase in PHASES}

    def observe(self, times: StepTimes) -> None:
        schedule, launch, collect, apply = self.by_phase.values()
        schedule.observe(times.schedule_s)
        launch.observe(times.launch_s)
        collect.observe(times.collect_s)
        apply.observe(times.apply_s)


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The engine now.

    state             "new", "loading", "ready", "draining", "dead" or "closed"
    step              the scheduler's counts after the last step
    live_streams      requests that have not ended
    waiting           those of them that have not run yet
    paused_streams    paused because their reader is behind, or by `pause`
    retained_streams  finished ones that are kept for later readers
    retained_bytes    of all retained ones
    submitted, finished, cancelled, failed  requests since the start
    max_loop_lag_s    seconds from a step's end to its delivery, the largest of the last seconds
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
    max_loop_lag_s: float


def take_snapshot(
    streams: Registry,
    *,
    state: str,
    step: StepStats,
    max_loop_lag_s: float,
) -> Snapshot:
    """A Snapshot, with the counts of the engine's streams."""
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
        max_loop_lag_s=max_loop_lag_s,
    )
