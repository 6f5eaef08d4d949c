"""Load: what waits, what runs, and how long a newcomer would wait.

Counts choices, by priority and tenant while they wait; measures how long one holds its row. By
Little's law `rows / mean_s` rows come free a second, whatever bounds how many run. Owned by
Registry, called on the loop with a clock's seconds; decides nothing about the order itself.
"""

from __future__ import annotations

from typing import Final

import msgspec

RECENT: Final = 0.05  # weight of the newest in the mean
STUCK_S: Final = 0.5  # a wait beyond it beside idle rows: blocks are what is waited for


class Waiter(msgspec.Struct):
    """One request.

    since   when it took its rows; None while it has none (it waits, or is paused)
    held_s  how long it had them before
    """

    priority: int
    tenant: str
    n: int
    since: float | None = None
    held_s: float = 0.0


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
        self._since: dict[str, float] = {}  # when those that wait arrived, the first of them first
        self._lines: dict[int, dict[str, int]] = {}  # priority -> tenant -> choices that wait
        self._mean_s = 0.0
        self._num_seen = 0
        self._sum_begun = 0.0  # of (since - held_s), a choice each, of those that have a row

    def arrived(self, request_id: str, *, priority: int, tenant: str, n: int, now: float) -> None:
        """It waits."""
        self._requests[request_id] = Waiter(priority, tenant, n)
        self._since[request_id] = now
        self.num_waiting += 1
        self.num_waiting_rows += n
        line = self._lines.setdefault(priority, {})
        line[tenant] = line.get(tenant, 0) + n

    def moved(self, request_id: str, *, is_scheduled: bool, now: float) -> None:
        """It has rows now (waits for them to come back, too), or has not."""
        r = self._requests[request_id]
        if is_scheduled == (r.since is not None):
            return
        if is_scheduled:
            self._leave_line(request_id, r)
            r.since = now
            self.num_rows += r.n
            self._sum_begun += r.n * (now - r.held_s)
        else:
            self._give_up(r, now)

    def ended(self, request_id: str, now: float) -> str:
        """It is over, wherever it was; its tenant."""
        r = self._requests.pop(request_id)
        self._leave_line(request_id, r)
        if r.since is not None:
            self._give_up(r, now)
        if r.held_s:
            self._num_seen += r.n
            weight = max(1 - (1 - RECENT) ** r.n, r.n / self._num_seen)
            self._mean_s += weight * (r.held_s - self._mean_s)
        return r.tenant

    def mean_s(self, now: float) -> float:
        """Seconds that a choice holds its row: of those that ended, or of those that run if longer.

        The latter is what tells of longer answers before the first of them has ended.
        """
        age_s = now - self._sum_begun / self.num_rows if self.num_rows else 0.0
        return max(self._mean_s, age_s)

    def waiting_rows(self, tenant: str) -> int:
        """Choices of one tenant that wait."""
        return sum(line.get(tenant, 0) for line in self._lines.values())

    def rows_before(self, priority: int, tenant: str, n: int) -> int:
        """Choices that would run before the last of `n` more: tenants take turns."""
        own = self._lines.get(priority, {}).get(tenant, 0)
        urgent = sum(sum(line.values()) for p, line in self._lines.items() if p < priority)
        others = (rows for t, rows in self._lines.get(priority, {}).items() if t != tenant)
        return urgent + own + sum(min(rows, own + n) for rows in others)

    def wait_s(self, priority: int, tenant: str, n: int, num_idle: int, now: float) -> float:
        """Seconds until `n` more choices would run; `num_idle` rows can be had at once.

        Unless the first in line waits in spite of them.
        """
        if now - next(iter(self._since.values()), now) > STUCK_S:
            num_idle = 0
        rows = self.rows_before(priority, tenant, n) + n - num_idle
        return rows * self.mean_s(now) / max(1, self.num_rows) if rows > 0 else 0.0

    def _leave_line(self, request_id: str, r: Waiter) -> None:
        if self._since.pop(request_id, None) is None:
            return
        self.num_waiting -= 1
        self.num_waiting_rows -= r.n
        line = self._lines[r.priority]
        line[r.tenant] -= r.n
        if not line[r.tenant]:
            del line[r.tenant]
        if not line:
            del self._lines[r.priority]

    def _give_up(self, r: Waiter, now: float) -> None:
        since = r.since or 0.0
        self.num_rows -= r.n
        self._sum_begun -= r.n * (since - r.held_s)
        r.held_s += now - since
        r.since = None
