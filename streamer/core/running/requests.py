"""Requests: every live request, by id and by status, and the lineup of sequences that run.

`Requests.move` is the only place that changes a status and the sets by status. Owned by State.
"""

from __future__ import annotations

from streamer.core.plan import Add, FinishReason
from streamer.core.request import Event, Request, Sequence, Status
from streamer.core.running.lineup import Lineup
from streamer.errors import InvariantViolated


class Requests:
    """Every live request, by id and by status, and the lineup of their sequences that run.

    by_id             all of them
    running, paused   those with that status, in order of admission
    swapping          those whose copies are not done
    counts            by status; FINISHED: all that ever finished
    """

    def __init__(self) -> None:
        self.by_id: dict[str, Request] = {}
        self.running: dict[Request, None] = {}
        self.paused: dict[Request, None] = {}
        self.swapping: list[Request] = []
        self.counts = dict.fromkeys(Status, 0)
        self._num_arrived = 0
        self._num_running: dict[int, int] = {}  # by priority
        self.lineup = Lineup()

    @property
    def lowest_running(self) -> int | None:
        """The priority of the running requests that give way first; None: none run."""
        return max(self._num_running, default=None)

    @property
    def is_progressing(self) -> bool:
        """Whether a request runs, or will when its copies are done."""
        return bool(self.running) or any(r.status is Status.SWAPPING_IN for r in self.swapping)

    def add(self, add: Add, max_tokens: int) -> Request:
        """A new request, WAITING."""
        self._num_arrived += 1
        request = Request(add, self._num_arrived, max_tokens)
        self.by_id[add.request_id] = request
        self.counts[Status.WAITING] += 1
        return request

    def move(self, request: Request, event: Event) -> None:
        """Move a request and update the sets by status; a finished one is no longer live."""
        before = request.status
        request.move(event)
        after = request.status
        self.counts[before] -= 1
        self.counts[after] += 1
        if before is Status.RUNNING:
            self._count_running(request, -1)
            del self.running[request]
            for seq in request.sequences:
                self.lineup.remove(seq)
        elif before is Status.PAUSED:
            del self.paused[request]
        elif before in (Status.SWAPPING_OUT, Status.SWAPPING_IN):
            self.swapping.remove(request)
        if after is Status.RUNNING:
            self._count_running(request, 1)
            self.running[request] = None
            for seq in request.live():
                self.lineup.add(seq)
        elif after is Status.PAUSED:
            self.paused[request] = None
        elif after in (Status.SWAPPING_OUT, Status.SWAPPING_IN):
            self.swapping.append(request)
        elif after is Status.FINISHED:
            del self.by_id[request.request_id]

    def _count_running(self, request: Request, change: int) -> None:
        priority = request.add.priority
        count = self._num_running.pop(priority, 0) + change
        if count:
            self._num_running[priority] = count

    def open_running(self) -> list[Sequence]:
        """The open sequences of running requests, in order of admission: a pass over all."""
        return [s for r in self.running for s in r.sequences if s.finish_reason is None]

    def open_choice(self, request: Request, choice: int) -> Sequence:
        """Add a sequence to a request, with its prompt."""
        seq = Sequence(request, choice, list(request.add.prompt))
        request.sequences.append(seq)
        if request.status is Status.RUNNING:
            self.lineup.add(seq)
        return seq

    def close_choice(self, seq: Sequence, reason: FinishReason) -> None:
        """End the sequence; only `move` ends its request."""
        seq.finish_reason = reason
        self.lineup.remove(seq)

    def check(self) -> None:
        """Prove that sets and counts agree with the statuses, or raise."""
        for status, members in ((Status.RUNNING, self.running), (Status.PAUSED, self.paused)):
            actual = [r for r in self.by_id.values() if r.status is status]
            if set(actual) != set(members) or self.counts[status] != len(actual):
                raise InvariantViolated(
                    f"{len(actual)} requests are {status.value}, {len(members)} in its set, "
                    f"{self.counts[status]} counted"
                )
