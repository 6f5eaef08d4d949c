"""The rules that plans carry: copies that conflict are refused; what a run of tokens confirms."""

from __future__ import annotations

import pytest

from streamer.core.plan import Plan, accepted, check_moves
from streamer.errors import InvariantViolated


@pytest.mark.parametrize(
    "plan",
    [
        Plan(1, copies=((1, 4), (3, 1))),
        Plan(1, copies=((1, 4), (3, 4))),
        Plan(1, copies=((1, 4),), swap_in=((0, 1),)),
        Plan(1, copies=((1, 4),), swap_in=((0, 4),)),
        Plan(1, copies=((1, 4),), swap_out=((4, 0),)),
        Plan(1, swap_out=((4, 0),), swap_in=((1, 4),)),
        Plan(1, swap_out=((1, 3), (2, 3))),
        Plan(1, swap_out=((1, 3),), swap_in=((3, 5),)),
        Plan(1, copies=((1, 9),)),
        Plan(1, swap_out=((1, 9),)),
    ],
)
def test_copies_that_touch_the_same_block_are_refused(plan: Plan) -> None:
    with pytest.raises(InvariantViolated, match=r"copies into|beyond the pools"):
        check_moves(plan, 9, 9)


def test_copies_of_different_blocks_pass() -> None:
    check_moves(Plan(1, copies=((1, 4), (1, 5)), swap_out=((1, 0),), swap_in=((1, 6),)), 9, 9)


@pytest.mark.parametrize(
    ("provisional", "drawn", "right"),
    [
        ((), (5,), 0),
        ((5, 6), (5, 6, 7), 2),
        ((5, 6), (5, 7, 7), 1),
        ((5, 6), (6, 6, 7), 0),  # what is equal after a difference is chance
        ((5, 6), (5,), 1),  # a run already cut
    ],
)
def test_drawn_tokens_confirm_provisional_ones_up_to_the_first_that_differs(
    provisional: tuple[int, ...], drawn: tuple[int, ...], right: int
) -> None:
    assert accepted(provisional, drawn) == right
