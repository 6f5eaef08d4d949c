"""Steering: input for a streaming response, which ends it early; a successor answers the input.

Values and checks: OpenAI's client event, the accepted input, the events that answer it, and the
body of the successor. lanes.py cancels the response and starts the successor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from streamer.errors import InvalidRequest
from streamer.server.errors import clip
from streamer.server.openai.common import new_id
from streamer.server.openai.fields import located
from streamer.server.responses.body import InputItem, InputText, ResponseCreate

MAX_STEERS: Final = 16  # waiting for one response to end


Decode = Callable[..., Any]  # msgspec's, of JSON or MessagePack


class SteerEvent(msgspec.Struct, kw_only=True, tag_field="type", tag="response.steer"):
    """response.steer, its input not decoded: where it is refused, it is returned as it came."""

    previous_response_id: str
    stream_id: str | None = None
    input: msgspec.Raw = msgspec.Raw()


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user"]
    content: str | list[InputText]
    type: Literal["message"] = "message"


class Steer(msgspec.Struct, frozen=True):
    """Accepted input; `given` is the client's encoding of it, `size` the event's bytes."""

    id: str
    previous_response_id: str
    given: msgspec.Raw
    items: list[InputItem]
    size: int


def check_encoding(event: SteerEvent, decode: Decode) -> None:
    """InvalidRequest for an input that can't be decoded: with the event it was only skipped, and a
    refusal has it as it came."""
    try:
        if event.input:
            decode(event.input)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise InvalidRequest(f"input: {e}", param="input", code="invalid_event") from None


def read_steer(event: SteerEvent, size: int, decode: Decode) -> Steer:
    """The checked input: a text, or messages of the user; InvalidRequest otherwise."""
    if not event.input:
        raise InvalidRequest("response.steer requires input", param="input")
    given = event.input.copy()  # alone, without the event around it
    try:
        found: str | list[_Message] = decode(given, type=str | list[_Message])
    except msgspec.ValidationError as e:
        raise located(str(e), list[_Message]) from None
    if isinstance(found, str):
        items = [InputItem("user", found)]
    else:
        items = [
            InputItem(m.role, m.content if isinstance(m.content, str) else [*m.content])
            for m in found
        ]
    if not items:
        raise InvalidRequest("input has no items", param="input")
    return Steer(new_id("steer_"), event.previous_response_id, given, items, size)


def successor(body: ResponseCreate, steers: Sequence[Steer], lane: str | None) -> ResponseCreate:
    """The body of the response that follows: the same settings, the input of the steers."""
    return msgspec.structs.replace(
        body,
        input=[item for steer in steers for item in steer.items],
        previous_response_id=steers[0].previous_response_id,
        fork=None,
        background=None,
        stream_id=lane,
    )


# ---------------------------------------------------------------- server events


class _Named(msgspec.Struct, frozen=True):
    previous_response_id: str
    id: str | UnsetType = UNSET
    input: Any = UNSET


class _Error(msgspec.Struct, frozen=True):
    code: str
    message: str
    type: str = "invalid_request_error"


class SteerAccepted(msgspec.Struct, frozen=True, tag="response.steer.accepted"):
    """The server keeps the input; the successor's response.created shows that it is used."""

    sequence_number: int
    steer: _Named
    stream_id: str | UnsetType = UNSET


class SteerFailed(msgspec.Struct, frozen=True, tag="response.steer.failed"):
    """A refused or unused input, returned to the client."""

    sequence_number: int
    steer: _Named
    error: _Error
    stream_id: str | UnsetType = UNSET


def accepted(steer: Steer, number: int, lane: str | None) -> SteerAccepted:
    named = _Named(steer.previous_response_id, steer.id)
    return SteerAccepted(max(0, number), named, UNSET if lane is None else lane)


def refused(event: SteerEvent, code: str, message: str, number: int = 0) -> SteerFailed:
    """response.steer.failed, for input that was never accepted."""
    named = _Named(clip(event.previous_response_id), input=event.input or UNSET)
    return SteerFailed(max(0, number), named, _Error(code, message))


def failed(steer: Steer, message: str, number: int, lane: str | None) -> SteerFailed:
    """response.steer.failed, for accepted input whose successor could not be made."""
    named = _Named(steer.previous_response_id, steer.id, steer.given)
    error = _Error("successor_creation_failed", message)
    return SteerFailed(max(0, number), named, error, UNSET if lane is None else lane)
