"""Fair share: the queue of requests that may be admitted, and each tenant's service so far.

Order: priority, preempted before new, virtual time of the tenant, arrival. Virtual time is service
in weighted tokens. A tenant that begins to wait is lifted to the lowest virtual time of the tenants
already waiting, so that idling earns nothing. This is the virtual token counter of Sheng et al.
2024, "Fairness in Serving Large Language Models", with separate counters for each priority:
requests waiting at a low priority earn no claim on a higher one. Also finds each request's position
in the queue, for its reader. Owned by State; deterministic, no clock.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Final

from streamer.core.plan import Notice, NoticeKind
from streamer.core.recovery.trials import Trials
from streamer.core.request import Request, Share
from streamer.errors import InvariantViolated

_arrival = attrgetter("arrival")

# Finding positions sorts the queue: 0.5 us a request (one EPYC core, 2026-11-21). In a queue longer
# than MAX_WALKED none are found; a request beyond MAX_NOTIFIED gets notices when it is nearer.
MAX_WALKED: Final = 4096
MAX_NOTIFIED: Final = 512


class _Level:
    """One priority.

    returning   requests that ran before, by arrival; they are admitted first
    backlogged  shares with waiting requests
    last        the share that most recently stopped waiting
    """

    __slots__ = ("backlogged", "last", "num_live", "returning", "shares")

    def __init__(self) -> None:
        self.returning: list[Request] = []
        self.shares: dict[str, Share] = {}
        self.backlogged: dict[Share, None] = {}
        self.last = Share()
        self.num_live = 0

    @property
    def is_empty(self) -> bool:
        return not self.returning and not self.backlogged

    def floor(self) -> int:
        """The virtual time to which a tenant that begins to wait is lifted."""
        return min((s.time for s in self.backlogged), default=self.last.time)

    def head(self) -> Request:
        """The request to admit next; O(waiting tenants)."""
        if self.returning:
            return self.returning[0]
        return min(self.backlogged, key=lambda s: (s.time, s.waiting[0].arrival)).waiting[0]

    def forget(self) -> None:
        """Drop the shares that would be lifted anyway if their tenants came back."""
        floor = self.floor()
        for tenant in [t for t, s in self.shares.items() if not s.num_live and s.time <= floor]:
            del self.shares[tenant]


class FairQueue:
    """Requests that may be admitted, in order; each is known from `open` to `close`.

    num_notified  new requests in the queue whose readers receive their position
    """

    def __init__(self, trials: Trials) -> None:
        self.num_notified = 0
        self._trials = trials
        self._levels: dict[int, _Level] = {}
        self._priorities: list[int] = []  # of levels that are not empty, ascending

    def __bool__(self) -> bool:
        return bool(self._priorities)

    def __iter__(self) -> Iterator[Request]:
        for priority in self._priorities:
            level = self._levels[priority]
            yield from level.returning
            for share in level.backlogged:
                yield from share.waiting

    def in_order(self) -> list[Request]:
        """All queued requests, as they would be admitted if nothing were served meanwhile."""
        return sorted(self, key=_rank)

    def open(self, request: Request) -> None:
        """Register a new request: its service is charged to its tenant from here on."""
        add = request.add
        level = self._levels.setdefault(add.priority, _Level())
        request.share = level.shares.setdefault(add.tenant, Share())
        request.share.num_live += 1
        level.num_live += 1

    def close(self, request: Request) -> None:
        """Forget a request that ended; it has left the queue before."""
        level = self._levels[request.add.priority]
        level.num_live -= 1
        request.share.num_live -= 1
        if not level.num_live:
            del self._levels[request.add.priority]
        elif not request.share.num_live:
            level.forget()

    def head(self) -> Request | None:
        """The request to admit next: of those on trial, while there are any."""
        if members := self._trials.members:
            return min((r for r in self if r in members), key=_rank, default=None)
        return self._levels[self._priorities[0]].head() if self._priorities else None

    def push(self, request: Request) -> None:
        """Queue a request for admission."""
        priority, share = request.add.priority, request.share
        level = self._levels[priority]
        if level.is_empty:
            insort(self._priorities, priority)
        if not request.is_new:
            insort(level.returning, request, key=_arrival)
            return
        if not share.waiting:
            share.time = max(share.time, level.floor())
            level.backlogged[share] = None
        insort(share.waiting, request, key=_arrival)
        self.num_notified += request.queue_position is not None

    def remove(self, request: Request) -> None:
        """Take the request out if it is queued; call this before its status changes."""
        priority, share = request.add.priority, request.share
        level = self._levels[priority]
        waiting = share.waiting if request.is_new else level.returning
        at = bisect_left(waiting, request.arrival, key=_arrival)
        if at == len(waiting) or waiting[at] is not request:
            return
        del waiting[at]
        if request.is_new:
            self.num_notified -= request.queue_position is not None
            if not waiting:
                del level.backlogged[share]
                level.last = share
        if level.is_empty:
            self._priorities.remove(priority)

    def changed_positions(self, num_waiting: int) -> tuple[Notice, ...]:
        """A notice for each request whose position differs from the one its reader last received.

        Sorts the queue; called only when EngineCore's clock allows it and a reader asked for
        positions. `num_waiting` new requests wait, held ones included.
        """
        if num_waiting > MAX_WALKED:
            return ()
        notices = []
        for position, request in enumerate(self.in_order()[:MAX_NOTIFIED]):
            if request.is_new and request.queue_position not in (None, position):
                request.queue_position = position
                notices.append(Notice(request.request_id, NoticeKind.WAITING, position=position))
        return tuple(notices)

    def check(self, requests: Iterable[Request]) -> None:
        """Prove that the shares count these live requests and that the head is first in order."""
        live: dict[Share, int] = {}
        for request in requests:
            add = request.add
            if self._levels[add.priority].shares.get(add.tenant) is not request.share:
                raise InvariantViolated(f"request {add.request_id} is charged to another tenant")
            live[request.share] = live.get(request.share, 0) + 1
        for priority, level in self._levels.items():
            total = 0
            for share in level.shares.values():
                total += share.num_live
                if share.num_live != live.get(share, 0):
                    raise InvariantViolated(
                        f"a tenant has {live.get(share, 0)} requests of priority {priority}, "
                        f"{share.num_live} counted"
                    )
                if bool(share.waiting) != (share in level.backlogged):
                    raise InvariantViolated(f"a tenant has {len(share.waiting)} waiting, unlisted")
            if total != level.num_live or level.is_empty == (priority in self._priorities):
                raise InvariantViolated(
                    f"priority {priority}: {total} requests, {level.num_live} counted"
                )
        notified = sum(r.is_new and r.queue_position is not None for r in self)
        if notified != self.num_notified:
            raise InvariantViolated(
                f"{notified} requests receive their queue position, {self.num_notified} counted"
            )
        members = self._trials.members
        head = self.head()
        first = min((r for r in self if not members or r in members), key=_rank, default=None)
        if head is not first:
            raise InvariantViolated(f"{head and head.request_id} is before {first}")


def _rank(request: Request) -> tuple[int, bool, int, int]:
    time = request.share.time if request.is_new else 0
    return request.add.priority, request.is_new, time, request.arrival
