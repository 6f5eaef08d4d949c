"""Scripted: a stand-in for the speculation, which knows what the simulated device will draw.

It proposes the right tokens, with errors, to some of the sequences: from its own seed alone, so
that a log replays. It checks what the scheduler promises every speculation.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

from streamer.core.plan import Facts
from streamer.core.request import Sequence
from tests.core.device import VOCAB, continuation


class Scripted:
    """`share` of the rows get tokens, up to `most`; `errors`: share of the tokens that are wrong.

    rows  sequences that have a row
    asked      sequence -> the length of its latest proposal
    """

    def __init__(
        self, seed: int, *, share: float = 0.7, most: int = 6, errors: float = 0.2
    ) -> None:
        self.rows: dict[Sequence, None] = {}
        self.asked: dict[Sequence, int] = {}
        self.num_proposed = self.num_accepted = 0
        self._rng = random.Random(seed)
        self._share, self._most, self._errors = share, most, errors
        self._drafts: dict[Sequence, tuple[int, tuple[int, ...]]] = {}

    def begin(self, seq: Sequence) -> None:
        assert seq not in self.rows
        assert not seq.num_pending
        self.rows[seq] = None

    def end(self, seq: Sequence) -> None:
        del self.rows[seq]

    @property
    def has_drafts(self) -> bool:
        return True

    def looks(self, num_rows: int, budget: int, facts: Facts) -> list[Sequence]:
        return list(self.rows)

    def wait(self, rows: Seq[Sequence], facts: Facts) -> list[Sequence]:
        assert all(seq.num_pending for seq in rows)
        return [seq for seq in rows if self._rng.random() < self._share]

    def choose(
        self, rows: Seq[Sequence], budget: int, facts: Facts
    ) -> dict[Sequence, tuple[int, ...]]:
        assert budget > 0
        chosen = {}
        for seq in rows:
            assert seq in self.rows
            assert len(seq.tokens) == seq.num_computed + 1
            assert not seq.num_pending
            if self._rng.random() < self._share:
                chosen[seq] = self._tokens(seq)
                self.asked[seq] = len(chosen[seq])
        return chosen

    def _tokens(self, seq: Sequence) -> tuple[int, ...]:
        at, drafted = self._drafts.pop(seq, (0, ()))
        if at == len(seq.tokens):
            return drafted
        right = continuation(seq.tokens, seq.choice, self._rng.randint(0, self._most))
        wrong = self._rng.randrange(1, VOCAB)
        return tuple((t + wrong) % VOCAB if self._rng.random() < self._errors else t for t in right)

    def drafts(self, rows: Seq[Sequence], facts: Facts) -> tuple[tuple[Sequence, int], ...]:
        assert all(seq.num_pending for seq in rows)
        return tuple((seq, self._rng.randint(1, 3)) for seq in rows if self._rng.random() < 0.2)

    def proposed(self, seq: Sequence, tokens: tuple[int, ...]) -> None:
        assert seq in self.rows
        self._drafts[seq] = len(seq.tokens), tokens

    def observe(self, seq: Sequence, num_proposed: int, num_accepted: int) -> None:
        assert seq in self.rows
        assert 0 <= num_accepted <= num_proposed
        self.num_proposed += num_proposed
        self.num_accepted += num_accepted
