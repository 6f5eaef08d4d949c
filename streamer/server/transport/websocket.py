"""StreamingWebSocket: uvicorn's WebSocket protocol, for many small messages and hostile clients.

Every frame is counted against a budget where it is parsed. lifecycle.py passes this class to
uvicorn, which hands it the upgraded connections of transport/http.py.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, Final, cast

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.datastructures import Headers
from websockets.exceptions import ProtocolError, SecurityError
from websockets.extensions import Extension
from websockets.frames import Frame, Opcode
from websockets.headers import parse_extension
from websockets.http11 import Request, Response
from websockets.protocol import OPEN
from websockets.server import ServerProtocol

from streamer.server.transport.loop_turn import WRITE_PART, TurnTransport
from streamer.server.transport.stuck import ABORT

TEXT, BINARY = b"\x81", b"\x82"  # opcode, and FIN: no message is cut in pieces
VERSION: Final = "13"
FLOOD: Final = 4429
INVALID_DATA: Final = 1007
LINGER_S: Final = 2.0
# What one socket may send. An event costs the loop from 13 us (an ack) to 90 us (a refused event
# and its answer; a shared EPYC core, 2026-11-21), a frame alone 8 us: at the limit one socket takes
# at worst a fifth of the loop.
EVENTS_PER_S: Final = 2000
EVENT_BURST: Final = 10_000  # at once, after a silence: acks of many lanes that were held up
EVENT_BYTES: Final = 4096  # an event counts once more for each of these that it has
BARE_COST: Final = 10  # a ping, a pong or a fragment counts as this many events: a client needs few


class FrameBudget:
    """What one socket may send, in events: a token bucket.

    `now` is in seconds of a monotonic clock.
    """

    __slots__ = ("_level", "_since")

    def __init__(self, now: float) -> None:
        self._level = float(EVENT_BURST)
        self._since = now

    def take(self, now: float, num_bytes: int = 0, *, is_event: bool = True) -> bool:
        """Whether one more frame is within the budget."""
        cost = (1 if is_event else BARE_COST) + num_bytes // EVENT_BYTES
        self._level = min(EVENT_BURST, self._level + (now - self._since) * EVENTS_PER_S) - cost
        self._since = now
        return self._level >= 0


class Frames(ServerProtocol):
    """websockets' protocol, with a budget of frames.

    The refusal of a handshake of another version names ours (RFC 6455, 4.4), a close may come
    inside a fragmented message (5.4), and every extension is declined, but for a list that is none,
    which fails the handshake (9.1).
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, **settings: Any) -> None:
        super().__init__(**settings)
        self._clock = loop.time
        self._budget = FrameBudget(loop.time())

    def accept(self, request: Request) -> Response:
        """The answer to a handshake, a refusal included."""
        try:
            response = super().accept(request)
        except UnicodeEncodeError:  # websockets repeats the header, which may hold a ticket
            says = "a header of the handshake has characters that are no ASCII\n"
            return self.reject(HTTPStatus.BAD_REQUEST, says)
        if response.status_code != HTTPStatus.SWITCHING_PROTOCOLS and request.headers.get_all(
            "Sec-WebSocket-Version"
        ) != [VERSION]:
            says = f"this server speaks version {VERSION} of the WebSocket protocol\n"
            response = self.reject(HTTPStatus.UPGRADE_REQUIRED, says)
            response.headers["Upgrade"] = "websocket"
            response.headers["Sec-WebSocket-Version"] = VERSION
        return response

    def process_extensions(self, headers: Headers) -> tuple[None, list[Extension]]:
        """Decline the offers: InvalidHandshake if they can't be parsed."""
        for offers in headers.get_all("Sec-WebSocket-Extensions"):
            parse_extension(offers)
        return None, []

    def recv_frame(self, frame: Frame) -> None:
        """Count a frame, then pass it to websockets; ProtocolError ends the parser."""
        is_event = frame.fin and frame.opcode in (Opcode.TEXT, Opcode.BINARY)
        if not self._budget.take(self._clock(), len(frame.data), is_event=is_event):
            self.fail(FLOOD, f"flood: more than {EVENTS_PER_S} events a second")
            raise ProtocolError("flood")
        if frame.opcode is Opcode.CLOSE:
            self.cur_size = None
        super().recv_frame(frame)


class StreamingWebSocket(WebSocketsSansIOProtocol):
    """uvicorn's protocol, with a fast path for messages to an open socket.

    The application may abort the connection. Pings are answered while the peer reads.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = Frames(self.loop, max_size=self.config.ws_max_size, logger=self.conn.logger)
        self._pong = b""  # to send when the peer reads again

    def connection_lost(self, exc: Exception | None) -> None:
        cast("TurnTransport", self.transport).lost()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close an open connection with 1012; uvicorn's raises for one that its peer is closing."""
        if self.handshake_complete and self.conn.state is not OPEN:
            self.stop_keepalive()
            self.transport.close()
        else:
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        """Feed the parser, part by part."""
        cast("TurnTransport", self.transport).receive(data, self._parse)

    def _parse(self, data: bytes) -> None:
        if self.conn.parser_exc is not None:
            return  # data after a failure is ignored (RFC 6455, 7.1.7)
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            # websockets allows shorter heads than transport/http.py does, and sends no answer
            self.handshake_initiated = self.handshake_complete = self.close_sent = True
            cause = self.conn.handshake_exc.__cause__
            if isinstance(cause, SecurityError):
                says = "a header of the handshake is too long for a WebSocket\n"
                status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            else:
                says, status = f"no handshake of a WebSocket: {cause}\n", HTTPStatus.BAD_REQUEST
            response = self.conn.reject(status, says)
            self.transport.write(response.serialize())
            self.transport.close()

    def handle_connect(self, event: Request) -> None:
        """Answer the handshake; unless refused, it makes the scope."""
        super().handle_connect(event)
        if self.response.status_code == 101:
            extensions = self.scope["extensions"]
            extensions[ABORT] = self.transport.abort  # type: ignore[assignment]
            extensions[WRITE_PART] = self.write_message  # type: ignore[assignment]

    def handle_ping(self) -> None:
        """Pong; for a peer that does not read, the last one is enough (RFC 6455, 5.5.3)."""
        pongs = b"".join(self.conn.data_to_send())
        if pongs and self.writable.is_set():
            self.transport.write(pongs)
        elif pongs:
            self._pong = pongs

    def resume_writing(self) -> None:
        """The peer reads again: send the pong that was held back."""
        super().resume_writing()
        if self._pong and self.conn.state is OPEN:
            self.transport.write(self._pong)
        self._pong = b""

    def keepalive_timeout(self) -> None:
        """No pong came: close, or abort where the close can't be sent."""
        super().keepalive_timeout()
        if not self.writable.is_set():
            self.transport.abort()

    def handle_parser_exception(self) -> None:
        """Close the socket for what the peer sent; LINGER_S lets the peer read why.

        Closing at once, with unread data in the kernel, would reset the connection.
        """
        closed = self.conn.close_sent
        if closed is None:  # bytes came before the handshake was answered
            self.transport.abort()
            return
        self.queue.put_nowait(
            {"type": "websocket.disconnect", "code": closed.code, "reason": closed.reason}
        )
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.close_timer = self.loop.call_later(LINGER_S, self.transport.close)

    def send_receive_event_to_app(self) -> None:
        """Queue a whole message; text that is not UTF-8 ends the socket."""
        if self.curr_msg_data_type == "text" and not self.close_sent:
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError as e:  # uvicorn would log a traceback
                self.conn.fail(INVALID_DATA, f"{e.reason} at position {e.start}")
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    async def receive(self) -> Any:
        """An ASGI message; each one yields to the loop first."""
        if not self.queue.empty():
            await asyncio.sleep(0)  # a queue that is not empty never yields
        return await super().receive()

    def write_message(self, data: bytes, is_text: bool) -> bool:
        """Write a whole message, if the socket is open and accepts it now.

        False: nothing was written, and `send` has to be used.
        """
        if (
            self.conn.state is not OPEN
            or self.close_sent
            or self.disconnected
            or not self.writable.is_set()
        ):
            return False
        self.transport.write(frame(TEXT if is_text else BINARY, data))
        return True

    async def send(self, message: Any) -> None:
        """Send an ASGI message; uvicorn handles all that are not data for an open socket."""
        is_over = self.handshake_complete and (self.close_sent or self.disconnected)
        if message["type"] == "websocket.close" and is_over:
            return  # closed by the peer, or for what it sent
        if message["type"] == "websocket.send":
            if not self.writable.is_set():
                await self.writable.wait()
            if self.conn.state is OPEN and not (self.close_sent or self.disconnected):
                text = message.get("text")
                if text is not None:
                    self.transport.write(frame(TEXT, text.encode()))
                else:
                    self.transport.write(frame(BINARY, message["bytes"]))
                return
            if self.handshake_complete:  # a lane may still send after the socket has closed
                raise ClientDisconnected
        await super().send(message)


def frame(kind: bytes, data: bytes) -> bytes:
    """A whole message as one frame without a mask (RFC 6455, 5.2), as servers send them."""
    length = len(data)
    if length < 126:
        return b"%b%c%b" % (kind, length, data)
    if length < 1 << 16:
        return b"%b\x7e%b%b" % (kind, length.to_bytes(2, "big"), data)
    return b"%b\x7f%b%b" % (kind, length.to_bytes(8, "big"), data)
