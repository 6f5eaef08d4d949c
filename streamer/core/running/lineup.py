"""Lineup: the open sequences of running requests, of which a plan looks at the fewest it can.

A sequence is steady while nothing about it needs a decision: its row has joined, the block that it
writes is its own and not full, the last token that it may draw is not reached. Steady sequences
decode one token each in every plan, which one clock counts for all of them; a calendar says when
each needs a block or is done. Owned by Requests.
"""

from __future__ import annotations

from collections.abc import Iterable

from streamer.core.request import STILL, Clock, Sequence
from streamer.errors import InvariantViolated

_Calendar = dict[int, dict[Sequence, None]]


class Lineup:
    """The open sequences of running requests, each steady or among the others.

    others      in the order in which they came
    num_steady  how many are steady
    """

    def __init__(self) -> None:
        self.others: dict[Sequence, None] = {}
        self.num_steady = 0
        self._clock = Clock()  # plans in which steady sequences decoded
        self._full: _Calendar = {}  # those that need a block for the plan of this time
        self._last: _Calendar = {}  # those that have drawn all they may before it

    def __len__(self) -> int:
        return len(self.others) + self.num_steady

    def add(self, seq: Sequence) -> None:
        """A sequence that runs from now on."""
        self.others[seq] = None

    def remove(self, seq: Sequence) -> None:
        """The sequence ended, or its request does not run any more."""
        self.disturb(seq)
        self.others.pop(seq, None)

    def settle(self, seq: Sequence, num_free: int, num_left: int) -> None:
        """One of the others may be steady: its block takes `num_free` more tokens from the next
        plan on, and it may draw `num_left`."""
        if num_free <= 0 or num_left <= 0:
            return
        del self.others[seq]
        num_computed, num_tokens = seq.num_computed, seq.num_tokens
        seq.clock = self._clock
        seq.num_computed, seq.num_tokens = num_computed, num_tokens
        self.num_steady += 1
        self._enter(seq, num_free, num_left)

    def _enter(self, seq: Sequence, num_free: int, num_left: int) -> None:
        seq.steady_until = until = self._clock.now + min(num_free, num_left)
        calendar = self._full if num_free < num_left else self._last
        calendar.setdefault(until, {})[seq] = None

    def disturb(self, seq: Sequence) -> None:
        """The sequence needs a decision, if it was steady: it is among the others again."""
        until = seq.steady_until
        if not until:
            return
        for calendar in (self._full, self._last):
            if (members := calendar.get(until)) and seq in members:
                del members[seq]
        self._leave(seq)

    def _leave(self, seq: Sequence) -> None:
        num_computed, num_tokens = seq.num_computed, seq.num_tokens
        seq.clock = STILL
        seq.num_computed, seq.num_tokens = num_computed, num_tokens
        seq.steady_until = 0
        self.num_steady -= 1
        self.others[seq] = None

    def disturb_all(self) -> None:
        """There is not room for all in the plan."""
        for calendar in (self._full, self._last):
            for members in calendar.values():
                for seq in members:
                    self._leave(seq)
            calendar.clear()

    # ------------------------------------------------------------ a plan

    @property
    def num_full_next(self) -> int:
        """Steady sequences that will need a block in the plan after this one."""
        return len(self._full.get(self._clock.now + 1, ()))

    def take_full(self) -> list[Sequence]:
        """The steady sequences that need a block now, for `renew` or `disturb`; those that have
        drawn all they may are among the others from here on."""
        for seq in self._last.pop(self._clock.now, ()):
            self._leave(seq)
        return list(self._full.pop(self._clock.now, ()))

    def renew(self, full: Iterable[Sequence], block_size: int) -> None:
        """They have got a block each."""
        for seq in full:
            self._enter(seq, block_size, seq.request.num_at_most - seq.num_tokens)

    def decode(self) -> Iterable[Sequence]:
        """Every steady sequence computes a token and draws the next; returns those that may draw no
        more."""
        self._clock.now += 1
        return self._last.get(self._clock.now, ())

    # ------------------------------------------------------------ proof

    def check(self, running: list[Sequence], block_size: int) -> None:
        """Prove that these are its sequences, and that each steady one needs no decision until its
        time."""
        steady = [seq for seq in running if seq.steady_until]
        others = {seq for seq in running if not seq.steady_until}
        if len(steady) != self.num_steady or others != self.others.keys():
            raise InvariantViolated(
                f"{len(running)} sequences run, {len(steady)} of them steady; {len(self)} are "
                f"lined up, {self.num_steady} of them steady"
            )
        now = self._clock.now
        for seq in steady:
            request, num_tokens, until = seq.request, seq.num_tokens, seq.steady_until
            is_ready = seq.joined and not seq.shares_tail and not request.spare_rows
            room = len(seq.blocks) * block_size - num_tokens + 1
            left = request.num_at_most - num_tokens
            calendar = self._full if room < left else self._last
            if (
                not is_ready
                or seq.provisional
                or num_tokens - seq.num_computed != 1
                or until - now != min(room, left)
                or seq not in calendar.get(until, {})
            ):
                raise InvariantViolated(
                    f"request {request.request_id} counts as steady for {until - now} plans: "
                    f"{seq.num_computed} of {num_tokens} tokens computed, room for {room}, {left} "
                    f"to draw"
                )
