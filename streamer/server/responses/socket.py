"""GET /v1/responses as a WebSocket: OpenAI's mode, and our subprotocols on top of it.

One Session a socket. Its read loop always waits in `receive()`; lanes.py runs the responses and
sends their events; replies to events go through a small queue. JSON and MessagePack carry the same
Structs. The limits on incoming frames are in transport/websocket.py, which parses them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from typing import Any, Final

import msgspec
from starlette.types import Receive, Scope, Send

from streamer.core.sampling import model_defaults
from streamer.errors import InvalidRequest, StreamerError
from streamer.server.admission import tenant_of
from streamer.server.errors import clip
from streamer.server.openai.common import encode
from streamer.server.openai.fields import located
from streamer.server.responses.lanes import MAX_LANES, MAX_QUEUED, MAX_RESPONSES, Lanes
from streamer.server.responses.socket_events import (
    EXTENDED,
    EXTENSIONS,
    PACKED,
    PLAIN,
    Ack,
    Cancel,
    ClientEvent,
    Create,
    GoAway,
    Head,
    Ping,
    Pong,
    Resume,
    SessionCreated,
    SessionLimits,
    Settings,
    Update,
    error_event,
)
from streamer.server.responses.steering import Decode, SteerEvent
from streamer.server.service import Service
from streamer.server.transport.follow import Work
from streamer.server.transport.loop_turn import WRITE_PART
from streamer.server.transport.stuck import StuckWatch
from streamer.server.transport.websocket import EVENT_BURST, EVENTS_PER_S

log = logging.getLogger(__name__)

JSON, MSGPACK = "streamer.v1.json", "streamer.v1.msgpack"
MAX_REPLIES: Final = 256
MAX_REPLY_BYTES: Final = 4 << 20

_pack = msgspec.msgpack.Encoder().encode


class Endpoint:
    """The ASGI endpoint: one Session for each connection."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Session(self._service, scope, receive, send).run()


class Session:
    """One socket: its handshake, its settings, its lanes and its replies."""

    def __init__(self, service: Service, scope: Scope, receive: Receive, send: Send) -> None:
        self._service = service
        self._offered: list[str] = list(scope.get("subprotocols") or ())
        self._receive = receive
        self._asgi_send = send
        self._protocol = next((p for p in self._offered if p in (JSON, MSGPACK)), None)
        self._is_packed = self._protocol == MSGPACK
        self._encode = _pack if self._is_packed else encode
        self._decode: Decode = msgspec.msgpack.decode if self._is_packed else msgspec.json.decode
        extended = PACKED if self._is_packed else EXTENDED
        self._reader = extended if self._is_extended else PLAIN
        self._id = "sess_" + secrets.token_hex(12)
        config = service.config
        self._settings = Settings(config.stream_window, config.detach_timeout)
        self._lanes = Lanes(
            service,
            scope,
            self._id,
            write=self._write,
            reply=self._reply,
            is_extended=self._is_extended,
        )
        self._scope = scope
        self._write_now: Callable[[bytes, bool], bool] = lambda _data, _is_text: False
        self._stuck: StuckWatch
        self._replies: asyncio.Queue[bytes] = asyncio.Queue(MAX_REPLIES)
        self._reply_bytes = 0
        self._is_flooded = False

    @property
    def _is_extended(self) -> bool:
        return self._protocol is not None

    async def run(self) -> None:
        """Handshake, then read until the socket is closed."""
        await self._receive()  # websocket.connect
        self._write_now = self._scope.get("extensions", {}).get(WRITE_PART, self._write_now)
        limit_s = self._service.config.pause_timeout
        self._stuck = StuckWatch(self._scope, limit_s, self._lanes.drop)
        with self._stuck, contextlib.ExitStack() as open_socket:
            if not await self._open(open_socket):
                return
            writer = asyncio.create_task(self._write_replies())
            forget = self._service.on_drain(self._go_away)
            try:
                await self._read()
            except OSError:
                pass  # the client is gone
            finally:
                forget()
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
                await self._lanes.close()

    async def _open(self, stack: contextlib.ExitStack) -> bool:
        """Accept, and count the socket until `stack` exits; False if it was closed at once."""
        tenant = tenant_of(self._scope)
        unknown = [p for p in self._offered if p.startswith("streamer.")]
        await self._asgi_send({"type": "websocket.accept", "subprotocol": self._protocol})
        if unknown and not self._is_extended:
            reason = f"unknown subprotocol {unknown[0]}; there are {JSON} and {MSGPACK}"
            await self._close(4406, reason)
            return False
        try:
            self._service.require_ready()
            stack.enter_context(self._service.admission.socket(tenant))
        except StreamerError as e:
            self._service.metrics.refused(e)
            await self._close(1011 if self._service.engine.is_dead else 1013, e.message)
            return False
        if self._is_extended:
            info = self._service.engine.info
            event = SessionCreated(
                self._id,
                self._service.names[0],
                info.max_model_len,
                model_defaults(info.generation_defaults),
                self._service.epoch,
                self._settings.window,
                self._settings.detach_s,
                SessionLimits(
                    lanes=MAX_LANES,
                    responses=MAX_RESPONSES,
                    queued=MAX_QUEUED,
                    events_per_s=EVENTS_PER_S,
                    event_burst=EVENT_BURST,
                    sockets=self._service.admission.max_sockets(tenant),
                ),
            )
            await self._send_bytes(self._encode(event))
        return True

    # ------------------------------------------------------------ reader

    async def _read(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                return
            data = self._bytes_of(message)
            try:
                event = self._reader.decode(data)
            except InvalidRequest as e:
                self._refuse_undecoded(e, data)
            else:
                try:
                    await self._handle(event, len(data))
                except StreamerError as e:
                    self._refuse(e, event.stream_id)
                except Exception:  # a bug of ours costs one event, not the whole socket
                    log.exception("an event failed")
                    error = StreamerError("internal error", code="internal")
                    self._refuse(error, event.stream_id)
            if self._is_flooded:
                await self._close(4429, "flood: too many replies are waiting to be read")
                return

    def _bytes_of(self, message: Any) -> bytes:
        """The event's bytes; none, which is no event, for the other kind of frame."""
        data: bytes | str | None = message.get("bytes" if self._is_packed else "text")
        return data.encode() if isinstance(data, str) else data or b""

    def _refuse_undecoded(self, error: InvalidRequest, data: bytes) -> None:
        """Refuse an event that could not be decoded, on its lane where it names one.

        A response.create counts as a request even so.
        """
        try:
            head = self._decode(data, type=Head)
        except msgspec.ValidationError as e:
            self._refuse(located(str(e), code="invalid_event"), None)
            return
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            form = "MessagePack in binary" if self._is_packed else "JSON in text"
            text = f"events are {form} frames, and this one is not"
            self._refuse(InvalidRequest(text, code="invalid_event"), None)
            return
        refusal: StreamerError = error
        if error.param == "type":
            text = f"there is no event {clip(head.type)!r} here"
            if not self._is_extended and head.type in EXTENSIONS:
                text += f"; a socket has it that is opened with the subprotocol {JSON} or {MSGPACK}"
            refusal = InvalidRequest(text, param="type", code="unknown_event")
        elif head.type == "response.create":
            try:
                self._service.admit(self._scope)
            except StreamerError as e:
                refusal = e
        self._refuse(refusal, head.stream_id)

    async def _handle(self, event: ClientEvent, num_bytes: int) -> None:
        lanes = self._lanes
        match event:
            case Create():
                lanes.create(event, num_bytes, self._settings)
            case Cancel():
                await lanes.cancel(event.response_id)
            case SteerEvent():
                lanes.steer(event, num_bytes, self._decode)
            case Resume():
                lanes.resume(event, self._settings)
            case Ack():
                lanes.acknowledge(event.response_id, event.sequence_number)
            case Update():
                self._settings = event.apply(self._settings)
            case Ping():
                self._reply(Pong(event.t))

    def _go_away(self, deadline_s: float) -> None:
        if self._is_extended:
            self._reply(GoAway(int(1000 * deadline_s)))

    # ------------------------------------------------------------ writing

    def _refuse(self, error: StreamerError, stream_id: str | None) -> None:
        self._service.metrics.refused(error)
        self._reply(error_event(error, stream_id))

    def _reply(self, event: msgspec.Struct) -> None:
        data = self._encode(event)
        self._reply_bytes += len(data)
        if self._replies.full() or self._reply_bytes > MAX_REPLY_BYTES:
            self._is_flooded = True
        else:
            self._replies.put_nowait(data)

    async def _write_replies(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                data = await self._replies.get()
                await self._send_bytes(data)
                self._reply_bytes -= len(data)

    def _write(self, event: msgspec.Struct) -> Work | None:
        data = self._encode(event)
        return None if self._write_now(data, not self._is_packed) else self._send_bytes(data)

    async def _send_bytes(self, data: bytes) -> None:
        self._stuck.began()
        if self._is_packed:
            await self._asgi_send({"type": "websocket.send", "bytes": data})
        else:
            await self._asgi_send({"type": "websocket.send", "text": data.decode()})
        self._stuck.ended()

    async def _close(self, code: int, reason: str) -> None:
        # a close frame holds 125 bytes: the code and 123 of the reason
        reason = reason.encode()[:123].decode(errors="ignore")
        await self._asgi_send({"type": "websocket.close", "code": code, "reason": reason})
