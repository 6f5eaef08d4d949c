"""Rows whose masks are late, on a device that delays everything and with a plan ahead."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.model.greedy_oracle import mixed_asks
from tests.model.lates import Lates
from tests.model.runner.test_cuda import KINDS, TIGHT, TINY, Late, late, serve
from tests.model.test_parity import RECOMPUTE, SWAP
from tests.model.where import Where

__all__ = ["late"]


@pytest.mark.parametrize("seed", [1, 2])
def test_rows_whose_masks_are_late_draw_the_same(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch, late: Late, seed: int
) -> None:
    """The CPU runner's tokens, also while plans are under way in which rows go on from a token that
    none drew; rows beside them are replayed."""
    folder = checkpoint("llama", 1, **TINY)
    asks = mixed_asks(4, 8, longest=14, output=(12, 16))
    kinds = [*KINDS[5:], KINDS[6], replace(KINDS[6], n=2, frequency_penalty=0.8)]
    with monkeypatch.context() as here:
        here.setattr(Where, "make", lambda: None)
        expected = serve(folder, asks, kinds, max_num_seqs=16)
    device, lates = late(seed), Lates(monkeypatch, seed=seed)
    costs = SWAP if seed % 2 else RECOMPUTE
    got = serve(folder, asks, kinds, costs=costs, **TIGHT)
    assert got.tokens == expected.tokens
    for key, values in expected.logprobs.items():
        assert got.logprobs[key] == pytest.approx(values, abs=1e-4)
    assert lates.num > 15
    assert device.num_replays > 0
