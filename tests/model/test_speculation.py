"""Speculation changes no token and no log probability: a table of products.

Every kind of request, alone and in one batch, through every way of the scheduler, with a proposer
that has the right tokens and makes random errors, is compared with the same request where nothing
is proposed: tokens, log probabilities with their alternatives to the last bit, and ends.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from streamer.core.plan import (
    STEP_FAILED,
    Cancel,
    Drawn,
    FinishReason,
    Pause,
    Plan,
    Reasoning,
    Resume,
)
from streamer.core.recovery.trials import Verdict
from streamer.core.request import Request, Sequence, Status
from streamer.core.sampling import SamplingParams
from streamer.core.speculation.speculator import Speculator
from streamer.core.speculation.values import SpeculationSizes
from streamer.engine.core import InFlight
from streamer.kernels import ops
from streamer.model import memory
from streamer.model.sampling import host
from tests.model.lates import Lates
from tests.model.proposers import Answer, Key, Oracle
from tests.model.sync_engine import END, Injected, SyncEngine
from tests.model.test_decoder import random_tokens
from tests.model.test_parity import MIXED, RECOMPUTE, SWAP

pytestmark = pytest.mark.skipif(ops.why_not_native() != "", reason="torch's sums depend on shapes")

# Two letters a token, so that stop strings end within tokens and across them.
TOKEN_BYTES = tuple(bytes([97 + t % 7, 97 + t % 5]) for t in range(256))
STOPS = ("abc", "dda", "bee", "cab", "fda", "gcb", "ebd", "adc")
ROOMY: dict[str, Any] = {"max_num_seqs": 24, "max_num_batched_tokens": 512}
TIGHT: dict[str, Any] = {"max_num_seqs": 18, "max_num_batched_tokens": 45, "block_size": 8}
TIGHT |= {"num_gpu_blocks_override": 36, "max_model_len": 128}


class Ask(NamedTuple):
    """A request; `shares`: whose prompt and first tokens its prompt is; `stage`: of its reasoning,
    where it has one."""

    params: SamplingParams
    num_prompt: int = 20
    stop_ids: tuple[int, ...] = ()
    shares: int | None = None
    stage: str = ""


P = SamplingParams
LETTERS = {"regex": "(ab|ad|b[a-d]|[c-f]{2}|g[a-e]ba)*"}
SHORT = {"grammar": 'start: "ab" word{3,5} "gc"\nword: "c" /[a-e]/ | "dd" "ee"+ | "fe"'}
LONG = {"regex": "((ab|cd)bbccdaeefagb){3}"}
ASKS = [
    Ask(P(temperature=0.0), 40),
    Ask(P(seed=1, temperature=0.9)),
    Ask(P(seed=2, temperature=1.2, top_k=12), 1),
    Ask(P(seed=3, top_p=0.8), 33),
    Ask(P(seed=4, min_p=0.1)),
    Ask(P(seed=5, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3), 9),
    Ask(P(temperature=0.0, frequency_penalty=0.9, repetition_penalty=0.8)),
    Ask(P(seed=6, logit_bias={5: 4.0, 9: -100.0, 11: 3.0}), 17),
    Ask(P(temperature=0.0, logprobs=3)),
    Ask(P(seed=7, logprobs=0, presence_penalty=1.0, top_k=40), 12),
    Ask(P(temperature=0.0, stop=STOPS), 25),
    Ask(P(seed=8, temperature=0.7), 20, stop_ids=tuple(range(0, 256, 19))),
    Ask(P(seed=9, min_tokens=14, logprobs=1, stop=STOPS[:2]), 20, tuple(range(0, 256, 11))),
    Ask(P(seed=10, n=3, logprobs=2), 37),
    Ask(P(temperature=0.0, logprobs=1), shares=0),
    Ask(P(seed=11, temperature=0.8, top_p=0.95, top_k=60, min_p=0.01, repetition_penalty=1.1,
          logit_bias={3: 2.0}, min_tokens=5, logprobs=5, stop=STOPS[2:]), 49, (3, 77)),
    Ask(P(seed=12, n=2, logprobs=2, structured_outputs=LETTERS, min_tokens=9), 21, (END,)),
    Ask(P(temperature=0.0, structured_outputs=LETTERS, ignore_eos=True), 5),
    Ask(P(seed=13, structured_outputs=SHORT, repetition_penalty=1.2, top_k=30), 33, (END, 3)),
    Ask(P(temperature=0.0, structured_outputs=SHORT, logprobs=1, min_tokens=20), 8, (END,)),
    Ask(P(seed=14, structured_outputs=LETTERS, stop=STOPS, temperature=1.3), 12, (END,)),
    Ask(P(seed=15, n=2, structured_outputs=SHORT, thinking_token_budget=6), 9, (END,),
        stage="inside"),
    Ask(P(seed=16, structured_outputs=SHORT, logprobs=1), 30, (END,), stage="before"),
    Ask(P(temperature=0.0, thinking_token_budget=0, logprobs=1), 14, (END,), stage="inside"),
    Ask(P(seed=17, structured_outputs=LETTERS), 11, (END,), stage="inside"),
    Ask(P(seed=18, structured_outputs=LONG, logprobs=2), 22, (END,)),
]  # fmt: skip

CLOSING, ENDS = (5, 20), "faga"  # token 5 is "fa", token 20 "ga"


OPENING = [t for t in range(255) if TOKEN_BYTES[t] == b"gb"]


def reasoning_of(ask: Ask) -> Reasoning | None:
    return Reasoning(ask.stage, "gb", (ENDS,), CLOSING) if ask.stage else None  # type: ignore[arg-type]


CONSTRAINED = [i for i, ask in enumerate(ASKS) if ask.params.structured_outputs or ask.stage]


def prompt_of(i: int, answers: dict[Key, Answer]) -> list[int]:
    ask = ASKS[i]
    if ask.shares is None:
        return random_tokens(ask.num_prompt, i)
    return prompt_of(ask.shares, answers) + answers[ask.shares, 0].tokens[:21]


def add(
    engine: SyncEngine, i: int, answers: dict[Key, Answer], outputs: tuple[Drawn, ...] = (),
    *, is_plain: bool = False,
) -> None:  # fmt: skip
    ask = ASKS[i]
    with_whom = (
        f"r{ask.shares}" if f"r{ask.shares}" in engine.scheduler.state.requests.by_id else None
    )
    params = msgspec.structs.replace(ask.params, speculation=not is_plain)
    engine.add(
        f"r{i}", prompt_of(i, answers), 30 + i % 9, params, share_with=with_whom,
        stop_ids=frozenset(ask.stop_ids), outputs=outputs, reasoning=reasoning_of(ask),
    )  # fmt: skip


def answers_of(engine: SyncEngine, i: int) -> dict[Key, Answer]:
    found = {}
    for choice in range(ASKS[i].params.n):
        key = f"r{i}", choice
        finish = msgspec.structs.replace(
            engine.finishes[key], copied_tokens=0, proposed_tokens=0, accepted_tokens=0
        )
        found[i, choice] = Answer(engine.tokens[key], engine.details[key], finish)
    return found


def check_grammar(ask: Ask, answer: Answer) -> None:
    """The text is of the grammar, or may become so where it was cut."""
    tokens, budget = answer.tokens, ask.params.thinking_token_budget
    if budget is not None:
        assert tuple(tokens[budget : budget + 2]) == CLOSING
        tokens = tokens[budget + 2 :]
    elif ask.stage == "inside" or tokens[0] in OPENING:
        assert ENDS not in b"".join(TOKEN_BYTES[t] for t in tokens).decode()
        return
    text = b"".join(TOKEN_BYTES[t] for t in tokens if t not in (END, 3)).decode()
    if ask.params.structured_outputs == P(structured_outputs=LETTERS).structured_outputs:
        assert re.fullmatch(LETTERS["regex"] + "g?[a-e]?", text)
    elif ask.params.structured_outputs == P(structured_outputs=LONG).structured_outputs:
        assert re.fullmatch(LONG["regex"], text)
    elif ask.params.structured_outputs is not None:
        assert re.fullmatch("ab(c[a-e]|dd(ee)+|fe){3,5}gc", text)
        assert answer.finish.reason is FinishReason.STOP
        assert len(answer.tokens) >= ask.params.min_tokens


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: Any, checkpoint: Any) -> tuple[Path, dict[str, Any], dict[Key, Answer]]:
    """(folder, settings, each request's answers alone and without speculation)."""
    folder, settings = checkpoint("llama", 1), {"dtype": request.param, "token_bytes": TOKEN_BYTES}
    answers: dict[Key, Answer] = {}
    for i in range(len(ASKS)):
        engine = SyncEngine(folder, **settings, **ROOMY)
        add(engine, i, answers, is_plain=True)
        engine.run()
        answers |= answers_of(engine, i)
    for key, answer in answers.items():
        check_grammar(ASKS[key[0]], answer)
    reasons = [answer.finish.reason for answer in answers.values()]
    assert reasons.count(FinishReason.STOP) >= 3
    return folder, settings, answers


Model = tuple[Path, dict[str, Any], dict[Key, Answer]]


def check(engine: SyncEngine, answers: dict[Key, Answer], asks: Seq[int]) -> None:
    for i in asks:
        for key, answer in answers_of(engine, i).items():
            assert answer == answers[key], f"request {key}"


@pytest.mark.parametrize("depth", [0, 1])
def test_alone(model: Model, depth: int) -> None:
    """One after the other, in blocks that the one before left, some of them found again."""
    folder, settings, answers = model
    oracle = Oracle(answers, 1)
    engine = SyncEngine(folder, speculation=oracle, depth=depth, **settings, **ROOMY)
    for i in range(len(ASKS)):
        add(engine, i, answers)
        engine.run()
        check(engine, answers, [i])
    assert engine.stats.prefix_hit_tokens > 0
    assert oracle.num_accepted > 0.5 * oracle.num_proposed > 100


@pytest.mark.parametrize("depth", [0, 1])
def test_in_one_batch(model: Model, depth: int) -> None:
    """All at once, with forks of a request that runs; then again, with their prompts in blocks."""
    folder, settings, answers = model
    oracle = Oracle(answers, 2)
    engine = SyncEngine(folder, speculation=oracle, depth=depth, **settings, **ROOMY)
    order = sorted(range(len(ASKS)), key=lambda i: ASKS[i].shares is not None)
    for _ in range(2):
        for i in order:
            add(engine, i, answers)
            if ASKS[i].shares is None:
                engine.step()
        engine.run()
        check(engine, answers, order)
    assert engine.stats.prefix_hit_tokens > 100
    assert engine.stats.copied_blocks > 0
    assert oracle.num_accepted > 500


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("costs", [SWAP, RECOMPUTE, MIXED], ids=["swap", "recompute", "mixed"])
def test_through_preemptions(model: Model, costs: dict[str, float], depth: int) -> None:
    """Prompts in chunks, too little memory; with a plan ahead, rows leave in mid-verification."""
    folder, settings, answers = model
    oracle = Oracle(answers, 3)
    engine = SyncEngine(
        folder, speculation=oracle, depth=depth, costs=costs, **{**settings, **TIGHT}
    )
    for i in range(len(ASKS)):
        add(engine, i, answers)
    engine.run()
    check(engine, answers, range(len(ASKS)))
    swaps, recomputes = engine.preemptions
    assert swaps + recomputes >= 5
    assert (swaps > 0) or costs is not SWAP
    assert (recomputes > 0) or costs is not RECOMPUTE
    assert oracle.num_accepted > 100
    assert oracle.left_unsettled > 0 or depth == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_what_grammars_force_alone(model: Model, depth: int) -> None:
    """Without a proposer, tokens that must come are verified together: fewer steps, and no count of
    proposals."""
    folder, settings, answers = model
    engine = SyncEngine(folder, depth=depth, costs=RECOMPUTE, **{**settings, **TIGHT})
    for i in CONSTRAINED:
        add(engine, i, answers)
    engine.run()
    check(engine, answers, CONSTRAINED)
    assert {finish.proposed_tokens for finish in engine.finishes.values()} == {0}
    steps = []
    for is_plain in (True, False):
        engine = SyncEngine(folder, depth=depth, **settings, **ROOMY)
        add(engine, CONSTRAINED[-1], answers, is_plain=is_plain)
        engine.run()
        check(engine, answers, CONSTRAINED[-1:])
        steps.append(engine.steps)
    assert depth or 2 * steps[1] < steps[0]


@pytest.mark.parametrize("depth", [0, 1])
def test_with_cancels_and_pauses(model: Model, depth: int) -> None:
    """At any moment, in mid-verification too: what goes on is what it would have been."""
    folder, settings, answers = model
    rng, oracle = random.Random(4), Oracle(answers, 4)
    engine = SyncEngine(folder, speculation=oracle, depth=depth, **{**settings, **TIGHT})
    for i in range(len(ASKS)):
        add(engine, i, answers)
    cancelled = rng.sample(range(len(ASKS)), 4)
    paused: set[str] = set()
    steps = 0
    while engine.step() or paused:
        steps += 1
        for request_id in [name for name in sorted(paused) if rng.random() < 0.4]:
            engine.scheduler.command(Resume(request_id))
            paused.discard(request_id)
        if steps < 60 and rng.random() < 0.5:
            request_id = f"r{rng.randrange(len(ASKS))}"
            engine.scheduler.command(Pause(request_id))
            paused.add(request_id)
        if steps % 9 == 0 and steps // 9 <= len(cancelled):
            engine.scheduler.command(Cancel(f"r{cancelled[steps // 9 - 1]}"))
    check(engine, answers, [i for i in range(len(ASKS)) if i not in cancelled])
    for i in cancelled:
        for key, answer in answers_of(engine, i).items():
            count = len(answer.tokens)
            assert answer.tokens == answers[key].tokens[:count]
            assert answer.logprobs == answers[key].logprobs[: len(answer.logprobs)]
    assert oracle.left_unsettled > 0 or depth == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_in_one_engine_after_another(model: Model, depth: int) -> None:
    """Each engine is lost at a random step; the next one gets what was drawn."""
    folder, settings, answers = model
    rng, num_engines, num_cut = random.Random(depth), 0, 0
    outputs: dict[int, tuple[Drawn, ...]] = dict.fromkeys(range(len(ASKS)), ())
    while outputs:
        num_engines += 1
        oracle = Oracle(answers, num_engines) if num_engines % 2 else None
        size = TIGHT if num_engines % 3 else ROOMY
        engine = SyncEngine(folder, speculation=oracle, depth=depth, **{**settings, **size})
        for i, drawn in outputs.items():
            add(engine, i, answers, drawn)
        for _ in range(rng.randint(1, 9)):
            engine.step()
        for i in list(outputs):
            drawn = engine.drawn(f"r{i}")
            if all(each.finish is not None for each in drawn):
                check(engine, answers, [i])
                del outputs[i]
            else:
                outputs[i] = drawn
                num_cut += any(each.tokens for each in drawn)
    assert num_engines > 5
    assert num_cut > 40


@pytest.mark.parametrize("depth", [0, 1])
def test_through_steps_that_fail(model: Model, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a forward that was computed, for lack of memory or not; a request that always fails is
    found, and the others' answers are what they would have been."""
    folder, settings, answers = model
    oracle = Oracle(answers, 5)
    engine = SyncEngine(folder, speculation=oracle, depth=depth, **{**settings, **TIGHT})
    num_steps, poisoned, runner = 0, 7, engine.runner
    launch, forward = runner.launch, type(runner.model).forward
    is_doomed = False

    def faulty_launch(plan: Plan) -> Any:
        nonlocal is_doomed
        running = engine.scheduler.state.requests.running
        is_doomed = any(r.request_id == f"r{poisoned}" for r in running)
        return launch(plan)

    def faulty_forward(*args: Any) -> Any:
        nonlocal num_steps
        logits = forward(*args)
        num_steps += 1
        if num_steps in (4, 60):
            torch.empty(1 << 60, dtype=torch.uint8)  # the allocator's own error
        if is_doomed or num_steps == 7:
            raise Injected
        return logits

    monkeypatch.setattr(runner, "launch", faulty_launch)
    monkeypatch.setattr(type(runner.model), "forward", faulty_forward)
    for i in range(len(ASKS)):
        add(engine, i, answers)
    engine.run()
    assert num_steps > 60
    assert engine.finishes[f"r{poisoned}", 0].detail == STEP_FAILED
    check(engine, answers, [i for i in range(len(ASKS)) if i != poisoned])
    assert {Verdict.RETRIED, Verdict.HALVED, Verdict.BLAMED, Verdict.SHRUNK} == {*engine.verdicts}


@pytest.mark.parametrize("small", ["llama", "qwen2"])
def test_with_a_draft_model(
    model: Model, checkpoint: Any, small: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model as its own draft, which is always right, and one that never is: through swaps and
    recomputations, by the speculation's own choice of lengths. Every mask is waited for: a row that
    sits out for a late one verifies nothing of what was proposed to it."""
    monkeypatch.setattr(host, "LATE_S", 60.0)
    folder, settings, answers = model
    sizes = SpeculationSizes(
        max_proposed=5, has_texts=False, has_recent=False, has_draft=True,
        min_match=0, max_match=0, max_indexed=0,
    )  # fmt: skip
    engine = SyncEngine(
        folder, speculation=Speculator(sizes), speculative_model=str(checkpoint(small, 1)),
        costs=MIXED | {"step_s": ((1, 1.0), (64, 1.1)), "draft_s": 0.01}, **{**settings, **TIGHT},
    )  # fmt: skip
    for i in range(len(ASKS)):
        add(engine, i, answers)
    engine.run()
    check(engine, answers, range(len(ASKS)))
    assert sum(engine.preemptions) >= 3
    proposed, accepted = engine.stats.proposed_tokens, engine.stats.accepted_tokens
    if small == "llama":
        assert accepted == proposed > 100
    else:
        assert 0 < proposed < 400


def test_a_draft_models_memory_is_counted(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks beside the model's, and two spare ones for each row."""
    folder, free = checkpoint("llama", 1), 40 << 20
    monkeypatch.setattr(memory, "device_free_bytes", lambda where: free)
    sizes = {"num_gpu_blocks_override": None, "max_num_seqs": 100, "gpu_memory_utilization": 0.5}
    sizes["max_num_batched_tokens"] = 512
    drafted = SyncEngine(folder, speculative_model=str(folder), **sizes)
    block = drafted.info.block_bytes
    assert drafted.info.num_blocks == (free - 100 * 2 * block) // 2 // (2 * block)
    runner: Any = drafted.runner
    pool = runner._drafter._pool
    assert pool.shape[0] == drafted.info.num_blocks + 200


NUM_NEIGHBOURHOODS = 200  # of whom a request runs beside


class Company:
    """Whom a request ran beside, step by step, and what happened to those: `kinds`."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.kinds: set[str] = set()


KINDS = ("preemption", "fork", "choices", "structure", "speculation", "beams", "cancel")


def kinds_of(sequence: Sequence) -> set[str]:
    """What a row of a step is that most rows are not."""
    request, params = sequence.request, sequence.request.add.params
    found = {
        "fork": request.add.share_with is not None,
        "choices": len(request.sequences) > 1 and request.beams is None,
        "structure": params.structured_outputs is not None,
        "speculation": bool(sequence.provisional) and not sequence.is_forced,
        "beams": request.beams is not None,
    }
    return {kind for kind, is_so in found.items() if is_so}


class Flow:
    """Requests that come and go; `company` has, of each that has ended, whom it ran beside."""

    def __init__(self, model: Model, seed: int, depth: int) -> None:
        folder, settings, self.answers = model
        self.chance = random.Random(seed)
        self.engine = SyncEngine(
            folder,
            speculation=Oracle(self.answers, seed),
            depth=depth,
            costs=MIXED,
            check=False,
            **{**settings, **TIGHT},
        )
        self.live: dict[int, Company] = {}
        self.company: list[Company] = []
        self._num_strangers = 0
        self._doomed: set[str] = set()  # to be cancelled
        self._ran: dict[Request, int] = {}  # in the latest step, with its evictions before it
        self._launch = self.engine.runner.launch
        self.engine.runner.launch = self._seen  # type: ignore[method-assign]

    def _seen(self, plan: Plan) -> InFlight:
        """Note who runs in this step beside whom: rows that compute or draw in it."""
        state = self.engine.scheduler.state
        if any(request.evictions > before for request, before in self._ran.items()):
            self._note({"preemption"})
        rows = [
            seq
            for row, seq in enumerate(state.rows.owners)
            if seq is not None and seq.joined and seq.row == row and row not in plan.idle
        ]
        assert len(rows) == plan.num_rows - len(plan.idle)
        self._ran = {seq.request: seq.request.evictions for seq in rows}
        for company, own in self._companies():
            others = [seq for seq in rows if seq.request is not own]
            company.names |= {seq.request.request_id for seq in others}
            company.kinds |= set[str]().union(*map(kinds_of, others))
        return self._launch(plan)

    def _companies(self) -> list[tuple[Company, Request]]:
        """Of those that ran in the latest step and are compared."""
        by_id = self.engine.scheduler.state.requests.by_id
        found = [(self.live[i], by_id.get(f"r{i}")) for i in self.live]
        return [
            (c, request) for c, request in found if request is not None and request in self._ran
        ]

    def _note(self, kinds: set[str]) -> None:
        for company, _ in self._companies():
            company.kinds |= kinds

    def arrive(self) -> None:
        absent = [i for i in range(len(ASKS)) if i not in self.live]
        forks = [i for i in absent if ASKS[i].shares in self.live]  # there is one
        i = self.chance.choice(forks if forks and self.chance.random() < 0.3 else absent)
        add(self.engine, i, self.answers)
        self.live[i] = Company()

    def strange(self) -> None:
        """A beam search or choices, some of which are cancelled when they run; not compared."""
        self._num_strangers += 1
        name, chance = f"s{self._num_strangers}", self.chance
        params = P(temperature=1.0, n=chance.randint(1, 3), speculation=False)
        if chance.random() < 0.5:
            params = P(use_beam_search=True, beam_width=chance.randint(1, 3))
        prompt = random_tokens(chance.randint(1, 60), self._num_strangers)
        self.engine.add(name, prompt, chance.randint(2, 20), params)
        if chance.random() < 0.5:
            self._doomed.add(name)

    def step(self) -> None:
        engine = self.engine
        engine.step()
        for i in [*self.live]:
            if all((f"r{i}", choice) in engine.finishes for choice in range(ASKS[i].params.n)):
                check(engine, self.answers, [i])
                engine.scheduler.check()
                for choice in range(ASKS[i].params.n):
                    del engine.finishes[f"r{i}", choice]
                self.company.append(self.live.pop(i))
        running = {r.request_id for r in self._ran if r.status is Status.RUNNING}
        for name in sorted(self._doomed & running):
            if self.chance.random() < 0.3:
                self._doomed.discard(name)
                self._note({"cancel"})
                engine.scheduler.command(Cancel(name))


@pytest.mark.parametrize("depth", [0, 1])
def test_in_any_company(model: Model, depth: int) -> None:
    """A random flow, beside beam searches, choices and cancels, with too little memory."""
    flow = Flow(model, 3 + depth, depth)
    while len(flow.company) < NUM_NEIGHBOURHOODS:
        if len(flow.live) < 7:
            flow.arrive()
        if flow.chance.random() < 0.04:
            flow.strange()
        flow.step()
    assert len({frozenset(each.names) for each in flow.company}) > 0.9 * NUM_NEIGHBOURHOODS
    counts = {kind: sum(kind in each.kinds for each in flow.company) for kind in KINDS}
    assert min(counts.values()) > 10, counts
    assert sum(flow.engine.preemptions) > 20
    assert flow.engine.stats.prefix_hit_tokens > 100


@pytest.mark.parametrize("depth", [0, 1])
def test_with_masks_that_are_late(
    model: Model, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At random, so that rows that were to draw, or to verify, sit out and come back."""
    folder, settings, answers = model
    lates = Lates(monkeypatch, seed=6)
    oracle = Oracle(answers, 6)
    engine = SyncEngine(
        folder, speculation=oracle, depth=depth, costs=MIXED, **{**settings, **TIGHT}
    )
    for i in range(len(ASKS)):
        add(engine, i, answers)
    engine.run()
    check(engine, answers, range(len(ASKS)))
    assert lates.num > 40
