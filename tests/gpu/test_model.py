"""tests/model's suites on a CUDA device: plans by hand, parity, preemption, seeds; and races.

The same functions, with runners made on CUDA, for a family of each path through the kernels and one
seed, since each runner records its steps. Bit equality between batch shapes is not tested: cuBLAS
chooses its kernel by the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.gpu.on_device import require_cuda

require_cuda()

from streamer.kernels import reference as plain  # noqa: E402
from streamer.model.runner import recorded  # noqa: E402
from streamer.model.runner.device import CudaDevice, CudaStream  # noqa: E402
from streamer.model.runner.recorded import RecordedMixed  # noqa: E402
from tests.gpu.few_sizes import record_few  # noqa: E402
from tests.model import test_parity as parity  # noqa: E402
from tests.model.conftest import checkpoint, reference  # noqa: E402
from tests.model.runner import test_cpu as by_hand  # noqa: E402
from tests.model.runner.test_cpu import (  # noqa: E402
    test_a_fork_without_its_parents_prompt,
    test_a_nan_row_fails_alone,
    test_a_plan_without_rows,
    test_recompute,
    test_results_are_ascending_and_numbered,
    test_swap_needs_its_copies,
    test_swap_out_and_in,
    test_wrong_plans,
)
from tests.model.runner.test_cuda import KINDS, SWAP, serve, tokens_of  # noqa: E402
from tests.model.sampling.test_seeded import *  # noqa: E402, F403
from tests.model.sync_engine import GREEDY  # noqa: E402
from tests.model.test_parity import oracle  # noqa: E402
from tests.model.where import Where  # noqa: E402

__all__ = [
    "checkpoint",
    "oracle",
    "reference",
    "test_a_fork_without_its_parents_prompt",
    "test_a_nan_row_fails_alone",
    "test_a_plan_without_rows",
    "test_recompute",
    "test_results_are_ascending_and_numbered",
    "test_swap_needs_its_copies",
    "test_swap_out_and_in",
    "test_wrong_plans",
]

WHERE = torch.device("cuda", 0)
SLEEP_CYCLES = 3_000_000  # 1.5 to 2 ms, longer than several steps of a tiny model
KINDS_OF_MODELS = ["llama", "qwen3", "gemma3_text"]  # plain; norms of heads; windows too


@pytest.fixture(autouse=True)
def _on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Where, "make", partial(CudaDevice, WHERE))
    record_few(monkeypatch)


@pytest.mark.parametrize(
    ("family", "overrides"), by_hand.FAMILIES, ids=[family for family, _ in by_hand.FAMILIES]
)
def test_greedy_equals_transformers(
    checkpoint: Any, reference: Any, family: str, overrides: dict[str, Any]
) -> None:
    by_hand.test_greedy_equals_transformers(checkpoint, reference, family, overrides, 0)


@pytest.mark.parametrize("family", KINDS_OF_MODELS)
def test_16_requests_in_one_batch_with_chunked_prefill(
    checkpoint: Any, oracle: Any, record_property: Any, family: str
) -> None:
    parity.test_16_requests_in_one_batch_with_chunked_prefill(
        checkpoint, oracle, record_property, family, 0
    )


@pytest.mark.parametrize(
    ("family", "policy"),
    [("llama", "swap"), ("llama", "recompute"), ("qwen3", "mixed"), ("gemma3_text", "mixed")],
)
def test_64_requests_in_a_pool_that_preempts_at_least_50_times(
    checkpoint: Any, oracle: Any, record_property: Any, family: str, policy: str
) -> None:
    parity.test_64_requests_in_a_pool_that_preempts_at_least_50_times(
        checkpoint, oracle, record_property, family, policy, 0
    )


@pytest.mark.parametrize("family", KINDS_OF_MODELS)
def test_prefix_hits_change_no_token(
    checkpoint: Any, oracle: Any, record_property: Any, family: str
) -> None:
    parity.test_prefix_hits_change_no_token(checkpoint, oracle, record_property, family, 0)


@pytest.mark.parametrize(
    ("family", "costs"),
    [("llama", parity.SWAP), ("llama", parity.RECOMPUTE), ("gemma3_text", parity.SWAP)],
    ids=["llama-swap", "llama-recompute", "gemma3_text-swap"],
)
def test_four_forks_of_a_prefill_through_preemption(
    checkpoint: Any, reference: Any, oracle: Any, record_property: Any, family: str,
    costs: dict[str, float],
) -> None:  # fmt: skip
    parity.test_four_forks_of_a_prefill_through_preemption(
        checkpoint, reference, oracle, record_property, family, 0, costs
    )


class SlowStream(CudaStream):
    """All work queued here sleeps first; a copy's destination is overwritten at once."""

    def run(self, work: Callable[[], None]) -> None:
        """See CudaStream."""
        if isinstance(work, partial) and work.func is plain.swap_blocks:
            _, destination, pairs = work.args
            with torch.cuda.stream(torch.cuda.default_stream(WHERE)):
                destination[[block for _, block in pairs]] = torch.nan
            torch.cuda.default_stream(WHERE).synchronize()

        def late() -> None:
            torch.cuda._sleep(SLEEP_CYCLES)
            work()

        super().run(late)


class SlowCuda(CudaDevice):
    """CUDA with streams that are slow: "copies" or "steps"."""

    def __init__(self, slow: str) -> None:
        super().__init__(WHERE)
        if slow == "steps":
            self.main = SlowStream(self.main.stream, True)
        else:
            self.out = SlowStream(self.out.stream, False)
            self.into = SlowStream(self.into.stream, False)


@pytest.mark.parametrize("policy", ["swap", "mixed"])
@pytest.mark.parametrize("slow", ["copies", "steps"])
def test_swaps_race_with_replays(
    checkpoint: Any, oracle: Any, record_property: Any, monkeypatch: pytest.MonkeyPatch,
    slow: str, policy: str,
) -> None:  # fmt: skip
    """It would show blocks that are freed while a step or a copy still uses them."""
    monkeypatch.setattr(Where, "make", partial(SlowCuda, slow))
    parity.test_64_requests_in_a_pool_that_preempts_at_least_50_times(
        checkpoint, oracle, record_property, "llama", policy, 0
    )


def test_every_kind_of_row_is_drawn_alike_under_races(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draws, penalties, bias, forks and log probabilities, alone and through slow swaps."""
    folder = checkpoint("llama", 1)
    asks = parity.mixed_asks(4, 12, longest=14, output=(14, 20))
    alone = serve(folder, asks, KINDS, max_num_seqs=16)
    monkeypatch.setattr(Where, "make", partial(SlowCuda, "copies"))
    pressed = serve(
        folder, asks, KINDS, costs=SWAP, num_gpu_blocks_override=14, max_num_seqs=6,
        max_num_batched_tokens=24, block_size=8, max_model_len=48,
    )  # fmt: skip
    assert pressed.preemptions[0] >= 1
    assert pressed.tokens == alone.tokens


def test_recorded_steps_with_chunks_have_transformers_tokens(
    checkpoint: Any, oracle: Any, record_property: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replayed for as many tokens as are in them, and op by op beyond the largest size."""
    given: list[int] = []
    pack = RecordedMixed.pack

    def seen(self: Any, tokens: Any, *more: Any) -> Any:
        given.append(len(tokens))
        return pack(self, tokens, *more)

    monkeypatch.setattr(RecordedMixed, "pack", seen)
    monkeypatch.setattr(recorded, "MIXED_SIZES", (16, 32))
    folder = checkpoint("llama", 1)
    asks = parity.mixed_asks(2, 24, longest=60, output=(4, 12))
    engine = serve(folder, asks, [GREEDY], max_num_seqs=8, max_num_batched_tokens=64)
    assert given
    assert max(given) <= 32
    oracle(folder).compare(tokens_of(engine, asks), asks, record_property)
