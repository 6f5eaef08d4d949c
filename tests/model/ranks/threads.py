"""Ranks as threads of the test: what RankedRunner does, without processes and a leader."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any

import torch

from streamer.config import Config
from streamer.constraints.grammars import Grammars
from streamer.core.plan import Facts, Plan
from streamer.core.sizes import ModelInfo
from streamer.engine.core import InFlight, Runner
from streamer.model.inspect import Recognized
from streamer.model.ranks.group import LOOPBACK, Group, Seat
from streamer.model.ranks.store import FirstStore
from streamer.model.runner.load import Place, load_runner
from tests.model.where import Where

DEADLINE_S = 60.0


class ThreadRanks:
    """The first rank's runner, on the thread that calls it; the others carry out the same plans.

    error  the first one of another rank
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._count = config.tensor_parallel_size
        self._store = FirstStore(DEADLINE_S)
        self._plans: list[SimpleQueue[tuple[Plan, int] | Grammars | None]] = []
        self._groups: dict[int, Group] = {}
        self._copies_done = 0
        self.error: Exception | None = None
        self._threads = []
        for index in range(1, self._count):
            self._plans.append(SimpleQueue())
            thread = threading.Thread(target=self._serve, args=(index,), daemon=True)
            self._threads.append(thread)
            thread.start()
        self._runner, self.info = self._load(0)

    @classmethod
    def load(cls, config: Config, *_: object) -> tuple[Runner, ModelInfo]:
        """As load_ranked."""
        ranks = cls(config)
        return ranks, ranks.info

    @property
    def depth(self) -> int:
        return self._runner.depth

    def constrain(self, grammars: Grammars) -> None:
        self._runner.constrain(grammars)
        for plans in self._plans:
            plans.put(grammars)

    def facts(self) -> Facts:
        found = self._runner.facts()
        self._copies_done = found.copies_done
        return found

    def launch(self, plan: Plan) -> InFlight:
        for plans in self._plans:
            plans.put((plan, self._copies_done))
        return self._runner.launch(plan)

    def reset(self, launched: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Ends the other ranks, and raises what one of them failed of."""
        for plans in self._plans:
            plans.put(None)
        for thread in self._threads:
            thread.join(DEADLINE_S)
        if self.error is not None:
            raise self.error

    def _load(self, index: int) -> Any:
        def join(known: Recognized, where: torch.device) -> Group:
            seat = Seat(index, self._count, self._count, LOOPBACK)
            self._groups[index] = Group(seat, self._store)
            return self._groups[index]

        return load_runner(self._config, Where.make(), place=Place(index, self._count, join))

    def _serve(self, index: int) -> None:
        try:
            runner, _ = self._load(index)
            launched: list[InFlight] = []
            while (message := self._plans[index - 1].get()) is not None:
                if isinstance(message, Grammars):
                    runner.constrain(message)
                    continue
                plan, copies_done = message
                runner.await_copies(copies_done)
                launched.append(runner.launch(plan))
                while len(launched) > runner.depth:
                    launched.pop(0).collect()
        except Exception as error:
            self.error = error
            self._groups.pop(index).leave()
