"""Stores: where ranks leave each other the addresses at which they can be reached, to meet.

torch's own store would listen on a port of its own, on every interface and without a proof; these
use the connection that each rank has proved itself on. Made by leader.py and worker.py, called by
torch while a Group begins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from streamer.model.ranks import wire

MAX_VALUES = 4096  # of a few hundred bytes


class FirstStore(Store):
    """The first rank's. `put` and `ask` serve the others, on the thread that hears them."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._asked: dict[str, list[Callable[[bytes], None]]] = {}
        self._is_ended = False

    def end(self) -> None:
        """A rank is gone: who waits for what it would leave waits in vain."""
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    def put(self, key: str, value: bytes) -> None:
        """ConnectionError where a rank leaves more than any that only meets."""
        with self._changed:
            if len(self._values) >= MAX_VALUES:
                raise ConnectionError(f"more than {MAX_VALUES} values to meet")
            self._values[key] = value
            self._changed.notify_all()
            waiting = self._asked.pop(key, [])
        for answer in waiting:
            answer(value)

    def ask(self, key: str, answer: Callable[[bytes], None]) -> None:
        """Call `answer` with the value, when it is there."""
        with self._changed:
            value = self._values.get(key)
            if value is None:
                self._asked.setdefault(key, []).append(answer)
        if value is not None:
            answer(value)

    def set(self, key: str, value: Any) -> None:
        """See torch.distributed.Store."""
        self.put(key, bytes(value))

    def get(self, key: str) -> bytes:
        """See torch.distributed.Store."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_ended or key in self._values, self._timeout_s)
            if key not in self._values:
                raise TimeoutError(f"no rank has left {key}")
            return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """See torch.distributed.Store."""
        for key in keys:
            self.get(key)


class RankStore(Store):
    """Another rank's: what it leaves and asks for goes through its channel."""

    def __init__(self, channel: wire.Channel) -> None:
        super().__init__()
        self._channel = channel

    def set(self, key: str, value: Any) -> None:
        """See torch.distributed.Store."""
        self._channel.send(wire.Put(key, bytes(value)))

    def get(self, key: str) -> bytes:
        """See torch.distributed.Store."""
        self._channel.send(wire.Ask(key))
        return self._channel.expect(wire.Value).value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """See torch.distributed.Store."""
        for key in keys:
            self.get(key)
