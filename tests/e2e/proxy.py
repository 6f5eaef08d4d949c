"""A reverse proxy that serves an application below a path of its own, as nginx would."""

from __future__ import annotations

import asyncio
from typing import Self

from tests.server.running import Running


class Proxy:
    """Below `prefix` is the server, which sees paths without it; the rest is a 404.

    One request a connection, or one WebSocket. Runs on the server's own loop.
    """

    def __init__(self, server: Running, prefix: str) -> None:
        self._server = server
        self._prefix = prefix
        self._tasks: set[asyncio.Task[None]] = set()
        self._transports: set[asyncio.WriteTransport] = set()
        self._listener: asyncio.Server
        self.origin = ""

    def __enter__(self) -> Self:
        self._server.on_loop(self._open())
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.on_loop(self._close())

    def cut(self) -> None:
        """Break every connection that there is; new ones work."""
        self._server.on_loop(self._cut())

    async def _cut(self) -> None:
        for transport in self._transports:
            transport.abort()

    async def _open(self) -> None:
        self._listener = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.origin = f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    async def _close(self) -> None:
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._transports.add(writer.transport)
        try:
            await self._pass_on(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # either end is gone
        finally:
            self._transports.discard(writer.transport)
            writer.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, _, fields = head.partition("\r\n")
        method, path, version = first.split(" ")
        if not path.startswith(self._prefix + "/"):
            writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            writer.write_eof()
            await writer.drain()
            return
        if "\r\nupgrade:" not in head.lower():
            kept = [f for f in fields.split("\r\n") if not f.lower().startswith("connection:")]
            fields = "\r\n".join(["connection: close", *kept])
        host, port = self._server.url.removeprefix("http://").split(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        far_writer.write(
            f"{method} {path.removeprefix(self._prefix)} {version}\r\n{fields}".encode("latin-1")
        )
        try:
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        finally:
            far_writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.write_eof()
