"""Blocks that n choices share: counted right where it can be done by hand."""

from __future__ import annotations

import pytest

from streamer.demo import CHECKPOINT
from streamer.loadtest.paper import sharing as paper_sharing
from streamer.loadtest.paper.asks import Ask
from streamer.loadtest.paper.sharing import room_for, run, saving


def test_two_choices_of_one_prompt() -> None:
    """A prompt of two blocks, and 8 tokens of each choice in a third one, from step 2 to 7.

    The first step leaves the prompt's blocks, the last one nothing.
    """
    requests = [Ask(tuple(range(100, 132)), 8)]
    room = room_for(requests, 2)
    shared = run(CHECKPOINT, requests, 2, is_shared=True, room=room)
    alone = run(CHECKPOINT, requests, 2, is_shared=False, room=room)
    assert (alone.held, alone.peak) == (2 * 2 + 6 * 6, 6)
    assert (shared.held, shared.peak) == (2 + 6 * 4, 4)
    assert shared.listed == alone.listed == alone.held
    assert saving(shared, alone) == pytest.approx(35)


def test_it_runs() -> None:
    told: list[str] = []
    found = paper_sharing.measure(told.append, tiny=True)
    assert [row[0] for row in found.rows] == [
        f"{kind}, n = {n}" for kind in ("Alpaca", "ShareGPT") for n in (2, 4, 6)
    ]
    assert told[-1] == "ShareGPT, n = 6, alone"
    saved = {row[0]: float(str(row[2]).split()[0]) for row in found.rows}
    for kind in ("Alpaca", "ShareGPT"):
        assert 0 < saved[f"{kind}, n = 2"] < saved[f"{kind}, n = 4"] < saved[f"{kind}, n = 6"]
