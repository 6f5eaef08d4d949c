"""Trials: which requests run after a step failed, and how large a step may be.

The suspects run again, and no other request does, until each has computed what it had computed when
the step failed, and PROOF tokens more. If a step fails before, they are tried in halves, the
largest group first; a request whose steps fail when it runs alone is at fault. Without memory for a
step the steps become smaller instead, and grow again slowly. Owned by State; no clock.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Final

import msgspec

from streamer.core.request import Request, Sequence, Status

PROOF: Final = 2  # a recomputed token, and one that decodes
GROW_STEPS: Final = 32  # between two growths by an eighth, doubled with each lack of memory
MOST_STEPS: Final = 8192


class Fault(msgspec.Struct, frozen=True):
    """A step failed: nothing that was launched has a result.

    num_tokens  that it was to compute
    is_memory   there was no memory for it
    """

    num_tokens: int
    is_memory: bool = False


class Verdict(enum.Enum):
    """What follows from a fault."""

    RETRIED = "all are tried again"
    HALVED = "they are tried in halves"
    BLAMED = "the request fails"
    SHRUNK = "steps are smaller"


class Trials:
    """See the module.

    members     the requests on trial; empty: there is none
    max_tokens  tokens that a step may compute, and rows that requests may have beside others
    has_escaped  a suspect of the last fault was cancelled or paused before it was cleared: it may
                 have been at fault
    """

    def __init__(self, max_tokens: int) -> None:
        self.members: frozenset[Request] = frozenset()
        self.max_tokens = max_tokens
        self.has_escaped = False
        self._cancelled_until = 0  # the last plan that a cancelled request may have been in
        self._most = max_tokens
        self._groups: list[list[Request]] = []
        self._marks: dict[Sequence, int] = {}
        self._num_steps = 0
        self._grow_steps = GROW_STEPS // 2

    # ------------------------------------------------------------ suspects

    def begin(self, suspects: list[Request], marks: dict[Sequence, int], collected: int) -> None:
        """A plan after `collected` failed: try these, up to these numbers of computed tokens."""
        self.has_escaped = self._cancelled_until > collected
        self._groups, self._marks = [suspects], marks
        self.next()

    def judge(self, suspects: Iterable[Request]) -> Request | None:
        """A step of the trial failed, in which these ran: the one that is at fault, if known."""
        ran = [r for r in suspects if r in self.members] or list(self.members)
        others = [r for r in self.members if r not in ran]
        ran.sort(key=lambda r: r.arrival)
        at_fault = ran[0] if len(ran) == 1 else None
        half = len(ran) // 2
        self._groups += [ran[half:], ran[:half]] if at_fault is None else []
        self._groups += [others]
        self.next()
        return at_fault

    def probe(self, request: Request) -> None:
        """Try this request before all others."""
        self._groups.append([*self.members])
        self.members = frozenset((request,))
        self._marks |= {s: len(s.tokens) for s in request.live()}

    def cancelled(self, request: Request, last: int) -> None:
        """A request will not be tried any more, which may have been in plans up to `last`."""
        self._cancelled_until = max(self._cancelled_until, last)
        self.has_escaped |= request in self.members or any(request in g for g in self._groups)

    def passed(self) -> None:
        """The members ran without a fault, or are paused by their readers."""
        self.has_escaped |= not all(map(self._is_cleared, self.members))
        self.next()

    def next(self) -> None:
        """Try the largest group that is left, or end."""
        self._groups = [
            group
            for each in self._groups
            if (group := [r for r in each if r.status is not Status.FINISHED])
        ]
        if not self._groups:
            self.members, self._marks = frozenset(), {}
            return
        group = max(self._groups, key=len)
        self._groups.remove(group)
        self.members = frozenset(group)

    @property
    def is_passed(self) -> bool:
        """Whether every member came beyond its mark, or ended, or is paused by its reader."""
        return all(r.is_held or self._is_cleared(r) for r in self.members)

    def _is_cleared(self, request: Request) -> bool:
        return all(s.num_computed >= self._marks.get(s, 0) for s in request.live())

    # ------------------------------------------------------------ memory

    def shrink(self, num_tokens: int) -> bool:
        """Halve the steps after one of `num_tokens` found no memory; False: they can't be less."""
        if num_tokens < 2:
            return False
        self.max_tokens = min(self.max_tokens, num_tokens) // 2
        self._num_steps = 0
        self._grow_steps = min(2 * self._grow_steps, MOST_STEPS)
        return True

    def stepped(self) -> None:
        """A step succeeded."""
        if self.max_tokens == self._most:
            return
        self._num_steps += 1
        if self._num_steps == self._grow_steps:
            self._num_steps = 0
            self.max_tokens = min(self._most, self.max_tokens + max(1, self.max_tokens // 8))
            if self.max_tokens == self._most:
                self._grow_steps = GROW_STEPS // 2
