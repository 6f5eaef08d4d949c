"""A cluster in one process: replicas over the fake model, and ingresses that use them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from streamer.config import Config
from streamer.engine.requests import GenerateRequest
from streamer.engine.stream import Delta, TokenStream
from streamer.fake.model import expected_tokens
from streamer.replicas.cluster import Cluster
from streamer.replicas.messages import Member
from streamer.replicas.replica import ReplicaServer

DEADLINE_S = 20.0
SECRET = b"tests/replicas, which is no secret"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Replicas:
    """Replicas by name, in this process."""

    def __init__(self, **settings: Any) -> None:
        given = {"model": "fake", "load_progress": False, "num_gpu_blocks_override": 512}
        self.config = Config(**{**given, **settings})
        self.servers: dict[str, ReplicaServer] = {}

    async def members(self) -> Sequence[Member]:
        return [Member(name, server.address) for name, server in self.servers.items()]

    async def add(self, name: str, **settings: Any) -> ReplicaServer:
        server = ReplicaServer(self.config, name=name, secret=SECRET, **settings)
        await server.start()
        self.servers[name] = server
        return server

    @asynccontextmanager
    async def ingress(self, num: int | None = None) -> AsyncIterator[Cluster]:
        """A cluster that uses them, connected to all."""
        cluster = Cluster(self.config, self.members, SECRET)
        try:
            await cluster.start()
            async with asyncio.timeout(DEADLINE_S):
                while (  # noqa: ASYNC110
                    len(cluster.counts) < (len(self.servers) if num is None else num)
                ):
                    await asyncio.sleep(0.01)
            yield cluster
        finally:
            await cluster.aclose()

    async def aclose(self) -> None:
        for server in self.servers.values():
            await server.aclose()


@asynccontextmanager
async def replicas(count: int = 2, **settings: Any) -> AsyncIterator[Replicas]:
    """So many replicas, r0 and on."""
    found = Replicas(**settings)
    try:
        for number in range(count):
            await found.add(f"r{number}")
        yield found
    finally:
        await found.aclose()


def request(number: int = 0, max_tokens: int = 300, **fields: Any) -> GenerateRequest:
    """A request for so many tokens; requests of other numbers share no block."""
    from streamer.core.sampling import SamplingParams

    prompt = tuple(f"{number} is my number; count, please".encode())
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(prompt=prompt, params=params, **fields)


async def read(stream: TokenStream) -> list[int]:
    """All tokens of a stream, each delta where it belongs."""
    tokens: list[int] = []
    async for items in stream.read():
        for item in items:
            if isinstance(item, Delta):
                assert item.start == len(tokens), "tokens are missing, or came twice"
                tokens += item.token_ids
    return tokens


def undisturbed(asked: GenerateRequest) -> list[int]:
    """The tokens of such a request in an engine to which nothing happens."""
    return expected_tokens(0, asked.params.max_tokens or 0)


async def until(is_so: Any) -> None:
    """Wait until it holds."""
    async with asyncio.timeout(DEADLINE_S):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
