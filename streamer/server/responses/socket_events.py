"""The events of a socket besides those of responses: client events, session events, errors.

Values alone: socket.py decodes and encodes them, as JSON or MessagePack.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from streamer.core.sampling import MAX_TOKENS
from streamer.errors import InvalidRequest, StreamerError
from streamer.server.errors import MAX_ECHO, ApiError, api_error, clip
from streamer.server.openai.common import MAX_DETACH_S
from streamer.server.openai.fields import Reader, Table
from streamer.server.responses.body import FIELDS, ResponseCreate, check_stream_id
from streamer.server.responses.events import EVERYTHING
from streamer.server.responses.steering import SteerEvent

MAX_MESSAGE_BYTES: Final = 1 << 20
MAX_WINDOW: Final = 1 << 24

# What a ping may carry: a time or a short name, as the client chooses.
Stamp = (
    Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
    | float
    | Annotated[str, Meta(max_length=MAX_ECHO)]
    | None
)


class Settings(msgspec.Struct, frozen=True):
    """What `session.update` changes, for later creates and resumes.

    window    output tokens that a reader may lag
    detach_s  seconds that a response outlives its last reader
    include   LOGPROBS, TOKEN_IDS: which of those that a body requests are sent on this socket
    """

    window: int
    detach_s: float
    include: frozenset[str] = EVERYTHING


# ---------------------------------------------------------------- client events


class Head(msgspec.Struct):
    """What every client event has: of one that could not be decoded, all that is known."""

    type: str
    stream_id: str | None = None


class _Event(msgspec.Struct, kw_only=True, tag_field="type"):
    stream_id: str | None = None


class Create(ResponseCreate, kw_only=True, tag_field="type", tag="response.create"):
    """response.create: the body of a response, as an event."""


class Cancel(_Event, kw_only=True, tag="response.cancel"):
    """response.cancel."""

    response_id: str | None = None


class Resume(_Event, kw_only=True, tag="response.resume"):
    """response.resume; without starting_after every event is sent again, one for each token."""

    response_id: str
    starting_after: int | None = None

    def check(self) -> None:
        """InvalidRequest for a number below -1, or a bad stream_id."""
        if self.starting_after is not None and self.starting_after < -1:
            raise InvalidRequest("starting_after is the number of an event", param="starting_after")
        check_stream_id(self.stream_id)


class Ack(_Event, kw_only=True, tag="response.ack"):
    """response.ack: consumed up to this number."""

    response_id: str
    sequence_number: int


class Ping(_Event, kw_only=True, tag="session.ping"):
    """session.ping."""

    t: Stamp = None


class Update(_Event, kw_only=True, tag="session.update"):
    """session.update."""

    window: int | None = None
    detach_s: float | None = None
    include: list[str] | None = None

    def apply(self, settings: Settings) -> Settings:
        """The settings with these changes."""
        if self.window is not None and not 0 <= self.window <= MAX_WINDOW:
            raise InvalidRequest(
                f"window must be from 0 to {MAX_WINDOW}, got {self.window}", param="window"
            )
        if self.detach_s is not None and not 0 <= self.detach_s <= MAX_DETACH_S:
            raise InvalidRequest(
                f"detach_s must be from 0 to {MAX_DETACH_S}, got {self.detach_s}", param="detach_s"
            )
        for i, name in enumerate(self.include or ()):
            if name not in EVERYTHING:
                known = ", ".join(sorted(EVERYTHING))
                raise InvalidRequest(
                    f"include has {known}, got {clip(name)!r}", param=f"include[{i}]"
                )
        return Settings(
            settings.window if self.window is None else self.window,
            settings.detach_s if self.detach_s is None else self.detach_s,
            settings.include if self.include is None else frozenset(self.include),
        )


ClientEvent = Create | Cancel | SteerEvent | Resume | Ack | Ping | Update

OPENAIS: Final[dict[type[ClientEvent], Table]] = {Create: FIELDS, Cancel: {}, SteerEvent: {}}
OURS: Final[tuple[type[ClientEvent], ...]] = (Resume, Ack, Ping, Update)
EXTENSIONS: Final = {kind.__struct_config__.tag for kind in OURS}
ALL: Final[dict[type[ClientEvent], Table]] = {**OPENAIS, **{kind: {} for kind in OURS}}
PLAIN: Final = Reader(OPENAIS)
EXTENDED: Final = Reader(ALL)
PACKED: Final = Reader(ALL, is_packed=True)


# ---------------------------------------------------------------- server events


class SessionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one socket.

    responses     made on it and not ended; at most `queued` of them wait for their lanes
    events_per_s  on average; event_burst at once, after a silence
    sockets       open at once with its key; 0: any number
    """

    lanes: int
    responses: int
    queued: int
    events_per_s: int
    event_burst: int
    sockets: int
    message_bytes: int = MAX_MESSAGE_BYTES
    output_tokens: int = MAX_TOKENS


class SessionCreated(msgspec.Struct, frozen=True, tag="session.created"):
    """The first event to a client of our subprotocol.

    sampling_defaults  sampling settings of requests that do not name them
    """

    session_id: str
    model: str
    context_length: int
    sampling_defaults: dict[str, float]
    epoch: str
    window: int
    detach_s: float
    limits: SessionLimits


class GoAway(msgspec.Struct, frozen=True, tag="session.goaway"):
    """A planned stop: responses may finish until the deadline; reconnect and resume."""

    deadline_ms: int


class Pong(msgspec.Struct, frozen=True, tag="session.pong"):
    """Echoes what the ping carried."""

    t: Stamp = None


class Resumed(msgspec.Struct, frozen=True, tag="response.resumed", rename={"after": "from"}):
    """Before a replay: the number it continues from, -1 for the beginning, and the status.

    status  live, finished, or gone (never made, not kept, or another key's)
    """

    response_id: str
    after: int
    status: str
    stream_id: str | UnsetType = UNSET


class ErrorEvent(msgspec.Struct, frozen=True, tag="error"):
    """A refused event; the socket stays open."""

    status: int
    error: ApiError
    stream_id: str | UnsetType = UNSET


def error_event(error: StreamerError, stream_id: str | None) -> ErrorEvent:
    lane: str | UnsetType = UNSET if stream_id is None else clip(stream_id)
    return ErrorEvent(error.status, api_error(error), stream_id=lane)
