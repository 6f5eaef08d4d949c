"""GET /v1/responses as a WebSocket: OpenAI's mode, and our subprotocol on top of it.

One Session a socket. Its reader always sits in `receive()`; each lane is a task that runs its
responses in order and sends their events itself, so a socket that takes nothing holds up only its
own lanes, whose cursors then merge what they missed. Replies to bad events go by a small queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import OrderedDict, deque
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.types import Receive, Scope, Send

from streamer.core.plan import Notice
from streamer.core.sampling import MAX_TOKENS, SamplingParams
from streamer.engine.stream import Delta, TokenStream
from streamer.errors import InvalidRequest, NotFound, RateLimited, StreamerError
from streamer.server.admission import tenant_of
from streamer.server.follow import follow
from streamer.server.openai.common import MAX_ECHO, ApiError, api_error, clip, encode, new_id
from streamer.server.openai.events import ResponseEvents
from streamer.server.openai.fields import decode_body, located
from streamer.server.openai.models import check_model
from streamer.server.openai.responses import DECODER, FIELDS, ResponseCreate
from streamer.server.service import Service, salt_of

log = logging.getLogger(__name__)

PROTOCOL: Final = "streamer.v1.json"
MAX_MESSAGE_BYTES: Final = 1 << 20
MAX_LANES: Final = 64
MAX_QUEUED: Final = 256  # creates that wait for their lane
MAX_REPLIES: Final = 256
MAX_QUEUED_BYTES: Final = 4 << 20  # of creates whose response has not begun
MAX_REPLY_BYTES: Final = 4 << 20
MAX_REMEMBERED: Final = 1024  # finished ids, so that a late cancel is not an error


class SessionLimits(msgspec.Struct, frozen=True):
    """What one socket may do."""

    message_bytes: int = MAX_MESSAGE_BYTES
    lanes: int = MAX_LANES
    queued: int = MAX_QUEUED
    output_tokens: int = MAX_TOKENS


class SessionCreated(msgspec.Struct, frozen=True, tag="session.created"):
    """The first event to a client of our subprotocol."""

    session_id: str
    model: str
    context_length: int
    epoch: str
    window: int
    detach_s: float
    limits: SessionLimits = SessionLimits()


class ErrorEvent(msgspec.Struct, frozen=True, tag="error"):
    """A refused event; the socket stays open."""

    status: int
    error: ApiError
    stream_id: str | UnsetType = UNSET


# What a ping may carry: a time or a short name, of whatever kind the client keeps.
Stamp = (
    Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
    | float
    | Annotated[str, Meta(max_length=MAX_ECHO)]
    | None
)


class Pong(msgspec.Struct, frozen=True, tag="session.pong"):
    """Echoes what the ping carried."""

    t: Stamp = None


class ClientEvent(msgspec.Struct):
    """What every event has, and the fields of the small ones."""

    type: str
    stream_id: str | None = None
    response_id: str | None = None
    t: Stamp = None


class Job(msgspec.Struct, frozen=True):
    """A create that was read and checked, waiting for its lane; `size` in bytes of JSON."""

    response_id: str
    size: int
    body: ResponseCreate
    model: str
    params: SamplingParams
    messages: list[dict[str, Any]]


_EVENT = msgspec.json.Decoder(ClientEvent)


class Endpoint:
    """The ASGI endpoint: a Session a connection."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one socket to its end."""
        await Session(self._service, scope, receive, send).run()


class Session:
    """One socket: its lanes, and the responses that run on them."""

    def __init__(self, service: Service, scope: Scope, receive: Receive, send: Send) -> None:
        self._service = service
        self._scope = scope
        self._offered: list[str] = list(scope.get("subprotocols") or ())
        self._receive = receive
        self._asgi_send = send
        self._is_extended = PROTOCOL in self._offered
        self._lanes: dict[str | None, deque[Job]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._live: dict[str, TokenStream] = {}
        self._finished: OrderedDict[str, None] = OrderedDict()
        self._replies: asyncio.Queue[bytes] = asyncio.Queue(MAX_REPLIES)
        self._reply_bytes = 0
        self._queued_bytes = 0
        self._is_flooded = False

    async def run(self) -> None:
        """Handshake, then read until the socket is closed."""
        await self._receive()  # websocket.connect
        if not await self._open():
            return
        writer = asyncio.create_task(self._write_replies())
        self._tasks.add(writer)
        try:
            await self._read()
        except OSError:
            pass  # the client is gone
        finally:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _open(self) -> bool:
        """Accept; False if it was closed at once."""
        unknown = [p for p in self._offered if p.startswith("streamer.") and p != PROTOCOL]
        chosen = PROTOCOL if self._is_extended else None
        await self._asgi_send({"type": "websocket.accept", "subprotocol": chosen})
        if unknown and not self._is_extended:
            await self._close(4406, f"unknown subprotocol {unknown[0]}; there is {PROTOCOL}")
            return False
        try:
            self._service.require_ready()
        except StreamerError as e:
            await self._close(1011 if self._service.engine.is_dead else 1013, e.message)
            return False
        if self._is_extended:
            config, info = self._service.config, self._service.engine.info
            event = SessionCreated(
                "sess_" + secrets.token_hex(12),
                self._service.names[0],
                info.max_model_len,
                self._service.epoch,
                config.stream_window,
                config.detach_timeout,
            )
            await self._send(encode(event))
        return True

    # ------------------------------------------------------------ reader

    async def _read(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                return
            text = message.get("text")
            if text is None:
                await self._close(4400, "events are JSON in text frames")
                return
            try:
                event = _EVENT.decode(text)
            except msgspec.ValidationError as e:
                self._refuse(located(str(e), "invalid_event"), None)
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                await self._close(4400, "an event is not valid JSON")
                return
            else:
                try:
                    self._handle(event, text)
                except StreamerError as e:
                    self._refuse(e, event.stream_id)
                except Exception:  # a bug of ours costs one event, not everybody on this socket
                    log.exception("an event failed")
                    error = StreamerError("internal error", code="internal")
                    self._refuse(error, event.stream_id)
            if self._is_flooded:
                await self._close(4429, "too many replies are waiting to be read")
                return

    def _handle(self, event: ClientEvent, text: str) -> None:
        match event.type:
            case "response.create":
                self._create(text)
            case "response.cancel":
                self._cancel(event.response_id)
            case "session.ping" if self._is_extended:
                self._reply(encode(Pong(event.t)))
            case _:
                raise InvalidRequest(
                    f"there is no event {clip(event.type)!r} here",
                    param="type",
                    code="unknown_event",
                )

    def _create(self, text: str) -> None:
        service = self._service
        service.admit(self._scope)
        body = decode_body(text, DECODER, FIELDS)
        model = check_model(body.model, service.names)
        params = body.params(service.engine.info.generation_defaults)
        size = len(text.encode())
        if self._queued_bytes + size > MAX_QUEUED_BYTES:
            raise RateLimited(
                f"{self._queued_bytes} bytes of responses wait on this socket and this one has "
                f"{size}; the limit is {MAX_QUEUED_BYTES}"
            )
        job = Job(new_id("resp_"), size, body, model, params, body.template_messages())
        lane = self._lanes.get(body.stream_id)
        if lane is not None:
            if sum(map(len, self._lanes.values())) >= MAX_QUEUED:
                raise RateLimited(f"{MAX_QUEUED} responses wait for their lanes on this socket")
            lane.append(job)
            self._queued_bytes += size
            return
        if len(self._lanes) >= MAX_LANES:
            raise RateLimited(f"{MAX_LANES} lanes are running on this socket")
        self._lanes[body.stream_id] = deque([job])
        self._queued_bytes += size
        task = asyncio.create_task(self._run_lane(body.stream_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _cancel(self, response_id: str | None) -> None:
        if response_id is None:
            raise InvalidRequest("response.cancel wants a response_id", param="response_id")
        stream = self._live.get(response_id)
        if stream is not None:
            self._service.cancel([stream])
        elif response_id not in self._finished:
            raise NotFound(f"there is no response {clip(response_id)!r} here", param="response_id")

    # ------------------------------------------------------------ lanes

    async def _run_lane(self, name: str | None) -> None:
        lane = self._lanes[name]
        try:
            while lane:
                await self._run(lane.popleft())
        except OSError:
            pass  # the client is gone; the reader sees it too
        except Exception:
            log.exception("a lane failed")
            with contextlib.suppress(OSError):
                await self._close(1011, "internal error")
        finally:
            del self._lanes[name]

    async def _run(self, job: Job) -> None:
        service = self._service
        with service.working():
            try:
                salt = salt_of(self._scope, job.body)
                prompt = await service.encode_messages(job.messages, salt=salt)
                tenant = tenant_of(self._scope)
                service.admission.accept(tenant, [prompt])
                stream = service.submit(
                    prompt,
                    job.params,
                    job.body,
                    tenant=tenant,
                    salt=salt,
                    request_id=job.response_id,
                    detach_s=service.config.detach_timeout,
                )
            except StreamerError as e:
                service.metrics.refused(e)
                await self._send(_error(e, job.body.stream_id))
                return
            finally:
                self._queued_bytes -= job.size
            service.record("responses", "websocket", self._scope, [stream], job.model)
            self._live[job.response_id] = stream
            try:
                await self._follow(job, stream)
            finally:
                del self._live[job.response_id]
                self._finished[job.response_id] = None
                if len(self._finished) > MAX_REMEMBERED:
                    self._finished.popitem(last=False)

    async def _follow(self, job: Job, stream: TokenStream) -> None:
        """Send a response's events to the last one."""
        service = self._service
        events = ResponseEvents(
            job.body, stream, job.model, service.token_text, is_extended=self._is_extended
        )
        meter = service.metrics.meter([stream])

        async def send_news(_: int, items: list[Delta | Notice]) -> None:
            deltas = [d for d in items if isinstance(d, Delta)]
            meter.deltas(0, deltas)
            if self._is_extended:
                for notice in items:
                    if isinstance(notice, Notice):
                        await self._send(events.state(notice))
            for data in events.deltas(deltas):
                await self._send(data)

        is_reading = False
        try:
            for data in events.opening():
                await self._send(data)
            if self._is_extended:
                await self._send(events.waiting(service.engine.stats.waiting))
            is_reading = True
            await follow([stream], send_news)
        except StreamerError as e:
            service.cancel([stream])
            for data in events.failed(e):
                await self._send(data)
        finally:
            if not is_reading:  # nobody ever read, so nobody's leaving would end it
                service.cancel([stream])

    # ------------------------------------------------------------ writing

    def _refuse(self, error: StreamerError, stream_id: str | None) -> None:
        self._service.metrics.refused(error)
        self._reply(_error(error, stream_id))

    def _reply(self, data: bytes) -> None:
        self._reply_bytes += len(data)
        if self._replies.full() or self._reply_bytes > MAX_REPLY_BYTES:
            self._is_flooded = True
        else:
            self._replies.put_nowait(data)

    async def _write_replies(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                data = await self._replies.get()
                await self._send(data)
                self._reply_bytes -= len(data)

    async def _send(self, data: bytes) -> None:
        await self._asgi_send({"type": "websocket.send", "text": data.decode()})

    async def _close(self, code: int, reason: str) -> None:
        # a close frame holds 125 bytes: the code and 123 of the reason
        reason = reason.encode()[:123].decode(errors="ignore")
        await self._asgi_send({"type": "websocket.close", "code": code, "reason": reason})


def _error(error: StreamerError, stream_id: str | None) -> bytes:
    lane: str | UnsetType = UNSET if stream_id is None else clip(stream_id)
    return encode(ErrorEvent(error.status, api_error(error), stream_id=lane))
