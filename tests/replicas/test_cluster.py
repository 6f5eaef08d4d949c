"""A cluster's streams: the tokens of one engine, whatever becomes of replicas and ingresses."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from streamer.core.plan import Drawn, FinishReason
from streamer.core.sampling import SamplingParams
from streamer.engine.requests import Progress
from streamer.errors import DeadlineExceeded, Overloaded
from streamer.replicas.connection import Connection
from streamer.replicas.replica import ReplicaServer
from tests.replicas.helpers import read, replicas, request, undisturbed, until


async def test_streams_over_two_replicas_are_whole() -> None:
    async with replicas() as found, found.ingress() as cluster:
        asked = [request(i) for i in range(12)]
        streams = [cluster.submit(each) for each in asked]
        for stream in streams:
            await cluster.recorded(stream)
        got = await asyncio.gather(*map(read, streams))
        assert got == [undisturbed(each) for each in asked]
        generated = [server.engine.stats.generated_tokens for server in found.servers.values()]
        assert sum(generated) == 12 * 300
        assert min(generated) >= 4 * 300  # spread over both
        assert cluster.snapshot().finished == 12


async def test_a_first_step_elsewhere_is_no_time_in_the_queue() -> None:
    async with replicas(1, model="fake:tokens_per_s=5") as found, found.ingress() as cluster:
        stream = cluster.submit(request(max_tokens=2))
        await read(stream)
        assert stream.timing.prefill_s == pytest.approx(0.2, abs=0.1)


async def test_a_lost_replicas_streams_go_on_in_the_other_with_the_same_tokens() -> None:
    async with replicas(model="fake:tokens_per_s=500") as found, found.ingress() as cluster:
        asked = [request(i) for i in range(8)]
        streams = [cluster.submit(each) for each in asked]
        reading = [asyncio.create_task(read(stream)) for stream in streams]
        await until(lambda: all(s.num_output_tokens > 20 for s in streams))
        await found.servers.pop("r0").aclose()
        assert await asyncio.gather(*reading) == [undisturbed(each) for each in asked]
        assert {f.reason for s in streams for f in s.finishes if f} == {FinishReason.LENGTH}
        assert set(cluster.counts) == {"r1"}


async def test_a_draining_replica_gives_its_streams_to_the_other() -> None:
    async with replicas(model="fake:tokens_per_s=500") as found, found.ingress() as cluster:
        asked = [request(i) for i in range(8)]
        streams = [cluster.submit(each) for each in asked]
        reading = [asyncio.create_task(read(stream)) for stream in streams]
        await until(lambda: all(s.num_output_tokens > 20 for s in streams))
        leaving = found.servers.pop("r0")
        async with asyncio.timeout(0.5):  # not until its streams have ended there
            await leaving.drain(10.0)
        assert not any(reader.done() for reader in reading)
        await leaving.aclose()
        assert await asyncio.gather(*reading) == [undisturbed(each) for each in asked]


async def test_without_replicas_streams_wait_and_new_requests_are_refused() -> None:
    async with replicas(1, model="fake:tokens_per_s=500") as found, found.ingress() as cluster:
        asked = request()
        stream = cluster.submit(asked)
        reading = asyncio.create_task(read(stream))
        await until(lambda: stream.num_output_tokens > 20)
        await found.servers.pop("r0").aclose()
        await until(lambda: not cluster.is_ready)
        with pytest.raises(Overloaded) as refused:
            cluster.submit(request(1))
        assert refused.value.code == "no_replica"
        await found.add("r0")
        assert await reading == undisturbed(asked)


async def test_another_ingress_finds_reads_and_cancels_a_stream() -> None:
    async with (
        replicas(model="fake:tokens_per_s=500") as found,
        found.ingress() as one,
        found.ingress() as other,
    ):
        asked = replace(request(max_tokens=6000), detach_s=None)
        stream = one.submit(asked)
        await until(lambda: stream.num_output_tokens > 20)
        twin = await other.find(stream.request_id)
        assert twin is not None
        assert twin is not stream
        assert twin.num_output_tokens >= 20
        reading = asyncio.create_task(read(twin))
        await until(lambda: twin.num_output_tokens > 100)
        other.cancel(stream.request_id)
        tokens = await reading
        await until(lambda: stream.is_finished)
        assert tokens == list(stream.token_ids()) == undisturbed(request(max_tokens=len(tokens)))
        for each in (stream, twin):
            (finish,) = each.finishes
            assert finish is not None
            assert finish.reason is FinishReason.CANCELLED
        assert await other.find("resp_unknown") is None


async def test_a_finished_answer_is_found_and_forgotten_at_every_ingress() -> None:
    async with replicas() as found, found.ingress() as one, found.ingress() as other:
        stream = one.submit(request())
        tokens = await read(stream)
        twin = await other.find(stream.request_id)
        assert twin is not None
        assert list(twin.token_ids()) == tokens
        assert twin.text() == stream.text()
        other.forget(stream.request_id)
        await other.recorded()
        await until(lambda: one.get(stream.request_id) is None)
        assert await one.find(stream.request_id) is None
        assert await other.find(stream.request_id) is None


async def test_an_ingress_that_ends_leaves_its_streams_to_another() -> None:
    async with replicas(model="fake:tokens_per_s=500") as found, found.ingress() as other:
        asked = replace(request(), detach_s=20.0)
        async with found.ingress() as one:
            stream = one.submit(asked)
            await until(lambda: stream.num_output_tokens > 20)
        twin = await other.find(stream.request_id)
        assert twin is not None
        assert await read(twin) == undisturbed(asked)


async def test_a_reader_that_leaves_ends_its_stream_but_not_that_of_another_ingress() -> None:
    async with (
        replicas(1, model="fake:tokens_per_s=500") as found,
        found.ingress() as one,
        found.ingress() as other,
    ):
        stream = one.submit(request(max_tokens=2000))
        reading = asyncio.create_task(read(stream))
        await until(lambda: stream.num_output_tokens > 20)
        twin = await other.find(stream.request_id)
        assert twin is not None
        reading_twin = asyncio.create_task(read(twin))
        reading.cancel()
        await until(lambda: stream.is_finished)
        num_tokens = twin.num_output_tokens
        await until(lambda: twin.num_output_tokens > num_tokens + 20)
        reading_twin.cancel()
        (server,) = found.servers.values()
        await until(lambda: not server.engine.live())


async def test_a_refused_request_is_tried_elsewhere_and_then_refused() -> None:
    async with (
        replicas(max_num_seqs=1, max_queue=1, model="fake:tokens_per_s=50") as found,
        found.ingress() as one,
        found.ingress() as other,
    ):
        for number, cluster in enumerate((one, other, one, other)):
            stream = cluster.submit(request(number, 5000))  # runs or waits, in one of them
            await cluster.recorded(stream)
        stream = one.submit(request(99))
        with pytest.raises(Overloaded) as refused:
            await one.recorded(stream)
        assert refused.value.retry_after_s >= 1.0
        assert one.get(stream.request_id) is None


async def test_log_probabilities_come_through() -> None:
    async with replicas() as found, found.ingress() as cluster:
        params = SamplingParams(max_tokens=6, logprobs=2, prompt_logprobs=1, n=2, ignore_eos=True)
        stream = cluster.submit(replace(request(), params=params))
        await stream.wait()
        assert len(stream.logprobs(1) or ()) == 6
        assert len(stream.prompt_logprobs) == len(stream.prompt) - 1


async def test_a_view_is_that_of_one_replica() -> None:
    async with replicas() as found, found.ingress() as cluster:
        view = await cluster.view_feed.next()
        assert view.step == found.servers["r0"].engine.stats.steps


class Held(asyncio.Protocol):
    """What a socket has for a connection is kept until `release`."""

    def __init__(self, connection: Connection) -> None:
        self._give, self._kept = connection.data_received, bytearray()
        connection.data_received = self._kept.extend  # type: ignore[method-assign]
        self._connection = connection

    def release(self) -> None:
        self._connection.data_received = self._give  # type: ignore[method-assign]
        self._give(bytes(self._kept))


def deaf(server: ReplicaServer) -> list[Held]:
    """Nothing more that ingresses send reaches a replica."""
    return [Held(each.connection) for each in server._ingresses]


@pytest.mark.parametrize("how", ["cancel", "leave", "forget"])
async def test_what_is_ended_while_its_replica_is_lost_does_not_go_on(how: str) -> None:
    async with replicas(model="fake:tokens_per_s=500") as found, found.ingress() as cluster:
        stream = cluster.submit(request(max_tokens=5000))
        await until(lambda: stream.num_output_tokens > 20)
        (name,) = [n for n, server in found.servers.items() if server.engine.live()]
        lost = found.servers.pop(name)
        deaf(lost)
        {"cancel": cluster.cancel, "leave": cluster.leave, "forget": cluster.forget}[how](
            stream.request_id
        )
        await lost.aclose()
        await until(lambda: stream.is_finished)
        assert not any(server.engine.live() for server in found.servers.values())
        assert not cluster._placed
        if how == "forget":
            assert await cluster.find(stream.request_id) is None


async def test_what_readers_at_two_ingresses_lose_goes_on_once() -> None:
    async with (
        replicas(4, model="fake:tokens_per_s=500") as found,
        found.ingress() as one,
        found.ingress() as other,
    ):
        asked = [replace(request(i, 400), detach_s=20.0) for i in range(4)]
        streams = [one.submit(each) for each in asked]
        await until(lambda: all(s.num_output_tokens > 20 for s in streams))
        twins = [await other.find(stream.request_id) for stream in streams]
        for cluster, name in ((one, "r1"), (other, "r2")):  # what they know differs
            for placed in cluster._placed.values():
                cluster._links._links[name].known.add(placed.hashes)
        assert found.servers["r0"].engine.live()
        await found.servers.pop("r0").aclose()
        await until(lambda: all(p.link for c in (one, other) for p in c._placed.values()))
        await until(lambda: min(s.num_output_tokens for s in streams) > 150)
        assert sum(len(server.engine.live()) for server in found.servers.values()) == 4
        for stream in (*streams, *twins):
            assert stream is not None
            assert await read(stream) == undisturbed(asked[0])


async def test_a_replica_forgets_what_was_moved_and_deleted_while_it_was_gone(
    tmp_path: Path,
) -> None:
    settings = {"model": "fake:tokens_per_s=500", "journal": str(tmp_path)}
    async with replicas(**settings) as found, found.ingress() as cluster:
        asked = [replace(request(i), is_durable=True, detach_s=60.0) for i in range(4)]
        ended = [cluster.submit(each) for each in asked[:2]]
        await asyncio.gather(*map(read, ended))
        streams = [cluster.submit(each) for each in asked[2:]]
        await until(lambda: all(s.num_output_tokens > 20 for s in streams))
        await found.servers.pop("r0").aclose()
        await until(lambda: not cluster._links._links.get("r0"))  # out of the directory
        for stream in (*ended, *streams):
            cluster.forget(stream.request_id)
        back = await found.add("r0")
        assert back.engine._streams.num_retained + len(back.engine.live()) >= 2
        await until(lambda: len(cluster.counts) == 2)
        ids = [stream.request_id for stream in (*ended, *streams)]
        await until(lambda: not any(back.engine.get(each) for each in ids))
        assert not back.engine.live()
        for stream in (*ended, *streams):
            assert await cluster.find(stream.request_id) is None


async def test_a_request_that_runs_twice_is_read_once_and_ended_once() -> None:
    async with replicas(model="fake:tokens_per_s=500") as found, found.ingress() as cluster:
        asked = replace(request(), request_id="twice", detach_s=None)
        for server in found.servers.values():
            server.engine.submit(replace(asked, context=None))
        stream = await cluster.find("twice")
        assert stream is not None
        assert await read(stream) == undisturbed(asked)
        await until(lambda: not any(server.engine.live() for server in found.servers.values()))
        assert sum(server.engine.get("twice") is not None for server in found.servers.values()) == 1


async def test_a_replica_that_does_not_answer_is_no_proof_that_there_is_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("streamer.replicas.cluster.FIND_S", 0.1)
    async with (
        replicas(1, model="fake:tokens_per_s=500") as found,
        found.ingress() as one,
        found.ingress() as other,
    ):
        stream = one.submit(replace(request(), detach_s=20.0))
        await until(lambda: stream.num_output_tokens > 20)
        held = deaf(found.servers["r0"])
        with pytest.raises(Overloaded):
            await other.find(stream.request_id)
        for each in held:
            each.release()
        await until(lambda: other.get(stream.request_id) is not None)  # it reads what was asked for
        twin = await other.find(stream.request_id)
        assert twin is not None
        assert await read(twin) == undisturbed(request())


async def test_a_deadline_is_counted_from_the_beginning_wherever_it_runs() -> None:
    async with replicas(model="fake:tokens_per_s=500") as found, found.ingress() as cluster:
        now = time.time()
        begun = Progress(outputs=(Drawn(),), created=now - 5.0)
        asked = replace(request(max_tokens=5000), deadline_s=6.0, progress=begun)
        stream = cluster.submit(asked)
        with pytest.raises(DeadlineExceeded):
            await read(stream)
        assert 0.5 < time.time() - now < 4.0
        await until(lambda: not cluster._placed)
        assert not cluster._streams._leaving


async def test_a_connection_that_breaks_alone_costs_nothing() -> None:
    async with replicas(1, model="fake:tokens_per_s=500") as found, found.ingress() as cluster:
        asked = request()
        stream = cluster.submit(asked)
        reading = asyncio.create_task(read(stream))
        await until(lambda: stream.num_output_tokens > 20)
        (link,) = cluster._links.connected
        link.close()
        assert await reading == undisturbed(asked)
        assert found.servers["r0"].engine.stats.generated_tokens == 300  # none twice


async def test_what_is_lost_goes_on_where_its_prefix_is() -> None:
    async with replicas(4, model="fake:tokens_per_s=500") as found, found.ingress() as cluster:
        asked = [request(i) for i in range(8)]
        streams = [cluster.submit(each) for each in asked]
        reading = [asyncio.create_task(read(stream)) for stream in streams]
        await until(lambda: all(s.num_output_tokens > 20 for s in streams))
        moved = [p for p in cluster._placed.values() if p.link and p.link.name == "r0"]
        assert len(moved) == 2
        for placed, name in zip(moved, ("r1", "r3"), strict=True):
            cluster._links._links[name].known.add(placed.hashes)
        await found.servers.pop("r0").aclose()
        await until(lambda: all(placed.is_moved and placed.link for placed in moved))
        assert [placed.link.name for placed in moved if placed.link] == ["r1", "r3"]
        assert await asyncio.gather(*reading) == [undisturbed(each) for each in asked]


@pytest.mark.parametrize("num_tokens", [100, 5000])
async def test_a_replica_that_began_again_is_not_believed_before_one_that_is_further(
    num_tokens: int,
) -> None:
    async with replicas(model="fake:tokens_per_s=500") as found, found.ingress() as cluster:
        name = "0" * 24 + "r0"
        asked = replace(request(max_tokens=num_tokens), request_id=name, detach_s=None)
        engines = [found.servers[each].engine for each in ("r0", "r1")]
        further = engines[1].submit(asked)
        await until(lambda: further.num_output_tokens >= 100)
        engines[0].submit(asked)
        stream = await cluster.find(name)
        assert stream is not None
        assert stream.num_output_tokens >= 100
        assert stream.is_finished is (num_tokens == 100)
        if not stream.is_finished:
            await until(lambda: engines[0].get(name) is None)
            cluster.cancel(name)
            await until(lambda: stream.is_finished)
        tokens = list(stream.token_ids())
        assert tokens == undisturbed(request(max_tokens=len(tokens)))


async def test_what_a_lost_replica_may_come_back_with_is_not_unknown(tmp_path: Path) -> None:
    async with replicas(journal=str(tmp_path)) as found, found.ingress() as one:
        name = "0" * 24 + "r0"
        asked = replace(request(), request_id=name, is_durable=True)
        assert await read(one.submit(asked)) == undisturbed(asked)
        async with found.ingress() as other:
            await found.servers.pop("r0").aclose()
            await until(lambda: len(other.counts) == 1)
            with pytest.raises(Overloaded):
                await other.find(name)
            await found.add("r0")
            await until(lambda: len(other.counts) == 2)
            twin = await other.find(name)
            assert twin is not None
            assert await read(twin) == undisturbed(asked)
            assert await other.find("1" * 24 + "r0") is None
