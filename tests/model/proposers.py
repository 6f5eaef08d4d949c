"""A proposer of speculation that knows the answers, and is wrong now and then.

Given to a scheduler in the place of Speculator, by tests that have the requests' answers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from typing import NamedTuple

from streamer.core.plan import Facts, Finish, TokenLogprob
from streamer.core.request import Sequence

Key = tuple[int, int]


class Answer(NamedTuple):
    """What a choice drew, as it was reported."""

    tokens: list[int]
    logprobs: list[TokenLogprob]
    finish: Finish


class Oracle:
    """Proposes the right tokens, a share of them changed, to a share of the rows.

    left_unsettled  rows that were taken from a sequence whose verification was under way
    """

    def __init__(self, answers: dict[Key, Answer], seed: int, errors: float = 0.15) -> None:
        self.num_proposed = self.num_accepted = self.left_unsettled = 0
        self._answers = answers
        self._rows: dict[Sequence, None] = {}
        self._rng = random.Random(seed)
        self._errors = errors

    def begin(self, seq: Sequence) -> None:
        self._rows[seq] = None

    @property
    def has_drafts(self) -> bool:
        return False

    def looks(self, num_rows: int, budget: int, facts: Facts) -> list[Sequence]:
        return list(self._rows)

    def end(self, seq: Sequence) -> None:
        del self._rows[seq]
        self.left_unsettled += bool(seq.provisional)

    def wait(self, rows: Seq[Sequence], facts: Facts) -> list[Sequence]:
        return [seq for seq in rows if self._rng.random() < 0.7]

    def choose(
        self, rows: Seq[Sequence], budget: int, facts: Facts
    ) -> dict[Sequence, tuple[int, ...]]:
        known = [seq for seq in rows if seq.request.request_id[0] == "r"]
        return {seq: self._tokens(seq) for seq in known if self._rng.random() < 0.8}

    def _tokens(self, seq: Sequence) -> tuple[int, ...]:
        key, done = (int(seq.request.request_id[1:]), seq.choice), seq.num_output
        right = self._answers[key].tokens[done:] + [1] * 9  # it may not know where the answer ends
        count, rng = self._rng.randint(1, 8), self._rng
        return tuple((t + (rng.random() < self._errors)) % 256 for t in right[:count])

    def drafts(self, rows: Seq[Sequence], facts: Facts) -> tuple[tuple[Sequence, int], ...]:
        return ()

    def proposed(self, seq: Sequence, tokens: tuple[int, ...]) -> None: ...

    def observe(self, seq: Sequence, num_proposed: int, num_accepted: int) -> None:
        self.num_proposed += num_proposed
        self.num_accepted += num_accepted
