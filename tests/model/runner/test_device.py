"""The device layer without a GPU: which device a Config gets, and what the stand-in promises."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from streamer.errors import ConfigError
from streamer.model.runner.device import CudaDevice, choose_device, memory_errors
from tests.model.late_device import LateDevice


def test_auto_takes_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cpu` never takes a GPU; `cuda` without one is refused before anything is loaded."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto").type == choose_device("cpu").type == "cpu"
    with pytest.raises(ConfigError, match="is_available") as refused:
        choose_device("cuda")
    assert refused.value.param == "device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda", 0)
    assert choose_device("cpu").type == "cpu"


@pytest.mark.parametrize("seed", range(5))
def test_late_devices_keep_the_order_that_events_give(seed: int) -> None:
    """Order holds within a stream; between streams only where one waits for the other's event."""
    device, done = LateDevice(seed), list[str]()
    device.main.run(partial(done.append, "main 1"))
    device.out.wait(device.main.record())
    device.out.run(partial(done.append, "out"))
    device.main.run(partial(done.append, "main 2"))
    event = device.out.record()
    event.wait()
    assert done.index("main 1") < done.index("out")
    device.synchronize()
    assert done.index("main 1") < done.index("main 2")
    assert len(done) == 3


def test_an_upload_is_what_was_there_when_it_was_asked_for() -> None:
    """The host may change its array after the call; the device gets the old values, later."""
    device = LateDevice()
    device.is_still = True
    values = np.arange(4)
    there = device.upload(values)
    values[:] = 9
    assert there.tolist() != [0, 1, 2, 3]
    device.synchronize()
    assert there.tolist() == [0, 1, 2, 3]


NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: not enough memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
]
OTHERS = [
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
]


@pytest.mark.parametrize("error", NO_MEMORY, ids=str)
def test_whatever_has_no_memory_is_a_memory_error(error: RuntimeError) -> None:
    """As torch, cuBLAS and Triton say it; its first line is kept."""
    with pytest.raises(MemoryError) as raised, memory_errors():
        raise error
    assert str(raised.value) == str(error).partition("\n")[0]


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_other_errors_of_a_device_stay_what_they_are(error: RuntimeError) -> None:
    """They may have ended its context."""
    with pytest.raises(RuntimeError) as raised, memory_errors():
        raise error
    assert raised.value is error


class Captures:
    """torch.cuda's graphs without a GPU: graphs that are freed, and whether in a capture."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.freed: list[bool] = []
        self.is_capturing = False
        captures = self

        class Graph:
            replay = None

            def __del__(self) -> None:
                captures.freed.append(captures.is_capturing)

        for name in ("set_device", "set_stream", "synchronize", "Stream", "graph_pool_handle"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", self.capture)

    @contextmanager
    def capture(self, *_: Any, **__: Any) -> Iterator[None]:
        self.is_capturing = True
        try:
            yield
        finally:
            self.is_capturing = False

    def leave(self) -> None:
        """A graph that only the collector frees, as those of a runner that was not closed."""
        cycle: list[Any] = [torch.cuda.CUDAGraph()]
        cycle.append(cycle)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[Captures]:
    thresholds = gc.get_threshold()
    gc.collect()
    yield Captures(monkeypatch)
    gc.set_threshold(*thresholds)


def test_graphs_of_an_engine_that_is_gone_are_freed_before_the_next_ones_memory_is_measured(
    captures: Captures,
) -> None:
    captures.leave()
    CudaDevice(torch.device("cuda", 0))
    assert captures.freed == [False]


@pytest.mark.parametrize("is_enabled", [True, False])
def test_no_garbage_is_collected_while_a_graph_is_recorded(
    captures: Captures, is_enabled: bool
) -> None:
    """A graph freed there would fail the capture; afterwards the collector is as it was."""
    device = CudaDevice(torch.device("cuda", 0))

    def work() -> None:
        captures.leave()
        if captures.is_capturing:
            gc.set_threshold(1, 1, 1)
            assert len([[n] for n in range(10_000)]) == 10_000
            raise ValueError("no kernel")

    if not is_enabled:
        gc.disable()
    try:
        with pytest.raises(ValueError, match="no kernel"):
            device.record(work)
        assert gc.isenabled() is is_enabled
    finally:
        gc.enable()
    assert not any(captures.freed)
    gc.collect()
    assert len(captures.freed) >= 2
