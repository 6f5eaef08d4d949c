"""A checkpoint's files, read a tensor at a time into memory of its own, which is used again.

Owns the open files while a model is loaded, and the memory that tensors were read into. They are
read and not mapped: a file that is cut or replaced meanwhile is an error here, where a mapping
would end the process (SIGBUS), and no check of its size beforehand changes that. Called by
loader.py.
"""

from __future__ import annotations

import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from streamer.errors import ModelNotSupported
from streamer.model.checkpoint import TensorEntry

ALIGN = 64
OWN_BYTES = 64 << 10  # a tensor of fewer has memory that is not used again
READERS = 2  # threads that read one tensor: 3 MB at 8.8 GB/s, not 6.0 (EPYC Zen 4, 2026-11-27)
SPARE = 4  # of a tensor's size may be lent beside it, since some backends keep dense tensors
SHARE_BYTES = 512 << 10  # that a thread is worth it for


class Reused:
    """Memory for tensors that are soon let go: what none of them uses is lent again, since the
    system clears what it gives for the first time, which takes as long as reading into it."""

    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []
        self._lent_since: set[int] = set()  # addresses, since `shrink`
        self._keeps = False  # since the first `shrink`: an embedding's would be lent to all layers

    def empty(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes]; it is lent until no tensor is left that shares it."""
        if num_bytes < OWN_BYTES:
            return torch.empty(num_bytes, dtype=torch.uint8)
        sizes = range(num_bytes, num_bytes + num_bytes // SPARE + 1)
        fitting = [i for i, block in enumerate(self._free) if block.nbytes in sizes]
        if fitting:
            block = self._free.pop(min(fitting, key=lambda i: self._free[i].nbytes))
        else:
            block = np.empty(num_bytes + ALIGN, np.uint8)
            block = block[-block.ctypes.data % ALIGN :][:num_bytes]
        self._lent_since.add(block.ctypes.data)
        lent = block[:num_bytes]  # an object of its own, which the tensor's storage holds
        weakref.finalize(lent, self._take_back, block).atexit = False
        return torch.from_numpy(lent)

    def shrink(self) -> None:
        """Let go what was not lent since the last call; what comes back from now on is kept."""
        self._free[:] = [b for b in self._free if b.ctypes.data in self._lent_since]
        self._lent_since.clear()
        self._keeps = True

    def close(self) -> None:
        """Let go all, and what tensors still use once they do not: a model keeps some for good."""
        self._keeps = False
        self._free.clear()

    def _take_back(self, block: NDArray[np.uint8]) -> None:
        if self._keeps:
            self._free.append(block)


class WeightFiles:
    """The files in a folder, each opened when a tensor of it is first read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, int] = {}
        self._stack = ExitStack()
        self._readers = self._stack.enter_context(ThreadPoolExecutor(READERS - 1))
        self.memory = Reused()

    def close(self) -> None:
        """Close what was opened, and let go the memory that no tensor uses."""
        self._stack.close()
        self.memory.close()

    def read(self, entry: TensorEntry) -> torch.Tensor:
        """The tensor's bytes, uint8 [bytes]; ModelNotSupported where the file has no such bytes."""
        found = self.memory.empty(entry.end - entry.start)
        size = len(found)
        try:
            file = self._open(entry.file)
        except OSError as e:
            raise ModelNotSupported(f"{entry.file} can't be read: {e}", param="model") from e
        share = size if size < READERS * SHARE_BYTES else -(-size // READERS // ALIGN) * ALIGN
        others = [
            self._readers.submit(_fill, file, entry, found, first, min(size, first + share))
            for first in range(share, size, max(1, share))
        ]
        try:
            _fill(file, entry, found, 0, share)
        finally:
            for other in others:
                other.result()
        return found

    def _open(self, name: str) -> int:
        if name not in self._files:
            file = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC)
            self._stack.callback(os.close, file)
            self._files[name] = file
        return self._files[name]


def _fill(file: int, entry: TensorEntry, found: torch.Tensor, first: int, last: int) -> None:
    """Read bytes from `first` up to `last` of the tensor."""
    left, place = found[first:last].numpy().data, entry.start + first
    try:
        while left:  # a call reads at most 2 GiB
            count = os.preadv(file, [left], place)
            if not count:
                raise ModelNotSupported(f"{entry.file} was cut while it was read", param="model")
            left, place = left[count:], place + count
    except OSError as e:
        raise ModelNotSupported(f"{entry.file} can't be read: {e}", param="model") from e
