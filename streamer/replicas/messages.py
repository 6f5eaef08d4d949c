"""What an ingress and a replica send each other: lengths and MessagePack, after a handshake.

An ingress names requests by their ids. What a replica drew comes in News, a StepOutput of all the
requests that this ingress follows there: one at most a turn of the replica's loop. Values alone:
connection.py has the socket.
"""

from __future__ import annotations

import msgspec

from streamer import errors
from streamer.core.plan import StepOutput
from streamer.core.sizes import ModelInfo
from streamer.core.view import SchedulerView, ViewQuery
from streamer.engine.requests import GenerateRequest
from streamer.errors import Overloaded, StreamerError


class Member(msgspec.Struct, frozen=True):
    """A replica that there is; `address` is host:port."""

    name: str
    address: str


class Problem(msgspec.Struct, frozen=True, array_like=True):
    """A StreamerError."""

    kind: str
    message: str
    param: str | None
    code: str | None
    retry_after_s: float | None = None

    @classmethod
    def of(cls, error: StreamerError) -> Problem:
        retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else None
        return cls(type(error).__name__, error.message, error.param, error.code, retry_after_s)

    @property
    def error(self) -> StreamerError:
        """The error again; a kind that is unknown here is a StreamerError."""
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, StreamerError)):
            kind = StreamerError
        error: StreamerError = kind(self.message, code=self.code)
        error.param = self.param
        if isinstance(error, Overloaded) and self.retry_after_s is not None:
            error.retry_after_s = self.retry_after_s
        return error


# ---------------------------------------------------------------- ingress -> replica


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The first message: `taken` are requests that went on elsewhere, to be forgotten here."""

    taken: list[str]


class Submit(msgspec.Struct, frozen=True, tag=True):
    """A request, with what it drew elsewhere; one that is here already is followed from there on.

    context  its encoded context
    """

    request: GenerateRequest
    context: bytes | None


class Attach(msgspec.Struct, frozen=True, tag=True):
    """Follow a request that another ingress submitted; answered by Found."""

    request_id: str


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """End a request; `detail` of its finishes then."""

    request_id: str
    detail: str | None


class Leave(msgspec.Struct, frozen=True, tag=True):
    """The last reader here is gone for good: end it, unless another ingress follows it."""

    request_id: str


class Hold(msgspec.Struct, frozen=True, tag=True):
    """Its readers here lag, or do so no longer: it pauses when those of all ingresses do."""

    request_id: str
    is_held: bool


class Taken(msgspec.Struct, frozen=True, tag=True):
    """These went on elsewhere: nothing of them is kept here."""

    request_ids: list[str]


class Settle(msgspec.Struct, frozen=True, tag=True):
    """Answered by Settled, when all before it is done, and is in the journal if there is one."""

    number: int


class View(msgspec.Struct, frozen=True, tag=True):
    """Answered by Seen."""

    query: ViewQuery


# ---------------------------------------------------------------- both ways


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Keep nothing of a request; a replica passes it on to every other ingress."""

    request_id: str


# ---------------------------------------------------------------- replica -> ingress


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The first message, when the model is loaded.

    is_draining  it takes no requests
    """

    name: str
    info: ModelInfo
    is_draining: bool = False


class Answer(msgspec.Struct, frozen=True, tag=True):
    """A submitted request was taken, or was not."""

    request_id: str
    problem: Problem | None = None


class Found(msgspec.Struct, frozen=True, tag=True):
    """The request of an Attach, with its progress; None: it is not here."""

    request_id: str
    request: GenerateRequest | None = None
    context: bytes | None = None
    error: Problem | None = None


class News(msgspec.Struct, frozen=True, tag=True):
    """What was drawn, and the replica's counts; at least one every BEAT_S, perhaps empty.

    errors  what ended requests without finishes
    """

    output: StepOutput
    errors: dict[str, Problem] = {}


class Left(msgspec.Struct, frozen=True, tag=True):
    """A request that was left goes on for another ingress: no more of it comes here."""

    request_id: str


class Shared(msgspec.Struct, frozen=True, tag=True):
    """Another ingress follows this request as well."""

    request_id: str


class Settled(msgspec.Struct, frozen=True, tag=True):
    """See Settle."""

    number: int


class Seen(msgspec.Struct, frozen=True, tag=True):
    """See View."""

    view: SchedulerView


class Draining(msgspec.Struct, frozen=True, tag=True):
    """The replica is to end: take its requests elsewhere."""


ToReplica = Begin | Submit | Attach | Cancel | Leave | Hold | Taken | Settle | View | Forget
ToIngress = Welcome | Answer | Found | News | Left | Shared | Settled | Seen | Draining | Forget
