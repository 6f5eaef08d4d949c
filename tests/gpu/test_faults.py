"""Faults of a step on a CUDA device: the suite of tests/model/runner, and memory that really ends.

An error of the device that stays (an illegal access) is not among them: it ends the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from tests.gpu.on_device import require_cuda

require_cuda()

from streamer.model.runner.device import CudaDevice  # noqa: E402
from tests.model.conftest import checkpoint  # noqa: E402
from tests.model.runner.test_cuda import TINY  # noqa: E402
from tests.model.runner.test_faults import (  # noqa: E402
    check_large_steps_without_memory,
    test_a_launch_without_memory_shrinks_the_step_and_fails_nobody,
    test_a_poisoned_row_fails_alone,
    test_a_step_that_raises_changes_no_token,
)
from tests.model.where import Where  # noqa: E402

__all__ = [
    "checkpoint",
    "test_a_launch_without_memory_shrinks_the_step_and_fails_nobody",
    "test_a_poisoned_row_fails_alone",
    "test_a_step_that_raises_changes_no_token",
]

WHERE = torch.device("cuda", 0)
# A step of 2,048 tokens has 2,048 x 2 x 32,768 gates and ups in float32, 512 MiB, and half of that
# behind the activation; one of 256 has 96 MiB.
TOKENS, INNER, LEFT_BYTES = 2048, 32_768, 320 << 20
LARGEST_BYTES = TOKENS * 2 * INNER * 4
WIDE = {**TINY, "intermediate_size": INNER, "max_position_embeddings": TOKENS}
SPARE_BYTES = 1 << 30  # of which the tensor takes all but LEFT_BYTES


@pytest.fixture(autouse=True)
def _on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Where, "make", partial(CudaDevice, WHERE))


@contextmanager
def memory_taken() -> Iterator[None]:
    """A tensor takes all but LEFT_BYTES of what this process may have: that is limited, since other
    tests run on the device at the same time.

    A capture that failed earlier in the process would keep what torch has cached, and with it the
    memory of a large step: torch empties no cache while it believes that one goes on."""
    torch.cuda.synchronize(WHERE)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(WHERE).total_memory
    most = torch.cuda.memory_reserved(WHERE) + SPARE_BYTES
    torch.cuda.set_per_process_memory_fraction(min(1.0, most / total), WHERE)
    held = torch.empty(SPARE_BYTES - LEFT_BYTES, dtype=torch.uint8, device=WHERE)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(LARGEST_BYTES, dtype=torch.uint8, device=WHERE)
        yield
    finally:
        del held
        torch.cuda.set_per_process_memory_fraction(1.0, WHERE)


def test_a_step_whose_memory_ends_is_computed_in_smaller_ones(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the device's allocator says so, in whichever operation that is."""
    check_large_steps_without_memory(
        checkpoint("llama", 1, **WIDE), monkeypatch, memory_taken, TOKENS
    )
