"""The backends that every test of the ops runs on: those of tests/conftest.py, and the GPU's."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from streamer.kernels import ops, reference


@pytest.fixture(params=["torch", "native", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The ops' backend for this test; "triton" is the GPU's, in Triton's interpreter."""
    yield from use(request.param, monkeypatch)


@pytest.fixture(params=["torch", "triton"])
def quantizing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Like `backend`, of those that have INT8 and FP8 pools."""
    yield from use(request.param, monkeypatch)


def use(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The backend of that name is the ops' own until the generator goes on."""
    module: Any = reference
    if name == "native":
        if ops.why_not_native:
            pytest.fail(f"the native kernels do not compile here: {ops.why_not_native}")
        from streamer.kernels.cpu import native as module
    elif name == "triton":
        skip_without_interpreter()
        from streamer.kernels.gpu import backend as module
    monkeypatch.setattr(ops, "_backend", module)
    # The interpreter computes with numpy, which warns of what a GPU does in silence.
    with np.errstate(all="ignore"):
        yield name


def skip_without_interpreter() -> None:
    """Where Triton can't interpret CPU tensors in this process."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("there is no triton for this platform")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("this machine has a GPU: tests/gpu runs these kernels compiled")
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        pytest.skip("the interpreter of Triton before 3.7 can't count a loop with numpy 2.4")


@pytest.fixture
def device() -> Iterator[str]:
    """Where tests that know the GPU's kernels by name run them: here, interpreted."""
    skip_without_interpreter()
    with np.errstate(all="ignore"):
        yield "cpu"
