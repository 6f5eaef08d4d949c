"""How many tokens to verify: expected tokens over measured cost, and nothing without a gain."""

from __future__ import annotations

import pytest

from streamer.core.plan import Facts
from streamer.core.speculation.policy import GAIN, StepCosts, can_gain, draft_length, shares

FLAT = StepCosts(Facts(step_s=((1, 0.020), (2, 0.020), (64, 0.021)), prefill_s=1e-3))
LINEAR = StepCosts(Facts(step_s=tuple((n, n * 1e-3) for n in (1, 2, 4, 8, 16, 64, 128))))


def test_costs_between_measured_sizes_are_linear_and_beyond_them_those_of_prompts() -> None:
    costs = StepCosts(Facts(step_s=((4, 0.010), (8, 0.020)), prefill_s=0.001))
    assert [costs.plain_s(n) for n in (1, 4, 6, 8, 10)] == pytest.approx(
        [0.010, 0.010, 0.015, 0.020, 0.022]
    )


def test_one_bad_measurement_does_not_outlast_better_ones_of_larger_steps() -> None:
    costs = StepCosts(Facts(step_s=((1, 0.010), (4, 0.900), (8, 0.012))))
    assert costs.plain_s(4) == costs.plain_s(8) == 0.012


def test_nothing_is_proposed_before_a_plain_step_was_measured() -> None:
    sure = [[1.0] * 8]
    for costs in (StepCosts(Facts()), StepCosts(Facts(step_s=((8, 0.01),)))):
        assert not can_gain(costs, 1, 8)
        assert shares(sure, 1, 8, costs) == [0]
        assert draft_length([1.0], 8, 0.001, costs) == 0


def test_where_wider_steps_are_free_all_that_is_likely_is_verified() -> None:
    assert shares([[0.9, 0.8, 0.7, 0.6]], 1, 64, FLAT) == [4]


def test_where_each_token_costs_its_share_nothing_is_not_even_what_is_sure() -> None:
    assert not can_gain(LINEAR, 16, 64)
    assert shares([[1.0] * 8] * 16, 16, 64, LINEAR) == [0] * 16


def test_the_most_probable_tokens_of_all_rows_come_first() -> None:
    costs = StepCosts(Facts(step_s=((2, 0.010), (6, 0.011), (7, 0.1), (64, 1.0))))
    counts = shares([[0.9, 0.85, 0.8, 0.7], [0.75, 0.2]], 2, 64, costs)
    assert counts == [3, 1]


def test_the_budget_holds() -> None:
    assert sum(shares([[0.9] * 8] * 4, 4, 5, FLAT)) == 5


def test_a_gain_within_the_uncertainty_of_measured_costs_is_none() -> None:
    chance = (GAIN - 1) * 0.9  # for a cost of nothing
    free = StepCosts(Facts(step_s=((1, 0.02), (64, 0.02))))
    assert shares([[chance]], 1, 64, free) == [0]
    assert shares([[2 * chance]], 1, 64, free) == [1]


def test_the_draft_is_longer_the_better_it_is_and_absent_where_it_costs_too_much() -> None:
    lengths = [draft_length([rate], 16, 0.001, FLAT) for rate in (0.05, 0.5, 0.8, 0.95)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 0 < lengths[1] < lengths[3]
    assert draft_length([0.8], 16, 0.1, FLAT) == 0


def test_steps_that_verify_are_compared_by_what_they_were_measured_to_cost() -> None:
    plain = ((4, 0.010), (64, 0.010))
    sure = [[1.0] * 4]
    assert shares(sure, 4, 64, StepCosts(Facts(step_s=plain))) == [4]
    dear = StepCosts(Facts(step_s=plain, verify_s=((5, 0.030), (64, 0.030))))
    assert shares(sure, 4, 64, dear) == [0]
