"""Speculation: what the scheduler asks of the one object that proposes provisional tokens.

A protocol alone. The scheduler calls it on the GPU thread, in schedule and apply; whatever it
answers must follow from these calls, so that a recorded log replays to the same plans.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Protocol

from streamer.core.plan import Facts

if TYPE_CHECKING:
    from streamer.core.request import Sequence


class Speculation(Protocol):
    """Proposes tokens; only tokens that the model draws as well are ever known."""

    def begin(self, seq: Sequence) -> None:
        """The sequence takes a row, for the first time or again; it knows `seq.tokens`."""

    def end(self, seq: Sequence) -> None:
        """The sequence gives up its row; `begin` may follow, unless it has a finish_reason."""

    @property
    def has_drafts(self) -> bool:
        """Whether `drafts` may name any row."""
        ...

    def looks(self, num_rows: int, budget: int, facts: Facts) -> Collection[Sequence]:
        """The sequences that `wait` or `choose` is to look at in this step, none where no proposal
        can pay beside this many rows; called once in every step."""
        ...

    def wait(self, rows: Seq[Sequence], facts: Facts) -> Collection[Sequence]:
        """Those of `rows` that sit this plan out, so that the next one can verify tokens of theirs.

        rows  of those to look at, the sequences that would decode now, but whose newest token the
              scheduler does not know yet: an earlier plan, not applied, draws it. Without plans
              ahead there are none
        """
        ...

    def choose(
        self, rows: Seq[Sequence], budget: int, facts: Facts
    ) -> dict[Sequence, tuple[int, ...]]:
        """The provisional tokens of those of `rows` that get any; about `budget` in all.

        The scheduler drops what exceeds the budget, max_tokens or the blocks that are free.

        rows  of those to look at, the sequences that would decode and may be verified now: all
              their tokens are known
        """
        ...

    def drafts(self, rows: Seq[Sequence], facts: Facts) -> tuple[tuple[Sequence, int], ...]:
        """Of the rows that draw in this plan: those whose next tokens the runner is to propose
        after it, and how many."""
        ...

    def proposed(self, seq: Sequence, tokens: tuple[int, ...]) -> None:
        """The runner proposes these tokens after `seq.tokens`."""

    def observe(self, seq: Sequence, num_proposed: int, num_accepted: int) -> None:
        """A verification of `num_proposed` tokens found `num_accepted` of them right."""
