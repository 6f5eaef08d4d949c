"""Replicas as processes of their own: killed, stopped and drained while they run streams."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from streamer.config import Config
from streamer.replicas.cluster import Cluster
from streamer.replicas.processes import Processes
from tests.replicas.helpers import read, request, undisturbed, until


class Started:
    """Two processes, r0 and r1, and an ingress."""

    def __init__(self, processes: Processes, cluster: Cluster) -> None:
        self.processes = processes
        self.cluster = cluster

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.processes.processes[name].pid, number)

    async def joined(self, *names: str) -> None:
        links = self.cluster._links
        await until(lambda: {link.name for link in links.usable} == set(names))


@pytest.fixture
async def started(tmp_path: Path) -> AsyncIterator[Started]:
    config = Config(
        model="fake:tokens_per_s=300",
        load_progress=False,
        num_gpu_blocks_override=4096,
        journal=str(tmp_path),
    )
    processes = Processes(config, 2)
    cluster = Cluster(config, processes.members, processes.secret)
    try:
        await processes.start()
        await cluster.start()
        found = Started(processes, cluster)
        await found.joined("r0", "r1")
        yield found
    finally:
        await cluster.aclose()
        await processes.stop()


async def test_kill_stop_and_drain_cost_no_token_and_a_successor_has_the_journal(
    started: Started,
) -> None:
    cluster = started.cluster
    asked = [replace(request(i, 8000), is_durable=True, detach_s=60.0) for i in range(8)]
    streams = [cluster.submit(each) for each in asked]
    for stream in streams:
        await cluster.recorded(stream)
    assert {p.link.name for p in cluster._placed.values() if p.link} == {"r0", "r1"}
    reading = [asyncio.create_task(read(stream)) for stream in streams]
    await until(lambda: all(s.num_output_tokens > 50 for s in streams))

    started.signal("r0", signal.SIGKILL)
    await until(lambda: set(cluster.counts) == {"r1"})
    await started.joined("r0", "r1")  # its successor, which has given up what went on in r1
    assert {p.link.name for p in cluster._placed.values() if p.link} == {"r1"}

    seen = [stream.num_output_tokens for stream in streams]
    started.signal("r1", signal.SIGSTOP)  # silent, and its socket is open
    loop = asyncio.get_running_loop()
    stopped_at = loop.time()
    await until(
        lambda: all(s.num_output_tokens > n + 20 for s, n in zip(streams, seen, strict=True))
    )
    assert loop.time() - stopped_at < 6.0  # 4 s of silence, looked at twice a second
    started.signal("r1", signal.SIGCONT)
    await started.joined("r0", "r1")
    await until(lambda: cluster.counts["r1"].running == 0)  # it has dropped what it had
    assert {p.link.name for p in cluster._placed.values() if p.link} == {"r0"}

    await started.processes.remove("r0")  # drains
    assert {p.link.name for p in cluster._placed.values() if p.link} == {"r1"}
    for stream in streams:
        cluster.cancel(stream.request_id)
    for tokens in await asyncio.gather(*reading):
        assert len(tokens) > 100
        assert tokens == undisturbed(request(0, len(tokens)))

    # What no ingress holds comes back from the journal of a replica that was killed.
    async with asyncio.timeout(20):
        last = cluster.submit(replace(request(9, 900), is_durable=True, detach_s=60.0))
        await cluster.recorded(last)
        await until(lambda: last.num_output_tokens > 50)
        other = Cluster(cluster.config, started.processes.members, started.processes.secret)
        await cluster.aclose()
        started.signal("r1", signal.SIGKILL)
        await other.start()
        try:
            twin = await other.find(last.request_id)
            assert twin is not None
            assert await read(twin) == undisturbed(request(9, 900))
            assert await other.find(streams[0].request_id) is not None  # a finished one
        finally:
            await other.aclose()
