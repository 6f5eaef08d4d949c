"""The suites of tests/kernels on a CUDA device; skipped as a whole where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from streamer.kernels import ops
from tests.gpu.on_device import OnDevice


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One reason for all of them."""
    if torch.cuda.is_available():
        return
    reason = "torch.cuda.is_available() is false here: there is no CUDA device to run kernels on"
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> str:
    """The ops of tests/kernels, on the device."""
    from streamer.kernels.gpu import backend as gpu

    monkeypatch.setattr(ops, "_backend", OnDevice(gpu, "cuda"))
    return "cuda"


@pytest.fixture
def device() -> str:
    """Where tests that know the GPU's kernels by name run them."""
    return "cuda"
