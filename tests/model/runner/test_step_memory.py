"""What a step of a GPU takes of its memory, against what was set aside for the largest one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from streamer.core.plan import Plan
from streamer.core.sampling import SamplingParams
from tests.model.late_device import LateDevice
from tests.model.runner.test_cuda import TINY, Late, PromptDevice, late
from tests.model.sync_engine import END, SyncEngine
from tests.model.test_speculation import TOKEN_BYTES
from tests.model.where import Where

pytestmark = pytest.mark.usefixtures("late")
__all__ = ["late"]

VOCABULARY = 2048  # what takes most of the memory


class Peak(TorchDispatchMode):
    """The most bytes that operations held at once, of memory that they took."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.most = 0
        self._known: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for storage in _storages((args, kwargs)):
            self._known[storage] = None
        out = func(*args, **kwargs or {})
        for storage in _storages(out):
            if storage not in self._known:
                self._known[storage] = None
                self.held += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.most = max(self.most, self.held)
        return out

    def _free(self, num_bytes: int) -> None:
        self.held -= num_bytes


def _storages(found: Any) -> list[torch.UntypedStorage]:
    """Of all tensors in it but packed weights, which have none."""
    tensors = (x for x in tree_leaves(found) if isinstance(x, torch.Tensor))
    return [x.untyped_storage() for x in tensors if x.layout is torch.strided]


def test_no_step_takes_more_memory_than_the_largest_that_was_tried(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch, late: Late
) -> None:
    """Where all rows have penalties, a bias, a grammar and log probabilities, beside scores, and
    the vocabulary is what takes memory."""
    from streamer.kernels.gpu.sampling import sample

    monkeypatch.setattr(Where, "make", PromptDevice)
    monkeypatch.setattr(sample, "sample", lambda logits, *_, **__: logits.max(-1)[1])
    tried: list[int] = []

    def peak_bytes(self: LateDevice, work: Callable[[], None]) -> int:
        with Peak() as peak:
            work()
        tried.append(peak.most)
        return peak.most

    monkeypatch.setattr(LateDevice, "peak_bytes", peak_bytes)
    folder = checkpoint("llama", 1, **TINY, vocab_size=VOCABULARY)
    engine = SyncEngine(
        folder, token_bytes=TOKEN_BYTES * (VOCABULARY // 256), max_num_seqs=8,
        max_num_batched_tokens=16, max_model_len=64,
    )  # fmt: skip
    launch, most = engine.runner.launch, 0

    def measured(plan: Plan) -> Any:
        nonlocal most
        with Peak() as peak:
            flight = launch(plan)
        most = max(most, peak.most)
        return flight

    monkeypatch.setattr(engine.runner, "launch", measured)
    params = SamplingParams(
        repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.1, logprobs=5,
        logit_bias={5: 2.0}, min_tokens=3, structured_outputs={"regex": "([a-g]{2})*"},
        prompt_logprobs=3,
    )  # fmt: skip
    for i in range(8):
        engine.add(f"r{i}", [5 + i] * 2, 4, params, stop_ids=frozenset([END]))
    engine.run()
    assert engine.widest == 8
    counts = 8 * VOCABULARY * 4  # TokenCounts, which the runner holds since before the first step
    assert counts < most <= tried[0] - counts + counts // 4  # which ids and bits may take
