"""GET /v1/engine: the engine as the page draws it, once or as a stream of snapshots.

Bodies and the SSE response of the stream. Without followers nothing is built: engine/view_feed.py
times the snapshots, and removes what belongs to other keys. app.py calls this.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import msgspec
from starlette.types import Receive, Scope, Send

from streamer.core.view import SchedulerView
from streamer.engine.stats import Snapshot
from streamer.errors import InvalidRequest, StreamerError
from streamer.server.admission import tenant_of
from streamer.server.errors import clip, error_body
from streamer.server.openai.common import encode
from streamer.server.transport.frames import SSE, frame
from streamer.server.transport.sse import HEADERS, KEEP_ALIVE_S, ClientWatch
from streamer.server.transport.stuck import StuckWatch

if TYPE_CHECKING:
    from streamer.server.service import Service


class EngineBody(msgspec.Struct, frozen=True, tag_field="object", tag="engine"):
    """The engine now.

    engine     its state and counts
    scheduler  block pools, requests and steps
    """

    model: str
    engine: Snapshot
    scheduler: SchedulerView


def wants_stream(value: str | None) -> bool:
    """The value of `?stream=`; InvalidRequest if it is no boolean."""
    if value in (None, "", "false", "0"):
        return False
    if value in ("true", "1"):
        return True
    raise InvalidRequest(f"stream is true or false, got {clip(value or '')!r}", param="stream")


def owner_of(scope: Scope) -> str:
    """The prefix of the salts of this caller's requests (Prepared.salt); "" without keys."""
    tenant = tenant_of(scope)
    return tenant and f"{tenant}:"


async def engine_body(service: Service, scope: Scope) -> bytes:
    """The body of GET /v1/engine."""
    view = await service.engine.view_feed.next(owner_of(scope))
    return _body(service, view)


def _body(service: Service, view: SchedulerView) -> bytes:
    return encode(EngineBody(service.names[0], service.engine.snapshot(), view))


class SnapshotStream:
    """The ASGI response of GET /v1/engine?stream=true.

    An event at once, then whenever something changed, at most one a tick; at least one every
    KEEP_ALIVE_S. It ends when the server drains: no request depends on it; and when its client has
    read nothing for --pause-timeout.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._send: Send
        self._stuck: StuckWatch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send snapshots until the client is gone or the server stops.

        A follower is refused with an exception, before anything is sent.
        """
        self._send = send
        self._stuck = StuckWatch(scope, self._service.config.pause_timeout, lambda: None)
        follower = self._service.engine.view_feed.follow(owner_of(scope))
        async with ClientWatch(receive), contextlib.aclosing(follower) as views:
            first = await anext(views)
            headers = [(b"content-type", SSE.media), *HEADERS]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            with self._stuck:
                try:
                    await self._send_views(first, views)
                except StreamerError as e:
                    await self._put(frame("", error_body(e)))
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_views(self, first: SchedulerView, views: AsyncIterator[SchedulerView]) -> None:
        service, clock = self._service, asyncio.get_running_loop().time
        last, view, sent_s = None, first, 0.0
        while True:
            is_last = service.engine.is_draining
            if view != last or is_last or clock() - sent_s >= KEEP_ALIVE_S:
                await self._put(frame(str(view.step), _body(service, view)))
                sent_s = clock()
            if is_last:
                return
            last, view = view, await anext(views)

    async def _put(self, body: bytes) -> None:
        self._stuck.began()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
        self._stuck.ended()
