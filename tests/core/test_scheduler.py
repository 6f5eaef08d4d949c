"""The scheduler's rules one by one, on the simulated device."""

from __future__ import annotations

import pytest

from streamer.core.blocks import BlockHasher
from streamer.core.plan import (
    Add,
    Drawn,
    Facts,
    Finish,
    FinishReason,
    NoticeKind,
    StepResult,
)
from streamer.core.request import Status
from streamer.core.sampling import SamplingParams
from streamer.core.scheduler import Scheduler, check_fits
from streamer.errors import ConfigError, ContextLengthExceeded, InvalidRequest, InvariantViolated
from tests.core.device import oracle
from tests.core.driver import RECOMPUTE, SWAP, Driver, make_config


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + i) % 97 for i in range(length)]


# ------------------------------------------------------------ the token budget


def test_decodes_come_first_and_a_long_prompt_is_chunked_by_what_is_left() -> None:
    driver = Driver(make_config(max_num_batched_tokens=8))
    driver.add(prompt(3), max_tokens=20)
    driver.step()
    driver.add(prompt(20, start=50), max_tokens=4)
    counts = []
    for _ in range(4):
        driver.step()
        counts.append([c.count for c in driver.plans[-1].chunks])
        assert driver.plans[-1].num_tokens <= 8
    assert counts == [[7], [7], [6], []]
    driver.drain()


def test_a_steady_decode_plan_names_no_row() -> None:
    driver = Driver(make_config(block_size=16, max_model_len=64))
    for i in range(4):
        driver.add(prompt(2, start=i), max_tokens=12)
    driver.step()
    for _ in range(5):
        driver.step()
        plan = driver.plans[-1]
        assert (plan.leaves, plan.joins, plan.tables, plan.chunks) == ((), (), (), ())
        assert plan.num_rows == plan.num_tokens == plan.num_samples == 4
    driver.drain()


def test_a_budget_below_the_rows_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(max_num_batched_tokens=4, max_num_seqs=5)
    assert caught.value.param == "max_num_batched_tokens"


# ------------------------------------------------------------ the prefix cache and forks


def test_simultaneous_twins_share_all_but_their_last_token() -> None:
    driver = Driver(make_config(max_num_batched_tokens=64))
    driver.add(prompt(17), max_tokens=2)
    driver.add(prompt(17), max_tokens=2)
    driver.step()
    assert driver.plans[0].num_tokens == 17 + 1
    driver.drain()
    assert driver.outputs[-1].stats.prefix_hit_tokens == 16


def test_a_later_request_finds_the_blocks_of_a_finished_one() -> None:
    driver = Driver(make_config())
    driver.add(prompt(12), max_tokens=2)
    driver.run()
    driver.add(prompt(12), max_tokens=2)
    driver.step()
    assert driver.plans[-1].num_tokens == 4  # two blocks of four found, the last token computed
    driver.drain()


def test_the_last_step_counts_what_it_leaves_in_the_cache() -> None:
    driver = Driver(make_config())
    driver.add(prompt(10), max_tokens=3)  # 12 tokens are computed: 3 blocks of 4
    driver.drain()
    stats = driver.outputs[-1].stats
    assert (stats.blocks_free, stats.blocks_cached) == (stats.blocks_total, 3)


def test_without_the_cache_nothing_is_shared() -> None:
    driver = Driver(make_config(enable_prefix_caching=False, max_num_batched_tokens=64))
    driver.add(prompt(12), max_tokens=2)
    driver.add(prompt(12), max_tokens=2)
    driver.step()
    assert driver.plans[0].num_tokens == 24
    driver.drain()


def test_another_tenants_blocks_are_not_found() -> None:
    scheduler = Scheduler(make_config(), BlockHasher(4, b"s" * 32))
    for name, salt in (("a", b"one"), ("b", b"two")):
        scheduler.command(Add(name, tuple(prompt(8)), SamplingParams(max_tokens=1), salt=salt))
    plan = scheduler.schedule(Driver(make_config()).scheduler.state.facts)
    assert plan is not None
    assert plan.num_tokens == 16


def test_a_fork_shares_the_parents_partial_block_and_copies_it_on_write() -> None:
    driver = Driver(make_config())
    parent = driver.add(prompt(6), max_tokens=12)
    for _ in range(5):
        driver.step()
    known = [*driver.adds[parent].prompt, *driver.tokens[parent, 0]]
    driver.add(known[:10], max_tokens=6, share_with=parent)
    driver.step()
    notice = next(n for n in driver.outputs[-1].notices if n.kind is NoticeKind.RUNNING)
    assert (notice.shared_tokens, notice.cached_tokens) == (9, 0)
    assert len(driver.plans[-1].copies) == 1
    driver.drain()
    copied = [driver.finishes[r, 0].copied_tokens for r in (parent, "r1")]
    assert copied == [0, 1]  # two blocks of four are full


def test_a_fork_of_a_finished_request_falls_back_to_the_cache_with_the_same_tokens() -> None:
    driver = Driver(make_config())
    parent = driver.add(prompt(8), max_tokens=4)
    driver.run()
    known = [*driver.adds[parent].prompt, *driver.tokens[parent, 0]]
    driver.add(known[:10], max_tokens=6, share_with=parent)
    driver.step()
    notice = next(n for n in driver.outputs[-1].notices if n.kind is NoticeKind.RUNNING)
    assert (notice.shared_tokens, notice.cached_tokens) == (0, 8)
    driver.drain()


def test_n_choices_are_n_forks_of_one_prefill() -> None:
    driver = Driver(make_config(max_num_batched_tokens=64))
    driver.add(prompt(10), n=3, max_tokens=5)
    driver.step()
    plan = driver.plans[0]
    assert (plan.num_tokens, plan.num_samples) == (10, 3)
    assert [j.logits_of for j in plan.joins] == [-1, 0, 0]
    driver.drain()
    assert len({tuple(driver.tokens["r0", c]) for c in range(3)}) == 3


def test_copied_tokens_are_final_at_the_last_end_and_those_of_all_choices() -> None:
    driver = Driver(make_config(max_num_batched_tokens=64))
    driver.add(prompt(10), n=3, max_tokens=1)  # no row ever writes into the shared block
    driver.add(prompt(10, start=40), n=3, max_tokens=5)
    driver.drain()
    copied = {r: driver.finishes[r, 2].copied_tokens for r in ("r0", "r1")}
    assert copied == {"r0": 0, "r1": 2 * 2}  # two of three copy two tokens


def test_a_copy_cancelled_before_its_plan_is_not_counted() -> None:
    """The second of three choices copies its block; none is left for the third: all give way."""
    driver = Driver(make_config(num_blocks=6), costs=RECOMPUTE)
    driver.add(prompt(12), max_tokens=12)
    driver.add(prompt(3, start=40), n=3, max_tokens=5)
    driver.drain()
    assert driver.outputs[-1].stats.preemptions_recompute > 0
    copies = sum(len(plan.copies) for plan in driver.plans)
    assert driver.finishes["r1", 2].copied_tokens == 3 * copies


# ------------------------------------------------------------ memory pressure


def small_pool(costs: dict[str, float], *, depth: int = 0) -> Driver:
    """Four requests that need 28 blocks of 20, all admitted while they are small."""
    config = make_config(num_blocks=20, max_num_batched_tokens=32)
    driver = Driver(config, costs=costs, depth=depth)
    for i in range(4):
        driver.add(prompt(8, start=20 * i), max_tokens=20)
    return driver


@pytest.mark.parametrize("depth", [0, 1])
def test_costs_decide_between_swap_and_recompute(depth: int) -> None:
    driver = small_pool(SWAP, depth=depth)
    driver.drain()
    stats = driver.outputs[-1].stats
    assert stats.preemptions_swap > 0
    assert stats.preemptions_recompute == 0
    assert stats.swapped_in_blocks > 0
    driver = small_pool(RECOMPUTE, depth=depth)
    driver.drain()
    stats = driver.outputs[-1].stats
    assert stats.preemptions_recompute > 0
    assert stats.preemptions_swap == stats.swapped_out_blocks == 0


def test_a_full_host_pool_falls_back_to_recompute() -> None:
    driver = Driver(make_config(num_blocks=20, num_host_blocks=1), costs=SWAP)
    for i in range(4):
        driver.add(prompt(8, start=20 * i), max_tokens=20)
    driver.drain()
    assert driver.outputs[-1].stats.preemptions_recompute > 0


def test_a_clean_host_copy_is_not_copied_twice() -> None:
    driver = Driver(make_config(num_blocks=17), costs=SWAP)
    victim = driver.add(prompt(16), max_tokens=20)
    for _ in range(3):
        driver.step()
    other = driver.add(prompt(30, start=50), max_tokens=30)
    driver.pause(victim)
    moved = []
    for _ in range(2):
        for _ in range(300):
            driver.step()
            if driver.status(victim) is Status.SWAPPED:
                break
        moved.append(driver.outputs[-1].stats.swapped_out_blocks)
        driver.cancel(other)
        driver.resume(victim)
        while driver.status(victim) is not Status.RUNNING:
            driver.step()
        driver.pause(victim)
        other = driver.add(prompt(40, start=13), max_tokens=24)
    driver.drain()
    assert moved[0] >= 4
    assert moved[1] - moved[0] <= 1  # only the block that was not full then


def test_a_preempted_request_comes_back_before_new_ones_of_its_priority() -> None:
    driver = small_pool(RECOMPUTE)
    while not any(driver.status(f"r{i}") is Status.PREEMPTED for i in range(4)):
        driver.step()
    preempted = next(f"r{i}" for i in range(4) if driver.status(f"r{i}") is Status.PREEMPTED)
    late = driver.add(prompt(2, start=90), max_tokens=2)
    while driver.status(preempted) is Status.PREEMPTED:
        assert driver.status(late) is Status.WAITING
        driver.step()
    driver.drain()


def test_a_request_that_can_never_run_is_refused_with_the_numbers() -> None:
    config = make_config(num_blocks=10)
    with pytest.raises(ContextLengthExceeded, match=r"need 12 blocks of 4 tokens; .* has 10"):
        check_fits(10, 3, 6, config)
    with pytest.raises(ContextLengthExceeded, match="64 tokens, but 65 were requested: 60 "):
        check_fits(60, 1, 5, make_config())
    with pytest.raises(ContextLengthExceeded, match="too long: it has 64, "):
        check_fits(64, 1, None, make_config())
    assert check_fits(10, 1, None, config) == 30
    assert check_fits(10, 1, None, make_config()) == 54


def test_the_last_running_request_fills_the_whole_pool() -> None:
    driver = Driver(make_config(num_blocks=8))
    driver.add(prompt(8), max_tokens=24)
    driver.drain()
    assert driver.outputs[-1].stats.preemptions_recompute == 0


# ------------------------------------------------------------ priority


def test_a_higher_priority_preempts_a_lower_one_for_its_row() -> None:
    driver = Driver(make_config(max_num_seqs=2))
    for i in range(2):
        driver.add(prompt(4, start=30 * i), max_tokens=20, priority=5)
    for _ in range(3):
        driver.step()
    urgent = driver.add(prompt(4, start=70), max_tokens=2, priority=0)
    driver.step()
    assert driver.status(urgent) is Status.RUNNING
    assert driver.status("r1") is Status.PREEMPTED or driver.outputs[-1].stats.preemptions_swap
    driver.drain()


def test_equal_priorities_do_not_preempt_each_other_for_rows() -> None:
    driver = Driver(make_config(max_num_seqs=2))
    for i in range(4):
        driver.add(prompt(4, start=20 * i), max_tokens=6)
    driver.drain()
    stats = driver.outputs[-1].stats
    assert stats.preemptions_swap + stats.preemptions_recompute == 0


# ------------------------------------------------------------ found by random lives


@pytest.mark.parametrize("depth", [0, 1])
def test_a_resumed_request_is_preempted_for_a_higher_priority_when_no_other_can_run(
    depth: int,
) -> None:
    driver = Driver(make_config(num_blocks=16, num_host_blocks=16), costs=SWAP, depth=depth)
    driver.add(prompt(30), max_tokens=20)
    for _ in range(4):
        driver.step()
    driver.pause("r0")
    for _ in range(2):
        driver.step()
    driver.resume("r0")
    driver.add(prompt(40, start=50), max_tokens=20, priority=-1)
    driver.drain()


def test_no_fork_from_blocks_that_a_twin_computes_in_the_same_plan() -> None:
    driver = Driver(make_config(max_num_batched_tokens=64))
    driver.add(prompt(23), max_tokens=4)
    driver.add([*prompt(23), 7], max_tokens=4)
    driver.add([*prompt(19), 9, 9], max_tokens=4, share_with="r1")
    driver.drain()


def test_a_failed_request_leaves_nothing_to_match_even_if_it_was_preempted_meanwhile() -> None:
    driver = Driver(make_config(num_blocks=16, max_num_seqs=1), depth=1, costs=RECOMPUTE)
    driver.add(prompt(16), max_tokens=8, priority=5)
    driver.launch()
    driver.add(prompt(4, start=60), max_tokens=4, priority=0)
    driver.launch()  # r0 gave way while its first plan was under way
    assert driver.status("r0") is Status.PREEMPTED
    driver.fail_next = True
    assert [f.reason for f in driver.collect().finishes] == [FinishReason.FAILED]
    driver.add(prompt(16), request_id="r2", max_tokens=2)
    driver.drain()
    assert driver.outputs[-1].stats.prefix_hit_tokens == 0


# ------------------------------------------------------------ mistakes


def test_unknown_ids_are_ignored_and_a_second_one_is_refused() -> None:
    driver = Driver(make_config())
    driver.cancel("absent")
    driver.add(prompt(2), request_id="same")
    with pytest.raises(InvalidRequest, match="same exists"):
        driver.scheduler.command(driver.adds["same"])
    with pytest.raises(InvalidRequest, match="n=7 exceeds max_num_seqs=6"):
        driver.add(prompt(2), n=7, max_tokens=1)
    driver.adds.pop("r1", None)
    driver.drain()


def test_results_must_come_in_order() -> None:
    driver = Driver(make_config(), depth=1)
    driver.add(prompt(2))
    driver.launch()
    driver.launch()
    second = driver.inflight[1]
    with pytest.raises(InvariantViolated, match="applied after 0"):
        driver.scheduler.apply(second, StepResult(second.number))


@pytest.mark.parametrize(
    ("tokens", "reason", "text_bytes"),
    [
        (b"ab-c", FinishReason.STOP, 2),  # its stop string, over two tokens
        (b"abcd!", FinishReason.STOP, 4),  # its stop id
        (b"abcdefgh", FinishReason.LENGTH, None),
    ],
)
def test_an_output_of_before_that_was_at_its_end_ends_without_another_token(
    tokens: bytes, reason: FinishReason, text_bytes: int | None
) -> None:
    config = make_config(token_bytes=tuple(bytes([b]) for b in range(256)))  # type: ignore[arg-type]
    scheduler = Scheduler(config, BlockHasher(4, b"s" * 32))
    params = SamplingParams(max_tokens=8, seed=1, stop=("-c",), n=2)
    drawn = Drawn(tuple(tokens)), Drawn((1, 2), (), Finish("r", 1, FinishReason.CANCELLED, 2))
    scheduler.command(Add("r", (1, 2, 3), params, frozenset([ord("!")]), (b"-c",), outputs=drawn))
    scheduler.check()
    plan = scheduler.schedule(Facts())
    assert plan is not None
    assert not plan.num_tokens
    (finish,) = scheduler.apply(plan, StepResult(1)).finishes
    assert (finish.choice, finish.reason, finish.text_bytes) == (0, reason, text_bytes)
    assert finish.num_tokens == len(tokens)
    assert not scheduler.state.requests.by_id


def test_a_request_comes_back_before_new_ones_of_its_priority() -> None:
    driver = Driver(make_config(max_num_seqs=1))
    driver.add([1, 2, 3], request_id="new", max_tokens=2)
    outputs = (Drawn(tuple(oracle([4, 5], 0, 3))),)
    driver.command(Add("old", (4, 5), SamplingParams(max_tokens=8, seed=1), outputs=outputs))
    plan = driver.launch()
    assert plan is not None
    assert [(j.request_id, len(j.tokens), j.num_prompt) for j in plan.joins] == [("old", 5, 2)]


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ((Drawn(),) * 2, "2 outputs of 1"),
        ((Drawn((1,) * 9),), "9 output tokens"),
        ((Drawn((), (), Finish("r", 0, FinishReason.LENGTH, 0)),), "has ended"),
    ],
)
def test_outputs_that_can_not_be_are_refused(outputs: tuple[Drawn, ...], message: str) -> None:
    scheduler = Scheduler(make_config(), BlockHasher(4, b"s" * 32))
    params = SamplingParams(max_tokens=8, seed=1)
    with pytest.raises(InvalidRequest, match=message):
        scheduler.command(Add("r", (1, 2), params, outputs=outputs))
    scheduler.check()
    assert not scheduler.state.requests.by_id
