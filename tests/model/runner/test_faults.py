"""Faults of a step on a GPU's runner: it is made anew, and what was asked is answered as ever.

Here on the late device; tests/gpu/test_faults.py runs the same on a GPU, where the memory ends for
real. Answers are compared with those of an engine in which nothing fails.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from streamer.core.plan import Plan
from streamer.core.recovery.trials import Verdict
from streamer.model.runner import recorded
from tests.model.greedy_oracle import Ask, mixed_asks
from tests.model.runner.test_cuda import KINDS, TIGHT, TINY, PromptDevice, late
from tests.model.sync_engine import GREEDY, Injected, SyncEngine
from tests.model.test_parity import SWAP
from tests.model.test_speculation import TOKEN_BYTES
from tests.model.where import Where

pytestmark = pytest.mark.usefixtures("late")
__all__ = ["late"]

APART = 6  # launches before the one that fails


def new_engine(folder: Path, asks: list[Ask], kinds: list[Any], **settings: Any) -> SyncEngine:
    """An engine that has all requests and has made no step. One with another device ends before:
    CUDA's main stream is the thread's."""
    engine = SyncEngine(folder, token_bytes=TOKEN_BYTES, **settings)
    for i, (prompt, count) in enumerate(asks):
        engine.add(f"r{i}", prompt, count, kinds[i % len(kinds)], stop_ids=frozenset([255]))
    return engine


def check_answers(engine: SyncEngine, expected: SyncEngine) -> None:
    """The engine's answers are the other's, and no request failed."""
    assert engine.tokens == expected.tokens
    assert all(finish.detail is None for finish in engine.finishes.values())


class Fault:
    """Launches of which one raises, of a step in which several rows draw."""

    def __init__(self, engine: SyncEngine, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._launch = engine.runner.launch
        self._device = engine.runner._device  # type: ignore[attr-defined]
        self._place = place
        self._count = 0
        self.is_over = False
        monkeypatch.setattr(engine.runner, "launch", self.launch)

    def launch(self, plan: Plan) -> Any:
        self._count += 1
        if self.is_over or self._count < APART or plan.num_samples < 2:
            return self._launch(plan)
        if self._place == "plan":
            self._fail()
        with pytest.MonkeyPatch.context() as here:
            if self._place == "inputs":  # of which a steady decode may have none
                here.setattr(self._device, "upload", self._fail)
            flight = self._launch(plan)
        if self._place == "result":
            flight._collect = self._fail
        return flight

    def _fail(self, *_: Any) -> Any:
        self.is_over = True
        raise Injected


@pytest.mark.parametrize("place", ["plan", "inputs", "result"])
def test_a_step_that_raises_changes_no_token(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Before anything of it is queued, when its copies between the pools are, or while its result
    is awaited; rows that are drawn and rows with penalties, through swaps."""
    folder = checkpoint("llama", 1, **TINY)
    asks = mixed_asks(4, 5, longest=14, output=(6, 9))
    kinds, sizes = [KINDS[0], KINDS[3]], {**TIGHT, "num_gpu_blocks_override": 7}
    expected = new_engine(folder, asks, kinds, costs=SWAP, **sizes)
    expected.run()
    engine = new_engine(folder, asks, kinds, costs=SWAP, **sizes)
    fault = Fault(engine, place, monkeypatch)
    engine.run()
    assert fault.is_over
    assert engine.verdicts == [Verdict.RETRIED]
    assert expected.preemptions[0] >= 1
    check_answers(engine, expected)


def test_a_launch_without_memory_shrinks_the_step_and_fails_nobody(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever computes more than 5 tokens has none: prompts go on in smaller chunks."""
    folder = checkpoint("llama", 1, **TINY)
    asks = mixed_asks(4, 3, longest=14, output=(3, 5))
    expected = new_engine(folder, asks, [KINDS[0], KINDS[3]], **TIGHT)
    expected.run()
    engine = new_engine(folder, asks, [KINDS[0], KINDS[3]], **TIGHT)
    launch = engine.runner._launch  # type: ignore[attr-defined]

    def short(plan: Plan) -> Any:
        if plan.num_tokens > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\n...")
        return launch(plan)

    monkeypatch.setattr(engine.runner, "_launch", short)
    engine.run()
    assert set(engine.verdicts) == {Verdict.SHRUNK}
    check_answers(engine, expected)


def check_large_steps_without_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, taken: Callable[[], AbstractContextManager[Any]],
    num_tokens: int,
) -> None:  # fmt: skip
    """Prompts that fill steps of so many tokens, for which there is no memory while it is `taken`;
    larger ones than of 32 tokens run op by op."""
    monkeypatch.setattr(recorded, "MIXED_SIZES", (16, 32))
    asks: list[Ask] = [([i * n % 251 for n in range(num_tokens // 2)], 4) for i in (1, 2, 3)]
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": num_tokens}
    sizes |= {"max_model_len": num_tokens, "enable_prefix_caching": False}
    expected = new_engine(folder, asks, [GREEDY], **sizes)
    expected.run()
    assert not expected.verdicts
    expected.runner.close()
    engine = new_engine(folder, asks, [GREEDY], **sizes)
    with taken():
        engine.run()
    assert set(engine.verdicts) == {Verdict.SHRUNK}
    check_answers(engine, expected)


class LargestResult(TorchDispatchMode):
    """Memory for results of up to so many bytes."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__()
        self._most_bytes = most_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **kwargs or {})
        is_new = not any(found.alias_info for found in func._schema.returns)
        if is_new and isinstance(out, torch.Tensor) and out.nbytes > self._most_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\n...")
        return out


def test_a_large_step_without_memory_is_computed_in_smaller_ones(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Where, "make", PromptDevice)
    folder = checkpoint("llama", 1, **TINY)
    # of gates and ups in float32, for a step of 40 tokens, and beside them attention's scores
    taken = partial(LargestResult, 40 * 2 * TINY["intermediate_size"] * 4)
    check_large_steps_without_memory(folder, monkeypatch, taken, 64)


def test_a_poisoned_row_fails_alone(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in the K of one row's first block, while all decode in recorded steps: its neighbours'
    answers are as ever, and so are those of later requests, which get its blocks."""
    folder = checkpoint("llama", 1, **TINY)
    asks = mixed_asks(4, 3, longest=14, output=(6, 8))
    sizes = {**TIGHT, "num_gpu_blocks_override": 20, "enable_prefix_caching": False}

    def ask_again(engine: SyncEngine) -> None:
        for i, (prompt, count) in enumerate(asks):
            engine.add(f"again{i}", prompt, count)
        engine.run()

    expected = new_engine(folder, asks, [GREEDY], **sizes)
    expected.run()
    ask_again(expected)
    engine = new_engine(folder, asks, [GREEDY], **sizes)
    runner: Any = engine.runner
    launch, places = runner.launch, dict[str, int]()

    def seen(plan: Plan) -> Any:
        places.update({join.request_id: join.blocks[0] for join in plan.joins})
        return launch(plan)

    monkeypatch.setattr(runner, "launch", seen)
    while min(map(len, engine.tokens.values())) < 3:
        engine.step()
    runner._device.main.run(lambda: runner._pool[places["r1"], :, 0].fill_(torch.nan))
    engine.run()
    ask_again(engine)
    finish = engine.finishes.pop(("r1", 0))
    assert finish.detail == "the model's logits are not finite"
    begun = engine.tokens.pop(("r1", 0))
    assert begun == expected.tokens.pop(("r1", 0))[: len(begun)]
    assert not engine.verdicts
    check_answers(engine, expected)
