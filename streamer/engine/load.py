"""Load: what waits, what runs, and how long a new request would wait.

Counts choices, by priority and tenant while they wait; measures how long one holds its row. By
Little's law `rows / mean_s` rows come free a second, whatever bounds how many run. Owned by
Registry, called on the loop with a clock's seconds; decides nothing about the order itself.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

import msgspec

RECENT: Final = 0.05  # weight of the newest in the mean
# A request that waits beside idle rows for more steps than its command takes to arrive, and for
# STUCK_S, waits for blocks or for the prompts before it. One slow step alone is no sign of that.
PASSED: Final = 4
STUCK_S: Final = 0.5
WINDOW_S: Final = 4.0  # over which the queue's rate is measured then


class Waiter(msgspec.Struct):
    """A live request.

    since    when it took its rows; None while it has none (it waits, or is paused)
    held_s   how long it had rows before
    is_new   it has never had rows
    is_held  it was paused before it had rows: the others go before it
    """

    priority: int
    tenant: str
    n: int
    since: float | None = None
    held_s: float = 0.0
    is_new: bool = True
    is_held: bool = False


class Load:
    """Requests by id, from `arrived` to `ended`.

    num_waiting  requests that have never run;  num_waiting_rows  their choices
    num_rows     choices that have a row, or wait to have it back
    """

    def __init__(self) -> None:
        self.num_waiting = 0
        self.num_waiting_rows = 0
        self.num_rows = 0
        self._requests: dict[str, Waiter] = {}
        self._waiting: Counter[str] = Counter()  # choices that have never run, by tenant
        # Waiting requests that are not paused: priority -> id, by arrival -> number of steps before
        # it joined.
        self._queue: dict[int, dict[str, int]] = {}
        # Priority -> tenant -> choices in the queue.
        self._queued_rows: dict[int, dict[str, int]] = {}
        self._rows: Counter[int] = Counter()  # num_rows by priority
        self._num_steps = 0
        self._num_begun = 0
        self._begun: deque[tuple[float, int]] = deque()  # while the queue's first is passed over
        self._mean_s = 0.0
        self._num_seen = 0
        self._sum_begun = 0.0  # of (since - held_s), a choice each, of those that have a row

    def arrived(self, request_id: str, *, priority: int, tenant: str, n: int) -> None:
        """A request begins to wait."""
        r = self._requests[request_id] = Waiter(priority, tenant, n)
        self.num_waiting += 1
        self.num_waiting_rows += n
        self._waiting[tenant] += n
        self._enqueue(request_id, r)

    def hold(self, request_id: str, is_held: bool) -> None:
        """A request that never ran is paused, so that others go before it, or is so no longer."""
        r = self._requests[request_id]
        if not r.is_new or r.is_held == is_held:
            return
        if is_held:
            self._dequeue(request_id, r)
        else:
            self._enqueue(request_id, r)
        r.is_held = is_held

    def stepped(self, now: float) -> None:
        """A step is over, after `moved` for the requests that began in it."""
        self._num_steps += 1
        if not any(map(self._is_passed_over, self._queue)):
            self._begun.clear()
            return
        self._begun.append((now, self._num_begun))
        while len(self._begun) > 1 and self._begun[1][0] <= now - WINDOW_S:
            self._begun.popleft()

    def moved(self, request_id: str, *, is_scheduled: bool, now: float) -> None:
        """A request has begun, and has rows now (or waits to have them back), or has none."""
        r = self._requests[request_id]
        if r.is_new:
            self._begin(request_id, r)
            self._num_begun += r.n
        if is_scheduled == (r.since is not None):
            return
        if is_scheduled:
            r.since = now
            self.num_rows += r.n
            self._rows[r.priority] += r.n
            self._sum_begun += r.n * (now - r.held_s)
        else:
            self._free_rows(r, now)

    def ended(self, request_id: str, now: float) -> str:
        """A request has ended, whatever its status was; returns its tenant."""
        r = self._requests.pop(request_id)
        if r.is_new:
            self._begin(request_id, r)
        if r.since is not None:
            self._free_rows(r, now)
        if r.held_s:
            self._num_seen += r.n
            weight = max(1 - (1 - RECENT) ** r.n, r.n / self._num_seen)
            self._mean_s += weight * (r.held_s - self._mean_s)
        return r.tenant

    def mean_s(self, now: float) -> float:
        """Seconds that a choice holds its row: of those that ended, or of those that run if longer.

        The age of running choices shows longer answers before the first of them has ended. Bounding
        it by the time between two ends admits too many: at 8 times capacity the queue took 7.6 s to
        recover instead of 0.3 (2 cores, 2026-11-22).
        """
        age_s = now - self._sum_begun / self.num_rows if self.num_rows else 0.0
        return max(self._mean_s, age_s)

    def waiting_rows(self, tenant: str) -> int:
        """Choices of one tenant that have never run."""
        return self._waiting[tenant]

    def rows_before(self, priority: int, tenant: str, n: int) -> int:
        """Choices that would run before the last of `n` more: tenants take turns."""
        own = self._queued_rows.get(priority, {}).get(tenant, 0)
        urgent = sum(
            sum(rows_by_tenant.values())
            for p, rows_by_tenant in self._queued_rows.items()
            if p < priority
        )
        others = (rows for t, rows in self._queued_rows.get(priority, {}).items() if t != tenant)
        return urgent + own + sum(min(rows, own + n) for rows in others)

    def num_idle(self, priority: int, num_rows: int) -> int:
        """Of `num_rows`, those a request can have at once: lower priorities give theirs up."""
        return max(0, num_rows - sum(n for p, n in self._rows.items() if p <= priority))

    def wait_s(self, priority: int, tenant: str, n: int, num_idle: int, now: float) -> float:
        """Seconds until `n` more choices would run; `num_idle` rows can be had at once.

        If the queue's first is passed over all the same, idle rows do not count, and the queue's
        rate since then gives a second estimate: the lower of the two holds.
        """
        num_begun, over_s = 0, 0.0
        is_stuck = any(p <= priority and self._is_passed_over(p) for p in self._queue)
        if is_stuck and self._begun and now - self._begun[0][0] > STUCK_S:
            since, before = self._begun[0]
            if num_idle > 0:
                num_begun, over_s = self._num_begun - before, now - since
            num_idle = 0
        rows = self.rows_before(priority, tenant, n) + n - num_idle
        if rows <= 0:
            return 0.0
        wait_s = rows * self.mean_s(now) / max(1, self.num_rows)
        return min(wait_s, rows * over_s / num_begun) if num_begun else wait_s

    def _is_passed_over(self, priority: int) -> bool:
        """Whether the queue's first with this priority has waited for more than PASSED steps."""
        return self._num_steps - next(iter(self._queue[priority].values())) > PASSED

    def _begin(self, request_id: str, r: Waiter) -> None:
        """The request is no longer new: take it out of the counts and the queue."""
        r.is_new = False
        self.num_waiting -= 1
        self.num_waiting_rows -= r.n
        self._waiting[r.tenant] -= r.n
        if not self._waiting[r.tenant]:
            del self._waiting[r.tenant]
        if not r.is_held:
            self._dequeue(request_id, r)

    def _enqueue(self, request_id: str, r: Waiter) -> None:
        self._queue.setdefault(r.priority, {})[request_id] = self._num_steps
        rows_by_tenant = self._queued_rows.setdefault(r.priority, {})
        rows_by_tenant[r.tenant] = rows_by_tenant.get(r.tenant, 0) + r.n

    def _dequeue(self, request_id: str, r: Waiter) -> None:
        ids = self._queue[r.priority]
        del ids[request_id]
        if not ids:
            del self._queue[r.priority]
        if not self._queue:
            self._begun.clear()
        rows_by_tenant = self._queued_rows[r.priority]
        rows_by_tenant[r.tenant] -= r.n
        if not rows_by_tenant[r.tenant]:
            del rows_by_tenant[r.tenant]
        if not rows_by_tenant:
            del self._queued_rows[r.priority]

    def _free_rows(self, r: Waiter, now: float) -> None:
        since = r.since or 0.0
        self.num_rows -= r.n
        self._rows[r.priority] -= r.n
        if not self._rows[r.priority]:
            del self._rows[r.priority]
        self._sum_begun -= r.n * (since - r.held_s)
        r.held_s += now - since
        r.since = None
