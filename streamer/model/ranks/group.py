"""Group: the ranks that compute one model, as seen by one of them: sums and gathers over all.

Owns a torch.distributed process group, gloo's so far, and the seconds spent in it.
Every rank makes the same calls in the same order, on the thread that computes. Results are equal,
bit for bit, on every rank, so that all of them draw the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

c10d: Any = torch.distributed  # whose stubs leave these classes out
LOOPBACK = "127.0.0.1"
TIMEOUT_S = 8.0  # that a rank may wait for another: they load before, and start a step together


class Group:
    """Rank `index` of `count`.

    meet     waits until every rank has loaded its part
    seconds  spent in sums and gathers: waiting for the others, and copying
    """

    def __init__(self, group: Any, index: int, count: int) -> None:
        self.index = index
        self.count = count
        self.seconds = 0.0
        self.meet: Callable[[], None] = lambda: None
        self._group = group

    @classmethod
    def on_one_host(cls, file: Path, index: int, count: int) -> Group:
        """Of processes that share a new `file`; they talk over the loopback interface alone."""
        store = c10d.FileStore(str(file), count)
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = timedelta(seconds=TIMEOUT_S)
        return cls(c10d.ProcessGroupGloo(store, index, count, options), index, count)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `part`, in fp32 and in the order of the ranks.

        So a row's sum does not depend on how many rows there are, which a ring's would.
        """
        parts = self._gather(part)
        if len(parts) == 2:  # as below, in one pass
            return torch.add(parts[0].float(), parts[1]).to(part.dtype)
        total = parts[0].float()
        for each in parts[1:]:
            total += each
        return total.to(part.dtype)

    def concatenate(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Every rank's `part` [S, sizes[rank]], side by side."""
        width = max(sizes)
        padded = torch.nn.functional.pad(part, (0, width - part.shape[1]))
        parts = self._gather(padded)
        return torch.cat([p[:, :n] for p, n in zip(parts, sizes, strict=True)], dim=1)

    def minima(self, numbers: Sequence[int]) -> list[int]:
        """The least of every rank's numbers, one by one."""
        parts = self._gather(torch.tensor(numbers, dtype=torch.int64))
        return [int(n) for n in torch.stack(parts).amin(0)]

    def close(self) -> None:
        """End the connections; a rank that waits for this one gets an error."""
        self._group.abort()

    def _gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        part = part.contiguous()
        found = [torch.empty_like(part) for _ in range(self.count)]
        began = time.perf_counter()
        self._group.allgather([found], [part]).wait()
        self.seconds += time.perf_counter() - began
        return found
