"""StreamingWebSocket: uvicorn's WebSocket protocol, for many small messages.

lifecycle.py names this class to uvicorn, and protocol.py's connections become one when they are
upgraded.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request
from websockets.protocol import OPEN

from streamer.server.stuck import ABORT

TEXT, BINARY = b"\x81", b"\x82"  # opcode, and FIN: no message is cut in pieces


class StreamingWebSocket(WebSocketsSansIOProtocol):
    """uvicorn's protocol, with a short way for messages to an open socket.

    The application may abort the connection.
    """

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
