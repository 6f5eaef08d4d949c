"""Swaps: copies of blocks between the two pools on side streams, and within the device's pool.

Owns the copies that are under way and what they cost; does not choose which blocks move. A block is
freed by the core, when Facts say that its copy is done and the plans that can touch it are
collected; so a block that is copied into has no other user left. Called by runner/cuda.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from streamer.core.plan import Plan, check_moves
from streamer.kernels import ops
from streamer.model.runner.costs import Costs
from streamer.model.runner.device import Device, Event, Stream


class _Copy(NamedTuple):
    """One plan's copies in one direction. written: blocks of the destination pool."""

    number: int
    began: Event
    done: Event
    written: frozenset[int]
    is_out: bool


class Swaps:
    """Copies between `pool` on the device and `host_pool`, which is pinned."""

    def __init__(
        self,
        device: Device,
        kernels: ops.Backend,
        pool: torch.Tensor,
        host_pool: torch.Tensor,
        costs: Costs,
    ) -> None:
        self._kernels = kernels
        self._device = device
        self._pool = pool
        self._host_pool = host_pool
        self._costs = costs
        self._pending: list[_Copy] = []  # by plan

    def reset(self) -> None:
        """Forget all copies; none is under way."""
        self._pending = []

    def start(self, plan: Plan) -> None:
        """Queue a plan's swaps, after the steps launched earlier; takes no memory."""
        if not (plan.swap_out or plan.copies or plan.swap_in):
            return
        check_moves(plan, self._pool.shape[0], self._host_pool.shape[0])
        device = self._device
        if plan.swap_out:
            device.out.wait(device.main.record())  # steps that wrote the blocks
            self._swap(plan.number, device.out, self._pool, self._host_pool, plan.swap_out)
        if plan.swap_in:
            for copy in self._touching((source for source, _ in plan.swap_in), is_out=True):
                device.into.wait(copy.done)
            self._swap(plan.number, device.into, self._host_pool, self._pool, plan.swap_in)

    def copy(self, plan: Plan) -> None:
        """Queue a plan's copies within the device's pool, after `start` and before its step."""
        if not plan.copies:
            return
        self.need(source for source, _ in plan.copies)
        pairs = self._device.upload(np.array(plan.copies).T.copy())
        copy = partial(self._kernels.copy_blocks, self._pool, pairs[0], pairs[1])
        self._device.main.run(copy)

    def need(self, blocks: Iterable[int]) -> None:
        """The steps queued from now on read these blocks of the device."""
        for copy in self._touching(blocks, is_out=False):
            self._device.main.wait(copy.done)

    def copies_done(self, launched: int) -> int:
        """The plan up to which all copies are done; plans up to `launched` were started."""
        if not self._pending:
            return launched
        for copy in [copy for copy in self._pending if copy.done.is_done()]:
            self._pending.remove(copy)
            self._costs.saw_swap(copy.done.since(copy.began), len(copy.written))
        return self._pending[0].number - 1 if self._pending else launched

    def await_all(self, number: int) -> None:
        """Block this thread until all copies of plans up to `number` are done."""
        while self._pending and self._pending[0].number <= number:
            self._pending.pop(0).done.wait()

    def wait(self) -> None:
        """Block this thread until the oldest copy that is under way is done."""
        if self._pending:
            self._pending[0].done.wait()

    def _swap(
        self,
        number: int,
        stream: Stream,
        source: torch.Tensor,
        destination: torch.Tensor,
        pairs: tuple[tuple[int, int], ...],
    ) -> None:
        began = stream.record()
        stream.run(partial(self._kernels.swap_blocks, source, destination, list(pairs)))
        written = frozenset(block for _, block in pairs)
        is_out = stream is self._device.out
        self._pending.append(_Copy(number, began, stream.record(), written, is_out))

    def _touching(self, blocks: Iterable[int], *, is_out: bool) -> list[_Copy]:
        copies = [copy for copy in self._pending if copy.is_out is is_out]
        if not copies:
            return []  # the usual case
        needed = frozenset(blocks)
        return [copy for copy in copies if not copy.written.isdisjoint(needed)]
