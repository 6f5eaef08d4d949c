"""A server under test: where it is, and one request a connection. Any OpenAI-compatible server.

`read` blocks (under gevent the other users run meanwhile); `aread` is for asyncio. Reads are
returned with their times and not parsed: sse.py parses them.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import time
from collections.abc import Generator
from functools import cache
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

from .sse import BadAnswer, Read, started, whole

READ_BYTES = 1 << 16
TIMEOUT_S = 120.0  # without a byte
ABRUPT = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets the connection


@cache
def tls() -> ssl.SSLContext:
    """Cached: loading the system's certificates takes longer than many requests."""
    return ssl.create_default_context()


class Exchange(asyncio.Protocol):
    """One request on a connection of its own, and the reads of its answer.

    A protocol, since streams and their time-outs cost 25 us a read, and those of a load test on the
    same machine take them from the server (a shared EPYC core, 2026-11-23).

    ended  done when the server closes; TimeoutError after TIMEOUT_S without a byte
    """

    def __init__(self, request: bytes, loop: asyncio.AbstractEventLoop) -> None:
        self.reads: list[Read] = []
        self.ended: asyncio.Future[None] = loop.create_future()
        self._request, self._loop = request, loop
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle
        self._began = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)
        self._began = time.perf_counter()
        self._timer = self._loop.call_later(TIMEOUT_S, self._see)

    def data_received(self, data: bytes) -> None:
        """Keep the bytes and their time."""
        self.reads.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        """The answer has ended, or `exc` has ended it."""
        self._timer.cancel()
        if self.ended.done():
            return
        if exc is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(exc)

    def close(self) -> None:
        """End the connection."""
        self._transport.close()

    def _see(self) -> None:
        """Called when the first byte, or the next, may be too late."""
        since = self.reads[-1][0] if self.reads else self._began
        left_s = since + TIMEOUT_S - time.perf_counter()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._see)
        elif not self.ended.done():
            self.ended.set_exception(TimeoutError(f"no byte within {TIMEOUT_S:g} s"))


class Target(msgspec.Struct, frozen=True):
    """A server by its base URL, with or without `/v1`; `key` is sent as a bearer token."""

    host: str
    port: int
    is_tls: bool
    prefix: str
    key: str = ""

    @classmethod
    def of(cls, url: str, key: str = "") -> Target:
        """From `http://host:port/prefix`; ValueError if the URL has another form."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an http:// or https:// URL")
        is_tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if is_tls else 80), is_tls, prefix, key)

    @property
    def origin(self) -> str:
        """Host and port, as written in URLs."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def socket_url(self) -> str:
        """The URL of the server's WebSocket."""
        return f"{'wss' if self.is_tls else 'ws'}://{self.origin}{self.prefix}/v1/responses"

    def request(self, method: str, path: str, body: Any = None) -> bytes:
        """A whole HTTP request; the body is encoded as JSON."""
        data = b"" if body is None else msgspec.json.encode(body)
        head = f"{method} {self.prefix}{path} HTTP/1.1\r\nHost: {self.origin}\r\n"
        head += f"Connection: close\r\nContent-Length: {len(data)}\r\n"
        head += "Content-Type: application/json\r\n" if data else ""
        head += f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        return head.encode() + b"\r\n" + data

    def read(self, request: bytes) -> Generator[Read]:
        """Send, then yield the reads; closing it early resets the connection. Raises OSError."""
        sock = socket.create_connection((self.host, self.port), TIMEOUT_S)
        try:
            if self.is_tls:
                sock = tls().wrap_socket(sock, server_hostname=self.host)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(request)
            while data := sock.recv(READ_BYTES):
                yield time.perf_counter(), data
        except GeneratorExit:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABRUPT)
            raise
        finally:
            sock.close()

    async def aread(self, request: bytes) -> list[Read]:
        """All reads up to the end of the connection, for asyncio; TimeoutError as for `read`."""
        loop = asyncio.get_running_loop()
        exchange = Exchange(request, loop)
        context = tls() if self.is_tls else None
        async with asyncio.timeout(TIMEOUT_S):
            await loop.create_connection(lambda: exchange, self.host, self.port, ssl=context)
        try:
            await exchange.ended
        finally:
            exchange.close()
        return exchange.reads

    def get(self, path: str) -> Any:
        """A JSON document; BadAnswer, OSError or a ValueError if there is none."""
        _, bodies = started(self.read(self.request("GET", path)))
        return msgspec.json.decode(whole(bodies))

    def first_model(self) -> str:
        """The name of the first model it serves; BadAnswer, OSError, ValueError or LookupError."""
        return str(self.get("/v1/models")["data"][0]["id"])

    def max_model_len(self, model: str) -> int | None:
        """A model's context in tokens, as vLLM's servers and ours list it; None if not listed."""
        try:
            listed = self.get("/v1/models")["data"]
        except BadAnswer:
            return None
        found = [each.get("max_model_len") for each in listed if each.get("id") == model]
        return int(found[0]) if found and found[0] else None
