"""The speculator on sequences: sources, tenants, bounds, the draft model, waiting and counts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from msgspec.structs import replace

from streamer.core.plan import Add, Facts, FinishReason
from streamer.core.request import Request, Sequence
from streamer.core.sampling import SamplingParams
from streamer.core.speculation.index import ANCHOR
from streamer.core.speculation.speculator import FIRST_TRIAL, INDEXED_A_STEP, Speculator
from streamer.core.speculation.values import SpeculationSizes

SIZES = SpeculationSizes(max_proposed=8)
FREE = Facts(step_s=((1, 0.020), (64, 0.020)), draft_s=0.0001)  # wider steps cost nothing
DEAR = Facts(step_s=((1, 0.010), (2, 0.020), (4, 0.040), (8, 0.080), (16, 0.160)))
TEXT = tuple(range(100, 140))


def begun(speculator: Speculator, prompt: tuple[int, ...], **fields: Any) -> Sequence:
    """A sequence that has a row."""
    request = Request(Add("r", prompt, fields.pop("params", SamplingParams()), **fields), 0, 1000)
    (seq,) = request.sequences
    speculator.begin(seq)
    return seq


def proposed(speculator: Speculator, seq: Sequence, *tokens: int) -> tuple[int, ...]:
    """What is proposed after the sequence drew these."""
    seq.tokens += tokens
    return chosen(speculator, [seq], 64, FREE).get(seq, ())


def chosen(
    speculator: Speculator, rows: list[Sequence], budget: int, facts: Facts
) -> dict[Sequence, tuple[int, ...]]:
    """What is verified in a step, of the rows that are looked at."""
    looked = speculator.looks(len(rows), budget, facts)
    return speculator.choose([seq for seq in rows if seq in looked], budget, facts)


def finished(speculator: Speculator, seq: Sequence) -> None:
    seq.finish_reason = FinishReason.STOP
    speculator.end(seq)


def test_the_prompt_and_the_own_output_are_continued() -> None:
    speculator = Speculator(SIZES)
    seq = begun(speculator, TEXT)
    assert proposed(speculator, seq, 7) == ()
    assert proposed(speculator, seq, *TEXT[:3])[:2] == TEXT[3:5]
    assert proposed(speculator, seq, 1, 2, 3, 4, 5, 1, 2, 3)[:2] == (4, 5)


def test_a_prediction_is_continued_and_no_match_goes_from_the_prompt_into_it() -> None:
    speculator = Speculator(SIZES)
    seq = begun(speculator, (1, 2, 3), prediction=TEXT)
    assert proposed(speculator, seq, *TEXT[:3])[:2] == TEXT[3:5]
    assert proposed(speculator, seq, 1, 2, 3) == ()


def test_an_ended_output_is_continued_for_its_tenant_and_salt_alone() -> None:
    speculator = Speculator(SIZES)
    seq = begun(speculator, (1,), salt=b"s", tenant="t")
    seq.tokens += TEXT
    finished(speculator, seq)
    for salt, tenant, expected in (
        (b"s", "t", TEXT[3:5]),
        (b"s", "other", ()),
        (b"other", "t", ()),
        (b"", "", ()),
    ):
        reader = begun(speculator, (2,), salt=salt, tenant=tenant)
        assert proposed(speculator, reader, *TEXT[:3])[:2] == expected


def test_ngram_keeps_to_the_request_and_to_matches_of_its_length() -> None:
    speculator = Speculator(replace(SIZES, has_recent=False, min_match=5))
    first = begun(speculator, (1,))
    first.tokens += TEXT
    finished(speculator, first)
    seq = begun(speculator, TEXT)
    assert proposed(speculator, seq, *TEXT[:4]) == ()
    assert proposed(speculator, seq, TEXT[4])[:2] == TEXT[5:7]
    other = begun(speculator, (1,))
    assert proposed(speculator, other, *TEXT[:6]) == ()


def test_a_request_without_speculation_is_not_even_indexed() -> None:
    speculator = Speculator(SIZES)
    off = begun(speculator, TEXT, params=SamplingParams(speculation=False))
    assert proposed(speculator, off, *TEXT[:3]) == ()
    finished(speculator, off)
    reader = begun(speculator, (1,))
    assert proposed(speculator, reader, *TEXT[:3]) == ()


def test_a_row_that_was_given_up_goes_on_where_it_was() -> None:
    speculator = Speculator(SIZES)
    seq = begun(speculator, TEXT)
    proposed(speculator, seq, 1, 2, 3, 4, 5)
    speculator.end(seq)
    seq.tokens += [1, 2]  # of its last step
    speculator.begin(seq)
    assert proposed(speculator, seq, 3)[:2] == (4, 5)


def test_a_running_request_is_indexed_before_outputs_that_wait_for_long() -> None:
    """Requests without a step to speculate in leave outputs behind; empty ones leave nothing."""
    speculator = Speculator(SIZES)
    for length in [5000] * 20 + [0] * 20:
        seq = begun(speculator, (1,), salt=b"s")
        seq.tokens += range(200, 200 + length)
        finished(speculator, seq)
    assert len(speculator._ended_jobs) == 20
    assert not speculator._given_jobs
    seq = begun(speculator, TEXT)
    assert proposed(speculator, seq, *TEXT[:3])[:2] == TEXT[3:5]


def test_a_long_output_that_comes_back_is_followed_in_parts() -> None:
    """A step spends no more on it than on other texts; nothing is proposed until all is known."""
    speculator = Speculator(SIZES)
    seq = begun(speculator, (1,))
    long = [i % 1000 for i in range(2 * INDEXED_A_STEP - 3)]
    assert proposed(speculator, seq, *long) == ()
    assert proposed(speculator, seq, *TEXT[:3])[:2] == TEXT[3:5]


def test_a_step_without_a_gain_costs_no_work_and_rows_catch_up_after_it() -> None:
    speculator = Speculator(SIZES)
    seq = begun(speculator, TEXT)
    for token in TEXT[:8]:
        seq.tokens.append(token)
        assert chosen(speculator, [seq], 64, DEAR) == {}
    assert proposed(speculator, seq, TEXT[8])[:2] == TEXT[9:11]


def test_the_indexes_stay_within_their_bound() -> None:
    speculator = Speculator(replace(SIZES, max_indexed=200))
    small = begun(speculator, TEXT)
    large = begun(speculator, tuple(range(1000, 1190)))
    assert proposed(speculator, large, 1000, 1001, 1002) == ()  # no room: not indexed
    for i in range(400):
        proposed(speculator, small, 5000 + i)
    match = speculator._rows[small].match
    assert match is not None
    assert len(match.own.text) + len(TEXT) <= 200
    finished(speculator, small)
    assert proposed(speculator, begun(speculator, TEXT), *TEXT[:3])  # there is room again


def test_an_output_too_short_to_propose_from_is_not_kept() -> None:
    """Each salt would hold an index of its own, which counts as its tokens alone."""
    speculator = Speculator(SIZES)
    for length in (0, 1, ANCHOR, ANCHOR + 1):
        seq = begun(speculator, (1,), salt=b"%d" % length)
        seq.tokens += TEXT[:length]
        finished(speculator, seq)
    proposed(speculator, begun(speculator, (1,)), 5)
    assert not speculator._ended_jobs
    assert [salt for salt, _ in speculator._recent._young] == [b"%d" % (ANCHOR + 1)]


def test_choices_of_a_request_share_the_index_of_its_prompt() -> None:
    speculator = Speculator(SIZES)
    request = Request(Add("r", TEXT, SamplingParams(n=2)), 0, 1000)
    other = Sequence(request, 1, list(TEXT))
    request.sequences.append(other)
    for seq in request.sequences:
        speculator.begin(seq)
        assert proposed(speculator, seq, *TEXT[:3])[:2] == TEXT[3:5]
    assert len(speculator._given) == 1
    for seq in request.sequences:
        assert speculator._given
        finished(speculator, seq)
    assert not speculator._given
    assert not speculator._rows


def test_a_row_waits_for_a_plan_only_for_a_long_match() -> None:
    speculator = Speculator(SIZES)
    seq = begun(speculator, TEXT)
    assert list(speculator.looks(1, 64, FREE)) == [seq]
    seq.tokens += TEXT[:3]
    assert list(speculator.wait([seq], FREE)) == []
    seq.tokens += TEXT[3:24]
    assert list(speculator.wait([seq], FREE)) == [seq]
    assert list(speculator.wait([seq], DEAR)) == []


def test_verifications_are_paid_with_what_they_took() -> None:
    """Not with an estimate by a lucky measurement: they end when what they took is more."""
    speculator = Speculator(SIZES)
    seq, taken, num_verified = begun(speculator, TEXT), 0.0, 0
    seq.tokens += TEXT[:3]
    for at in range(3, len(TEXT) - 8):
        facts = replace(FREE, verified_s=taken, num_verified=num_verified)
        if chosen(speculator, [seq], 64, facts):
            taken, num_verified = taken + 0.060, num_verified + 1  # estimated: 0.020
        seq.tokens.append(TEXT[at])
    assert 1 <= num_verified <= 3


# ---------------------------------------------------------------- a draft model

DRAFTED = replace(SIZES, has_texts=False, has_draft=True)


def test_a_drafts_proposal_is_used_at_its_place_alone() -> None:
    speculator = Speculator(DRAFTED)
    seq = begun(speculator, TEXT)
    seq.tokens.append(1)
    speculator.looks(1, 64, FREE)
    ((drafted, length),) = speculator.drafts([seq], FREE)
    assert drafted is seq
    assert 1 <= length <= 8
    assert list(speculator.wait([seq], FREE)) == [seq]  # until the draft is there
    speculator.proposed(seq, (5, 6, 7))
    assert list(speculator.wait([seq], FREE)) == []
    assert proposed(speculator, seq)[:2] == (5, 6)
    assert proposed(speculator, seq, 9) == ()


def test_a_draft_that_fails_is_tried_again_ever_more_rarely_and_one_that_succeeds_stays() -> None:
    speculator = Speculator(DRAFTED)
    seq = begun(speculator, TEXT)
    trials = []
    for i in range(6 * FIRST_TRIAL):
        seq.tokens.append(i)
        speculator.looks(1, 64, FREE)
        if speculator.drafts([seq], FREE):
            trials.append(i)
            speculator.proposed(seq, (1, 2))
            (count,) = map(len, chosen(speculator, [seq], 64, FREE).values()) or (0,)
            speculator.observe(seq, count, 0)
    gaps = [b - a for a, b in itertools.pairwise(trials)]
    assert gaps[-1] > FIRST_TRIAL > gaps[0] == 1
    assert len(trials) < 60


@pytest.mark.parametrize("wider_s", [0.021, 0.026])  # a poor draft still pays, or does not
def test_a_draft_that_was_poor_costs_little_and_is_not_given_up(wider_s: float) -> None:
    """Texts that the draft model is bad at, then some that it is good at."""
    speculator = Speculator(DRAFTED)
    facts = Facts(step_s=((1, 0.020), (2, wider_s), (17, wider_s + 0.020)), draft_s=0.002)

    def text(length: int, *, is_right: bool) -> tuple[int, int]:
        """(steps, drafts) of an answer."""
        seq, steps, drafts = begun(speculator, (1,)), 0, 0
        while len(seq.tokens) < length:
            verified = chosen(speculator, [seq], 64, facts).get(seq, ())
            seq.tokens += range(1 + len(verified) * is_right)
            if verified:
                speculator.observe(seq, len(verified), len(verified) * is_right)
            steps += 1
            for _, count in speculator.drafts([seq], facts):
                drafts += 1
                speculator.proposed(seq, (7,) * count)
        finished(speculator, seq)
        return steps, drafts

    poor = [text(300, is_right=False) for _ in range(20)]
    assert poor[-1][1] < 8
    assert text(300, is_right=True)[0] < 200
    assert text(300, is_right=True)[0] < 100


def test_drafts_are_paid_with_what_they_took() -> None:
    """A hundredth of each step's 20 ms: 0.2 s more than the four steps' time there was takes 600
    steps, in which nothing is drafted."""
    speculator = Speculator(DRAFTED)
    seq = begun(speculator, TEXT)
    seq.tokens.append(1)
    speculator.looks(1, 64, FREE)
    assert speculator.drafts([seq], FREE)
    after = replace(FREE, drafting_s=0.2)
    assert speculator.drafts([seq], after) == ()
    waited = 0
    while not speculator.has_drafts:
        speculator.looks(1, 64, after)
        waited += 1
    assert 500 < waited < 700
    assert speculator.drafts([seq], after)


def test_without_a_draft_model_nothing_is_drafted() -> None:
    speculator = Speculator(SIZES)
    assert not speculator.has_drafts


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_the_budget_holds_over_all_rows(budget: int) -> None:
    speculator = Speculator(SIZES)
    rows = [begun(speculator, TEXT) for _ in range(4)]
    for seq in rows:
        seq.tokens += TEXT[:12]
    assert sum(map(len, chosen(speculator, rows, budget, FREE).values())) == budget
