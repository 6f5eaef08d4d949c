"""A relay between a client and a server that can be cut, as a network is."""

from __future__ import annotations

import asyncio
from typing import Self

from tests.server.running import Running


class Relay:
    """Passes bytes on, on the server's own loop; `cut` drops every connection without a word."""

    def __init__(self, server: Running) -> None:
        self._server = server
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
        """Both ends lose what is in flight, and get no close frame."""
        self._server.on_loop(self._abort())

    async def _open(self) -> None:
        self._listener = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    async def _close(self) -> None:
        self._listener.close()
        await self._abort()

    async def _abort(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        host, port = self._server.url.removeprefix("http://").split(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        ends = {writer, far_writer}
        self._writers |= ends
        await asyncio.gather(
            self._pump(reader, far_writer),
            self._pump(far_reader, writer),
            return_exceptions=True,  # a connection that was cut
        )
        self._writers -= ends
        for end in ends:
            end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()
