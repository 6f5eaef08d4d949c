"""The base class of all users: server, flags, pauses between tasks, and timed answers.

A failure is reported to Locust, never raised: the user goes on with its next task.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from locust import User
from locust.exception import StopUser
from websockets.exceptions import WebSocketException

from ..open_loop.jobs import Prompts
from ..responses import check_counting
from ..sse import BadAnswer
from ..target import Target
from . import options
from .meter import ANSWER, Meter
from .session import Missing

FAULTS = (BadAnswer, OSError, ValueError, LookupError, WebSocketException)


class LoadUser(User):
    """A user of the OpenAI API. `measures`: the statistics that it reports."""

    abstract = True
    measures: ClassVar[tuple[str, ...]] = ANSWER
    num_started: ClassVar[int] = 0
    is_ready = False

    def on_start(self) -> None:
        """Set the server from --host and the model from --model or the server's list."""
        parsed: Any = self.environment.parsed_options
        self.options = options.of(parsed)
        self.target = Target.of(self.host or "", self.options.api_key)
        LoadUser.num_started += 1
        self.prompts = Prompts(LoadUser.num_started)
        self.source = random.Random(LoadUser.num_started)
        with self.answer():
            self.model = self.options.model or self.target.first_model()
            self.prepare()
            self.is_ready = True
        if not self.is_ready:
            raise StopUser  # it has failed, and would again

    def prepare(self) -> None:
        """A subclass's setup, once per user; Missing if the server lacks what it needs."""

    def recover(self) -> None:
        """After a failure: drop the state that can't be used any more."""

    def wait_time(self) -> float:
        """Seconds to the next task, exponential about --think-s."""
        mean_s = self.options.think_s
        return random.expovariate(1 / mean_s) if mean_s else 0.0

    def meter(self, name: str = "") -> Meter:
        """A meter for an answer that is requested now."""
        return Meter(self.environment.events.request.fire, name or type(self).__name__)

    @contextmanager
    def answer(self, name: str = "") -> Iterator[Meter]:
        """A context for one answer: errors in it are reported to Locust as failures of E2E."""
        meter = self.meter(name)
        try:
            yield meter
        except Missing as error:
            meter.fail(error)
            raise StopUser from None
        except FAULTS as error:
            meter.fail(error)
            self.recover()

    def verify(self, text: str, num_tokens: int) -> None:
        """With --counting: BadAnswer unless the text is the fake model's counting."""
        if self.options.counting:
            check_counting(text, num_tokens)
