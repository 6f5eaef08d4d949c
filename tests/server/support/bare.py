"""Clients on bare sockets: they read when the test calls for it, and keep what arrived whole.

One class a transport, over a sans-I/O protocol: nothing is read in the background, and every byte
counts. Their kernel buffers are small, so that unread bytes stay with the server.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable
from typing import Any

import h11
import msgspec
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from tests.server.support.counting import Event

ABRUPT = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets the connection
JSON, MSGPACK = "streamer.v1.json", "streamer.v1.msgpack"


class Bare:
    """A connection, its events so far, and the bytes that brought them, whole events or not.

    is_over  the server has ended it
    """

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self.host = f"{host}:{port}"
        self.events: list[Any] = []
        self.num_bytes = 0
        self.is_over = False
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.settimeout(20)
        self._socket.connect((host, int(port)))

    def __enter__(self) -> Bare:
        return self

    def __exit__(self, *_: object) -> None:
        """Close without a close frame: the connection is reset."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABRUPT)
        self._socket.close()

    def read_until(self, is_enough: Callable[[Any], bool], max_bytes: int = 1 << 40) -> None:
        """Read up to an event for which `is_enough` holds, or `max_bytes`; more may follow."""
        seen, end = 0, self.num_bytes + max_bytes
        while self.num_bytes < end and not any(map(is_enough, self.events[seen:])):
            assert not self.is_over, "the server ended it"
            seen = len(self.events)
            self._read(min(1 << 16, end - self.num_bytes))

    def _read(self, max_bytes: int) -> None:
        data = self._socket.recv(max_bytes)
        self.num_bytes += len(data)
        self.is_over = not data
        self._take(data)

    def _take(self, data: bytes) -> None:
        raise NotImplementedError


class BareSse(Bare):
    """The `Event`s of a streamed answer; `num_bytes` counts its head too."""

    def __init__(self, url: str, path: str, body: Any = None, **headers: str) -> None:
        super().__init__(url)
        self._http = h11.Connection(h11.CLIENT)
        self._rest = b""
        data = b"" if body is None else json.dumps(body).encode()
        sent = {"host": self.host, "content-length": str(len(data)), **headers}
        request = h11.Request(
            method="GET" if body is None else "POST", target=path, headers=[*sent.items()]
        )
        for part in (request, h11.Data(data), h11.EndOfMessage()):
            self._socket.sendall(self._http.send(part) or b"")

    def _take(self, data: bytes) -> None:
        self._http.receive_data(data)
        while isinstance(event := self._http.next_event(), h11.Response | h11.Data):
            if isinstance(event, h11.Response):
                assert event.status_code == 200, event
                continue
            *blocks, self._rest = (self._rest + bytes(event.data)).split(b"\n\n")
            texts = (block.decode() for block in blocks)
            self.events += [Event(text.split("\n")) for text in texts if text[0] != ":"]
        self.is_over = self.is_over or isinstance(event, h11.EndOfMessage)


class BareSocket(Bare):
    """The events of a WebSocket, decoded; `num_bytes` counts what came after the handshake."""

    def __init__(self, url: str, subprotocol: str = JSON) -> None:
        super().__init__(url)
        uri = parse_uri(f"ws://{self.host}/v1/responses")
        self._ws = ClientProtocol(uri, subprotocols=[Subprotocol(subprotocol)], max_size=None)
        self._ws.send_request(self._ws.connect())
        self._flush()
        while self._ws.state is State.CONNECTING:
            self._ws.receive_data(self._socket.recv(1))
        assert self._ws.state is State.OPEN, self._ws.handshake_exc
        self._ws.events_received()  # the handshake's answer
        self._is_packed = subprotocol == MSGPACK

    def send(self, kind: str, **fields: Any) -> None:
        event = {"type": kind, **fields}
        if self._is_packed:
            self._ws.send_binary(msgspec.msgpack.encode(event))
        else:
            self._ws.send_text(json.dumps(event).encode())
        self._flush()

    def _take(self, data: bytes) -> None:
        if data:
            self._ws.receive_data(data)
        for frame in self._ws.events_received():
            if isinstance(frame, Frame) and frame.opcode in (Opcode.TEXT, Opcode.BINARY):
                assert (frame.opcode is Opcode.BINARY) is self._is_packed
                decode: Any = msgspec.msgpack.decode if self._is_packed else json.loads
                self.events.append(decode(frame.data))
        self._flush()

    def _flush(self) -> None:
        for data in self._ws.data_to_send():
            self._socket.sendall(data)
