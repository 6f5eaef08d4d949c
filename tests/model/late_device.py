"""LateDevice: a Device on the CPU that does everything as late and in as odd an order as allowed.

Work stays queued in its stream until the host waits; then work of all streams is taken in random
order, as far as events allow. By the seed, all streams are equally fast, or copies are slow, or
steps are. The destination of a copy between the pools is overwritten when the copy is queued, so
that a step that still reads it, or reads it too early, gets NaN. A copy reads its source when it is
carried out: source memory that was used again by then gives wrong tokens.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from streamer.kernels import reference

POISON = 0x55
SPEEDS = [(1, 1, 1), (50, 1, 1), (1, 50, 50), (50, 50, 1), (50, 1, 50)]  # main, out, into


class LateEvent:
    """Done when the stream has reached its place in the queue."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.is_reached = False

    def is_done(self) -> bool:
        """Asking may let the device get a little further."""
        self._device.nudge([0, 1, 2])
        return self.is_reached

    def wait(self) -> None:
        """The device works until this event is reached, on any stream that can go on."""
        while not self.is_reached:
            assert self._device.work(1), "this thread waits for what nothing will bring"

    def since(self, earlier: Any) -> float:
        """Every step takes a millisecond."""
        assert self.is_reached
        assert earlier.is_reached
        return 1e-3


class LateStream:
    """A queue of work, of events to reach, and of events to wait for."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.queue: deque[tuple[str, Any]] = deque()

    def run(self, work: Callable[[], None]) -> None:
        """Queue the work; a copy's destination is overwritten at once."""
        if isinstance(work, partial) and work.func is reference.swap_blocks:
            _, destination, pairs = work.args
            if destination.element_size() == 1:
                destination = destination.view(torch.int8)
            spoilt = torch.nan if destination.is_floating_point() else -1  # NaN as FP8 or scale
            destination[[block for _, block in pairs]] = spoilt
        self.queue.append(("run", work))
        self._device.nudge([0, 0, 0, 2])

    def record(self) -> LateEvent:
        """An event behind all that is queued."""
        event = LateEvent(self._device)
        self.queue.append(("reach", event))
        return event

    def wait(self, event: LateEvent) -> None:
        """Work queued from now on waits for the event."""
        self.queue.append(("wait", event))

    @property
    def can_go_on(self) -> bool:
        """Whether the first entry of the queue may happen now."""
        return bool(self.queue) and (self.queue[0][0] != "wait" or self.queue[0][1].is_reached)

    def go_on(self) -> None:
        """Take the first entry off the queue."""
        kind, what = self.queue.popleft()
        if kind == "run":
            with torch.inference_mode():
                what()
        elif kind == "reach":
            what.is_reached = True


class LateDevice:
    """See streamer.model.runner.device.Device.

    free      the number of free bytes it reports
    is_still  work is done only where the host waits
    """

    def __init__(self, seed: int = 0, free: int = 1 << 30) -> None:
        self.where = torch.device("cpu")
        self.rng = random.Random(seed)
        self.free = free
        self.is_still = False
        self.main, self.out, self.into = (LateStream(self) for _ in range(3))
        self._speeds = dict(
            zip((self.main, self.out, self.into), SPEEDS[seed % len(SPEEDS)], strict=True)
        )
        self.num_replays = 0
        self.num_recorded = 0

    def work(self, count: int) -> bool:
        """Take up to `count` entries off the queues; False where none can go on."""
        for _ in range(count):
            ready = [s for s in (self.main, self.out, self.into) if s.can_go_on]
            if not ready:
                return False
            (stream,) = self.rng.choices(ready, [self._speeds[s] for s in ready])
            stream.go_on()
        return True

    def nudge(self, counts: list[int]) -> None:
        """The host has spent time: take a random number of entries, one of `counts`."""
        self.work(0 if self.is_still else self.rng.choice(counts))

    def upload(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        """Values are copied now; the device has them later."""
        source = torch.from_numpy(values.copy())
        there = torch.empty_like(source)
        there.view(torch.uint8).fill_(POISON) if there.numel() else None
        self.main.run(partial(_fill, there, source))
        return there

    def download(self, values: torch.Tensor) -> torch.Tensor:
        """Called by queued work, so the copy is made at once."""
        return values.clone()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """A graph that replays by running the same work again."""
        work()
        self.num_recorded += 1

        def replay() -> None:
            self.num_replays += 1
            work()

        return replay

    def free_bytes(self) -> int:
        return self.free

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """Not measured: always 0."""
        del work
        return 0

    def probe_copy(self) -> tuple[float, float]:
        """Figures of a PCIe bus."""
        return 1e-5, 1e-10

    def synchronize(self) -> None:
        """Empty all queues."""
        while self.work(1):
            pass
        assert not any(s.queue for s in (self.main, self.out, self.into))


def _fill(there: torch.Tensor, source: torch.Tensor) -> None:
    there.copy_(source)
