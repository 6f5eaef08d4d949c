"""A client that is cut off: raw sockets, closed after N bytes, and the events that came whole."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

import httpx

from tests.server.support.counting import Event, sse
from tests.server.support.running import Running

ABRUPT = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets the connection


def cut_after(
    server: Running, num_bytes: int, method: str, path: str, body: Any = None, **headers: str
) -> list[Event]:
    """The events that end within the first `num_bytes` of the response's body."""
    host, port = server.url.removeprefix("http://").split(":")
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {len(data)}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    with socket.create_connection((host, int(port)), timeout=20) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABRUPT)
        raw.sendall(head.encode() + b"\r\n" + data)
        got = b""
        while b"\r\n\r\n" not in got:
            got += raw.recv(4096)
        status, _, rest = got.partition(b"\r\n\r\n")
        assert b" 200 " in status.split(b"\r\n")[0], got
        while len(plain := dechunk(rest)) < num_bytes and not rest.endswith(b"0\r\n\r\n"):
            rest += raw.recv(4096)
    blocks = plain[:num_bytes].decode(errors="ignore").split("\n\n")[:-1]
    return [Event(block.split("\n")) for block in blocks]


def dechunk(data: bytes) -> bytes:
    """The body without its chunk frames; the last chunk may be incomplete."""
    plain = b""
    while b"\r\n" in data:
        size, _, data = data.partition(b"\r\n")
        plain += data[: int(size, 16)]
        data = data[int(size, 16) + 2 :]
    return plain


def follow(server: Running, path: str, **headers: str) -> list[Event]:
    """Every event of a resume, to its end."""
    with httpx.stream("GET", server.url + path, headers=headers, timeout=20) as response:
        assert response.status_code == 200, response.read()
        return list(sse(response))
