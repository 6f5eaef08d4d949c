"""The CUDA runner against transformers and the CPU's runner, on a device that delays everything.

tests/model/late_device.py is the device. Ops are plain torch where a test needs many steps, and
Triton's interpreter where it is about the kernels. tests/gpu runs the same tests on a GPU.
"""

from __future__ import annotations

import gc
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from streamer.core.plan import Plan
from streamer.core.recovery.trials import Verdict
from streamer.core.sampling import SamplingParams
from streamer.kernels import ops, reference
from streamer.model.decoder import Decoder
from streamer.model.runner.costs import Costs
from streamer.model.runner.swaps import Swaps
from tests.kernels.conftest import skip_without_interpreter
from tests.model.greedy_oracle import Ask, GreedyOracle, mixed_asks
from tests.model.hand import make_runner
from tests.model.late_device import LateDevice
from tests.model.proposers import Answer, Oracle
from tests.model.runner.test_cpu import (  # the same Plans by hand, on late devices
    test_a_fork_without_its_parents_prompt,
    test_a_nan_row_fails_alone,
    test_a_plan_without_rows,
    test_forks_of_one_prefill,
    test_recompute,
    test_results_are_ascending_and_numbered,
    test_swap_needs_its_copies,
    test_swap_out_and_in,
    test_verified_runs_equal_transformers,
    test_wrong_plans,
)
from tests.model.runner.test_hidden import check_hidden
from tests.model.runner.test_scoring import check as check_scores
from tests.model.sync_engine import END, GREEDY, SyncEngine
from tests.model.test_beams import asks as searches
from tests.model.test_beams import check as check_searches
from tests.model.test_parity import MIXED, RECOMPUTE, SWAP
from tests.model.test_speculation import TOKEN_BYTES
from tests.model.torch_ops import TorchOps
from tests.model.where import Where

pytestmark = pytest.mark.usefixtures("late")
__all__ = [
    "test_a_fork_without_its_parents_prompt",
    "test_a_nan_row_fails_alone",
    "test_a_plan_without_rows",
    "test_forks_of_one_prefill",
    "test_recompute",
    "test_results_are_ascending_and_numbered",
    "test_swap_needs_its_copies",
    "test_swap_out_and_in",
    "test_verified_runs_equal_transformers",
    "test_wrong_plans",
]

TINY = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 1, "intermediate_size": 32}
TIGHT = {"num_gpu_blocks_override": 14, "max_num_seqs": 6, "max_num_batched_tokens": 24}
TIGHT |= {"block_size": 8, "max_model_len": 48}


Late = Callable[..., LateDevice]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Late]:
    """Runners are made on late devices; `late(seed)` returns one. Ops are plain torch, except for
    sampling and the making of decode steps."""
    skip_without_interpreter()
    from streamer.kernels.gpu.sampling import sample

    def put(seed: int = 0) -> LateDevice:
        device = LateDevice(seed)
        monkeypatch.setattr(Where, "make", lambda: device)
        return device

    monkeypatch.setattr(Where, "make", LateDevice)
    monkeypatch.setattr(ops, "choose", lambda device: TorchOps())
    monkeypatch.setattr(sample, "best", reference.best)
    with np.errstate(all="ignore"):
        yield put


@pytest.fixture(scope="module")
def oracle(reference: Any) -> Callable[[Path], GreedyOracle]:
    """transformers' answers for a checkpoint."""
    return lambda folder: GreedyOracle(reference(folder))


def serve(
    folder: Path, asks: list[Ask], params: list[SamplingParams], **settings: Any
) -> SyncEngine:
    """An engine that has answered all requests."""
    engine = SyncEngine(folder, token_bytes=TOKEN_BYTES, **settings)
    for i, (prompt, count) in enumerate(asks):
        one = params[i % len(params)]
        ends = frozenset((END,) if one.structured_outputs else ())
        engine.add(f"r{i}", prompt, count, one, stop_ids=ends)
    engine.run()
    return engine


def tokens_of(engine: SyncEngine, asks: list[Ask]) -> list[list[int]]:
    """The tokens of each answer."""
    return [engine.tokens[f"r{i}", 0] for i in range(len(asks))]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_greedy_equals_transformers(
    checkpoint: Any, oracle: Any, record_property: Any, monkeypatch: pytest.MonkeyPatch,
    late: Late, family: str,
) -> None:  # fmt: skip
    """Chunks, late joins and recorded decodes by the GPU's own kernels; gpt2 is not recorded."""
    from streamer.kernels.gpu import backend
    from streamer.kernels.gpu.attention import items
    from streamer.kernels.gpu.sampling import sample

    monkeypatch.setattr(ops, "choose", lambda device: backend)
    monkeypatch.setattr(sample, "best", backend.best)
    monkeypatch.setattr(items, "MAX_SPLITS", 2)  # programs of a decode: 16 are slow
    small = TINY if family == "llama" else {"n_layer": 1, "n_embd": 32, "n_head": 2}
    folder = checkpoint(family, 0, **small)
    asks = mixed_asks(1, 4, longest=20, output=(4, 6))
    device = late()
    engine = serve(
        folder, asks, [GREEDY],
        max_num_seqs=3, max_num_batched_tokens=16, block_size=8, max_model_len=48,
    )  # fmt: skip
    assert device.num_recorded == (2 * 3 + 1 if family == "llama" else 0)
    assert (device.num_replays > 0) == (family == "llama")
    oracle(folder).compare(tokens_of(engine, asks), asks, record_property)


@pytest.mark.parametrize(
    ("costs", "seed"),
    [(SWAP, 0), (SWAP, 1), (MIXED, 2), (RECOMPUTE, 0)],
    ids=lambda v: (
        {id(SWAP): "swap", id(MIXED): "mixed"}.get(id(v), "recompute")
        if isinstance(v, dict)
        else None
    ),
)
def test_preemption_changes_no_token(
    checkpoint: Any, oracle: Any, record_property: Any, late: Late,
    costs: dict[str, float], seed: int,
) -> None:  # fmt: skip
    """Swaps under replayed decodes, in any order in which the streams reach them."""
    folder = checkpoint("llama", 1, **TINY)
    asks = mixed_asks(seed, 16, longest=16, output=(10, 30))
    late(seed)
    engine = serve(folder, asks, [GREEDY], costs=costs, **TIGHT)
    swaps, recomputes = engine.preemptions
    assert swaps + recomputes >= 4
    assert (swaps > 0) or costs is not SWAP
    assert (recomputes > 0) or costs is not RECOMPUTE
    oracle(folder).compare(tokens_of(engine, asks), asks, record_property)


@pytest.mark.parametrize("costs", [SWAP, RECOMPUTE], ids=["swap", "recompute"])
def test_prompts_are_scored_as_by_transformers(
    checkpoint: Any, reference: Any, record_property: Any, late: Late, costs: dict[str, float]
) -> None:
    """Scores come before the previous plan's tokens are known, with decodes and preemptions."""
    folder = checkpoint("llama", 1, **TINY)
    late(3)
    engine = SyncEngine(folder, costs=costs, max_scored_tokens=5, **TIGHT)
    asks = mixed_asks(5, 14, longest=24, output=(10, 20))
    check_scores(engine, asks, reference(folder), record_property)
    assert sum(engine.preemptions) >= 4


def test_hidden_states_are_those_of_transformers(
    checkpoint: Any, reference: Any, record_property: Any, late: Late
) -> None:
    """Of rows that would else be in recorded decodes, a plan ahead of their tokens."""
    folder = checkpoint("llama", 1, **TINY)
    late(3)
    engine = SyncEngine(folder, costs=SWAP, max_scored_tokens=5, **TIGHT)
    asks = mixed_asks(5, 8, longest=24, output=(4, 20))
    check_hidden(engine, asks, reference(folder), record_property)


def test_beam_searches_beside_recorded_decodes(checkpoint: Any, reference: Any, late: Late) -> None:
    """Hypotheses wait for their candidates while other rows are a plan ahead."""
    folder = checkpoint("llama", 1, **TINY)
    given = searches(reference(folder))[:2]
    late(4)
    engine = check_searches(folder, given, costs=SWAP, num_gpu_blocks_override=20)
    assert engine.preemptions[0] > 0


@pytest.mark.parametrize("seed", range(10))
def test_a_step_waits_for_the_blocks_that_it_reads(
    checkpoint: Any, reference: Any, late: Late, seed: int
) -> None:
    """Rows of a plan read the blocks it swaps in, which hold NaN until the copy is done."""
    late(seed)
    test_swap_out_and_in(checkpoint, reference)


def test_blocks_are_the_copies_until_they_are_done(late: Late) -> None:
    """Facts count a plan as done when the copies of all plans up to it are, on both streams."""
    device = late()
    device.is_still = True
    pool, host = (torch.arange(8.0).view(8, 1).clone() + base for base in (0, 100))
    swaps = Swaps(device, reference, pool, host, Costs(4, device.probe_copy))
    swaps.start(Plan(number=1, swap_out=((1, 2), (3, 4))))
    swaps.start(Plan(number=2, swap_in=((7, 6),)))
    swaps.start(Plan(number=3, swap_in=((2, 5),)))  # what the first plan copies out
    device.into.go_on()
    device.into.go_on()
    device.into.go_on()
    assert (swaps.copies_done(3), pool[6].item()) == (0, 107.0), "the second is done, not the first"
    assert not device.into.can_go_on
    swaps.need([6, 0])
    assert device.main.can_go_on, "nothing waits for a copy that is done"
    swaps.need([5])
    swaps.wait()
    assert swaps.copies_done(3) >= 2
    device.synchronize()
    assert swaps.copies_done(3) == 3
    assert (host[2].item(), host[4].item(), pool[5].item()) == (1.0, 3.0, 1.0)


def test_closing_lets_the_device_finish(checkpoint: Any, late: Late) -> None:
    """A launched plan that is never collected is carried out before its memory is freed."""
    device = late()
    runner = make_runner(checkpoint("llama", 1, **TINY))
    runner.launch(Plan(number=1, copies=((3, 4),), swap_out=((1, 0),)))
    runner.close()
    assert not any(stream.queue for stream in (device.main, device.out, device.into))
    assert not hasattr(runner, "_pool")


def test_closing_frees_what_was_recorded(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch, late: Late
) -> None:
    """At once, by reference counts: the engine's thread has frozen the garbage collector."""
    device = late()
    monkeypatch.setattr(device, "record", lambda work: list)  # a graph holds no Python object
    runner: Any = make_runner(checkpoint("llama", 1, **TINY))
    parts = [weakref.ref(part) for part in (runner._steps, runner._model, runner._state.flat)]
    gc.disable()
    try:
        runner.close()
        assert [part() for part in parts] == [None] * 3
    finally:
        gc.enable()


def test_the_largest_step_is_tried_for_its_memory(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch, late: Late
) -> None:
    """As many tokens as a step may have, in contexts as long as the model's limit."""
    device, seen = late(), list[tuple[Any, ...]]()

    def peak_bytes(work: Callable[[], None]) -> int:
        work()
        return 0

    def forward(
        self: Decoder, tokens: torch.Tensor, positions: Any, batch: Any, pool: Any, last: Any
    ) -> torch.Tensor:
        if last is not None:  # no recorded decode
            seen.append((len(tokens), batch.context_lens.tolist(), len(last)))
        return compute(self, tokens, positions, batch, pool, last)

    compute = Decoder.forward
    monkeypatch.setattr(Decoder, "forward", forward)
    monkeypatch.setattr(device, "peak_bytes", peak_bytes)
    folder = checkpoint("llama", 1, **TINY, max_position_embeddings=40)
    make_runner(folder, max_num_batched_tokens=100, max_num_seqs=7)
    assert seen[0] == (100, [40, 40, 20], 100)  # every token may be scored


KINDS = [
    SamplingParams(temperature=0.8, logprobs=2),
    SamplingParams(temperature=1.2, top_k=20, n=2),
    SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, presence_penalty=0.9, frequency_penalty=0.7, logprobs=0),
    SamplingParams(temperature=0.9, min_p=0.05, logit_bias={5: 4.0, 9: -100.0, 11: 3.0}),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.1, structured_outputs={"regex": "([a-f]b|cd)*"}, logprobs=1),
    SamplingParams(
        temperature=0.0, structured_outputs={"regex": "([ac]|gb)*(d|e)"}, presence_penalty=0.5
    ),
]


def test_every_kind_of_row_is_sampled_as_on_the_cpu(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch, late: Late
) -> None:
    """Draws, filters, bias, penalties, forks, log probabilities, through swaps and recomputation:
    the CPU runner's tokens; log probabilities to rounding."""
    folder = checkpoint("llama", 1, **TINY)
    asks = mixed_asks(4, 8, longest=14, output=(12, 16))
    late(3)
    got = serve(folder, asks, KINDS, costs=SWAP, **TIGHT)
    assert got.preemptions[0] >= 1
    monkeypatch.undo()
    expected = serve(folder, asks, KINDS, max_num_seqs=16)
    assert got.tokens == expected.tokens
    assert got.logprobs.keys() == expected.logprobs.keys()
    for key, values in expected.logprobs.items():
        assert got.logprobs[key] == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize("seed", [1, 2])
def test_verified_rows_beside_recorded_ones_change_no_token(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch, late: Late, seed: int
) -> None:
    """The CPU runner's tokens without speculation, where rows wait for what they verify and lose
    their slots meanwhile; rows beside those that wait are replayed."""
    folder = checkpoint("llama", 1, **TINY)
    asks = mixed_asks(4, 6, longest=14, output=(10, 14))
    answers: dict[tuple[int, int], Answer] = {}
    with monkeypatch.context() as here:
        here.setattr(Where, "make", lambda: None)
        expected = serve(folder, asks, KINDS, max_num_seqs=16)
        for name, choice in expected.tokens:
            finish = expected.finishes[name, choice]
            answers[int(name[1:]), choice] = Answer(expected.tokens[name, choice], [], finish)
    device, oracle = late(seed), Oracle(answers, seed)
    costs = SWAP if seed % 2 else RECOMPUTE
    sizes = TIGHT | {"num_gpu_blocks_override": 11}
    got = serve(folder, asks, KINDS, speculation=oracle, costs=costs, **sizes)
    assert got.tokens == expected.tokens
    for key, values in expected.logprobs.items():
        assert got.logprobs[key] == pytest.approx(values, abs=1e-4)
    assert sum(got.preemptions) >= 1
    assert oracle.num_accepted > 20
    assert oracle.num_accepted < oracle.num_proposed
    assert device.num_replays > 0


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantized_blocks_survive_swaps_under_replay(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch, late: Late, kind: str
) -> None:
    """The CPU runner's tokens with such a cache, through swaps: scales go with their blocks."""
    folder = checkpoint("llama", 1, **TINY)
    asks = mixed_asks(4, 12, longest=14, output=(14, 20))
    device = late(3)
    got = serve(folder, asks, [GREEDY], costs=SWAP, kv_cache_dtype=kind, **TIGHT)
    assert got.preemptions[0] >= 1
    assert device.num_replays > 0
    monkeypatch.undo()  # removes the late ops
    # The native kernels sum in another order, which may round a code otherwise.
    monkeypatch.setenv("STREAMER_KERNELS", "torch")
    expected = serve(folder, asks, [GREEDY], max_num_seqs=16, kv_cache_dtype=kind)
    assert got.tokens == expected.tokens
    exact = serve(folder, asks, [GREEDY], max_num_seqs=16)
    assert got.tokens != exact.tokens, "nothing was quantized"


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_quantized_weights_stay_codes_on_the_gpu(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch, late: Late, kind: str
) -> None:
    """The tokens of the torch backend, which holds the same weights dense; embedding and head are
    one table."""
    from streamer.kernels.gpu import backend
    from streamer.kernels.gpu.linear.packed import Packed
    from streamer.kernels.gpu.sampling import sample

    small = {**TINY, "hidden_size": 64, "vocab_size": 64, "tie_word_embeddings": True}
    folder = checkpoint("llama", 1, **small)
    sizes: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 32}
    asks: list[Ask] = [([5, 9, 40, 7, 11, 6, 30, 21, 3], 3), ([50, 4, 12], 4)]
    monkeypatch.setattr(ops, "choose", lambda device: backend)
    monkeypatch.setattr(sample, "best", backend.best)
    late()
    got = serve(folder, asks, [GREEDY], quantization=kind, block_size=8, **sizes)
    runner: Any = got.runner
    assert isinstance(runner._model._head, Packed)
    assert runner._model._embed == runner._model._head.rows
    monkeypatch.undo()
    monkeypatch.setenv("STREAMER_KERNELS", "torch")
    expected = serve(folder, asks, [GREEDY], quantization=kind, block_size=8, **sizes)
    assert got.tokens == expected.tokens


def test_min_tokens_masks_stop_ids_until_then(checkpoint: Any, oracle: Any, late: Late) -> None:
    """Masked while the output is short, allowed after; positions are known without the tokens."""
    folder = checkpoint("llama", 1, **TINY)
    ask = ([5, 6, 7], 12)
    (free,) = oracle(folder).answers([ask])
    stop = free.tokens[2]
    late(1)
    engine = SyncEngine(folder, max_num_seqs=2, max_model_len=48)
    params = SamplingParams(temperature=0.0, min_tokens=8)
    engine.add("r", *ask, params, stop_ids=frozenset([stop]))
    engine.run()
    got = engine.tokens["r", 0]
    assert got[:2] == free.tokens[:2]
    assert stop not in got[:8]


def test_a_row_that_is_not_finite_fails_alone(checkpoint: Any, oracle: Any, late: Late) -> None:
    """One token's embedding is NaN: a row that draws it fails one step later, the other goes on."""
    folder = checkpoint("llama", 1, **TINY)
    asks: list[Ask] = [([5, 6, 7], 12), ([200, 8, 9, 10], 12)]
    good, bad = oracle(folder).answers(asks)
    poison = next(t for t in bad.tokens if t not in good.tokens and t not in (5, 6, 7))
    late(2)
    engine = SyncEngine(folder, max_num_seqs=2, max_model_len=48)
    with torch.inference_mode():
        engine.runner._model._embed.keywords["table"][poison] = torch.nan  # type: ignore
    for i, (prompt, count) in enumerate(asks):
        engine.add(f"r{i}", prompt, count)
    engine.run()
    assert engine.tokens["r0", 0] == good.tokens
    upto = bad.tokens.index(poison) + 1
    assert engine.tokens["r1", 0] == bad.tokens[:upto]
    assert engine.finishes["r1", 0].detail == "the model's logits are not finite"


class PromptDevice(LateDevice):
    """Work is done when it is queued, as far as events allow: its errors are the launch's."""

    def nudge(self, counts: list[int]) -> None:
        self.synchronize()


@pytest.mark.parametrize("prompt", [3, 40], ids=["drawing", "a chunk that draws nothing"])
def test_a_step_without_memory_is_computed_in_smaller_ones(
    checkpoint: Any, oracle: Any, monkeypatch: pytest.MonkeyPatch, late: Late, prompt: int
) -> None:
    """It gets its tokens, and so does what joins in a later plan."""
    folder = checkpoint("llama", 1, **TINY)
    asks: list[Ask] = [([5, 6, 7], 6), ([9, 8, 7, 6], 6)]
    monkeypatch.setattr(Where, "make", PromptDevice)
    engine = SyncEngine(folder, max_num_seqs=2, max_model_len=64, max_num_batched_tokens=16)
    asks.append((list(range(1, prompt + 1)), 6))
    engine.add("r2", *asks[2])
    with Memory(1):
        engine.step()
    assert engine.verdicts == [Verdict.SHRUNK]
    for i, (tokens, count) in enumerate(asks[:2]):
        engine.add(f"r{i}", tokens, count)
    engine.run()
    assert [engine.tokens[f"r{i}", 0] for i in range(3)] == [
        answer.tokens for answer in oracle(folder).answers(asks)
    ]


ENOUGH = 1 << 30


class Memory(TorchDispatchMode):
    """Memory for `left` allocations, then one that fails, then for all: of any operation whose
    result is neither a view nor an argument. Where that is ENOUGH, `places` are the lines of code
    that led to each: finding them takes longer than the operations."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left, self.is_enough = left, left == ENOUGH
        self.places: list[tuple[tuple[str, int], ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not any(found.alias_info for found in func._schema.returns):
            if self.is_enough:
                stack = ((f.f_code, line) for f, line in traceback.walk_stack(None))
                ours = ((c.co_name, line) for c, line in stack if "/tests/" not in c.co_filename)
                self.places.append(tuple(ours))
            self.left -= 1
            if self.left == -1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\n...")
        return func(*args, **kwargs or {})


TABLE = torch.randn(7 * 96, 96, generator=torch.Generator().manual_seed(0))


def states_by_table(
    self: Decoder, tokens: torch.Tensor, positions: torch.Tensor, batch: Any, pool: Any
) -> torch.Tensor:
    """Logits by a token and its position, as states: layers would be hundreds of operations."""
    return TABLE[tokens % 96 + positions % 7 * 96]


def states_as_logits(
    self: Decoder, states: torch.Tensor, last: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    found = states if last is None else states[last]
    return found, found


def forward_by_table(self: Decoder, *given: Any) -> torch.Tensor:
    return self.logits(self.states(*given[:4]), given[4])[0]


def test_whatever_takes_the_last_memory_no_request_ends_by_it(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch, late: Late
) -> None:
    """Each place of joins, uploads, forks, copies, swaps and draws in turn: scheduler and runner
    are reset, and all is answered as ever."""
    from streamer.kernels.gpu.sampling import sample

    monkeypatch.setattr(Where, "make", PromptDevice)
    monkeypatch.setattr(Decoder, "states", states_by_table)
    monkeypatch.setattr(Decoder, "logits", states_as_logits)
    monkeypatch.setattr(Decoder, "forward", forward_by_table)
    monkeypatch.setattr(sample, "sample", lambda logits, *_, **__: logits.max(-1)[1])
    folder = checkpoint("llama", 1, **TINY, vocab_size=len(TABLE) // 7)
    settings = {**TIGHT, "num_gpu_blocks_override": 9, "block_size": 4, "max_model_len": 16}
    settings["enable_prefix_caching"] = False
    engine = SyncEngine(folder, costs=SWAP, **settings)
    launch = engine.runner.launch
    rounds = 0
    penalised = SamplingParams(presence_penalty=0.9, logit_bias={5: 4.0}, min_tokens=2, n=2)
    kinds = [SamplingParams(logprobs=2), penalised, SamplingParams()]

    def answers(memory: Memory) -> dict[tuple[int, int], tuple[list[int], str | None]]:
        """The tokens of each choice, and why it failed."""
        nonlocal rounds
        rounds += 1

        def short(plan: Plan) -> Any:
            with memory:
                return launch(plan)

        monkeypatch.setattr(engine.runner, "launch", short)
        for i, params in enumerate(kinds):
            engine.add(f"{rounds}.{i}", [5 + i] * 5, 5, params, stop_ids=frozenset([3]))
            engine.step()
        engine.run()
        return {
            (int(name.split(".")[1]), choice): (engine.tokens[name, choice], finish.detail)
            for (name, choice), finish in engine.finishes.items()
            if name.startswith(f"{rounds}.")
        }

    trials = engine.scheduler.state.trials
    most = trials.max_tokens
    enough = Memory(ENOUGH)
    expected = answers(enough)
    assert engine.preemptions[0] >= 1
    for n in {place: n for n, place in enumerate(enough.places)}.values():  # the last of each
        memory = Memory(n)
        found = answers(memory)
        assert memory.left < 0
        assert engine.verdicts
        assert found == expected
        engine.verdicts.clear()
        trials.max_tokens = most
    assert answers(enough) == expected
