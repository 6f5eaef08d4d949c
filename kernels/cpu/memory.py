"""Memory for packed weights and pools: in pages of 2 MiB where the system has them.

With pages of 4 KiB every page costs a walk of the page tables: reading weights front to back, that
is up to a sixth of the time (docs/kernels.md), and in a pool each 4 KiB belong to another head or
block. Keeps the chunk of memory that the next packed weights come from. Called by native.py and by
the linear layers.
"""

from __future__ import annotations

import ctypes
import sys
import threading

import torch

from streamer.kernels.cpu.program import team

HUGE_PAGE = 2 << 20
MADV_HUGEPAGE = 14  # Linux's number; a refusal is harmless
LINE = 64
CHUNK = 64 << 20  # above what malloc may take from memory that was used before


def in_huge_pages(memory: torch.Tensor) -> torch.Tensor:
    """The same memory, not yet touched, in pages of 2 MiB where the system has them."""
    start = -(-memory.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    end = (memory.data_ptr() + memory.numel() * memory.element_size()) // HUGE_PAGE * HUGE_PAGE
    if sys.platform == "linux" and end > start:
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_HUGEPAGE
        )
    return memory


class Chunks:
    """Cuts tensors from large chunks, since most matrices are no multiple of a huge page. What is
    cut keeps its chunk; untouched memory costs nothing."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._lock = threading.Lock()  # two engines may load in one process

    def empty(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes], at the start of a cache line."""
        with self._lock:
            if self._used + num_bytes > self._chunk.numel():
                size = max(CHUNK, num_bytes + LINE)
                self._chunk = in_huge_pages(torch.empty(size, dtype=torch.uint8))
                self._used = -self._chunk.data_ptr() % LINE
            start = self._used
            self._used += -(-num_bytes // LINE) * LINE
            return self._chunk[start : start + num_bytes]

    def give_back(self, cut: torch.Tensor) -> None:
        """Let what was cut last be cut again."""
        with self._lock:
            start = cut.data_ptr() - self._chunk.data_ptr()
            if start >= 0 and start + -(-cut.numel() // LINE) * LINE == self._used:
                self._used = start


chunks = Chunks()


def new_panels(n: int, size: int, *, has_gates: bool) -> torch.Tensor:
    """uint8 [panels, size] for a weight of n outputs; gates and ups are each padded to whole
    vectors."""
    lanes = team.lanes
    outputs = -(-n // 2 // lanes) * lanes * 2 if has_gates else n
    num_panels = -(-outputs // (2 * lanes))
    return chunks.empty(num_panels * size).view(num_panels, size)
