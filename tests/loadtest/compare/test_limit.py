"""The arithmetic of the machine's limit, against figures worked out by hand."""

from __future__ import annotations

import pytest

from streamer.loadtest.compare.limit import Machine, ideal_tokens_s, prefill_s, step_s
from streamer.loadtest.compare.workload import MODELS, PROMPT_TOKENS, WORKS, Model, Work

SMALL, HALF = MODELS["small"], MODELS["half"]
MACHINE = Machine(44.0, {8: 660.0, 32: 660.0, 1024: 1000.0})
TINY = Model("tiny", 10, 4, 1, 1, 1, 4, 2)  # layers: 4 * 4 * 4 + 3 * 4 * 2 = 88, head: 40


def test_the_shapes_are_those_of_the_checkpoints() -> None:
    assert SMALL.layer_parameters + SMALL.head_parameters == pytest.approx(33.36e6, rel=1e-3)
    assert SMALL.step_bytes == pytest.approx(66.7e6, rel=1e-3)
    assert HALF.step_bytes == pytest.approx(820.5e6, rel=1e-3)
    assert (SMALL.kv_token_bytes, HALF.kv_token_bytes) == (8 << 10, 96 << 10)


def test_a_step_is_bound_by_memory_or_by_arithmetic() -> None:
    parameters = TINY.layer_parameters + TINY.head_parameters
    assert parameters == 128
    slow_memory = Machine(1e-9, {1: 1e9})
    assert step_s(TINY, slow_memory, 1, 0) == pytest.approx(256)
    slow_gemm = Machine(1e9, {8: 1e-9})
    assert step_s(TINY, slow_gemm, 3, 0) == pytest.approx(2 * 128 * 3)


def test_the_cache_is_read_beside_the_matrices() -> None:
    machine = Machine(1e-9, {1: 1e9})
    more = step_s(TINY, machine, 1, 10) - step_s(TINY, machine, 1, 0)
    assert more == pytest.approx(10 * TINY.kv_token_bytes)


def test_the_rate_is_that_of_the_next_larger_gemm() -> None:
    machine = Machine(1.0, {8: 1.0, 32: 2.0})
    rates = {rows: machine.gemm_flops(rows) / 1e9 for rows in (1, 8, 9, 32, 500)}
    assert rates == {1: 1.0, 8: 1.0, 9: 2.0, 32: 2.0, 500: 2.0}


def test_prompts_cost_their_tokens_and_one_row_of_logits() -> None:
    machine = Machine(1e9, {1: 1e-9})
    for tokens in (PROMPT_TOKENS, 512):
        work = Work("w", "", (1,) * 3, prompt_tokens=tokens)
        assert prefill_s(TINY, machine, work) == pytest.approx(3 * (2 * 88 * tokens + 2 * 40))
        rate = 3 * tokens / prefill_s(TINY, machine, work)
        assert ideal_tokens_s(TINY, machine, work) == pytest.approx(rate)  # of the prompts


def test_an_answer_is_its_prompt_and_one_step_less_than_its_tokens() -> None:
    work = Work("w", "", (3, 1))
    seconds = prefill_s(TINY, MACHINE, work)
    seconds += step_s(TINY, MACHINE, 1, PROMPT_TOKENS + 1)
    seconds += step_s(TINY, MACHINE, 1, PROMPT_TOKENS + 2)
    assert ideal_tokens_s(TINY, MACHINE, work) == pytest.approx(4 / seconds)


def test_known_figures() -> None:
    """At 44 GB/s and 660 / 1000 GFLOP/s: 32 requests alike, and one."""
    assert ideal_tokens_s(SMALL, MACHINE, WORKS["eq"]) == pytest.approx(5410, rel=0.02)
    assert ideal_tokens_s(HALF, MACHINE, WORKS["eq"]) == pytest.approx(416, rel=0.02)
    assert ideal_tokens_s(SMALL, MACHINE, WORKS["one"]) == pytest.approx(640, rel=0.02)
    assert ideal_tokens_s(HALF, MACHINE, WORKS["one"]) == pytest.approx(52, rel=0.03)


def test_waves_come_one_after_the_other() -> None:
    once = Work("w", "", (8,) * 4)
    twice = Work("w", "", (8,) * 4, waves=2)
    assert ideal_tokens_s(SMALL, MACHINE, twice) == ideal_tokens_s(SMALL, MACHINE, once)
