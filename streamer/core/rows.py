"""RowSlots: the runner's persistent rows, handed out and taken back.

A row that a launched plan still computes keeps its owner until that plan is collected, so that its
result finds the right sequence. Called by the scheduler alone.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable

from streamer.core.request import Sequence
from streamer.errors import InvariantViolated


class RowSlots:
    """`owners[row]` is the sequence whose results that row brings. Lowest rows go out first."""

    def __init__(self, num_rows: int) -> None:
        self.owners: list[Sequence | None] = [None] * num_rows
        self._free = list(range(num_rows))
        self._cooling: deque[tuple[int, int]] = deque()

    @property
    def num_free(self) -> int:
        """Rows that can be taken now."""
        return len(self._free)

    @property
    def num_cooling(self) -> int:
        """Rows that become free when launched plans are collected."""
        return len(self._cooling)

    def take(self, n: int) -> list[int] | None:
        """`n` rows, or None when fewer are free."""
        if n > len(self._free):
            return None
        return [heapq.heappop(self._free) for _ in range(n)]

    def give_back(self, row: int, after_plan: int, collected: int) -> None:
        """Reusable once `after_plan` is collected."""
        if after_plan <= collected:
            heapq.heappush(self._free, row)
        else:
            self._cooling.append((after_plan, row))

    def check(self, held: Iterable[int]) -> None:
        """Prove that each row is free, cooling or held, exactly once, or raise."""
        held, cooling = list(held), [row for _, row in self._cooling]
        if sorted([*self._free, *cooling, *held]) != list(range(len(self.owners))):
            raise InvariantViolated(
                f"{len(self.owners)} rows: {len(self._free)} free + {len(cooling)} cooling + "
                f"{len(held)} held; each must be one of these, once"
            )

    def retire(self, collected: int) -> None:
        """Every plan up to `collected` is collected."""
        while self._cooling and self._cooling[0][0] <= collected:
            heapq.heappush(self._free, self._cooling.popleft()[1])
