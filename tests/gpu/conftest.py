"""The suites of tests/kernels on a CUDA device; a file is skipped whole where there is none."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.on_device import OnDevice


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    """The name of `kernels`, in tests/kernels' suites."""
    if getattr(request, "param", "cuda") != "cuda":
        pytest.skip("of another backend alone")
    return "cuda"


@pytest.fixture
def kernels() -> Any:
    """The ops of tests/kernels, on the device."""
    from streamer.kernels.gpu import backend

    return OnDevice(backend, "cuda")


@pytest.fixture
def device() -> str:
    """Where tests that know the GPU's kernels by name run them."""
    return "cuda"
