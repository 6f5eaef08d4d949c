"""The arithmetic of paged attention, by name: what a textbook computes by hand.

Positions are in tests/model/runner/test_inputs.py, bytes in tests/model/test_inspect.py.
"""

from __future__ import annotations

from streamer.core.kv import num_blocks_for
from streamer.core.request import Status
from tests.core.driver import Driver, make_config


def forks_of_a_system_prompt() -> Driver:
    """16 choices of one 200-token prompt, at the step that ends its prefill."""
    driver = Driver(
        make_config(
            block_size=16,
            num_blocks=400,
            max_num_seqs=16,
            max_num_batched_tokens=256,
            max_model_len=512,
        )
    )
    driver.add(list(range(90)) + list(range(90)) + list(range(20)), n=16, max_tokens=8)
    driver.step()
    return driver


def blocks_held(driver: Driver) -> list[set[int]]:
    (request,) = driver.scheduler.state.requests.by_id.values()
    assert request.status is Status.RUNNING
    return [set(seq.blocks) for seq in request.sequences]


def test_16_forks_of_a_200_token_prompt_hold_13_blocks_instead_of_208() -> None:
    tables = blocks_held(forks_of_a_system_prompt())
    assert len(tables) == 16
    assert sum(len(table) for table in tables) == 208 == 16 * num_blocks_for(200, 16)
    assert len(set.union(*tables)) == 13


def test_after_the_first_write_12_blocks_are_shared_and_16_tails_are_not() -> None:
    driver = forks_of_a_system_prompt()
    driver.step()
    tables = blocks_held(driver)
    shared = set.intersection(*tables)
    tails = [table - shared for table in tables]
    assert len(shared) == 12
    assert all(len(tail) == 1 for tail in tails)
    assert len(set.union(*tails)) == 16
    # One of the sixteen writes the old block in place: fifteen copies.
    assert sum(len(plan.copies) for plan in driver.plans) == 15
    driver.drain()


def test_output_lengths_32_128_64_256_fill_46_9_percent_of_a_static_batch() -> None:
    lengths = [32, 128, 64, 256]
    assert round(100 * sum(lengths) / (len(lengths) * max(lengths)), 1) == 46.9


def test_the_scheduler_runs_those_lengths_in_480_row_steps_and_256_steps() -> None:
    """Continuous batching computes no row that has nothing to do: 480 of 480, not 480 of 1024."""
    driver = Driver(
        make_config(
            block_size=16,
            num_blocks=100,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_model_len=512,
        )
    )
    for i, length in enumerate([32, 128, 64, 256]):
        driver.add([i, 1, 2], max_tokens=length)
    driver.drain()
    assert sum(plan.num_samples for plan in driver.plans) == 480
    assert len([plan for plan in driver.plans if plan.num_samples]) == 256
