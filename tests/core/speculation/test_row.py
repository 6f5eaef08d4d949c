"""A row's match: found, followed, lost, taken up nearby; its measured rates; its proposals."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType

import pytest

from streamer.core.speculation.index import Text
from streamer.core.speculation.row import Rates, RowMatch, Source

PROMPT = list(range(100, 160))


def row(prompt: list[int], shared: Rates | None = None) -> tuple[RowMatch, list[int]]:
    """A row after its prompt, and its sequence's tokens, to be appended to."""
    known, given = list(prompt), Text()
    given.add(prompt)
    own = Source(Text(known, len(prompt)), shared or Rates())
    return RowMatch(own, Source(given, shared or Rates())), known


def draw(match: RowMatch, known: list[int], *tokens: int) -> None:
    for token in tokens:
        known.append(token)
        match.follow(len(known) - 1, len(known))


def test_the_prompts_continuation_is_proposed_after_three_equal_tokens() -> None:
    match, known = row(PROMPT)
    draw(match, known, 7, 110, 111)
    assert match.proposal(4) == []
    draw(match, known, 112)
    assert match.proposal(4) == [113, 114, 115, 116]


def test_its_own_output_is_continued_and_repeats_itself_beyond_its_end() -> None:
    match, known = row(PROMPT)
    draw(match, known, 1, 2, 3, 4, 1, 2, 3)
    assert match.proposal(10) == [4, 1, 2, 3, 4, 1, 2, 3, 4, 1]


def test_a_replaced_an_inserted_and_a_deleted_token_are_passed_at_once() -> None:
    for edit, after in (([9], 121), ([9, 8, 120], 121), ([123], 124)):
        match, known = row(PROMPT)
        draw(match, known, *PROMPT[5:20])  # the next would be 120
        draw(match, known, *edit)
        assert match.proposal(2) == [after, after + 1], edit


def test_a_short_match_that_fails_is_not_searched_for_nearby() -> None:
    match, known = row(PROMPT)
    draw(match, known, 110, 111, 112, 9, 115)
    assert match.source is None


SEGMENTS = [list(range(1000 + 10 * i, 1010 + 10 * i)) for i in range(41)]
SEGMENTED = [token for segment in SEGMENTS for token in segment]


def repeat(match: RowMatch, known: list[int], length: int) -> None:
    """Draw the first `length` tokens of each segment of the prompt, and three of the last."""
    for i, segment in enumerate(SEGMENTS[:-1]):
        draw(match, known, *segment[:length], i)
    draw(match, known, *SEGMENTS[-1][:3])


def test_chances_follow_what_the_row_drew_whether_or_not_it_was_proposed() -> None:
    (good, known), (bad, other) = row(SEGMENTED), row(SEGMENTED)
    repeat(good, known, 7)
    repeat(bad, other, 3)
    assert good.survivals(3, 0.01)[2] > 0.7
    assert bad.survivals(3, 0.01)[0] < 0.1


def test_chances_fall_along_the_proposal_and_end_where_they_are_too_small() -> None:
    match, known = row(PROMPT)
    draw(match, known, 110, 111, 112)
    chances = match.survivals(16, 0.2)
    assert chances == sorted(chances, reverse=True)
    assert 0 < len(chances) < 16
    assert chances[-1] >= 0.2


def test_a_new_row_begins_with_what_earlier_ones_measured() -> None:
    chances = []
    for length in (7, 3):
        shared = Rates()
        before, known = row(SEGMENTED, shared)
        repeat(before, known, length)
        after, known = row(PROMPT, shared)
        draw(after, known, 110, 111, 112)
        chances.append(after.survivals(1, 0.0)[0])
    assert chances[0] > 0.65 > 0.35 > chances[1]


def test_at_the_end_of_a_text_nothing_is_proposed_and_nothing_counts_as_wrong() -> None:
    match, known = row(PROMPT)
    rates = list(match.others[0].rates)
    draw(match, known, 157, 158, 159)
    assert (match.proposal(4), match.survivals(4, 0.0)) == ([], [])
    draw(match, known, 7)
    assert match.others[0].rates == rates


@pytest.mark.parametrize("step", [1, 2, 7, 50])
def test_tokens_that_are_followed_together_lead_to_the_same_match(step: int) -> None:
    source = random.Random(step)
    edited = [t if source.random() > 0.1 else 7 for t in PROMPT] + [1, 2, 3, 4, 1, 2, 3]
    (each, known), (many, other) = row(PROMPT), row(PROMPT)
    draw(each, known, *edited)
    for at in range(0, len(edited), step):
        other += edited[at : at + step]
        many.follow(len(other) - len(edited[at : at + step]), len(other))
    assert other == known
    assert many.proposal(4) == each.proposal(4) == [4, 1, 2, 3]
    assert many.own.text.before == each.own.text.before


def lines_run(work: Callable[[], None]) -> int:
    """How many lines of speculation it runs: what it costs, whatever else the machine does."""
    num_lines = 0

    def trace(frame: FrameType, event: str, _arg: object) -> Callable[..., object] | None:
        nonlocal num_lines
        if not frame.f_globals["__name__"].startswith("streamer.core.speculation."):
            return None  # a finalizer's, say, when the collector comes
        num_lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return num_lines


def test_a_miss_costs_the_same_few_lines_however_long_the_row_is() -> None:
    tokens = random.Random(3).sample(range(50_000), 5000)
    match, known = row(tokens[:1000])
    draw(match, known, *tokens[1000:1002])  # no anchor ends before the third
    costs = {lines_run(partial(draw, match, known, token)) for token in tokens[1002:]}
    assert len(costs) == 1
    assert max(costs) < 30
