"""The socket between ingress and replica: strangers, damage and slow readers."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest

from streamer import handshake
from streamer.cli.loop import new_runner
from streamer.errors import NotFound, Overloaded
from streamer.replicas.cluster import Cluster
from streamer.replicas.connection import LENGTH
from streamer.replicas.messages import Member, Problem
from tests.replicas.helpers import (
    DEADLINE_S,
    SECRET,
    Replicas,
    free_port,
    read,
    replicas,
    request,
    undisturbed,
    until,
)


async def connect(found: Replicas) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = found.servers["r0"].address.partition(":")
    return await asyncio.open_connection(host, int(port))


async def proved(
    found: Replicas, secret: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection after its hello."""
    reader, writer = await connect(found)
    theirs = await reader.readexactly(handshake.CHALLENGE_BYTES)
    writer.write(handshake.hello(secret, theirs, 0, handshake.challenge()))
    return reader, writer


async def ends(reader: asyncio.StreamReader) -> None:
    async with asyncio.timeout(10):
        try:
            while await reader.read(1 << 16):
                pass
        except ConnectionError:
            pass


async def test_a_stranger_gets_nothing_and_costs_nothing() -> None:
    draw = random.Random(3)
    async with replicas(1) as found, found.ingress() as cluster:
        for data in (
            b"",
            b"GET / HTTP/1.1\r\n\r\n" * 9,
            draw.randbytes(5000),
            bytes(68),
            b"\xff" * 68,
        ):
            reader, writer = await connect(found)
            writer.write(data)
            if not data:
                writer.close()
            await ends(reader)
            writer.close()
        reader, writer = await proved(found, b"another secret, of enough bytes")
        await ends(reader)
        writer.close()
        asked = request()
        assert await read(cluster.submit(asked)) == undisturbed(asked)


@pytest.mark.parametrize(
    "data",
    [
        LENGTH.pack(1 << 60),
        LENGTH.pack(5) + b"\xc1\xc1\xc1\xc1\xc1",
        LENGTH.pack(1) + b"\x80",
        LENGTH.pack(0),
        LENGTH.pack(8) + msgspec.msgpack.encode({"type": "X"}),
    ],
)
async def test_damage_ends_a_connection_alone(data: bytes) -> None:
    async with replicas(1) as found, found.ingress() as cluster:
        reader, writer = await proved(found, SECRET)
        await reader.readexactly(handshake.PROOF_BYTES)
        writer.write(data)
        await ends(reader)
        writer.close()
        asked = request()
        assert await read(cluster.submit(asked)) == undisturbed(asked)


async def test_an_ingress_that_reads_nothing_has_its_streams_paused() -> None:
    async with (
        replicas(1, num_gpu_blocks_override=4096) as found,
        found.ingress() as cluster,
    ):
        (server,) = found.servers.values()
        asked = request(0, 30_000, window=256)
        stream = cluster.submit(asked)
        reading = asyncio.create_task(read(stream))
        (link,) = cluster._links.connected
        assert link._connection is not None
        transport: Any = link._connection._transport
        await until(lambda: stream.num_output_tokens > 10)
        (ingress,) = server._ingresses
        ingress.connection.is_full = True  # what a full socket does, at once
        await until(lambda: server.engine.stats.paused == 1)
        theirs = server.engine.get(stream.request_id)
        assert theirs is not None
        num_tokens = theirs.num_output_tokens
        assert num_tokens - stream.num_output_tokens <= 256 + 64
        assert transport.get_write_buffer_size() == 0
        ingress.connection.resume_writing()
        assert await reading == undisturbed(asked)


async def test_a_slow_reader_pauses_its_stream_in_the_replica() -> None:
    async with replicas(1, num_gpu_blocks_override=4096) as found, found.ingress() as cluster:
        (server,) = found.servers.values()
        asked = request(0, 20_000, window=128)
        stream = cluster.submit(asked)
        reader = stream.attach(0, lambda: None)  # takes nothing
        await until(lambda: server.engine.stats.paused == 1)
        assert stream.num_output_tokens < 3000
        stream.take(reader)
        stream.took(reader)
        await until(lambda: server.engine.stats.paused == 0)
        stream.detach(reader)
        await until(lambda: not server.engine.live())


def test_an_error_is_the_same_after_its_way() -> None:
    for error in (
        Overloaded("full", retry_after_s=7.0, code="draining"),
        NotFound("nothing there", param="model"),
    ):
        packed = msgspec.msgpack.encode(Problem.of(error))
        back = msgspec.msgpack.decode(packed, type=Problem).error
        assert type(back) is type(error)
        names = ("message", "param", "code", "status", "retry_after_s")
        for name in names:
            assert getattr(back, name, None) == getattr(error, name, None)
    unknown = Problem("OSError", "no error of ours", None, None).error
    assert unknown.status == 500


async def refused_and_then_taken() -> None:
    found, port = Replicas(), free_port()

    async def members() -> list[Member]:
        return [Member("r0", f"127.0.0.1:{port}")]

    cluster = Cluster(found.config, members, SECRET)
    try:
        starting = asyncio.create_task(cluster.start())
        await until(lambda: cluster._links._links)
        (link,) = cluster._links._links.values()
        await until(lambda: link._connecting is None)
        await found.add("r0", port=port)
        async with asyncio.timeout(DEADLINE_S):
            await starting
    finally:
        await cluster.aclose()
        await found.aclose()


def test_a_replica_that_refused_a_connection_is_tried_again(caplog: Any) -> None:
    with new_runner() as runner:  # the loop of `streamer serve`
        runner.run(refused_and_then_taken())
    assert "silent" not in caplog.text
