"""Speculation: what the scheduler asks of the one object that proposes provisional tokens.

A protocol alone. The scheduler calls it on the GPU thread, in schedule and apply; whatever it
answers must follow from these calls, so that a recorded log replays to the same plans.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Protocol

from streamer.core.plan import Facts

if TYPE_CHECKING:
    from streamer.core.request import Sequence


class Speculation(Protocol):
    """Proposes tokens; only tokens that the model draws as well are ever known."""

    def begin(self, seq: Sequence) -> None:
        """A sequence begins to decode, or does so again; its known tokens are `seq.tokens`."""

    def extend(self, seq: Sequence, tokens: Seq[int]) -> None:
        """Known tokens were appended."""

    def end(self, seq: Sequence) -> None:
        """The sequence decodes no longer; `begin` may follow. It may not have begun."""

    def choose(
        self, rows: Seq[Sequence], budget: int, facts: Facts
    ) -> dict[Sequence, tuple[int, ...]]:
        """The provisional tokens of those of `rows` that get any, `budget` of them at most.

        rows  the sequences that would decode and may be verified now: all their tokens are known
        """
        ...

    def drafts(self, rows: Seq[Sequence], facts: Facts) -> tuple[tuple[Sequence, int], ...]:
        """Of the rows that draw in this plan: those whose next tokens the runner is to propose
        after it, and how many."""
        ...

    def proposed(self, seq: Sequence, tokens: tuple[int, ...]) -> None:
        """The runner proposes these tokens after the sequence's newest one."""

    def observe(self, seq: Sequence, num_proposed: int, num_accepted: int) -> None:
        """A verification of `num_proposed` tokens found `num_accepted` of them right."""
