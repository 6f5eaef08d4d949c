"""The device layer: streams, events, copies and recorded graphs, as the CUDA runner uses them.

Owns the three streams of a runner and what was recorded; knows no plan, no model and no pool. The
protocols are all that runner/cuda.py sees of a device; CudaDevice is what `--device cuda` makes,
and tests have one on the CPU that delays and reorders work as far as the protocols allow.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch
from numpy.typing import NDArray

from streamer.errors import ConfigError

CPU = torch.device("cpu")
PROBE_BYTES = 64 << 20


class Event(Protocol):
    """A point in a stream."""

    def is_done(self) -> bool:
        """Whether the stream has reached this point; does not wait."""
        ...

    def wait(self) -> None:
        """Block this thread until the stream has reached this point."""
        ...

    def since(self, earlier: Event) -> float:
        """Seconds by the device's clock between two points that are done."""
        ...


class Stream(Protocol):
    """Device work in order; only `wait` orders the work of two streams."""

    def run(self, work: Callable[[], None]) -> None:
        """Queue what `work` launches. `work` must not read host memory that changes later."""
        ...

    def record(self) -> Event:
        """The point after all work queued so far."""
        ...

    def wait(self, event: Event) -> None:
        """Work queued from now on starts after the event; the host does not wait."""
        ...


class Device(Protocol):
    """Where tensors are, and copies to and from there.

    where      torch's name of the device
    main       computes;  out, into: copies between the pools, beside the steps
    """

    @property
    def where(self) -> torch.device: ...
    @property
    def main(self) -> Stream: ...
    @property
    def out(self) -> Stream: ...
    @property
    def into(self) -> Stream: ...

    def upload(self, values: NDArray[Any]) -> torch.Tensor:
        """A copy on the device, queued in `main`; `values` may be changed at once."""
        ...

    def download(self, values: torch.Tensor) -> torch.Tensor:
        """A copy on the host, queued in `main`, to be read after an event recorded later."""
        ...

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run `work`; returns one launch that repeats it on the same tensors."""
        ...

    def free_bytes(self) -> int:
        """Memory of the device that is free, or kept by torch and unused."""
        ...

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """Run `work`; returns its peak of device memory above what was allocated before."""
        ...

    def probe_copy(self) -> tuple[float, float]:
        """(fixed seconds, seconds a byte) of a copy between host and device."""
        ...

    def synchronize(self) -> None:
        """Wait for everything queued, in all streams."""
        ...


def choose_device(
    setting: Literal["auto", "cpu", "cuda"], index: int | None = None
) -> torch.device:
    """The device that a Config names: `auto` is CUDA where torch sees one.

    index  of the GPU; None: torch's current one

    ConfigError if `cuda` is asked for and not available, or there are not so many GPUs.
    """
    is_there = setting != "cpu" and torch.cuda.is_available()
    if setting == "cuda" and not is_there:
        raise ConfigError(
            "device cuda: torch.cuda.is_available() is false (no GPU, no driver, or a torch built "
            "without CUDA)",
            param="device",
        )
    if not is_there:
        return CPU
    if index is not None and index >= (count := torch.cuda.device_count()):
        raise ConfigError(
            f"tensor_parallel_size: each rank needs a GPU of its own, and this host has {count}",
            param="tensor_parallel_size",
        )
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


@contextmanager
def memory_errors() -> Iterator[None]:
    """An allocation that fails raises MemoryError."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(str(error).partition("\n")[0]) from error


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocation failed: torch has a class for the device's memory alone, and reports
    pinned memory, which uploads and downloads take, as any other error of CUDA. cuBLAS, which takes
    a workspace, and Triton, which loads a kernel, have words of their own."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    says = str(error)
    if isinstance(error, torch.AcceleratorError) or says.startswith("Triton Error [CUDA]"):
        return "out of memory" in says
    return "DefaultCPUAllocator" in says or "CUBLAS_STATUS_ALLOC_FAILED" in says


class CudaEvent:
    """An Event of CUDA, with its time."""

    __slots__ = ("event",)

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def is_done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        """See Event; releases the GIL."""
        self.event.synchronize()

    def since(self, earlier: Event) -> float:
        return float(_own(earlier).event.elapsed_time(self.event)) / 1e3


class CudaStream:
    """A Stream of CUDA. The main stream is the thread's current one and needs no switch."""

    def __init__(self, stream: torch.cuda.Stream, is_current: bool) -> None:
        self.stream = stream
        self._is_current = is_current

    def run(self, work: Callable[[], None]) -> None:
        """See Stream: CUDA queues, so this calls `work` at once."""
        if self._is_current:
            work()
            return
        with torch.cuda.stream(self.stream):
            work()

    def record(self) -> CudaEvent:
        return CudaEvent(self.stream)

    def wait(self, event: Event) -> None:
        self.stream.wait_event(_own(event).event)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Garbage is not collected meanwhile, on any thread."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CudaDevice:
    """One GPU, for one runner, on one thread, whose current stream it sets."""

    def __init__(self, where: torch.device) -> None:
        gc.collect()  # a runner that was not closed is in cycles, and keeps its memory until then
        self.where = where
        torch.cuda.set_device(where)
        # Not the default stream, which waits for all others, as they do for it.
        streams = [torch.cuda.Stream(where) for _ in range(3)]  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(streams[0])
        self.main = CudaStream(streams[0], True)
        self.out, self.into = (CudaStream(stream, False) for stream in streams[1:])
        self._graphs_pool: Any = None

    def upload(self, values: NDArray[Any]) -> torch.Tensor:
        """See Device. torch keeps the pinned source until the copy is done, then reuses it."""
        return torch.from_numpy(values).pin_memory().to(self.where, non_blocking=True)

    def download(self, values: torch.Tensor) -> torch.Tensor:
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return host.copy_(values, non_blocking=True)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """See Device. All graphs share one pool of memory: they never run at the same time, and
        `work` holds what is read after the graph that wrote it."""
        work()  # compiles, and lets libraries take their workspaces outside of the graph
        torch.cuda.synchronize()
        if self._graphs_pool is None:
            self._graphs_pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # "thread_local": the event loop's thread may use CUDA meanwhile; this thread does not. To
        # destroy a graph is a use, and fails the capture: a collection of garbage may have one.
        with (
            _no_collections(),
            torch.cuda.graph(
                graph,
                pool=self._graphs_pool,
                stream=self.main.stream,  # whose workspaces are there already
                capture_error_mode="thread_local",
            ),
        ):
            work()
        return graph.replay

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.where)[0]

    def peak_bytes(self, work: Callable[[], None]) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(self.where)
        torch.cuda.reset_peak_memory_stats(self.where)
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(self.where) - before

    def probe_copy(self) -> tuple[float, float]:
        """See Device: a tiny pinned copy, and one of PROBE_BYTES, each the best of three."""
        host = torch.empty(PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
        there = torch.empty_like(host, device=self.where)

        def seconds(num_bytes: int) -> float:
            began = self.main.record()
            there[:num_bytes].copy_(host[:num_bytes], non_blocking=True)
            ended = self.main.record()
            ended.wait()
            return ended.since(began)

        fixed, large = (min(seconds(n) for _ in range(3)) for n in (64, PROBE_BYTES))
        return fixed, max(large - fixed, 1e-6) / PROBE_BYTES

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.where)


def _own(event: Event) -> CudaEvent:
    if not isinstance(event, CudaEvent):
        raise TypeError(f"{event!r} is no event of CUDA")
    return event
