"""The backends that every test of the ops runs on: those of tests/conftest.py, and the GPU's."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import numpy as np
import pytest

from streamer.kernels import ops, reference
from tests.kernels.interpreter import patch_once


@pytest.fixture(params=["torch", "native", "triton"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The backend that `kernels` is; "triton" is the GPU's, in Triton's interpreter."""
    yield from use(request.param)


@pytest.fixture
def kernels(backend: str) -> ops.Backend:
    """The ops of backend `backend`."""
    return ops_of(backend)


def use(name: str) -> Iterator[str]:
    """Set the environment in which the backend of that name can be used."""
    if name == "native" and (why := ops.why_not_native()):
        pytest.fail(f"the native kernels do not compile here: {why}")
    if name == "triton":
        skip_without_interpreter()
    # The interpreter computes with numpy, which warns of what a GPU does without a warning.
    with np.errstate(all="ignore"):
        yield name


def ops_of(name: str) -> ops.Backend:
    """The backend of that name."""
    if name == "native":
        from streamer.kernels.cpu import native

        return native
    if name == "triton":
        from streamer.kernels.gpu import backend

        return backend
    return reference


def skip_without_interpreter() -> None:
    """Skip the test where Triton can't interpret CPU tensors in this process."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("there is no triton for this platform")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("this machine has a GPU: tests/gpu runs these kernels compiled")
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        pytest.skip("the interpreter of Triton before 3.7 can't count a loop with numpy 2.4")
    patch_once()


@pytest.fixture
def device() -> Iterator[str]:
    """Where tests that know the GPU's kernels by name run them: here, interpreted."""
    skip_without_interpreter()
    with np.errstate(all="ignore"):
        yield "cpu"
