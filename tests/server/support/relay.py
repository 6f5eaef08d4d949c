"""A relay between a client and a server: a line that can be cut, or a proxy below a path."""

from __future__ import annotations

import asyncio
from typing import Self

from tests.server.support.running import Running

NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class Relay:
    """Passes bytes on, on the server's own loop.

    With a `prefix` it is a reverse proxy, as nginx would be: below that path is the server, which
    sees paths without it; the rest is a 404. Then a connection carries one request, or one socket.
    """

    def __init__(self, server: Running, prefix: str = "") -> None:
        self._server = server
        self.target = server  # may be changed: the next connection goes to another server
        self._prefix = prefix
        self._writers: set[asyncio.StreamWriter] = set()
        self._listener: asyncio.Server
        self.num_connections = 0
        self.url = ""

    def __enter__(self) -> Self:
        self._server.on_loop(self._open())
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.on_loop(self._close())

    def cut(self) -> None:
        """Abort all connections on both sides: what is in flight is lost, without a close frame."""
        self._server.on_loop(self._abort())

    async def _open(self) -> None:
        self._listener = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    async def _close(self) -> None:
        self._listener.close()
        await self._abort()

    async def _abort(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.add(writer)
        try:
            await self._pass_on(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # a connection that was cut
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await self._head(reader) if self._prefix else b""
        if head is None:
            writer.write(NOT_FOUND)
            await writer.drain()
            return
        host, port = self.target.url.removeprefix("http://").split(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        self._writers.add(far_writer)
        far_writer.write(head)
        try:
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        finally:
            self._writers.discard(far_writer)
            far_writer.transport.abort()

    async def _head(self, reader: asyncio.StreamReader) -> bytes | None:
        """A request's head as the server is to see it; None if it is not below the prefix."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, _, fields = head.partition("\r\n")
        method, path, version = first.split(" ")
        if not path.startswith(self._prefix + "/"):
            return None
        if "\r\nupgrade:" not in head.lower():
            kept = [f for f in fields.split("\r\n") if not f.lower().startswith("connection:")]
            fields = "\r\n".join(["connection: close", *kept])
        return f"{method} {path.removeprefix(self._prefix)} {version}\r\n{fields}".encode("latin-1")


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()
    await writer.wait_closed()  # all of it is out
