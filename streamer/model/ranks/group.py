"""Group: the ranks that compute one model, as seen by one of them: sums and gathers over all.

Owns a torch.distributed process group, gloo's on CPUs and NCCL's on GPUs, and the seconds spent in
it. Every rank makes the same calls in the same order, on the thread that computes. Results are
equal, bit for bit, on every rank, so that all of them draw the same tokens.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed
from torch._C._distributed_c10d import Store

from streamer.errors import InvariantViolated
from streamer.model.runner.device import CPU

c10d: Any = torch.distributed  # whose stubs leave these classes out
LOOPBACK = "127.0.0.1"
TIMEOUT_S = 8.0  # that a rank may wait for another: they load before, and start a step together
# NCCL counts the time in which another rank compiles kernels, too; who hangs is seen by its beats.
NCCL_TIMEOUT_S = 600.0
# Threads of NCCL's that would ask the store behind our back.
NCCL_QUIET = {"TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}

# Numbers from which a sum is worth a second exchange: they take longer than its latency.
SPLIT_FROM = 1 << 20


class OtherLeft(Exception):
    """A sum or gather failed, since another rank left it or did not come."""


class Seat(msgspec.Struct, frozen=True):
    """A rank's place.

    index, count  which rank it is, of how many
    on_host       ranks on its host, itself included
    address       of the interface on which other ranks reach it
    device        where it computes
    """

    index: int
    count: int
    on_host: int
    address: str
    device: torch.device = CPU


class Group:
    """The ranks as `seat` sees them.

    meet     waits until every rank has loaded its part
    seconds  spent in sums and gathers: waiting for the others, and copying. On a GPU only what
             queueing them takes
    """

    def __init__(self, seat: Seat, store: Store) -> None:
        """Meets the others, whose stores lead to the same values."""
        self.index = seat.index
        self.count = seat.count
        self.on_host = seat.on_host
        self.seconds = 0.0
        self.meet: Callable[[], None] = lambda: None
        self._seat = seat
        self._store = store
        self._group = self._join(0)

    @property
    def can_meet_again(self) -> bool:
        """Whether the connections can be made anew: on a GPU work that waits for another rank may
        stay in its queue."""
        return self._seat.device.type == "cpu"

    def meet_again(self, meeting: int) -> None:
        """New connections, after sums in which not all took part; every rank calls it."""
        self.leave()
        self._group = self._join(meeting)

    def _join(self, meeting: int) -> Any:
        seat = self._seat
        store = c10d.PrefixStore(f"meeting{meeting}", self._store)
        if seat.device.type == "cuda":
            os.environ.update(NCCL_QUIET)
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=NCCL_TIMEOUT_S)
            torch.cuda.set_device(seat.device)
            return c10d.ProcessGroupNCCL(store, seat.index, seat.count, options)
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=seat.address)]
        options._timeout = timedelta(seconds=TIMEOUT_S)
        return c10d.ProcessGroupGloo(store, seat.index, seat.count, options)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `part`, in fp32 and in the order of the ranks.

        So a row's sum does not depend on how many rows there are, which a ring's would. Many
        numbers are summed by one rank each, with the same result: a rank then receives
        2 (N - 1) / N times as many as it has, not N - 1 times.
        """
        if self.count == 2 or part.numel() < SPLIT_FROM:
            return _summed(self._gather(part))
        flat = part.reshape(-1)
        each = -(-flat.numel() // self.count)
        flat = torch.nn.functional.pad(flat, (0, each * self.count - flat.numel()))
        mine = torch.empty_like(flat)
        self._timed(lambda group: group.alltoall_base(mine, flat, [], []))
        total = torch.cat(self._gather(_summed(list(mine.chunk(self.count)))))
        return total[: part.numel()].view(part.shape)

    def concatenate(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Every rank's `part` [S, sizes[rank]], side by side."""
        width = max(sizes)
        padded = torch.nn.functional.pad(part, (0, width - part.shape[1]))
        parts = self._gather(padded)
        return torch.cat([p[:, :n] for p, n in zip(parts, sizes, strict=True)], dim=1)

    def minima(self, numbers: Sequence[int]) -> list[int]:
        """The least of every rank's numbers, one by one."""
        mine = torch.tensor(numbers, dtype=torch.int64, device=self._seat.device)
        return [int(n) for n in torch.stack(self._gather(mine)).amin(0)]

    def leave(self) -> None:
        """End the connections; a rank that waits for this one gets an error. On a GPU also from
        another thread, where this one waits."""
        group, self._group = self._group, None  # gloo closes its sockets with its last reference
        if group is not None and not self.can_meet_again:
            group.abort()

    def _gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        part = part.contiguous()
        if part.device.type != self._seat.device.type:
            raise InvariantViolated(f"a rank on {self._seat.device} sums on {part.device}")
        found = [torch.empty_like(part) for _ in range(self.count)]
        self._timed(lambda group: group.allgather([found], [part]))
        return found

    def _timed(self, begin: Callable[[Any], Any]) -> None:
        """Wait for what all ranks begin; OtherLeft where one does not."""
        group = self._group
        if group is None:
            raise OtherLeft("this rank has left")
        began = time.perf_counter()
        try:
            begin(group).wait()
        except RuntimeError as error:
            raise OtherLeft(str(error).partition("\n")[0]) from error
        self.seconds += time.perf_counter() - began


def _summed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(parts) == 2:  # as below, in one pass
        return torch.add(parts[0].float(), parts[1]).to(parts[0].dtype)
    total = parts[0].float()
    for each in parts[1:]:
        total += each
    return total.to(parts[0].dtype)
