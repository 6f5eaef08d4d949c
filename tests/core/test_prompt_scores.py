"""Log probabilities of a prompt in the scheduler: each token's once, also through preemption.

The driver compares them with the device's before a request's first output token; the state machine
does so in random runs.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from streamer.core.plan import NOT_FINITE, FinishReason, StepOutput, TokenLogprob
from streamer.core.request import Status
from tests.core.device import score
from tests.core.driver import RECOMPUTE, SWAP, Driver, make_config

PROMPT = [(7 * i) % 97 for i in range(24)]


def chunks(driver: Driver, first: int = 0) -> list[tuple[int, int]]:
    """(computed, scored) of every chunk."""
    return [(c.count, c.score) for plan in driver.plans[first:] for c in plan.chunks]


@pytest.mark.parametrize("n", [1, 3])
def test_a_step_scores_up_to_the_maximum_and_not_the_last_token(n: int) -> None:
    driver = Driver(make_config(max_scored_tokens=10, max_model_len=64))
    driver.add(PROMPT, max_tokens=2, n=n, prompt_logprobs=0)
    driver.drain()
    assert chunks(driver) == [(10, 10), (10, 10), (4, 3)]


def test_others_use_the_budget_that_a_scored_prompt_leaves() -> None:
    driver = Driver(make_config(max_scored_tokens=6))
    driver.add(PROMPT, max_tokens=2, prompt_logprobs=0)
    driver.add(PROMPT[::-1], max_tokens=2)
    driver.step()
    assert chunks(driver) == [(6, 6), (10, 0)]
    driver.drain()


def test_a_prompt_is_not_taken_from_the_cache_nor_from_a_parent() -> None:
    driver = Driver(make_config())
    parent = driver.add(PROMPT, max_tokens=20)
    driver.run()
    driver.add(PROMPT, max_tokens=2, prompt_logprobs=0)
    driver.run()
    parent = driver.add(PROMPT, max_tokens=20)
    driver.step()
    driver.add(PROMPT, max_tokens=2, prompt_logprobs=0, share_with=parent)
    driver.drain()
    assert driver.outputs[-1].stats.prefix_hit_tokens == 20  # the second parent's


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("costs", [SWAP, RECOMPUTE])
def test_preempted_during_its_prompt_it_resumes_scoring_where_it_was(
    costs: dict[str, float], depth: int
) -> None:
    config = make_config(num_blocks=12, max_scored_tokens=5, enable_prefix_caching=False)
    driver = Driver(config, depth=depth, costs=costs)
    asked = driver.add(PROMPT, max_tokens=4, prompt_logprobs=2, priority=1)
    driver.step()
    driver.step()
    driver.add(PROMPT[::-1], max_tokens=8, priority=0)  # takes the first request's blocks
    driver.step()
    assert driver.status(asked) not in (Status.RUNNING, Status.WAITING)
    driver.drain()
    assert sum(scored for _, scored in chunks(driver)) == len(PROMPT) - 1
    assert driver.scores[asked] == score(tuple(PROMPT))


def test_preempted_after_its_prompt_it_may_come_back_from_the_cache() -> None:
    driver = Driver(make_config(num_blocks=12), costs=RECOMPUTE)
    asked = driver.add(PROMPT, max_tokens=6, prompt_logprobs=2, priority=1)
    driver.step()
    driver.step()
    first = len(driver.plans)
    driver.add(PROMPT, max_tokens=8, priority=0, salt=b"other")
    driver.step()
    assert driver.status(asked) is Status.PREEMPTED
    driver.drain()
    assert not any(scored for _, scored in chunks(driver, first))


def scored(logprob: float) -> tuple[Driver, StepOutput]:
    """A first step in which the first score is `logprob`."""
    driver = Driver(make_config())
    driver.add(PROMPT, max_tokens=2, prompt_logprobs=0)
    driver.add(PROMPT, max_tokens=2)
    plan = driver.launch()
    assert plan is not None
    result = driver.device.run(1)
    first = TokenLogprob(PROMPT[1], logprob)
    scores = {0: (first, *result.prompt_logprobs[0][1:])}
    return driver, driver.scheduler.apply(plan, replace(result, prompt_logprobs=scores))


def test_a_nan_fails_its_request_and_a_minus_infinity_is_a_number() -> None:
    driver, output = scored(float("nan"))
    assert [(f.request_id, f.reason, f.detail) for f in output.finishes] == [
        ("r0", FinishReason.FAILED, NOT_FINITE)
    ]
    assert not output.prompt_logprobs
    assert driver.status("r1") is not Status.FINISHED
    driver, output = scored(float("-inf"))
    assert output.prompt_logprobs["r0"][0].logprob == float("-inf")


def test_a_cancelled_request_gets_no_scores() -> None:
    driver = Driver(make_config())
    asked = driver.add(PROMPT, max_tokens=2, prompt_logprobs=0)
    driver.launch()
    driver.cancel(asked)
    driver.collect()
    driver.drain()
    assert driver.scores[asked] == []
