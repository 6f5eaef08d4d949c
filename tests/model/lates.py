"""Lates: masks that are not there in time, at random."""

from __future__ import annotations

import random

import pytest

from streamer.constraints.filler import Begun


class Lates:
    """From here on a share of all masks is late, for one step at least. `num`: how many were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, seed: int, share: float = 0.3) -> None:
        self.num = 0
        rng, honest = random.Random(seed), Begun.are_there

        def some(begun: Begun) -> list[int]:
            found = [each and int(rng.random() > share) for each in honest(begun)]
            self.num += found.count(0)
            return found

        monkeypatch.setattr(Begun, "are_there", some)
