"""The token budget of a step: how much of a prompt is computed beside running decodes."""

from __future__ import annotations

import pytest

from tests.core.driver import Driver, make_config


@pytest.mark.parametrize(
    ("is_paced", "decode_s", "prefill_s", "chunk"),
    [
        (True, 0.01, 1e-4, 300),  # three times the time of a step without it
        (True, 0.02, 1e-4, 511),  # more than the budget allows beside the answer
        (True, 0.001, 1e-3, 128),  # a smaller chunk would not pay
        (True, 0.0, 1e-4, 511),  # no decode-only step was measured yet
        (False, 0.01, 1e-4, 511),  # a given budget is the only limit
    ],
)
def test_a_prompt_beside_running_answers_is_cut_by_measured_time(
    is_paced: bool, decode_s: float, prefill_s: float, chunk: int
) -> None:
    sizes = {"num_blocks": 600, "max_num_batched_tokens": 512, "max_model_len": 2000}
    config = make_config(**sizes, is_paced=is_paced)
    driver = Driver(config, costs={"decode_s": decode_s, "prefill_s": prefill_s})
    driver.add([1, 2, 3], max_tokens=20)
    driver.step()
    for start in (10, 30):  # two prompts share the budget
        driver.add([start + i % 40 for i in range(400)], max_tokens=1)
    driver.step()
    plan = driver.plans[-1]
    assert sum(part.count for part in plan.chunks) == chunk
    assert plan.num_tokens == chunk + 1
    driver.drain()


def test_without_running_answers_a_prompt_takes_the_whole_budget() -> None:
    sizes = {"num_blocks": 600, "max_num_batched_tokens": 512, "max_model_len": 2000}
    config = make_config(**sizes, is_paced=True)
    driver = Driver(config, costs={"decode_s": 0.01, "prefill_s": 1e-3})
    driver.add([i % 90 for i in range(1100)], max_tokens=2)
    driver.drain()
    assert [plan.num_tokens for plan in driver.plans] == [512, 512, 76, 1]
