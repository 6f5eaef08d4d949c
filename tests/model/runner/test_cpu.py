"""CpuRunner driven by hand-written Plans: greedy tokens equal transformers' whatever happens."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from streamer.core.plan import Plan
from streamer.core.sampling import SamplingParams
from streamer.errors import ConfigError, InvariantViolated, NotEnoughMemory
from streamer.model.checkpoint import open_checkpoint
from streamer.model.inspect import recognize
from streamer.model.runner import load as model_load
from tests.checkpoints import reference_greedy, reference_logits
from tests.kernels.sampling_oracle import noise
from tests.model.hand import BLOCK, GREEDY, Hand, make_runner
from tests.model.test_decoder import random_tokens

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("mistral", {"sliding_window": 24}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    ("qwen3", {"tie_word_embeddings": True}),
    ("gpt2", {}),
    ("gemma3_text", {}),
]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("family", "overrides"), FAMILIES, ids=[f for f, _ in FAMILIES])
def test_greedy_equals_transformers(
    checkpoint: Any, reference: Any, family: str, overrides: dict[str, Any], seed: int
) -> None:
    """Chunked prefill, late joins, a row that sits out, a row slot used twice."""
    folder = checkpoint(family, seed, **overrides)
    model = reference(folder)
    prompts = [random_tokens(n, seed * 10 + n) for n in (37, 5, 50, 1)]
    want = [reference_greedy(model, prompt, 12) for prompt in prompts]
    hand = Hand(make_runner(folder), num_blocks=64, seed=seed)
    first = hand.join(0, prompts[0])
    hand.step({0: 20})
    second = hand.join(3, prompts[1])
    hand.step({0: 0, 3: 5})  # row 0 sits out
    hand.step({0: 17})  # row 3 decodes beside the chunk
    third = hand.join(1, prompts[2])
    hand.step({1: 16})
    hand.step({1: 33})
    hand.step({1: 1})
    hand.step({1: 0})
    hand.run(7)
    hand.leave(3)
    fourth = hand.join(3, prompts[3])
    hand.run(12)
    got = [row.output[:12] for row in (first, second, third, fourth)]
    assert got == want


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_verified_runs_equal_transformers(checkpoint: Any, reference: Any, family: str) -> None:
    """Runs of any length, cut at any token, beside decodes, chunks and idle rows; where a run was
    cut, the next tokens take the places of those that were wrong."""
    folder = checkpoint(family, 0, **dict(FAMILIES)[family])
    prompts = [random_tokens(n, n) for n in (30, 14, 50)]
    want = [reference_greedy(reference(folder), prompt, 45) for prompt in prompts]
    hand = Hand(make_runner(folder), num_blocks=64)
    rng = random.Random(3)
    rows = [hand.join(row, prompt) for row, prompt in enumerate(prompts)]
    hand.step({0: 30, 1: 14, 2: 20})
    hand.step({0: 0, 2: 30})
    counts = []
    while min(len(row.output) for row in rows) < 25:
        verify, idle, expected = {}, {}, []
        for row, sequence in enumerate(rows):
            done = len(sequence.output)
            width, right = rng.randrange(7), rng.randrange(7)
            if width == 6:
                idle[row] = 0
                continue
            given = want[row][done : done + width]
            given = [t if n < right else (t + 1) % 256 for n, t in enumerate(given)]
            if given:
                verify[row] = tuple(given)
            expected += [row] * (min(right, len(given)) + 1)
        result = hand.step(idle, verify=verify)
        assert result.rows == tuple(expected)
        counts += [expected.count(row) for row in verify]
    for row, tokens in zip(rows, want, strict=True):
        assert row.output == tokens[: len(row.output)]
    assert set(counts) == {1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize(("wrong", "count"), [(0, 3), (1, 2)])
def test_a_run_fails_at_the_first_logits_that_are_not_finite(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch, wrong: int, count: int
) -> None:
    """If it gets there; what was drawn before counts. Log probabilities are by index."""
    hand = Hand(make_runner(checkpoint("llama", 1)), num_blocks=64)
    asks = SamplingParams(temperature=0.0, seed=1, logprobs=1, max_tokens=99)
    expected = hand.join(5, random_tokens(13), asks)
    hand.step({5: 13})
    hand.run(4)
    hand.leave(5)
    hand.join(0, random_tokens(5, 1))
    hand.join(1, random_tokens(13), asks)
    hand.step({0: 5, 1: 13})
    forward = hand.runner.model.forward

    def poisoned(*args: Any) -> torch.Tensor:
        logits = forward(*args).clone()
        logits[4] = torch.nan  # after row 0 and three tokens of row 1
        return logits

    monkeypatch.setattr(hand.runner.model, "forward", poisoned)
    first, second, third = expected.output[1:4]
    result = hand.step(verify={1: (first, second + wrong, third, 7, 7)})
    assert result.rows == (0, *[1] * count)
    assert list(result.tokens[1:]) == expected.output[1 : 1 + count]
    assert list(result.failed) == ([] if wrong else [1])
    assert list(result.logprobs) == list(range(1, 1 + count))
    assert [one.token_id for one in result.logprobs.values()] == list(result.tokens[1:])


def test_swap_out_and_in(checkpoint: Any, reference: Any) -> None:
    """Out to the host pool, its device blocks overwritten, and back into other blocks."""
    folder = checkpoint("llama", 1)
    prompt = random_tokens(40)
    want = reference_greedy(reference(folder), prompt, 14)
    hand = Hand(make_runner(folder), num_blocks=16)
    hand.join(0, prompt)
    hand.step({0: 40})
    hand.run(4)
    row = hand.leave(0)
    hosts = [4, 9, 1]
    old = list(row.blocks)
    hand.step(swap_out=tuple(zip(old, hosts, strict=True)))
    hand.free += old
    hand.join(0, random_tokens(60, 9))
    hand.step({0: 60})  # takes the blocks that were freed
    assert set(hand.rows[0].blocks) & set(old)
    fresh = [hand.free.pop() for _ in hosts]
    row.blocks = fresh
    hand.rejoin(2, row)
    hand.step(swap_in=tuple(zip(hosts, fresh, strict=True)))
    hand.run(8)
    assert row.output == want


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_recompute(checkpoint: Any, reference: Any, family: str) -> None:
    """A row that lost its blocks computes prompt and output again, in chunks, and goes on."""
    folder = checkpoint(family, 1)
    prompt = random_tokens(30)
    hand = Hand(make_runner(folder), num_blocks=64)
    hand.join(0, prompt)
    hand.step({0: 30})
    hand.run(5)
    row = hand.leave(0)
    row.computed, row.blocks = 0, []
    hand.rejoin(1, row)
    hand.step({1: 32})
    hand.step({1: 4})
    hand.run(6)
    assert row.output == reference_greedy(reference(folder), prompt, 13)


def test_swap_needs_its_copies(checkpoint: Any, reference: Any) -> None:
    """The test above can fail: without the swap-in the tokens differ."""
    folder = checkpoint("llama", 1)
    prompt = random_tokens(40)
    hand = Hand(make_runner(folder), num_blocks=16)
    hand.join(0, prompt)
    hand.step({0: 40})
    row = hand.leave(0)
    row.blocks = [hand.free.pop() for _ in row.blocks]
    hand.rejoin(2, row)
    hand.run(11)
    assert row.output[1:] != reference_greedy(reference(folder), prompt, 12)[1:]


@pytest.mark.parametrize("last", [7, 1])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_forks_of_one_prefill(checkpoint: Any, reference: Any, family: str, last: int) -> None:
    """Forks draw from the prompt's logits; the shared tail block is copied before it is written.

    Every token is transformers' logits plus the noise of its own position and choice, by hand.
    """
    folder = checkpoint(family, 2)
    prompt = random_tokens(37)
    params = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=64)
    hand = Hand(make_runner(folder), num_blocks=64)
    parent = hand.join(0, prompt, params)
    hand.step({0: 37 - last})
    children = [hand.fork(row, 0, choice, params) for choice, row in ((1, 4), (2, 2))]
    hand.step({0: last} if last > 1 else None)
    hand.step(copies=(hand.own_tail(4), hand.own_tail(2)))
    hand.run(7)
    for choice, row in enumerate([parent, *children]):
        logits = reference_logits(reference(folder), row.tokens).double().numpy()
        assert row.output == [
            int((logits[at - 1] + noise(7, at, choice, 256)).argmax())
            for at in range(37, len(row.tokens))
        ]
    assert len({tuple(row.output) for row in [parent, *children]}) == 3


@pytest.mark.parametrize("side", [0, 1])
def test_a_nan_row_fails_alone(checkpoint: Any, reference: Any, side: int) -> None:
    """NaN in one row's K or V: it is `failed` and draws nothing, its neighbour is unchanged."""
    folder = checkpoint("llama", 1)
    hand = Hand(make_runner(folder), num_blocks=64)
    sick = hand.join(0, random_tokens(20))
    well = hand.join(1, random_tokens(5, 3))
    hand.step({0: 20, 1: 5})
    hand.runner._pool[sick.blocks[0], :, side] = float("nan")
    result = hand.step()
    assert result.rows == (1,)
    assert "finite" in result.failed[0]
    hand.leave(0)
    hand.run(6)
    hand.runner._kernels.stop()  # its next decode has begun
    hand.runner._pool[well.blocks[0], :, side] = float("nan")
    assert hand.step().rows == (), "all rows may fail"
    assert well.output == reference_greedy(reference(folder), random_tokens(5, 3), 8)


def test_overflow_in_a_projection_fails_every_row(checkpoint: Any, tmp_path: Path) -> None:
    """No row gets a token of what can't be computed; NaN and infinity are refused at load."""
    for number, name in enumerate(("q_proj", "k_proj", "v_proj")):
        folder = shutil.copytree(checkpoint("llama", 1), tmp_path / str(number))
        weights = load_file(folder / "model.safetensors")
        weights[f"model.layers.1.self_attn.{name}.weight"][3] = 3e38
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        hand = Hand(make_runner(folder), num_blocks=64)
        hand.join(0, random_tokens(20))
        result = hand.step({0: 20})
        assert (result.rows, list(result.failed)) == ((), [0]), name


def test_results_are_ascending_and_numbered(checkpoint: Any) -> None:
    """Rows ascend whatever the order of chunks and decodes; only rows that ask get logprobs."""
    hand = Hand(make_runner(checkpoint("llama", 1)), num_blocks=64)
    hand.join(5, random_tokens(4))
    hand.step({5: 4})
    asks = SamplingParams(temperature=0.0, seed=1, logprobs=3, max_tokens=9)
    hand.join(1, random_tokens(6), asks)
    result = hand.step({1: 6})
    assert (result.number, result.rows) == (2, (1, 5))
    assert len(result.tokens) == 2
    assert list(result.logprobs) == [0]
    assert result.logprobs[0].token_id == result.tokens[0]


def test_a_plan_without_rows(checkpoint: Any) -> None:
    """A plan of copies alone is a step; facts report its copies done."""
    runner = make_runner(checkpoint("llama", 1))
    result = runner.launch(Plan(number=1, copies=((3, 4),), swap_out=((1, 0),))).collect()
    assert (result.number, result.rows) == (1, ())
    assert runner.facts().copies_done == 1


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (Plan(number=1, num_rows=1), "num_rows is 1, the rows say 0"),
        (Plan(number=1, num_tokens=3), "num_tokens is 3"),
        (Plan(number=1, num_samples=1), "num_samples is 1"),
        (Plan(number=1, copies=((0, 64),)), "copies"),
        (Plan(number=1, swap_in=((0, -1),)), "swap_in"),
        (Plan(number=1, leaves=(2,)), "row 2 leaves"),
    ],
)
def test_wrong_plans(checkpoint: Any, plan: Plan, says: str) -> None:
    """Sums and ids are checked before anything is computed."""
    runner = make_runner(checkpoint("llama", 1))
    with pytest.raises(InvariantViolated, match=says):
        runner.launch(plan)


def test_a_fork_without_its_parents_prompt(checkpoint: Any) -> None:
    """The parent computes nothing in the plan in which its fork draws from its logits."""
    hand = Hand(make_runner(checkpoint("llama", 1)), num_blocks=64)
    hand.join(0, random_tokens(4))
    hand.step({0: 4})
    hand.fork(1, 0, 1, GREEDY)
    with pytest.raises(InvariantViolated, match="fork of row 0"):
        hand.step({0: 0})


def test_facts_are_measured(checkpoint: Any) -> None:
    """After a prefill and swaps every figure is positive and finite."""
    hand = Hand(make_runner(checkpoint("llama", 1)), num_blocks=64)
    before = hand.runner.facts()
    hand.join(0, random_tokens(64))
    hand.step({0: 64}, swap_out=((1, 0), (2, 1)), swap_in=())
    facts = hand.runner.facts()
    assert facts.prefill_s != before.prefill_s
    assert 0 < facts.prefill_s < 1
    assert facts.swap_bytes_per_s == before.swap_bytes_per_s > 0  # not counted: it allocates
    assert facts.swap_fixed_s > 0
    assert facts.swap_s > 0
    hand.step({0: 1}, swap_out=((1, 0), (2, 1)), swap_in=())
    assert hand.runner.facts().swap_bytes_per_s != before.swap_bytes_per_s


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory from /proc")
def test_pools_are_touched_on_first_use(checkpoint: Any) -> None:
    """Most of a GiB of blocks takes no memory before it is used."""

    def resident_bytes() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    folder = checkpoint("llama", 1)
    make_runner(folder)  # what the first runner imports and compiles is not counted
    before = resident_bytes()
    runner = make_runner(folder, num_gpu_blocks_override=1 << 16, swap_space=0.25, max_num_seqs=256)
    pools = (runner._pool, runner._host_pool)
    assert sum(p.numel() * p.element_size() for p in pools) > 1 << 29
    assert resident_bytes() - before < 64 << 20


def test_closing_twice(checkpoint: Any) -> None:
    """The second close does nothing."""
    runner = make_runner(checkpoint("llama", 1))
    runner.close()
    runner.close()


def test_a_second_engine_in_a_process_gets_as_many_threads_as_the_first(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first engine leaves torch with one thread, which is not the process's number."""
    before = torch.get_num_threads()
    given: list[int] = []
    known = recognize(open_checkpoint(checkpoint("llama", 1)), "float32")
    kernels: Any = SimpleNamespace(set_threads=given.append)
    monkeypatch.setattr(model_load.memory, "cpu_quota", lambda: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    model_load._torch_threads.cache_clear()
    torch.set_num_threads(3)
    try:
        model_load._set_threads(known, kernels, 1)
        model_load._set_threads(known, kernels, 1)
        model_load._set_threads(known, kernels, 2)  # ranks share the cores
    finally:
        model_load._torch_threads.cache_clear()
        torch.set_num_threads(before)
    assert given == [3, 3, 1]


def test_model_info(checkpoint: Any) -> None:
    """The facts of the model that load_runner returns."""
    from streamer.config import Config
    from streamer.model.runner.load import load_runner

    folder = checkpoint("llama", 1, dtype=torch.bfloat16)
    config = Config(model=str(folder), load_progress=False, served_model_name="tiny")
    runner, info = load_runner(config)
    assert (info.name, info.dtype, info.vocab_size) == ("tiny", "bfloat16", 256)
    assert (info.max_model_len, info.eos_token_ids, info.block_size) == (512, (2,), BLOCK)
    assert info.block_bytes == runner.block_bytes == 3 * 2 * 16 * 2 * 16 * 2
    assert info.num_blocks == 256 * 512 // 16, "never more than max_num_seqs full contexts"
    assert info.num_parameters == 256 * 64 * 2 + 64 + 3 * (64 * (64 * 2 + 64 + 112 * 3) + 64 * 2)
    runner.close()


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"max_model_len": 513}, ConfigError, "exceeds the 512"),
        ({"num_gpu_blocks_override": 4, "max_model_len": 65}, NotEnoughMemory, "--max-model-len"),
    ],
)
def test_settings_that_do_not_fit(
    checkpoint: Any, settings: dict[str, Any], error: type[Exception], says: str
) -> None:
    """The refusal has the numbers."""
    with pytest.raises(error, match=says):
        make_runner(checkpoint("llama", 1), **settings)


def test_a_long_context_shrinks_to_the_pool(
    checkpoint: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Without --max-model-len the pool decides, and the log says so."""
    make_runner(checkpoint("llama", 1), num_gpu_blocks_override=4)
    assert "context limited to 64 of the model's 512 tokens" in caplog.text
