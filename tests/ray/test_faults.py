"""Replicas and ingresses under a real Ray are killed, stopped and scaled beneath their clients."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.chaos.clients import Events, Server, response_by_socket, response_by_sse
from tests.chaos.test_faults import count
from tests.chaos.test_kills import asks, outcomes
from tests.ray.running import INGRESS, REPLICA, UnderRay, alive, descendants, wait_for
from tests.server.support.counting import check_counting

NUM_STREAMS = int(os.environ.get("STREAMER_STREAMS", "200"))
NUM_TOKENS = 150
DEADLINE_S = 120.0
SILENT_S = 5.0
FAKE = {"model": "fake:tokens_per_s=25", "max_num_seqs": 256, "max_wait_s": 0}
FAKE |= {"num_gpu_blocks_override": 20000, "replicas": 2}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UnderRay]:
    with UnderRay.application(tmp_path_factory.mktemp("app"), FAKE) as running:
        wait_for(lambda: len(running.metric("streamer_steps_total")) == 2, "no second replica")
        yield running


@pytest.fixture
async def whole(app: UnderRay) -> UnderRay:
    """The application with all its processes again."""

    def is_whole() -> bool:
        if len(app.pids(REPLICA)) != 2 or len(app.pids(INGRESS)) != 2 or not app.is_ready():
            return False
        return len(app.metric("streamer_steps_total")) == 2

    await asyncio.to_thread(wait_for, is_whole, "processes are missing")
    return app


class Streams:
    """Many answers at once over SSE and WebSocket, and the moment when all have begun."""

    def __init__(self, url: str, num: int) -> None:
        async def ready() -> None:
            await asyncio.sleep(0.2)

        self.server = Server(url, ready)
        self.gaps: list[float] = []
        self._begun = asyncio.Event()
        self._waiting = set(range(num))
        self._last: dict[int, float] = {}
        self.tasks = [asyncio.create_task(self._one(i)) for i in range(num)]

    async def all_begun(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            begun = asyncio.create_task(self._begun.wait())
            await asyncio.wait([begun, *self.tasks], return_when=asyncio.FIRST_COMPLETED)
            assert begun.done(), [t.result() for t in self.tasks if t.done()]

    async def all_complete(self) -> None:
        """Every answer counted to its end, without a gap or a repetition."""
        async with asyncio.timeout(DEADLINE_S):
            for text in await asyncio.gather(*self.tasks):
                assert len(check_counting(text)) == NUM_TOKENS, text

    def begun(self, i: int) -> None:
        now = time.monotonic()
        self.gaps.append(now - self._last.setdefault(i, now))
        self._last[i] = now
        self._waiting.discard(i)
        if not self._waiting:
            self._begun.set()

    async def _one(self, i: int) -> str:
        body: dict[str, Any] = {"model": "fake", "input": "count", "ignore_eos": True}
        body |= {"max_output_tokens": NUM_TOKENS, "detach_s": 30}
        follow = response_by_socket if i % 2 else response_by_sse
        server = _Watched(self.server, lambda: self.begun(i))
        events: Events = await follow(server, body)
        assert events.final["status"] == "incomplete", events.final  # its length was the limit
        return "".join(events.texts.values())


class _Watched(Server):
    """The server of one stream, which says when something of it came."""

    def __init__(self, server: Server, came: Callable[[], None]) -> None:
        super().__init__(server.url, server.ready)
        self._all, self._came = server, came

    def read(self) -> None:
        self._came()

    async def lost(self) -> None:
        await self._all.lost()


async def test_streams_of_a_killed_replica_go_on_without_a_client_that_notices(
    whole: UnderRay,
) -> None:
    streams = Streams(whole.url, NUM_STREAMS)
    await streams.all_begun()
    both = await asyncio.to_thread(whole.metric, "streamer_requests", state="running")
    assert sum(both.values()) > 0
    assert all(both.values()), both
    os.kill(whole.pids(REPLICA)[0], signal.SIGKILL)
    await streams.all_complete()
    assert streams.server.num_resumed == 0


async def test_streams_of_a_stopped_replica_go_on_in_five_seconds(whole: UnderRay) -> None:
    streams = Streams(whole.url, 40)
    await streams.all_begun()
    stopped = whole.pids(REPLICA)[0]
    os.kill(stopped, signal.SIGSTOP)
    try:
        await streams.all_complete()
        assert streams.server.num_resumed == 0
        assert SILENT_S / 2 < max(streams.gaps) < SILENT_S + 2.0
        assert len(await count(whole.url, 20)) == 20  # new work goes around it
    finally:
        os.kill(stopped, signal.SIGCONT)


async def test_streams_of_a_killed_ingress_go_on_at_the_other(whole: UnderRay) -> None:
    streams = Streams(whole.url, 40)
    await streams.all_begun()
    os.kill(whole.pids(INGRESS)[0], signal.SIGKILL)
    await streams.all_complete()
    assert streams.server.num_resumed > 0


async def test_answers_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    settings = {"dtype": "float32", "num_gpu_blocks_override": 320, "max_wait_s": 0}
    with UnderRay.application(tmp_path, {**settings, "replicas": 2}) as app:

        async def ready() -> None:
            await asyncio.sleep(0.2)

        server, mix = Server(app.url, ready), asks(0)
        expected = await outcomes(server, mix)
        read = server.num_read
        again = asyncio.create_task(outcomes(server, mix))
        while server.num_read < read + 100:
            server.more.clear()
            await server.more.wait()
        os.kill(app.pids(REPLICA)[0], signal.SIGKILL)
        found = await again
    assert found == expected


async def test_replicas_come_and_go_by_load_and_no_client_notices(tmp_path: Path) -> None:
    policy = {"policy_function": "streamer.replicas.scaling:ByLoad"}
    scaling = {"min_replicas": 1, "max_replicas": 2, "look_back_period_s": 2}
    scaling |= {"upscale_delay_s": 0, "downscale_delay_s": 1, "policy": policy}
    settings = {**FAKE, "max_num_seqs": 16}
    with UnderRay.application(tmp_path, settings, autoscaling_config=scaling) as app:

        def num() -> int:
            return len(app.metric("streamer_steps_total"))

        assert num() == 1
        more = Streams(app.url, 40)
        await asyncio.to_thread(wait_for, lambda: num() == 2, "it did not scale up")
        few = Streams(app.url, 4)
        await more.all_complete()
        long = [asyncio.create_task(count(app.url, 1000)) for _ in range(4)]
        await few.all_complete()
        await asyncio.to_thread(wait_for, lambda: len(app.pids(REPLICA)) == 1, "nor down")
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*long)
        assert more.server.num_resumed + few.server.num_resumed == 0


async def test_streamer_serve_starts_and_ends_all_of_it(tmp_path: Path) -> None:
    flags = ("--replicas", "2", "--num-gpu-blocks-override", "20000", "--max-wait-s", "0")
    with UnderRay.alone(tmp_path, FAKE["model"], *flags) as running:
        process = running.process
        await asyncio.to_thread(
            wait_for, lambda: len(running.metric("streamer_steps_total")) == 2, "no replicas"
        )
        streams = Streams(running.url, 20)
        await streams.all_begun()
        os.kill(running.pids(REPLICA)[0], signal.SIGKILL)
        await streams.all_complete()
        assert streams.server.num_resumed == 0
        below = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 30.0) == 0
        await asyncio.to_thread(wait_for, lambda: not alive(below), "processes are left", 10.0)


async def test_after_a_kill_of_streamer_serve_its_journals_have_all_that_it_answered(
    tmp_path: Path,
) -> None:
    flags = ("--replicas", "2", "--num-gpu-blocks-override", "20000", "--max-wait-s", "0")
    flags += ("--journal", str(tmp_path / "journal"))
    body = {"model": "fake", "input": "count", "ignore_eos": True, "max_output_tokens": 10}
    long = {**body, "background": True, "max_output_tokens": 200}

    def has_two() -> bool:
        return len(running.metric("streamer_steps_total")) == 2

    async def read(client: httpx.AsyncClient, name: str) -> Any:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                found = (await client.get(f"/v1/responses/{name}")).raise_for_status().json()
                if found["status"] not in ("queued", "in_progress"):
                    return found["output"][0]["content"][0]["text"]
                await asyncio.sleep(0.1)

    with UnderRay.alone(tmp_path, FAKE["model"], *flags) as running:
        await asyncio.to_thread(wait_for, has_two, "no replicas")
        async with httpx.AsyncClient(base_url=running.url, timeout=20.0) as client:
            started = [(await client.post("/v1/responses", json=long)).json() for _ in range(4)]
            answers = [(await client.post("/v1/responses", json=body)).json() for _ in range(4)]
            before = [await read(client, answer["id"]) for answer in answers]
        engines = running.pids(REPLICA)
        running.process.kill()
        await asyncio.to_thread(wait_for, lambda: not alive(engines), "engines are left", 15.0)
    with UnderRay.alone(tmp_path, FAKE["model"], *flags) as running:
        await asyncio.to_thread(wait_for, has_two, "no replicas")
        async with httpx.AsyncClient(base_url=running.url, timeout=20.0) as client:
            assert [await read(client, answer["id"]) for answer in answers] == before
            for answer in started:
                assert len(check_counting(await read(client, answer["id"]))) == 200
