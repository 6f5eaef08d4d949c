"""Folds events of OpenAI's Responses API into an answer and checks that it is complete.

The same events come over SSE and WebSocket, and again after a resume; `Log` takes them from any of
these and raises BadAnswer where one was lost or repeated. No socket, no clock.
"""

from __future__ import annotations

from typing import Any

import msgspec

from .sse import BadAnswer

FINAL = frozenset(["response.completed", "response.incomplete", "response.failed"])
TEXT = "response.output_text.delta"
# Streamer's own: they repeat the last number and take none.
UNNUMBERED = frozenset(
    ["session.created", "response.resumed"]
    + [f"response.{what}" for what in ("waiting", "prefill", "preempted", "running", "paused")]
)


class OutputUsage(msgspec.Struct):
    output_tokens: int = 0


class Response(msgspec.Struct):
    """The fields of a response that are read here."""

    id: str
    status: str = ""
    usage: OutputUsage | None = None
    error: Any = None


class Event(msgspec.Struct):
    """Any event, with the fields that are read here."""

    type: str
    sequence_number: int = -1
    stream_id: str | None = None
    response_id: str = ""
    response: Response | None = None
    delta: Any = None
    text: str | None = None
    status: Any = None
    error: Any = None
    message: str | None = None  # of an `error` event over SSE
    window: int = 0


DECODER = msgspec.json.Decoder(Event)


class Log:
    """One response, built from its events; raises BadAnswer where they contradict each other."""

    def __init__(self) -> None:
        self.id = ""
        self.text = ""
        self.number = -1  # of the last event: a resume starts after it
        self.status = ""
        self.num_tokens = 0
        self._whole: str | None = None  # the complete text as the server repeats it at the end

    @property
    def is_final(self) -> bool:
        return bool(self.status)

    def add(self, event: Event) -> bool:
        """Process the next event; returns whether it has text."""
        if event.type == "error":
            raise BadAnswer(f"an error event: {event.error or event.message}")
        if event.type == "response.resumed" and event.status == "gone":
            raise BadAnswer(f"{self.id} is gone: the server no longer has it")
        if event.type in UNNUMBERED or event.sequence_number < 0:
            return False
        if event.sequence_number <= self.number:
            raise BadAnswer(f"event {event.sequence_number} came after {self.number}: doubled")
        self.number = event.sequence_number
        if event.response is not None:
            self.id = event.response.id
        if event.type in FINAL and event.response is not None:
            self._end(event.type, event.response)
        if event.type == "response.output_text.done":
            self._whole = event.text
        if event.type != TEXT or not event.delta:
            return False
        self.text += event.delta
        return True

    def _end(self, kind: str, response: Response) -> None:
        self.status = response.status or kind.rpartition(".")[2]
        self.num_tokens = response.usage.output_tokens if response.usage else 0
        if self.status == "failed":
            raise BadAnswer(f"{self.id} failed: {response.error}")

    def check(self) -> None:
        """BadAnswer unless the joined deltas equal the server's complete text."""
        if not self.is_final:
            raise BadAnswer("the stream ended without a terminal event")
        if self._whole is not None and self.text != self._whole:
            raise BadAnswer(
                f"{len(self.text)} characters came, {len(self._whole)} were written: "
                f"they differ from {common(self.text, self._whole)} on"
            )


def common(one: str, other: str) -> int:
    """Length in characters of the common prefix of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def check_counting(text: str, num_tokens: int) -> None:
    """BadAnswer if a number of the fake model's counting text is missing or repeated.

    The model draws one number per token.
    """
    expected = "".join(f" {number}" for number in range(1, num_tokens + 1))
    if text != expected:
        at = common(text, expected)
        raise BadAnswer(f"not 1 to {num_tokens}: {text[max(0, at - 20) : at + 20]!r} at {at}")
