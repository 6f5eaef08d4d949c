"""The transition table: what may happen to a request, and what may not."""

from __future__ import annotations

import pytest

from streamer.core.plan import Add
from streamer.core.request import TRANSITIONS, Event, Request, Status
from streamer.core.sampling import SamplingParams
from streamer.errors import InvariantViolated


def test_an_illegal_move_names_id_status_and_event() -> None:
    request = Request(Add("abc", (1,), SamplingParams()), 1, 8)
    with pytest.raises(InvariantViolated, match=r"abc: swap_in is illegal in waiting"):
        request.move(Event.SWAP_IN)


def test_every_living_status_can_finish_and_finished_can_do_nothing() -> None:
    for status in Status:
        can_finish = (status, Event.FINISH) in TRANSITIONS
        assert can_finish is (status is not Status.FINISHED)
    assert not [s for s, _ in TRANSITIONS if s is Status.FINISHED]


def test_every_status_is_reached_from_waiting() -> None:
    reached, grown = {Status.WAITING}, True
    while grown:
        new = {to for (s, _), to in TRANSITIONS.items() if s in reached} - reached
        reached |= new
        grown = bool(new)
    assert reached == set(Status)
