"""How many tokens to verify: expected tokens over measured cost, and nothing without a gain."""

from __future__ import annotations

import random
from functools import partial

import pytest

from streamer.core.plan import Facts
from streamer.core.speculation.policy import (
    DELAY,
    FIRST,
    GAIN,
    SAVED,
    SHARE,
    Account,
    StepCosts,
    draft_length,
    is_worth,
    shares,
)

FLAT = StepCosts(Facts(step_s=((1, 0.020), (2, 0.020), (64, 0.021)), prefill_s=1e-3))
LINEAR = StepCosts(Facts(step_s=tuple((n, n * 1e-3) for n in (1, 2, 4, 8, 16, 64, 128))))


def counts(survivals: list[list[float]], num_rows: int, costs: StepCosts) -> list[int]:
    return shares(survivals, num_rows, 64, costs)[0]


def test_costs_between_measured_sizes_are_linear_and_far_beyond_them_those_of_prompts() -> None:
    costs = StepCosts(Facts(step_s=((4, 0.010), (8, 0.020)), prefill_s=0.001))
    assert [costs.plain_s(n) for n in (1, 4, 6, 8, 12, 14)] == pytest.approx(
        [0.010, 0.010, 0.015, 0.020, 0.020, 0.022]
    )


def test_one_bad_measurement_does_not_outlast_better_ones_of_larger_steps() -> None:
    costs = StepCosts(Facts(step_s=((1, 0.010), (4, 0.900), (8, 0.012))))
    assert costs.plain_s(4) == costs.plain_s(8) == 0.012


def test_nothing_is_proposed_before_a_plain_step_was_measured() -> None:
    sure = [[1.0] * 8]
    for costs in (StepCosts(Facts()), StepCosts(Facts(step_s=((8, 0.01),)))):
        assert not costs.can_gain(1, 8)
        assert shares(sure, 1, 8, costs) == ([0], 1.0)
        assert draft_length([1.0], 8, 0.001, costs) == 0


def test_where_wider_steps_are_free_all_that_is_likely_is_verified() -> None:
    assert counts([[0.9, 0.8, 0.7, 0.6]], 1, FLAT) == [4]


def test_where_each_token_costs_its_share_nothing_is_not_even_what_is_sure() -> None:
    assert not LINEAR.can_gain(16, 64)
    assert counts([[1.0] * 8] * 16, 16, LINEAR) == [0] * 16


def test_the_most_probable_tokens_of_all_rows_come_first() -> None:
    costs = StepCosts(Facts(step_s=((2, 0.010), (6, 0.011), (7, 0.1), (64, 1.0))))
    assert counts([[0.9, 0.85, 0.8, 0.7], [0.75, 0.2]], 2, costs) == [3, 1]


def test_the_budget_holds() -> None:
    assert sum(shares([[0.9] * 8] * 4, 4, 5, FLAT)[0]) == 5


def test_a_gain_within_the_uncertainty_of_measured_costs_is_none() -> None:
    chance = (GAIN - 1) * 0.9  # for a cost of nothing
    free = StepCosts(Facts(step_s=((1, 0.02), (64, 0.02))))
    assert counts([[chance]], 1, free) == [0]
    assert counts([[2 * chance]], 1, free) == [1]


def test_the_draft_is_longer_the_better_it_is_and_absent_where_it_costs_too_much() -> None:
    lengths = [draft_length([rate], 16, 0.001, FLAT) for rate in (0.05, 0.5, 0.8, 0.95)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 0 < lengths[1] < lengths[3]
    assert draft_length([0.8], 16, 0.1, FLAT) == 0


def test_steps_that_verify_are_compared_by_what_they_were_measured_to_cost() -> None:
    plain = ((4, 0.010), (64, 0.010))
    sure = [[1.0] * 4]
    assert counts(sure, 4, StepCosts(Facts(step_s=plain))) == [4]
    dear = StepCosts(Facts(step_s=plain, verify_s=((5, 0.030), (64, 0.030))))
    assert counts(sure, 4, dear) == [0]


def test_wider_steps_are_tried_one_after_the_other_until_they_do_not_pay() -> None:
    """Widths beyond the measured ones would else never be measured."""
    measured, tried = {2: 0.021}, [2]
    for _ in range(20):
        facts = Facts(
            step_s=((1, 0.020),), verify_s=tuple(sorted(measured.items())), prefill_s=0.02
        )
        width = 1 + counts([[0.9] * 40], 1, StepCosts(facts))[0]
        measured[width] = 0.021 if width <= 12 else 0.021 * width
        tried.append(width)
    assert tried[:5] == [2, 3, 4, 6, 9]
    assert sum(width > 12 for width in tried) <= 2
    assert 6 <= tried[-1] <= 12


SMALL = StepCosts(  # as the bundled model's: wider is nearly free, but to verify is not
    Facts(
        step_s=((1, 0.0006), (16, 0.0008), (64, 0.0016)),
        verify_s=((2, 0.0007), (20, 0.0010), (80, 0.0020)),
    )
)


def run(num_rows: int, tokens: int, repeats: float, *, is_closed: bool) -> float:
    """How many times as fast as without: rows that draw `tokens` each, of which now and then the
    next four are known; a closed batch, or as many clients for the same number of requests."""
    source = random.Random(num_rows)
    count = num_rows if is_closed else 8 * num_rows
    queue = [0.0] * count
    left: list[list[float]] = []  # tokens to draw, accepted, lost
    took_s = plain_s = 0.0
    for tokens_left in ([tokens] * len(queue[i : i + num_rows]) for i in range(0, count, num_rows)):
        plain_s += max(tokens_left) * SMALL.plain_s(len(tokens_left))
    while queue or left:
        while queue and len(left) < num_rows:
            queue.pop()
            left.append([tokens, 0.0, 0.0])
        known = [row for row in left if row[0] > 5 and source.random() < repeats]
        others = [row for row in left if not any(row is each for each in known)]
        slack = min((DELAY * (tokens - n) + won - lost for n, won, lost in others), default=99.0)
        proposals, gain = shares([[0.9, 0.8, 0.7, 0.6]] * len(known), len(left), 64, SMALL)
        step_s = SMALL.plain_s(len(left))
        growth = SMALL.growth(len(left) + sum(proposals), len(left))
        if not is_worth(growth, gain, partial(float, slack)):
            proposals = [0] * len(known)
        if any(proposals):
            for row in left:
                row[2] += growth
            step_s *= 1 + growth
        took_s += step_s
        for row, proposed in zip(known, proposals, strict=True):
            won = 0
            while won < proposed and source.random() < 0.88:
                won += 1
            row[0] -= won
            row[1] += won
        for row in left:
            row[0] -= 1
        left = [row for row in left if row[0] > 0]
    return plain_s / took_s


@pytest.mark.parametrize("num_rows", [1, 4, 16, 64])
@pytest.mark.parametrize("is_closed", [True, False])
def test_what_repeats_little_loses_nothing_even_where_the_slowest_row_decides(
    num_rows: int, is_closed: bool
) -> None:
    for repeats in (0.0, 0.01, 0.03):
        assert run(num_rows, 128, repeats, is_closed=is_closed) > 0.98


@pytest.mark.parametrize(("num_rows", "times"), [(1, 2.0), (4, 1.7), (16, 1.2)])
def test_what_repeats_much_gains_in_a_batch_and_in_a_stream(num_rows: int, times: float) -> None:
    for is_closed in (True, False):
        assert run(num_rows, 128, 0.9, is_closed=is_closed) > times


def test_one_row_that_repeats_nothing_may_wait_for_many_that_do() -> None:
    known = [[0.95] * 8] * 15
    for many, slack, is_right in ((15, 0.0, True), (2, 0.0, False), (2, 9.0, True)):
        proposals, gain = shares(known[:many], 16, 256, SMALL)
        assert any(proposals)
        growth = SMALL.growth(16 + sum(proposals), 16)
        assert is_worth(growth, gain, partial(float, slack)) == is_right


def test_what_gains_nothing_costs_its_share_of_the_time_and_no_more() -> None:
    account, spent_s = Account(), 0.0
    for _ in range(5000):
        account.earn(1e-3, 1)
        if account.seconds > 0:
            account.add(-7e-4)
            spent_s += 7e-4
    assert spent_s == pytest.approx(5.0 * SHARE + 1e-3 * FIRST, rel=0.02)


def test_of_what_was_gained_only_so_much_can_be_lost_later() -> None:
    account = Account()
    account.earn(1e-3, 1)
    account.add(10.0)
    assert account.seconds == pytest.approx(1e-3 * SAVED)
    account.earn(1e-4, 1)  # fewer rows
    assert account.seconds == pytest.approx(1e-4 * SAVED)
