"""Events of OpenAI's Responses API, folded into the answer they make up; proof that it is whole.

The same events come over SSE and WebSocket, and again after a resume; `Log` takes them from any of
these and says where one was lost or came twice. No socket, no clock.
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
    """What is looked at of a response."""

    id: str
    status: str = ""
    usage: OutputUsage | None = None
    error: Any = None


class Event(msgspec.Struct):
    """Any event, with the fields that are looked at."""

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
    """One response as its events tell it; raises BadAnswer where they can't be right."""

    def __init__(self) -> None:
        self.id = ""
        self.text = ""
        self.number = -1  # of the last event: the cursor that a resume starts after
        self.status = ""
        self.num_tokens = 0
        self._whole: str | None = None  # the text as the server sums it up

    @property
    def is_final(self) -> bool:
        return bool(self.status)

    def add(self, event: Event) -> bool:
        """Take the next one; whether it brought text."""
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
        """The deltas joined are the text that the server sums up; BadAnswer if not."""
        if not self.is_final:
            raise BadAnswer("the stream ended without a terminal event")
        if self._whole is not None and self.text != self._whole:
            raise BadAnswer(
                f"{len(self.text)} characters came, {len(self._whole)} were written: "
                f"they differ from {common(self.text, self._whole)} on"
            )


def common(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def check_counting(text: str, num_tokens: int) -> None:
    """Streamer's fake model counts, a number a token: BadAnswer if one is missing or doubled."""
    wanted = "".join(f" {number}" for number in range(1, num_tokens + 1))
    if text != wanted:
        at = common(text, wanted)
        raise BadAnswer(f"not 1 to {num_tokens}: {text[max(0, at - 20) : at + 20]!r} at {at}")
