"""StreamingWebSocket: uvicorn's WebSocket protocol, for many small messages.

A socket with many lanes gets a frame a lane in every step: they go out in one write, at the end of
the loop turn. A system call a frame is most of what a frame costs. lifecycle.py names this class to
uvicorn.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request
from websockets.protocol import OPEN

from streamer.server.stuck import ABORT

TEXT, BINARY = b"\x81", b"\x82"  # opcode, and FIN: no message is cut in pieces


class TurnTransport(asyncio.Transport):
    """A transport that writes what a loop turn brings at once, at the turn's end.

    `close` lets go first of what was written; all else is the inner transport's.
    """

    def __init__(self, inner: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._inner = inner
        self._loop = loop
        self._parts: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write at the end of this turn."""
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(bytes(data))

    def close(self) -> None:
        """Close once everything is written."""
        self._flush()
        self._inner.close()

    def abort(self) -> None:
        """Close now."""
        self._inner.abort()

    def is_closing(self) -> bool:
        """Whether it was closed or the peer is gone."""
        return self._inner.is_closing()

    def pause_reading(self) -> None:
        """Let the peer wait."""
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        self._inner.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Of the socket."""
        return self._inner.get_extra_info(name, default)

    def _flush(self) -> None:
        if self._parts:
            parts, self._parts = self._parts, []
            # uvloop's transports raise where asyncio's let the write go: the peer has left, of
            # which the protocol is being told.
            with contextlib.suppress(RuntimeError):
                self._inner.write(parts[0] if len(parts) == 1 else b"".join(parts))


class StreamingWebSocket(WebSocketsSansIOProtocol):
    """uvicorn's protocol over a TurnTransport, with a short way for messages to an open socket.

    The application may abort the connection.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A new connection."""
        inner = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        super().connection_made(TurnTransport(inner, self.loop))

    def handle_connect(self, event: Request) -> None:
        """The handshake, which makes the scope unless it is refused."""
        super().handle_connect(event)
        if self.response.status_code == 101:
            self.scope["extensions"][ABORT] = self.transport.abort  # type: ignore[assignment]

    async def send(self, message: Any) -> None:
        """An ASGI message. Whatever is not a message to an open socket is uvicorn's business."""
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
        await super().send(message)


def frame(kind: bytes, data: bytes) -> bytes:
    """A whole message as one frame without a mask (RFC 6455, 5.2), as servers send them."""
    length = len(data)
    if length < 126:
        return b"%b%c%b" % (kind, length, data)
    if length < 1 << 16:
        return b"%b\x7e%b%b" % (kind, length.to_bytes(2, "big"), data)
    return b"%b\x7f%b%b" % (kind, length.to_bytes(8, "big"), data)
