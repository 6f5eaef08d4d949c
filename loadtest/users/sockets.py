"""Users of the WebSocket: chat and many lanes; with Streamer's subprotocol fork, cancel and acks.

SocketChat and Lanes speak OpenAI's WebSocket mode as it is, lanes (`stream_id`) included.
"""

from __future__ import annotations

import time
from typing import Any, ClassVar

from locust import tag, task

from ..responses import Log
from ..sse import BadAnswer
from .base import FAULTS, LoadUser
from .meter import ANSWER, CANCEL, E2E, FORK, PAUSED, TTFT, Meter
from .session import Session

WINDOW = 8  # tokens that the server may be ahead of SlowReader's acknowledgements


class SocketUser(LoadUser):
    """Holds one socket for as long as it lives; a broken one is opened again for the next task."""

    abstract = True
    is_ours: ClassVar[bool] = False

    def prepare(self) -> None:
        self._session: Session | None = self.open()

    def on_stop(self) -> None:
        self.close()

    def open(self) -> Session:
        """A new socket."""
        return Session(self.target, self.is_ours, type(self).__name__)

    def recover(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket, if one is open."""
        session, self._session = getattr(self, "_session", None), None
        if session is not None:
            session.drop()

    def session(self) -> Session:
        """The open socket; opened here if needed."""
        if self._session is None:
            self._session = self.open()
        return self._session

    def create(self, session: Session, **more: Any) -> None:
        """Send a response.create."""
        body: dict[str, Any] = {"model": self.model, "input": self.prompts.question()}
        body |= {"max_output_tokens": self.options.max_tokens, **more}
        session.send("response.create", **body)

    def finish(self, log: Log, meter: Meter) -> None:
        """Check that an ended answer is complete; end its meter."""
        log.check()
        self.verify(log.text, log.num_tokens)
        meter.end(log.num_tokens)


class SocketChat(SocketUser):
    """One question at a time on a socket of its own."""

    @tag("ws", "chat")
    @task
    def chat(self) -> None:
        with self.answer() as meter:
            session, log = self.session(), Log()
            self.create(session)
            session.follow(log, meter)
            self.finish(log, meter)


class Lanes(SocketUser):
    """Many answers at once on one socket, each on a lane."""

    @tag("ws", "lanes")
    @task
    def lanes(self) -> None:
        with self.answer():
            session = self.session()
            lanes: dict[str, tuple[Log, Meter]] = {}
            for i in range(self.options.lanes):
                lanes[f"lane {i}"] = (Log(), self.meter())
                self.create(session, stream_id=f"lane {i}")
            try:
                while lanes:
                    self._next(session, lanes)
            except FAULTS as error:
                for _, meter in list(lanes.values())[1:]:  # answer() reports the first one
                    meter.fail(error)
                raise

    def _next(self, session: Session, lanes: dict[str, tuple[Log, Meter]]) -> None:
        """Process one event; removes a lane whose answer has ended."""
        event = session.receive()
        if event.stream_id not in lanes:
            raise BadAnswer(f"an event for the lane {event.stream_id!r}: {event.type}")
        log, meter = lanes[event.stream_id]
        if log.add(event):
            meter.text()
        if log.is_final:
            self.finish(log, meter)
            del lanes[event.stream_id]


class Fork(SocketUser):
    """An answer, then two forks that continue from its middle."""

    is_ours = True
    measures = (*ANSWER, FORK)

    @tag("ws", "fork")
    @task
    def fork(self) -> None:
        with self.answer() as meter:
            session, log = self.session(), Log()
            self.create(session)
            session.follow(log, meter)
            self.finish(log, meter)
            for _ in range(2):
                self._branch(session, log)

    def _branch(self, session: Session, parent: Log) -> None:
        """One fork. FORK is the time to the first text after the kept part."""
        meter, log = self.meter(), Log()
        at, start = max(1, parent.num_tokens // 2), time.perf_counter()
        self.create(session, input=None, previous_response_id=parent.id, fork={"at": at})
        kept: str | None = None
        is_new = False
        while not log.is_final:
            if not log.add(session.receive()):
                continue
            if kept is None:
                kept = log.text
            elif not is_new:
                is_new = True
                meter.report(FORK, time.perf_counter() - start)
        log.check()
        if not kept or not parent.text.startswith(kept):
            raise BadAnswer(f"a fork of {parent.text[:40]!r} begins with {(kept or '')[:40]!r}")


class Cancel(SocketUser):
    """Requests a long answer and cancels it while it streams."""

    is_ours = True
    measures = (TTFT, E2E, CANCEL)

    @tag("ws", "cancel")
    @task
    def cancel(self) -> None:
        with self.answer() as meter:
            session, log = self.session(), Log()
            # As long as the context allows, but cancelled when this connection ends.
            self.create(session, max_output_tokens=None, detach_s=0)
            while not log.text:
                log.add(session.receive())
            meter.report(TTFT, meter.age_s)
            start = time.perf_counter()
            session.send("response.cancel", response_id=log.id)
            session.follow(log)
            if log.status == "cancelled":  # else it ended before the cancel arrived
                meter.report(CANCEL, time.perf_counter() - start)
            self.finish(log, meter)


class SlowReader(SocketUser):
    """Reads slower than the server writes and acknowledges what it read: the server must pause."""

    is_ours = True
    measures = (TTFT, E2E, PAUSED)

    @tag("ws", "slow")
    @task
    def read(self) -> None:
        with self.answer() as meter:
            session, log = self.session(), Log()
            session.send("session.update", window=WINDOW)
            self.create(session)
            paused_at: float | None = None
            while not log.is_final:
                event, before = session.receive(), log.number
                if event.type == "response.paused":
                    paused_at = time.perf_counter()
                elif event.type == "response.running" and paused_at is not None:
                    meter.report(PAUSED, time.perf_counter() - paused_at)
                    paused_at = None
                is_first = not log.text
                if not log.add(event):
                    continue
                if is_first:
                    meter.report(TTFT, meter.age_s)
                time.sleep((log.number - before) / self.options.reader_tokens_s)
                session.send("response.ack", response_id=log.id, sequence_number=log.number)
            self.finish(log, meter)
