"""Verification: runs end where tokens drawn one by one would; what is not confirmed leaves nothing.

The random lives with verifications, their replay and their controls: test_scheduler_machine.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamer.core.blocks import BlockHasher
from streamer.core.plan import (
    Add,
    Facts,
    Finish,
    FinishReason,
    Plan,
    StepOutput,
    StepResult,
    TokenLogprob,
    accepted,
)
from streamer.core.request import Sequence, Status
from streamer.core.sampling import SamplingParams
from streamer.core.scheduler import Scheduler
from streamer.errors import InvariantViolated
from tests.core.device import oracle
from tests.core.driver import RECOMPUTE, SWAP, Driver, make_config
from tests.core.scripted import Scripted

TABLE = tuple(bytes([97 + i]) for i in range(26))  # token i is the i-th letter
WRONG = 99


class Cuts(Scripted):
    """Proposes the next letters of a text, `lengths` of them a step; `wrong`: then an error."""

    def __init__(self, text: str, lengths: Iterable[int], *, wrong: bool = False) -> None:
        super().__init__(0)
        self._text = [ord(letter) - 97 for letter in text]
        self._lengths = iter(lengths)
        self._wrong = (WRONG,) * wrong

    def choose(self, rows: Any, budget: int, facts: Facts) -> dict[Sequence, tuple[int, ...]]:
        (seq,) = rows
        at = seq.num_output
        return {seq: (*self._text[at : at + next(self._lengths, 0)], *self._wrong)}


class Letters:
    """A request whose answer is a text of letters, with runs as a runner would cut them."""

    def __init__(self, text: str, speculation: Cuts | None = None, **params: Any) -> None:
        self.text = [ord(letter) - 97 for letter in text]
        self.scheduler = Scheduler(
            make_config(token_bytes=TABLE), BlockHasher(4, b"s" * 32), speculation
        )
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finishes: list[Finish] = []
        self.runs: list[int] = []
        asks = SamplingParams(**params)
        stops = tuple(s.encode() for s in asks.stop)
        self.scheduler.command(
            Add("a", (1, 2, 3), asks, stop_ids=frozenset(asks.stop_token_ids), stop=stops)
        )

    def schedule(self) -> Plan:
        plan = self.scheduler.schedule(Facts())
        assert plan is not None
        self.scheduler.check()
        return plan

    def run_of(self, plan: Plan) -> tuple[int, ...]:
        """What a runner draws in this plan, whose verification it cuts."""
        at = len(self.tokens)
        chunk = next((c for c in plan.chunks if c.tokens), None)
        provisional = chunk.tokens[1:] if chunk else ()
        drawn = tuple(self.text[at : at + len(provisional) + 1])
        return drawn[: accepted(provisional, drawn) + 1]

    def apply(self, plan: Plan, run: tuple[int, ...], **fields: Any) -> StepOutput:
        result = StepResult(plan.number, (0,) * len(run), run, **fields)
        out = self.scheduler.apply(plan, result)
        self.scheduler.check()
        self.runs.append(len(run))
        self.tokens += out.tokens
        self.finishes += out.finishes
        assert set(out.logprobs) <= set(range(len(out.tokens)))
        for index, value in sorted(out.logprobs.items()):
            assert value.token_id == out.tokens[index]
            self.logprobs.append(value.logprob)
        return out

    def run(self) -> Letters:
        """To the end of the answer."""
        while not self.finishes:
            plan, at = self.schedule(), len(self.tokens)
            run = self.run_of(plan)
            values = {i: TokenLogprob(token, -float(at + i)) for i, token in enumerate(run)}
            self.apply(plan, run, logprobs=values)
        return self

    @property
    def finish(self) -> Finish:
        """Its finish, without the counts that only verifications have."""
        (finish,) = self.finishes
        return msgspec.structs.replace(finish, proposed_tokens=0, accepted_tokens=0)


@settings(max_examples=150, deadline=None)
@given(
    text=st.text("abc", min_size=20, max_size=20),
    cuts=st.lists(st.integers(0, 7), max_size=12),
    wrong=st.booleans(),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=2),
    max_tokens=st.integers(1, 20),
    min_tokens=st.integers(0, 8),
    stop_ids=st.sets(st.integers(0, 2), max_size=1),
)
def test_an_answer_ends_where_it_would_token_by_token(
    text: str, cuts: list[int], wrong: bool, stop: list[str], max_tokens: int, min_tokens: int,
    stop_ids: set[int],
) -> None:  # fmt: skip
    """Stop strings, stop ids, min_tokens, max_tokens: the same finish, tokens, log probabilities,
    and the tenant pays for the same tokens."""
    asks: dict[str, Any] = {
        "stop": tuple(stop),
        "max_tokens": max_tokens,
        "min_tokens": min(min_tokens, max_tokens),
        "stop_token_ids": tuple(stop_ids),
        "logprobs": 0,
    }
    plain = Letters(text, **asks).run()
    verified = Letters(text, Cuts(text, cuts, wrong=wrong), **asks).run()
    assert verified.finish == plain.finish
    assert verified.tokens == plain.tokens
    assert verified.logprobs == plain.logprobs
    (finish,) = verified.finishes
    assert finish.proposed_tokens >= finish.accepted_tokens
    assert finish.accepted_tokens <= finish.num_tokens


def test_what_follows_the_end_within_a_run_is_dropped() -> None:
    text = "abxxccccc"
    answer = Letters(text, Cuts(text, (7,)), stop=("xx",), max_tokens=9).run()
    assert answer.runs == [1, 8]
    assert answer.tokens == [0, 1, 23, 23]
    (finish,) = answer.finishes
    assert (finish.text_bytes, finish.proposed_tokens, finish.accepted_tokens) == (2, 7, 3)
    stats = answer.scheduler.stats()
    assert (stats.generated_tokens, stats.proposed_tokens, stats.accepted_tokens) == (4, 7, 7)
    assert stats.blocks_free == stats.blocks_total


def test_no_more_tokens_are_proposed_than_may_be_drawn() -> None:
    text = "a" * 9
    answer = Letters(text, Cuts(text, (9,)), max_tokens=6).run()
    assert answer.runs == [1, 5]  # the last draw needs no proposal


def test_a_row_that_fails_within_its_run_keeps_the_tokens_before() -> None:
    text = "abcdefgh"
    answer = Letters(text, Cuts(text, (5,)), max_tokens=8)
    answer.apply(answer.schedule(), (0,))
    plan = answer.schedule()
    answer.apply(plan, (1, 2, 3), failed={0: "not finite"})
    (finish,) = answer.finishes
    assert (finish.reason, finish.num_tokens) == (FinishReason.FAILED, 4)
    assert answer.tokens == [0, 1, 2, 3]
    assert answer.scheduler.stats().blocks_free == 24


@pytest.mark.parametrize(
    ("run", "failed"),
    [
        ((), {}),  # it neither drew nor failed
        ((1, 2), {}),  # cut although nothing differs
        ((1, 9, 3), {}),  # goes on after a token that differs
        ((1, 2, 3, 4, 5), {}),  # longer than what was verified
        ((9, 2), {0: "not finite"}),
    ],
)
def test_a_run_that_no_runner_may_report_is_refused(
    run: tuple[int, ...], failed: dict[int, str]
) -> None:
    text = "abcdefgh"
    answer = Letters(text, Cuts(text, (3,)), max_tokens=8)
    answer.apply(answer.schedule(), (0,))
    plan = answer.schedule()
    assert plan.chunks[0].tokens == (0, 1, 2, 3)
    with pytest.raises(InvariantViolated, match="was to verify"):
        answer.apply(plan, run, failed=failed)


# ---------------------------------------------------------------- what happens meanwhile

CANCELLED = "cancelled"


def cancel(driver: Driver) -> str:
    driver.cancel("r0")
    return CANCELLED


def pause(driver: Driver) -> str:
    driver.pause("r0")
    driver.resume("r0")
    return Status.PAUSED.value


def swap(driver: Driver) -> str:
    driver.costs = SWAP
    return preempt(driver, Status.SWAPPING_OUT)


def recompute(driver: Driver) -> str:
    driver.costs = RECOMPUTE
    return preempt(driver, Status.PREEMPTED)


def preempt(driver: Driver, to: Status) -> str:
    """A request of better priority takes the blocks."""
    driver.add([50 + i for i in range(33)], priority=-1, max_tokens=2)
    driver.launch()
    assert driver.status("r0") is to
    return to.value


@pytest.mark.parametrize("errors", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("what", [cancel, pause, swap, recompute])
def test_a_request_may_leave_while_it_verifies(
    what: Callable[[Driver], str], errors: float
) -> None:
    """With a plan under way; its run is kept, its tokens are those without speculation."""
    script = Scripted(3, share=1.0, most=5, errors=errors)
    driver = Driver(make_config(num_blocks=10), depth=1, speculation=script)
    driver.add([1, 2, 3], max_tokens=24)
    while not seq_of(driver).provisional or len(driver.tokens["r0", 0]) < 5:
        assert driver.step()
    proposed, known = seq_of(driver).provisional, len(seq_of(driver).tokens)
    assert len(driver.inflight) == 1
    how = what(driver)
    if how != CANCELLED:
        driver.collect()
        seq = seq_of(driver)
        right = accepted(proposed, oracle((1, 2, 3), 0, 30)[known - 3 :])
        assert (len(seq.tokens), seq.provisional) == (known + right + 1, ())
        # What was confirmed is computed where its blocks are still there.
        assert seq.num_computed == {
            "swapping_out": known, "preempted": 0, "paused": known + right,
        }[how]  # fmt: skip
    driver.drain()
    reason = FinishReason.CANCELLED if how == CANCELLED else FinishReason.LENGTH
    assert driver.finishes["r0", 0].reason is reason


def seq_of(driver: Driver) -> Sequence:
    return driver.scheduler.state.requests.by_id["r0"].sequences[0]


def test_unsettled_rows_are_idle_and_the_others_decode_on() -> None:
    """One plan ahead: a row verifies in every second plan, beside a row that always decodes."""

    class OnlyFirst(Scripted):
        def wait(self, rows: Any, facts: Facts) -> list[Sequence]:
            return [seq for seq in rows if seq.request.request_id == "r0"]

        def choose(self, rows: Any, budget: int, facts: Facts) -> dict[Sequence, tuple[int, ...]]:
            return {seq: self._tokens(seq) for seq in self.wait(rows, facts)}

        def drafts(self, rows: Any, facts: Facts) -> tuple[tuple[Sequence, int], ...]:
            return ()

    script = OnlyFirst(1, errors=0.3)
    driver = Driver(make_config(), depth=1, speculation=script)
    driver.add([1, 2, 3], max_tokens=25)
    driver.add([4, 5], max_tokens=50)
    driver.drain()
    beside = [plan for plan in driver.plans if plan.num_rows == 2][2:]
    row, other = 0, 1
    verifying = [row in {c.row for c in plan.chunks} for plan in beside]
    assert sum(verifying) > 5
    for before, plan, is_verifying in zip(beside, beside[1:], verifying, strict=False):
        if is_verifying:
            assert plan.idle == (row,)
        assert other not in {*plan.idle, *(c.row for c in plan.chunks)}
        assert before.number == plan.number - 1


# ---------------------------------------------------------------- what it may take


@pytest.mark.parametrize("depth", [0, 1])
def test_provisional_tokens_preempt_no_request_and_delay_none(depth: int) -> None:
    """Two requests fill the pool to its last block but one, and a third waits for half of it."""
    script = Scripted(5, share=1.0, most=6, errors=0.6)
    driver = Driver(make_config(num_blocks=11), depth=depth, speculation=script)
    driver.add(list(range(5)), max_tokens=15)
    driver.add([20 + i for i in range(5)], max_tokens=15)
    shortened = False
    while "r0" not in {name for name, _ in driver.finishes}:
        driver.step()  # the driver checks that the head of the queue lacks blocks
        if "r2" not in driver.adds and len(driver.tokens["r1", 0]) > 4:
            driver.add([40 + i for i in range(20)], max_tokens=4)
        owners = driver.scheduler.state.rows.owners
        for chunk in driver.plans[-1].chunks:
            seq, length = owners[chunk.row], len(chunk.tokens) - 1
            if "r2" in driver.adds and seq in script.asked and 0 < length < script.asked[seq]:
                shortened |= (chunk.start + chunk.count) % driver.config.block_size == 0
    driver.drain()
    stats = driver.scheduler.stats()
    assert stats.preemptions_swap + stats.preemptions_recompute == 0
    assert shortened


def test_prompts_keep_half_of_what_decodes_leave() -> None:
    script = Scripted(2, share=1.0, most=40, errors=0.0)
    config = make_config(num_blocks=60, max_num_batched_tokens=12)
    driver = Driver(config, speculation=script)
    driver.add([1, 2, 3], max_tokens=60)
    driver.step()
    driver.add([7 + i for i in range(40)], max_tokens=1)
    while ("r1", 0) not in driver.finishes:
        driver.step()
        plan = driver.plans[-1]
        assert plan.num_tokens <= 12
        prefilled = sum(c.count for c in plan.chunks if not c.tokens)
        assert prefilled >= 5 or ("r1", 0) in driver.finishes
    driver.drain()


def test_provisional_and_scored_tokens_share_a_bound() -> None:
    """Each is a row of logits beside one for each row that draws."""
    driver = Driver(
        make_config(num_blocks=60, max_scored_tokens=6),
        speculation=Scripted(2, share=1.0, most=9, errors=0.2),
    )
    for i in range(4):
        driver.add([1 + i, 2, 3], max_tokens=40)
    while driver.step():
        if len(driver.plans) == 10:
            driver.add(list(range(1, 30)), prompt_logprobs=0, max_tokens=3)
    beside = [sum(c.score + max(0, c.num_draws - 1) for c in p.chunks) for p in driver.plans]
    assert max(beside) == 6
    assert len(driver.finishes) == 5


def test_a_tenant_pays_for_kept_tokens_alone() -> None:
    times = []
    for script in (None, Scripted(4, share=1.0, errors=0.3)):
        driver = Driver(make_config(), speculation=script)
        driver.add([1, 2, 3], max_tokens=20)
        driver.step()
        share = driver.scheduler.state.requests.by_id["r0"].share
        driver.drain()
        times.append(share.time)
    assert times[0] == times[1]
