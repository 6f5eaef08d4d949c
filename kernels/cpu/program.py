"""Ops as records that the native team runs: one at a time, or many, recorded and run in one call.

A recorded Program is what a CUDA graph is on a GPU: the Python that issues the ops runs once, on
buffers of the largest step; a step is then one call that releases the GIL once, with the numbers
of rows as its only arguments. Buffers whose lifetimes do not overlap share memory. A program may
begin on the other threads before its caller is there; whatever else runs ends it. Owns the team of
threads; contains no op. Called by native.py.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import struct
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from streamer.kernels.cpu.library import load

ALIGN = 64
MAX_OPS = 4095
NUM_POINTERS, NUM_INTEGERS, NUM_FLOATS = 10, 8, 4
# struct Op of common.h
OP = np.dtype(
    [
        ("kind", np.int32),
        ("count", np.int32),
        ("dtype", np.int32),
        ("flags", np.int32),
        ("p", np.int64, NUM_POINTERS),
        ("n", np.int64, NUM_INTEGERS),
        ("f", np.float32, NUM_FLOATS),
    ]
)
RECORD = struct.Struct(f"=4i{NUM_POINTERS + NUM_INTEGERS}q{NUM_FLOATS}f")  # the same fields
DTYPES = {torch.float32: 0, torch.bfloat16: 1}


class Kind(IntEnum):
    """Ops in the order of team.c's table."""

    LINEAR = 0
    ATTENTION = 1
    EMBEDDING = 2
    NORM = 3
    ROPE = 4
    STORE = 5
    COPY = 6
    BEST = 7
    DRAW = 8
    QUANTIZE = 9
    QUANTIZED_LINEAR = 10
    DENSE_ROWS = 11
    QUANTIZED_ROWS = 12
    PACK = 13
    PACK_QUANTIZED = 14
    UNPACK = 15
    FIT = 16
    ROUND = 17
    BAN = 18
    TOP = 19


class Count(IntEnum):
    """The counts of a step that bound the rows of its tensors, in the order of common.h."""

    TOKENS = 0
    DRAWN = 1
    TILES = 2


COUNTS = struct.Struct(f"={len(Count)}q")


class Call:
    """One op with its arguments; `rows` is the tensor whose rows bound it."""

    __slots__ = ("dtype", "flags", "floats", "integers", "kind", "pointers", "rows")

    def __init__(
        self,
        kind: Kind,
        rows: torch.Tensor,
        dtype: torch.dtype,
        pointers: Sequence[torch.Tensor | None],
        integers: Sequence[int],
        floats: Sequence[float] = (),
        flags: int = 0,
    ) -> None:
        self.kind = kind
        self.rows = rows
        self.dtype = dtype
        self.pointers = pointers
        self.integers = integers
        self.floats = floats
        self.flags = flags

    def record(self, count: Count) -> bytes:
        """The op as a record of dtype OP (numpy takes four times as long to fill one)."""
        pointers = [0 if t is None else t.data_ptr() for t in self.pointers]
        return RECORD.pack(
            self.kind,
            count,
            DTYPES[self.dtype],
            self.flags,
            *_padded(pointers, NUM_POINTERS),
            *_padded(self.integers, NUM_INTEGERS),
            *_padded(self.floats, NUM_FLOATS),
        )


def _padded(values: Sequence[float], size: int) -> tuple[float, ...]:
    return (*values, *(0,) * (size - len(values)))


class Team:
    """The threads, opened on first use; one run at a time has all of them."""

    def __init__(self) -> None:
        self._library: Any = load()
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        for name, arguments, result in (
            ("team_open", [ctypes.c_int], pointer),
            ("team_close", [pointer], None),
            ("team_run", [pointer, pointer, size, pointer], None),
            ("team_begin", [pointer, pointer, size, pointer], None),
            ("team_join", [pointer], None),
            ("team_stop", [pointer], None),
        ):
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, result
        self.lanes = int(self._library.lanes())
        self._threads = 1
        self._forget()
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self.stop)  # before Python frees what the threads read

    def _forget(self) -> None:
        """There are no threads: a forked process has none, and none to give back the lock."""
        self._handle: int | None = None
        self._begun: object = None  # who owns the memory that threads are in, which it keeps
        self._lock = threading.Lock()  # two engines may live in one process

    def set_threads(self, count: int) -> None:
        """Threads of the team from the next run on, the caller's included."""
        with self._lock:
            self._stop()
            if self._handle is not None and count != self._threads:
                self._library.team_close(self._handle)
                self._handle = None
            self._threads = count

    @property
    def has_others(self) -> bool:
        """Whether there are threads beside the caller's."""
        return self._threads > 1

    def run(self, ops: int | bytes, num_ops: int, counts: int | bytes) -> None:
        """Run records with the counts, each bytes or an address; the GIL is released."""
        with self._lock:
            self._stop()
            self._library.team_run(self._opened(), ops, num_ops, counts)

    def begin(self, owner: object, ops: int, num_ops: int, counts: int) -> None:
        """Let the other threads run the records at these addresses, whose memory is the owner's;
        whatever else is run, begun or stopped ends that. One thread runs them when it joins."""
        with self._lock:
            self._stop()
            team = self._opened()
            self._begun = owner  # first: a signal's handler may raise after any line
            self._library.team_begin(team, ops, num_ops, counts)

    def join(self, owner: object) -> bool:
        """Take part in what was begun for this owner, to its end; False: it does not run."""
        with self._lock:
            if self._begun is not owner:
                return False
            self._library.team_join(self._handle)
            self._begun = None
            return True

    def stop(self) -> None:
        """End what was begun: no thread is in memory of a program any more."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        if self._begun is not None:
            self._library.team_stop(self._handle)
            self._begun = None

    def _opened(self) -> int:
        if self._handle is None:
            self._handle = self._library.team_open(self._threads)
            if self._handle is None:
                raise MemoryError("no memory for the kernels' threads")
        return self._handle


class _ThisThread(threading.local):
    """The program that this thread records, if any."""

    recording: Program | None = None


team = Team()
_this_thread = _ThisThread()


def issue(call: Call) -> None:
    """Run the op now, or add it to the program that this thread records."""
    recording = _this_thread.recording
    if recording is not None:
        recording.add(call)
        return
    num_rows = call.rows.shape[0]
    team.run(call.record(Count.TOKENS), 1, COUNTS.pack(num_rows, num_rows, num_rows))


class Again(threading.local):
    """The latest op of a thread that comes again and again with the same tensor, as what is drawn
    from a decode's logits: to pack it, and to allocate its results, each time took twice as long as
    the op itself, 17 us with cold caches (2 cores of an EPYC Zen 5, 2026-11-23).

    results  of the latest run, which the next one overwrites
    """

    def __init__(self) -> None:
        self._of: Callable[[], torch.Tensor | None] = lambda: None
        self._record = self._counts = b""
        self.results: tuple[torch.Tensor, ...] = ()

    def is_of(self, x: torch.Tensor) -> bool:
        """Whether it was kept for this tensor."""
        return self._of() is x

    def keep(self, x: torch.Tensor, call: Call, results: tuple[torch.Tensor, ...]) -> None:
        """From now on `run` runs this call on x."""
        if _this_thread.recording is not None:
            raise ValueError("an op that is kept can't be recorded")
        num_rows = call.rows.shape[0]
        self._record = call.record(Count.TOKENS)
        self._counts = COUNTS.pack(num_rows, num_rows, num_rows)
        self._of, self.results = weakref.ref(x), results

    def run(self) -> None:
        team.run(self._record, 1, self._counts)


def new_rows(like: torch.Tensor, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor [rows of `like`, *shape] for an op to write."""
    out = torch.empty((like.shape[0], *shape), dtype=dtype)
    recording = _this_thread.recording
    if recording is not None:
        recording.own(out, recording.count_of(like))
    return out


class _Region:
    """Memory of one recorded tensor: [start, end) where it was recorded, ops first to last."""

    __slots__ = ("count", "end", "first", "is_input", "last", "place", "start", "tensor")

    def __init__(self, tensor: torch.Tensor, count: Count, first: int, is_input: bool) -> None:
        self.tensor = tensor
        self.start = tensor.data_ptr()
        self.end = self.start + max(1, tensor.numel() * tensor.element_size())
        self.count = count
        self.first = self.last = first
        self.is_input = is_input
        self.place = 0  # offset in the arena


class Program:
    """Recorded ops. `record` makes one; `run` runs it, as `begin` and `join` do.

    ops  the records, which may be changed between two runs
    """

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._regions: list[_Region] = []  # by start
        self._counts = np.zeros(len(Count), np.int64)
        self.ops: NDArray[np.void] = np.zeros(0, OP)
        self._addresses = (0, 0, 0)  # of ops, their number, of counts: asking numpy takes 1 us
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._out = self._shown = torch.empty(0)
        self._num_shown = -1  # rows of the output that the latest run returned

    @classmethod
    def record(
        cls, inputs: Mapping[Count, Sequence[torch.Tensor]], body: Callable[[], torch.Tensor]
    ) -> Program:
        """Record the ops that `body` issues; the tensor it returns is the program's output. Rows of
        its tensors follow those of `inputs`, which keep their memory."""
        program = cls()
        with program._open():
            for count, tensors in inputs.items():
                for tensor in tensors:
                    program.own(tensor, count, is_input=True)
            out = body()
        program._place(out)
        return program

    @contextmanager
    def _open(self) -> Iterator[None]:
        _this_thread.recording = self
        try:
            yield
        finally:
            _this_thread.recording = None

    def own(self, tensor: torch.Tensor, count: Count, *, is_input: bool = False) -> None:
        """Note the memory of a tensor whose rows follow `count`."""
        region = _Region(tensor, count, len(self._calls), is_input)
        self._regions.insert(self._index(region.start), region)

    def count_of(self, tensor: torch.Tensor) -> Count:
        """The count that the rows of a recorded tensor, or of a view of one, follow."""
        region = self._find(tensor.data_ptr())
        if region is None:
            raise ValueError("a recorded op was given a tensor that is no part of the recording")
        return region.count

    def add(self, call: Call) -> None:
        """Add an op; the tensors it touches live at least until it has run."""
        for tensor in call.pointers:
            region = None if tensor is None else self._find(tensor.data_ptr())
            if region is not None:
                region.last = len(self._calls)
        self._calls.append(call)

    def run(self, counts: Sequence[int]) -> torch.Tensor:
        """Run all ops with these numbers of rows, in the order of Count -> the output's rows."""
        team.stop()  # it may be this program that was begun, with other counts
        self._counts[:] = counts
        team.run(*self._addresses)
        return self._output(counts)

    def begin(self, counts: Sequence[int], owner: object) -> None:
        """Let the other threads run all ops with these numbers of rows; nothing of it may run yet.

        owner  of the program and of all else that its ops read; kept until that has ended
        """
        self._counts[:] = counts
        team.begin(owner, *self._addresses)

    def join(self, counts: Sequence[int], owner: object) -> torch.Tensor | None:
        """Take part in what was begun with these -> the output's rows; None: something else has
        ended it."""
        return self._output(counts) if team.join(owner) else None

    def _output(self, counts: Sequence[int]) -> torch.Tensor:
        num_rows = counts[self._out_count]
        if num_rows != self._num_shown:  # a slice takes 6 us between two steps, with cold caches
            self._num_shown, self._shown = num_rows, self._out[:num_rows]
        return self._shown

    def _index(self, address: int) -> int:
        return bisect_right(self._regions, address, key=lambda r: r.start)

    def _find(self, address: int) -> _Region | None:
        i = self._index(address) - 1
        return self._regions[i] if i >= 0 and address < self._regions[i].end else None

    def _place(self, out: torch.Tensor) -> None:
        """Place the buffers in the arena; those whose lifetimes do not overlap share memory."""
        result = self._find(out.data_ptr())
        if result is None:
            raise ValueError("the recorded function returned something it did not compute")
        if len(self._calls) > MAX_OPS:
            raise ValueError(f"{len(self._calls)} ops exceed the {MAX_OPS} that team.c can count")
        result.last = len(self._calls)
        self._out_count = result.count
        placed: list[_Region] = []
        for region in sorted(self._regions, key=lambda r: r.first):
            if region.is_input:
                continue
            placed = [r for r in placed if r.last >= region.first]
            region.place = _lowest_gap(placed, region.end - region.start)
            placed.append(region)
        ends = [r.place + r.end - r.start for r in self._regions if not r.is_input]
        self._arena = torch.from_numpy(np.zeros(max(ends) + ALIGN, np.uint8))
        base = -(-self._arena.data_ptr() // ALIGN) * ALIGN
        records = b"".join(call.record(self.count_of(call.rows)) for call in self._calls)
        self.ops = np.frombuffer(records, OP).copy()
        for op in self.ops:
            for i, address in enumerate(op["p"].tolist()):
                region_of = self._find(address) if address else None
                if region_of is not None and not region_of.is_input:
                    op["p"][i] = base + region_of.place + address - region_of.start
        self._addresses = (self.ops.ctypes.data, len(self.ops), self._counts.ctypes.data)
        start = base - self._arena.data_ptr() + result.place
        flat = self._arena[start : start + out.numel() * out.element_size()]
        self._out = flat.view(out.dtype).view(out.shape)
        self._keep = [t for c in self._calls for t in c.pointers if self._is_outside(t)]
        self._keep += [r.tensor for r in self._regions if r.is_input]
        self._calls, self._regions = [], []

    def _is_outside(self, tensor: torch.Tensor | None) -> bool:
        return tensor is not None and self._find(tensor.data_ptr()) is None


def _lowest_gap(placed: list[_Region], size: int) -> int:
    """The lowest offset at which `size` bytes overlap none of these."""
    place = 0
    for region in sorted(placed, key=lambda r: r.place):
        if place + size <= region.place:
            break
        end = region.place + region.end - region.start
        place = max(place, -(-end // ALIGN) * ALIGN)
    return place
