"""Ranks as threads of the test: RankedRunner and the others' Plans, without processes."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any

import torch

from streamer.config import Config
from streamer.constraints.grammars import Grammars
from streamer.core.sizes import ModelInfo
from streamer.model.inspect import Recognized
from streamer.model.ranks import wire
from streamer.model.ranks.group import LOOPBACK, Group, Seat
from streamer.model.ranks.runner import RankedRunner
from streamer.model.ranks.store import FirstStore
from streamer.model.ranks.worker import Plans
from streamer.model.runner.load import Place, load_runner
from tests.model.where import Where

DEADLINE_S = 60.0


class Threads:
    """In place of a Leader. `error`: the first one of another rank, which `close` raises."""

    failure = None

    def __init__(self, config: Config) -> None:
        self._config = config
        self._count = config.tensor_parallel_size
        self._store = FirstStore(DEADLINE_S)
        self._inboxes = [SimpleQueue[Any]() for _ in range(1, self._count)]
        self._threads = [
            threading.Thread(target=self._serve, args=(index,), daemon=True)
            for index in range(1, self._count)
        ]
        self.groups: dict[int, Group] = {}
        self.error: Exception | None = None
        for thread in self._threads:
            thread.start()

    def load(self, index: int) -> Any:
        """What load_runner returns on that rank."""

        def join(known: Recognized, where: torch.device) -> Group:
            self.groups[index] = Group(Seat(index, self._count, self._count, LOOPBACK), self._store)
            return self.groups[index]

        return load_runner(self._config, Where.make(), place=Place(index, self._count, join))

    def send(self, message: wire.Message | Grammars | None) -> None:
        for inbox in self._inboxes:
            inbox.put(message)

    def reason(self, error: Exception) -> Exception:
        return self.error or error

    def close(self) -> None:
        self.send(None)
        for thread in self._threads:
            thread.join(DEADLINE_S)
        if self.error is not None:
            raise self.error

    def _serve(self, index: int) -> None:
        try:
            runner, _ = self.load(index)
            plans = Plans(runner)
            while (message := self._inboxes[index - 1].get()) is not None:
                if isinstance(message, Grammars):
                    runner.constrain(message)
                else:
                    plans.launch(message)
        except Exception as error:
            self.error = error
            self.groups.pop(index).leave()


class OnThreads(RankedRunner):
    """The runner of the first rank; the others have the same grammars."""

    threads: Threads

    def constrain(self, grammars: Grammars) -> None:
        super().constrain(grammars)
        self.threads.send(grammars)


def load_ranked(config: Config, *_: object) -> tuple[OnThreads, ModelInfo]:
    """As streamer.model.ranks.runner's."""
    threads = Threads(config)
    runner, info = threads.load(0)
    found = OnThreads(runner, threads.groups[0], threads)  # type: ignore[arg-type]
    found.threads = threads
    return found, info
