"""Costs: estimates move towards the measured figures."""

from __future__ import annotations

import pytest

from streamer.core.plan import Facts
from streamer.model.runner.costs import Costs, probe_copy


def test_prefill_is_learned_from_prefill_steps() -> None:
    """Decode-only steps have an estimate of their own; a later measurement weighs a fifth."""
    costs = Costs(1000, probe_copy)
    assert costs.facts(0).decode_s == 0.0
    costs.saw_step(9.0, 4, 0)
    costs.saw_step(7.0, 0, 0)  # a step without tokens is no measurement
    assert costs.facts(0).prefill_s == Facts().prefill_s
    costs.saw_step(4.0, 9, 0)
    assert costs.facts(0).decode_s == pytest.approx(0.8 * 9.0 + 0.2 * 4.0)
    costs.saw_step(2.0, 100, 90)
    assert costs.facts(0).prefill_s == pytest.approx(0.02)
    costs.saw_step(3.0, 100, 100)
    assert costs.facts(7).prefill_s == pytest.approx(0.8 * 0.02 + 0.2 * 0.03)
    assert costs.facts(7).copies_done == 7


def test_steps_without_prompts_are_learned_by_their_width() -> None:
    """Small widths apart, larger ones to 25%, at the mean of the widths that were seen."""
    costs = Costs(1000, probe_copy)
    assert costs.facts(0).step_s == ()
    for width in (5, 1, 4, 6, 1):
        costs.saw_width(width / 10, width, is_verification=False)
    assert costs.facts(0).step_s == ((1, pytest.approx(0.1)), (4, 0.4), (5, 0.5), (6, 0.6))
    for width in (100, 110):
        costs.saw_width(width / 10, width, is_verification=False)
    assert costs.facts(0).step_s[-1] == (105, pytest.approx(10.5))
    for width in range(1, 5000):
        costs.saw_width(width / 10, width, is_verification=False)
    widths, seconds = zip(*costs.facts(0).step_s, strict=True)
    assert len(widths) < 50
    assert list(widths) == sorted(set(widths))
    assert all(s * 10 == pytest.approx(w, abs=0.6) for w, s in zip(widths, seconds, strict=True))


def test_steps_that_verify_are_measured_apart() -> None:
    costs = Costs(1000, probe_copy)
    costs.saw_width(1.0, 8, is_verification=False)
    costs.saw_width(3.0, 8, is_verification=True)
    facts = costs.facts(0)
    assert (facts.step_s, facts.verify_s) == (((8, 1.0),), ((8, 3.0),))


@pytest.mark.parametrize("is_verification", [False, True])
def test_a_width_that_no_step_has_is_forgotten(is_verification: bool) -> None:
    """Otherwise a width that was slow once, the largest one, would never be tried again."""
    costs = Costs(1000, probe_copy)
    costs.saw_width(9.0, 17, is_verification=is_verification)
    for _ in range(100):
        costs.saw_width(1.0, 1, is_verification=False)
    facts = costs.facts(0)
    assert (17, 9.0) in (facts.verify_s if is_verification else facts.step_s)
    for _ in range(1000):
        costs.saw_width(1.0, 1, is_verification=False)
    facts = costs.facts(0)
    assert (facts.step_s, facts.verify_s) == (((1, 1.0),), ())


def test_a_step_that_another_process_delayed_counts_as_twice_as_long_as_the_others() -> None:
    costs = Costs(1000, probe_copy)
    for seconds in [1.0] * 30 + [100.0] + [1.0] * 7:
        costs.saw_width(seconds, 4, is_verification=False)
    ((width, mean_s),) = costs.facts(0).step_s
    assert (width, 1.0 < mean_s < 1.05) == (4, True)


def test_what_a_draft_cost_once_is_forgotten() -> None:
    """Otherwise a speculation that drafts no more because of it would never measure again."""
    costs = Costs(1000, probe_copy)
    assert costs.facts(0).draft_s == 0.0
    costs.saw_draft(1.0)
    costs.saw_draft(6.0)
    assert costs.facts(0).draft_s == pytest.approx(2.0)
    for _ in range(1000):
        costs.saw_step(1.0, 1, 0)
    assert costs.facts(0).draft_s == pytest.approx(1.0, rel=1e-3)


def test_swaps_move_the_bandwidth() -> None:
    """Slow copies lower the bandwidth, which stays finite however short a copy seems."""
    costs = Costs(1000, probe_copy)
    before = costs.facts(0)
    assert before.swap_bytes_per_s > 1e6
    costs.saw_swap(1.0, 10, is_first=True)
    assert costs.facts(0).swap_bytes_per_s == before.swap_bytes_per_s
    assert costs.facts(0).swap_s == 1.0
    for _ in range(50):
        costs.saw_swap(1.0, 10)
    assert costs.facts(0).swap_bytes_per_s == pytest.approx(1e4, rel=0.1)
    costs.saw_swap(0.0, 1)
    assert 0 < costs.facts(0).swap_bytes_per_s < float("inf")


def test_what_swaps_cost_once_is_forgotten() -> None:
    """Otherwise a scheduler that recomputes because of it would never swap, nor measure, again."""
    costs = Costs(1000, lambda: (0.0, 1e-9))
    for _ in range(50):
        costs.saw_swap(1.0, 10)
    for _ in range(2000):
        costs.saw_step(1.0, 100, 100)
    assert costs.facts(0).swap_bytes_per_s == pytest.approx(1e9, rel=0.3)
