"""The suites of tests/kernels on a CUDA device; a file is skipped whole where there is none."""

from __future__ import annotations

import pytest

from streamer.kernels import ops
from tests.gpu.on_device import OnDevice


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> str:
    """The ops of tests/kernels, on the device."""
    from streamer.kernels.gpu import backend as gpu

    monkeypatch.setattr(ops, "_backend", OnDevice(gpu, "cuda"))
    return "cuda"


@pytest.fixture
def quantizing(backend: str) -> str:
    """The backends that have INT8 and FP8 pools: here all of them."""
    return backend


@pytest.fixture
def device() -> str:
    """Where tests that know the GPU's kernels by name run them."""
    return "cuda"
