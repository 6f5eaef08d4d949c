"""A user whose connection breaks while it reads, and which resumes there without losing a token.

`sse` resumes with `starting_after` as OpenAI's background responses do; `ws` with Streamer's
`response.resume`. Each answer is compared with the complete text that the server repeats.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from typing import Any

from locust import tag, task

from ..responses import DECODER, Log
from ..sse import BadAnswer, events, started
from .base import LoadUser
from .meter import ANSWER, RESUME, Meter
from .session import Missing, Session


class Flaky(LoadUser):
    """Drops --drops connections during each answer."""

    measures = (*ANSWER, RESUME)

    @tag("sse", "flaky")
    @task
    def over_sse(self) -> None:
        self._answer("Flaky sse", self._read_sse)

    @tag("ws", "flaky")
    @task
    def over_socket(self) -> None:
        self._answer("Flaky ws", self._read_socket)

    def _answer(self, name: str, read: Callable[[Log, Meter, int | None], None]) -> None:
        with self.answer(name) as meter:
            log = Log()
            for _ in range(self.options.drops):
                max_events = max(2, self.options.max_tokens // (self.options.drops + 1))
                read(log, meter, self.source.randint(2, max_events))
                if log.is_final:
                    break
            if not log.is_final:
                read(log, meter, None)
            log.check()
            self.verify(log.text, log.num_tokens)
            meter.end(log.num_tokens)

    def _read_sse(self, log: Log, meter: Meter, num_events: int | None) -> None:
        """Read `num_events` of a new connection, then reset it; None: read to the end."""
        begin = time.perf_counter()
        if not log.id:
            body: dict[str, Any] = {"model": self.model, "stream": True}
            body |= {
                "input": self.prompts.question(),
                "max_output_tokens": self.options.max_tokens,
                "background": True,
            }
            request = self.target.request("POST", "/v1/responses", body)
        else:
            path = f"/v1/responses/{log.id}?stream=true&starting_after={log.number}"
            request = self.target.request("GET", path)
        with closing(self.target.read(request)) as reads:
            try:
                _, bodies = started(reads)
            except BadAnswer as error:
                if str(error).startswith(("404", "405")):
                    raise Missing(f"Flaky needs /v1/responses with resume: {error}") from None
                raise
            is_resumed = bool(log.id)
            for at, data in islice(events(bodies), num_events):
                if is_resumed:
                    meter.report(RESUME, at - begin)
                    is_resumed = False
                if log.add(DECODER.decode(data)):
                    meter.text(at)
            if num_events is None and not log.is_final:
                raise BadAnswer("the stream ended without a terminal event")

    def _read_socket(self, log: Log, meter: Meter, num_events: int | None) -> None:
        """As `_read_sse`, on a WebSocket."""
        begin = time.perf_counter()
        session = Session(self.target, True, "Flaky")
        try:
            if not log.id:
                body = {"model": self.model, "input": self.prompts.question()}
                session.send("response.create", **body, max_output_tokens=self.options.max_tokens)
            else:
                session.send("response.resume", response_id=log.id, starting_after=log.number)
                log.add(session.receive())
                meter.report(RESUME, time.perf_counter() - begin)
            num_read = 0
            while not log.is_final and (num_events is None or num_read < num_events):
                num_read += 1
                if log.add(session.receive()):
                    meter.text()
        finally:
            session.drop()
