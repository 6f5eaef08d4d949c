"""Drafter: a draft model that is the model itself proposes exactly what the model draws next.

So whatever happens to a row, one wrong K or V shows as a wrong proposal. A smaller model may
propose anything: the tokens are the same.
"""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamer.core.plan import Plan
from streamer.core.sampling import SamplingParams
from streamer.errors import InvariantViolated
from streamer.kernels import ops
from streamer.model.runner import cpu
from streamer.model.runner.cpu import CpuRunner
from streamer.model.runner.draft import DraftModel
from streamer.model.runner.interface import RunnerSizes
from tests.model.hand import BLOCK, GREEDY, Hand, make_runner
from tests.model.test_decoder import random_tokens

pytestmark = pytest.mark.skipif(ops.why_not_native() != "", reason="torch's sums depend on shapes")

KINDS = [
    GREEDY,
    SamplingParams(seed=1, temperature=0.9),
    SamplingParams(seed=2, temperature=1.3, top_k=20, top_p=0.9),
    SamplingParams(seed=3, temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5),
    SamplingParams(temperature=0.0, frequency_penalty=0.8, logit_bias={7: 1.5}, logprobs=2),
    SamplingParams(seed=4, min_p=0.1, min_tokens=30, logit_bias={2: 3.0}),
]


def runner_of(folder: Path, draft: Path, max_len: int = 512, max_drafted: int = 20) -> CpuRunner:
    """A runner of a model that drafts with another one."""
    sizes = RunnerSizes(
        num_blocks=64,
        num_host_blocks=16,
        block_size=BLOCK,
        max_num_seqs=8,
        max_num_batched_tokens=200,
        max_model_len=512,
    )
    model, small = (make_runner(path).model for path in (folder, draft))
    return CpuRunner(ops.for_cpu(), model, sizes, DraftModel(small, max_len, max_drafted))


@pytest.fixture
def hand(checkpoint: Any) -> Hand:
    """Plans for a model that is its own draft."""
    folder = checkpoint("llama", 1)
    return Hand(runner_of(folder, folder), num_blocks=64)


def check(hand: Hand, steps: int, seed: int = 0) -> None:
    """All rows draft in every step, and verify what was proposed in the next; it is always right.
    Blocks end within drafts."""
    rng, proposals = random.Random(seed), dict[int, tuple[int, ...]]()
    for _ in range(steps):
        verify = {row: tokens for row, tokens in proposals.items() if rng.random() < 0.8}
        drafts = tuple((row, rng.randint(1, 20)) for row in hand.rows)
        result = hand.step(verify=verify, drafts=drafts)
        for row in hand.rows:
            assert result.rows.count(row) == 1 + len(verify.get(row, ()))
        assert {row: len(tokens) for row, tokens in result.proposals.items()} == dict(drafts)
        proposals = result.proposals


def test_its_proposals_are_what_the_model_draws(hand: Hand) -> None:
    """Every kind of row, prompts in chunks and whole."""
    for row, params in enumerate(KINDS):
        hand.join(row, random_tokens(11 + 7 * row, row), params)
    hand.step({0: 11, 1: 18, 2: 10, 3: 0, 4: 0, 5: 0}, drafts=((0, 3), (1, 1)))
    hand.step({2: 15, 3: 32, 4: 0, 5: 0})
    hand.step({4: 39, 5: 15})
    hand.step({5: 31})
    check(hand, 8)


def test_it_catches_up_with_rows_that_come_back(hand: Hand) -> None:
    """After a swap, when none of their blocks is filled, and after a recomputation."""
    for row in range(3):
        hand.join(row, random_tokens(20 + row, row), KINDS[row])
    hand.step({0: 20, 1: 21, 2: 22})
    check(hand, 3)
    swapped, lost = hand.leave(0), hand.leave(1)
    old = list(swapped.blocks)
    hosts = range(len(old))
    hand.step(swap_out=tuple(zip(old, hosts, strict=True)))
    hand.free = [*lost.blocks, *old, *hand.free]
    hand.join(4, random_tokens(40, 4))
    hand.step({4: 40})
    swapped.blocks = [hand.free.pop(0) for _ in old]
    lost.computed, lost.blocks = 0, []
    hand.rejoin(5, swapped)
    hand.rejoin(6, lost)
    moves = tuple(zip(hosts, swapped.blocks, strict=True))
    hand.step({6: min(20, len(lost.tokens))}, swap_in=moves)
    while lost.computed < len(lost.tokens) - 1:
        hand.step({6: min(20, len(lost.tokens) - lost.computed)})
    check(hand, 4)


def test_blocks_that_others_filled_are_computed_anew(hand: Hand) -> None:
    """A row decodes into the blocks of one that left, without drafts, and then drafts."""
    hand.join(0, random_tokens(60))
    hand.join(1, random_tokens(30, 1))
    hand.step({0: 60, 1: 30})
    check(hand, 2)
    hand.free += hand.leave(0).blocks
    hand.run(25)
    check(hand, 3)


def test_forks_draft_when_each_has_its_own_blocks(checkpoint: Any) -> None:
    folder = checkpoint("llama", 2)
    params = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=64)
    hand = Hand(runner_of(folder, folder), num_blocks=64)
    hand.join(0, random_tokens(37), params)
    hand.step({0: 30})
    for choice, row in ((1, 4), (2, 2)):
        hand.fork(row, 0, choice, params)
    forked = hand.step({0: 7}, drafts=((0, 3), (4, 3), (2, 3)))
    assert forked.proposals == {0: (), 4: (), 2: ()}
    hand.step(copies=(hand.own_tail(4), hand.own_tail(2)))
    check(hand, 4)
    assert len({tuple(row.output) for row in hand.rows.values()}) == 3


def test_a_long_prompt_is_caught_up_with_in_pieces(hand: Hand) -> None:
    """The draft saw none of it: nothing is proposed until it has computed all, a step's tokens at a
    time; another row's drafts go on meanwhile where there is room."""
    hand.join(0, random_tokens(9, 1))
    row = hand.join(1, random_tokens(450))
    hand.step({0: 9, 1: 150})
    hand.step({0: 0, 1: 150})
    hand.step({0: 0, 1: 150})
    drafter: Any = hand.runner._drafter
    drafter._filled[row.blocks] = 0
    counts = []
    for _ in range(4):
        proposals = hand.step(drafts=((0, 3), (1, 4))).proposals
        counts.append((len(proposals[0]), len(proposals[1])))
    assert counts == [(3, 0), (3, 0), (3, 4), (3, 4)]
    check(hand, 3)


def test_a_step_may_be_too_small_for_a_draft(hand: Hand) -> None:
    """Then the one row that drafts only catches up."""
    hand.join(0, random_tokens(25))
    hand.step({0: 25})
    drafter: Any = hand.runner._drafter
    drafter._max_tokens = 16
    drafter._filled[:] = 0
    counts = [len(hand.step(drafts=((0, 3),)).proposals[0]) for _ in range(3)]
    assert counts == [0, 3, 3]


def test_another_model_changes_no_token(checkpoint: Any) -> None:
    """It proposes little that is right; beyond its own context it proposes nothing."""
    folder, small = checkpoint("llama", 1), checkpoint("qwen2", 0)
    plain, drafted = Hand(make_runner(folder), 64), Hand(runner_of(folder, small, 40), 64)
    for hand in (plain, drafted):
        for row, params in enumerate(KINDS):
            hand.join(row, random_tokens(9, row), params)
        hand.step(dict.fromkeys(range(6), 9))
    proposals: dict[int, tuple[int, ...]] = {}
    while min(len(row.tokens) for row in drafted.rows.values()) < 50:
        drafts = tuple((row, 3) for row in drafted.rows)
        result = drafted.step(verify={r: t for r, t in proposals.items() if t}, drafts=drafts)
        proposals = result.proposals
        for row, tokens in proposals.items():
            assert len(tokens) == max(0, min(3, 40 - len(drafted.rows[row].tokens)))
    plain.run(80)
    for row, sequence in drafted.rows.items():
        assert sequence.tokens == plain.rows[row].tokens[: len(sequence.tokens)]
    assert drafted.runner.facts().draft_s > 0


def test_drafts_need_a_draft_model(checkpoint: Any) -> None:
    runner = make_runner(checkpoint("llama", 1))
    with pytest.raises(InvariantViolated, match="no draft model"):
        runner.launch(Plan(number=1, drafts=((0, 3),)))


def test_what_a_draft_takes_is_no_part_of_its_step(
    hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain steps that draft would seem so dear that any draft pays."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.001
        return now

    drafter: Any = hand.runner._drafter
    propose = drafter.propose

    def slow(drafts: Any) -> Any:
        nonlocal now
        now += 100.0
        return propose(drafts)

    monkeypatch.setattr(drafter, "propose", slow)
    monkeypatch.setattr(cpu, "time", SimpleNamespace(perf_counter=clock))
    hand.join(0, random_tokens(9))
    hand.step({0: 9})
    for _ in range(12):
        hand.step(drafts=((0, 1),))
    facts = hand.runner.facts()
    assert max(seconds for _, seconds in facts.step_s) < 1.0
    assert facts.drafting_s >= 1200.0
