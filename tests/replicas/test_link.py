"""What an ingress takes for a replica that is gone: silence of the replica, not its own."""

from __future__ import annotations

import asyncio
import time

import pytest

from streamer.replicas.link import CHECK_S, SILENT_S
from tests.replicas.helpers import read, replicas, request, undisturbed, until

FASTER = 0.1


@pytest.fixture
def _faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beats, checks and silence ten times as short."""
    for name, value in (("link.CHECK_S", CHECK_S), ("link.SILENT_S", SILENT_S)):
        monkeypatch.setattr(f"streamer.replicas.{name}", value * FASTER)
    monkeypatch.setattr("streamer.replicas.replica.BEAT_S", FASTER)


@pytest.mark.usefixtures("_faster")
async def test_a_silent_replica_is_given_up_and_drops_what_goes_on_elsewhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with replicas(model="fake:tokens_per_s=500") as found, found.ingress() as cluster:
        asked = [request(i, 600) for i in range(4)]
        streams = [cluster.submit(each) for each in asked]
        reading = [asyncio.create_task(read(stream)) for stream in streams]
        await until(lambda: all(s.num_output_tokens > 20 for s in streams))
        stopped = found.servers["r0"]
        assert stopped.engine.live()
        for ingress in stopped._ingresses:
            ingress.connection.send = lambda message: None  # type: ignore[method-assign]
        await until(lambda: not stopped.engine.live())
        assert {p.link.name for p in cluster._placed.values() if p.link} == {"r1"}
        await until(lambda: len(cluster.counts) == 2)  # it is back
        assert await asyncio.gather(*reading) == [undisturbed(each) for each in asked]
        assert caplog.text.count("silent") == 1


@pytest.mark.usefixtures("_faster")
async def test_an_ingress_that_stands_still_itself_gives_no_replica_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with replicas(model="fake:tokens_per_s=500") as found, found.ingress() as cluster:
        asked = request(0, 600)
        stream = cluster.submit(asked)
        await until(lambda: stream.num_output_tokens > 20)
        for stall in (1, 1, 2):
            time.sleep(stall * SILENT_S * FASTER)  # noqa: ASYNC251  # the fault itself
            await asyncio.sleep(CHECK_S * FASTER)
        assert await read(stream) == undisturbed(asked)
        assert "silent" not in caplog.text
