"""Runs: the draws of a row that verifies provisional tokens, and where they end.

A run's draws are made together, each as if all provisional tokens before it had been drawn; what
follows the first draw that differs from its provisional token is worth nothing. Called by
sampling/host.py and sampling/device.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from streamer.core.plan import accepted

FAILED = -1  # in place of a token: its logits are not finite
CUT = -2  # in place of a token: its run ended before, or its mask was late


class Run(NamedTuple):
    """A row's successive draws among those of a step: index `first` and one more for each of
    `tokens`, the provisional tokens that they are compared with."""

    first: int
    tokens: tuple[int, ...]

    @property
    def end(self) -> int:
        """Index after its last draw."""
        return self.first + len(self.tokens) + 1

    def before(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Each draw's index, with the provisional tokens before it."""
        for n in range(len(self.tokens) + 1):
            yield self.first + n, self.tokens[:n]


def cut(tokens: list[int], runs: Sequence[Run]) -> None:
    """Replace what was drawn beyond the end of each run, in place."""
    for run in runs:
        end = run.first + accepted(run.tokens, tokens[run.first : run.end]) + 1
        tokens[end : run.end] = [CUT] * (run.end - end)
