"""What a lane has to do: creates that wait, resumes, and what is attached to a socket.

Values alone; lanes.py keeps and runs them.
"""

from __future__ import annotations

import time

import msgspec
from msgspec import UNSET

from streamer.core.sampling import SamplingParams
from streamer.engine.stream import TokenStream
from streamer.server.context import Context
from streamer.server.responses.body import ResponseCreate
from streamer.server.responses.events import ResponseEvents, blank_response
from streamer.server.responses.socket_events import Resume, Settings
from streamer.server.responses.steering import Steer
from streamer.server.responses.types import ResponseEvent


class Job(msgspec.Struct, frozen=True):
    """A create that was read and checked, waiting for its lane; `size` in bytes of JSON."""

    response_id: str
    size: int
    body: ResponseCreate
    model: str
    params: SamplingParams
    settings: Settings
    steers: tuple[Steer, ...] = ()


class Resuming(msgspec.Struct, frozen=True):
    """A resume that was read."""

    event: Resume
    settings: Settings


class Attached(msgspec.Struct, eq=False):
    """A response whose events go out on this socket, and the number its reader has there.

    steers  input that follows it when it has ended
    """

    stream: TokenStream
    reader: int
    events: ResponseEvents
    lane: str | None
    settings: Settings
    steers: list[Steer] = []


def cancelled(job: Job) -> ResponseEvent:
    """The terminal event of a response that never began."""
    context = Context(kind="response", tenant="", body=job.body, model=job.model)
    response = blank_response(context, job.response_id, time.time(), job.params, "cancelled")
    lane = UNSET if job.body.stream_id is None else job.body.stream_id
    return ResponseEvent("response.incomplete", 0, response, lane)
