"""Rows: the runner's rows, and what `apply` needs of those that drew.

Rows is owned by State; a Drawing is made for the rows of a result, and kept until others draw.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable
from operator import itemgetter
from typing import NamedTuple

from streamer.core.request import Request, Sequence, Share
from streamer.errors import InvariantViolated


class Drawing(NamedTuple):
    """The rows that drew a token each, and of each, in their order, what `apply` needs.

    moves     Rows.num_moves when it was made; it holds until a row joins or leaves
    known     the lists of known tokens
    shares    the tenants' accounts, and how many of the rows are each's
    stop_ids  that end any of them
    stops     of those with stop strings, by index: the tokens that end none
    """

    rows: tuple[int, ...] = ()
    moves: int = -1
    request_ids: tuple[str, ...] = ()
    choices: tuple[int, ...] = ()
    known: tuple[list[int], ...] = ()
    shares: tuple[tuple[Share, int], ...] = ()
    stop_ids: frozenset[int] = frozenset()
    stops: tuple[tuple[int, set[int]], ...] = ()


class Rows:
    """The runner's persistent rows: free, reserved by a request, or joined by a sequence.

    A row that a launched plan still computes keeps its owner until that plan is collected, so that
    its result finds the right sequence. Lowest rows go out first.

    owners      row -> the sequence that its results belong to
    num_joined  rows the runner knows
    num_moves   rows that joined and left so far
    """

    def __init__(self, num_rows: int) -> None:
        self.owners: list[Sequence | None] = [None] * num_rows
        self.num_joined = 0
        self.num_moves = 0
        self._leaves: list[int] = []  # not yet sent to the runner
        self._free = list(range(num_rows))
        self._cooling: deque[tuple[int, int]] = deque()
        # Of the owners, a column each: to pick some rows of these takes a third of the time that it
        # takes to look at each owner (60 of 180 us for 1,024; EPYC Zen 5, Python 3.11, 2026-11-23).
        self._request_ids = [""] * num_rows
        self._choices = [0] * num_rows
        self._known: list[list[int]] = [[]] * num_rows
        self._shares = [Share()] * num_rows
        self._stop_ids: list[frozenset[int]] = [frozenset()] * num_rows
        self._harmless: list[set[int] | None] = [None] * num_rows
        self._drawing = Drawing()

    @property
    def num_free(self) -> int:
        """Rows that can be reserved now."""
        return len(self._free)

    @property
    def num_reserved(self) -> int:
        """Rows that requests have, those not joined yet included."""
        return len(self.owners) - len(self._free) - len(self._cooling)

    @property
    def num_cooling(self) -> int:
        """Rows that become free when launched plans are collected."""
        return len(self._cooling)

    def reserve(self, request: Request, n: int) -> bool:
        """A row for each live sequence, the rest for choices that fork later; False: no room."""
        if n > len(self._free):
            return False
        rows = [heapq.heappop(self._free) for _ in range(n)]
        for seq in request.live():
            seq.row = rows.pop(0)
        request.spare_rows = rows
        return True

    def join(self, seq: Sequence) -> None:
        """Record that the runner gets the sequence in its row."""
        row, request = seq.row, seq.request
        self.owners[row] = seq
        self._request_ids[row], self._choices[row] = request.request_id, seq.choice
        self._known[row], self._shares[row] = seq.tokens, request.share
        self._stop_ids[row] = request.add.stop_ids
        self._harmless[row] = request.harmless if request.add.stop else None
        seq.joined = True
        self.num_joined += 1
        self.num_moves += 1

    def leave(self, seq: Sequence, launched: int, collected: int) -> None:
        """Take the sequence out of its row, which is free when the launched plans are collected."""
        if seq.row < 0:
            return
        self.num_moves += 1
        if seq.joined:
            self._leaves.append(seq.row)
            self.num_joined -= 1
        self._give_back(seq.row, launched if seq.joined else 0, collected)
        seq.row, seq.joined = -1, False

    def leave_all(self, request: Request, launched: int, collected: int) -> None:
        """Take the request out of all its rows, reserved ones too."""
        for seq in request.sequences:
            self.leave(seq, launched, collected)
        for row in request.spare_rows:
            self._give_back(row, 0, collected)
        request.spare_rows = []

    def _give_back(self, row: int, after_plan: int, collected: int) -> None:
        if after_plan <= collected:
            heapq.heappush(self._free, row)
        else:
            self._cooling.append((after_plan, row))

    def take_leaves(self) -> tuple[int, ...]:
        """Rows that were left since the last plan."""
        leaves, self._leaves = tuple(self._leaves), []
        return leaves

    def retire(self, collected: int) -> None:
        """Free the rows that only waited for plans up to `collected`."""
        while self._cooling and self._cooling[0][0] <= collected:
            heapq.heappush(self._free, self._cooling.popleft()[1])

    def drawing(self, rows: tuple[int, ...]) -> Drawing:
        """What `apply` needs of these rows, each of which drew a token."""
        last = self._drawing
        if self.num_moves != last.moves or (rows is not last.rows and rows != last.rows):
            self._drawing = self._pick(rows) if rows else Drawing()
        return self._drawing

    def _pick(self, rows: tuple[int, ...]) -> Drawing:
        pick = itemgetter(*rows) if len(rows) > 1 else lambda column: (column[rows[0]],)
        if not all(pick(self.owners)):
            row = next(row for row in rows if self.owners[row] is None)
            raise InvariantViolated(f"a token was drawn for row {row}, which no sequence has")
        harmless = pick(self._harmless)
        has_stops = harmless.count(None) < len(rows)
        return Drawing(
            rows,
            self.num_moves,
            request_ids=pick(self._request_ids),
            choices=pick(self._choices),
            known=pick(self._known),
            shares=tuple(Counter(pick(self._shares)).items()),
            stop_ids=frozenset().union(*set(pick(self._stop_ids))),
            stops=tuple((i, each) for i, each in enumerate(harmless) if each is not None)
            if has_stops
            else (),
        )

    def check(self, requests: Iterable[Request]) -> None:
        """Prove that each row is free, cooling or held, exactly once, or raise."""
        held, joined = [], []
        for request in requests:
            held += [s.row for s in request.sequences if s.row >= 0] + request.spare_rows
            joined += [s for s in request.sequences if s.joined]
        if len(joined) != self.num_joined or len({s.row for s in joined}) != len(joined):
            raise InvariantViolated(f"{len(joined)} rows joined, {self.num_joined} counted")
        if any(self.owners[s.row] is not s for s in joined):
            raise InvariantViolated("a joined row's results would go to another sequence")
        cooling = [row for _, row in self._cooling]
        if sorted([*self._free, *cooling, *held]) != list(range(len(self.owners))):
            raise InvariantViolated(
                f"{len(self.owners)} rows: {len(self._free)} free + {len(cooling)} cooling + "
                f"{len(held)} held; each must be one of these, once"
            )
