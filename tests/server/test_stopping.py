"""How a process ends, as its clients see it: drained under 50 streams, given up when it hangs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from streamer.server.service import Service
from tests.engine.helpers import make_engine
from tests.server.counting import CHAT, check_counting
from tests.test_cli_run import server as serving

NUM_STREAMS, DEADLINE_S = 50, 60.0
SHORT, ENDLESS = 40, 30_000  # tokens, at 50 a second

ENDLESS_BODY: dict[str, Any] = {"stream": True, "max_tokens": ENDLESS, "ignore_eos": True}


class Stream:
    """One chat over SSE, read as it comes."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.has_begun = asyncio.Event()
        self.text = ""
        self.reason: str | None = None
        self.error: dict[str, Any] | None = None
        self.is_done = False

    async def read(self, client: httpx.AsyncClient, url: str) -> None:
        body = {**CHAT, "stream": True, "max_tokens": self.max_tokens, "ignore_eos": True}
        async with client.stream("POST", url + "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            async for data in _events(response):
                self.take(data)

    def take(self, data: str) -> None:
        assert self.error is None, "something after the error"
        if data == "[DONE]":
            self.is_done = True
            return
        event = json.loads(data)
        self.error = event.get("error")
        for choice in event.get("choices", ()):
            self.text += choice["delta"].get("content") or ""
            self.reason = choice["finish_reason"] or self.reason
        if self.text:
            self.has_begun.set()


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    """The data of each event; a body that is cut in its middle raises."""
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line[6:]


async def test_sigterm_under_50_streams() -> None:
    """Half finish whole, half are cut at the deadline and told; nothing new is taken; exit 0."""
    words = ("fake:tokens_per_s=50", "--drain-timeout", "3")
    with serving(*words) as (process, url, _):
        limits = httpx.Limits(max_connections=None)
        async with asyncio.timeout(DEADLINE_S), httpx.AsyncClient(timeout=60, limits=limits) as c:
            streams = [Stream(SHORT if i % 2 else ENDLESS) for i in range(NUM_STREAMS)]
            async with asyncio.TaskGroup() as group:
                for stream in streams:
                    group.create_task(stream.read(c, url))
                for stream in streams:
                    await stream.has_begun.wait()
                process.send_signal(signal.SIGTERM)
                refused = await _first_refusal(c, url)
        assert await asyncio.to_thread(process.wait, DEADLINE_S) == 0
        assert process.stderr is not None
        told = process.stderr.read()
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "draining"
    assert int(refused.headers["retry-after"]) > 0
    for stream in streams:
        numbers = check_counting(stream.text)
        if stream.max_tokens == SHORT:
            assert (len(numbers), stream.reason, stream.is_done) == (SHORT, "length", True)
        else:
            assert stream.error is not None
            assert stream.error["code"] == "cancelled"
            assert len(numbers) > SHORT
    assert told.count("reason=length status=200") >= NUM_STREAMS // 2
    assert told.count("reason=cancelled status=499") == NUM_STREAMS // 2
    assert "Traceback" not in told


async def _first_refusal(client: httpx.AsyncClient, url: str) -> httpx.Response:
    """The signal takes until the next tick; requests are the pace."""
    while True:
        body = {**CHAT, "max_tokens": 1}
        response = await client.post(url + "/v1/chat/completions", json=body)
        if response.status_code != 200:
            assert (await client.get(url + "/ready")).status_code == 503
            assert (await client.get(url + "/health")).status_code == 200
            return response


async def test_who_wants_to_hears_of_the_drain() -> None:
    service = Service(make_engine(), make_engine().config)
    heard: list[tuple[str, float]] = []
    service.on_drain(lambda s: heard.append(("stays", s)))
    forget = service.on_drain(lambda s: heard.append(("left", s)))
    forget()
    forget()
    service.begin_drain(3.5)
    assert heard == [("stays", 3.5)]


# ---------------------------------------------------------------- a hung step

HANGING = """
import sys, time
import streamer.bench.fake_runner as fake
from streamer.cli import main

original = fake.FakeRunner.launch

def launch(self, plan):
    if any(join.num_prompt > 500 for join in plan.joins):
        print("hanging", flush=True)
        while True:  # no signal, no exception and no join ends this thread
            try:
                time.sleep(3600)
            except BaseException:
                pass
    return original(self, plan)

fake.FakeRunner.launch = launch
sys.exit(main(["serve", "fake", "--port", "0", "--watchdog-s", "0.5"]))
"""


@pytest.fixture
def hanging() -> Iterator[tuple[subprocess.Popen[str], str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", HANGING],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    try:
        url = next(found[0] for line in child.stdout if (found := re.search(r"http://\S+", line)))
        yield child, url
    finally:
        child.kill()
        child.communicate(timeout=DEADLINE_S)


async def test_a_hung_step_is_told_to_all_and_ends_the_process(
    hanging: tuple[subprocess.Popen[str], str],
) -> None:
    process, url = hanging
    async with asyncio.timeout(DEADLINE_S), httpx.AsyncClient(timeout=60) as client:
        streams = [Stream(ENDLESS) for _ in range(3)]
        reading = [asyncio.create_task(s.read(client, url)) for s in streams]
        for stream in streams:
            await stream.has_begun.wait()
        body = {**CHAT, **ENDLESS_BODY}
        async with client.stream("POST", url + "/v1/chat/completions", json=body):
            # This one takes nothing: the process waits a while for it, and /health can be asked.
            await _until_paused(client, url)
            prompt = {"prompt": "x" * 600, "max_tokens": 5}
            whole = await client.post(url + "/v1/completions", json=prompt)
            health = await client.get(url + "/health")
            await asyncio.gather(*reading)
    for answer in (whole, health):
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_dead"
        assert "a step took longer than 0.5 s" in answer.json()["error"]["message"]
    for stream in streams:
        check_counting(stream.text)
        assert stream.error is not None
        assert stream.error["code"] == "engine_dead"
    _, told = await asyncio.to_thread(process.communicate, timeout=DEADLINE_S)
    assert process.returncode == 1
    assert 'File "<string>"' in told  # the stack of the thread that hangs
    assert "in launch" in told
    assert told.count("status=503") == 5


async def _until_paused(client: httpx.AsyncClient, url: str) -> None:
    sample = 'streamer_requests{state="paused"} 1.0'
    while True:
        if sample in (await client.get(url + "/metrics")).text:
            return


def test_a_forced_end_does_not_wait_for_the_drain() -> None:
    with serving("fake:tokens_per_s=50", "--drain-timeout", "600") as (process, url, _):
        body = {**CHAT, **ENDLESS_BODY}
        with httpx.stream("POST", url + "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(httpx.HTTPError):  # its body may be cut anywhere
                list(lines)
        assert process.wait(DEADLINE_S) == 0


# ---------------------------------------------------------------- the bundled model


async def test_bundled_sigterm_lets_20_streams_finish() -> None:
    """Told to stop, it takes nothing new, ends what it has begun, and exits with 0."""
    with serving("--drain-timeout", "60", "--max-num-seqs", "32") as (process, url, announced):
        limits = httpx.Limits(max_connections=None)
        async with asyncio.timeout(DEADLINE_S), httpx.AsyncClient(timeout=60, limits=limits) as c:
            streams = [Stream(50 + 3 * i) for i in range(20)]
            async with asyncio.TaskGroup() as group:
                for stream in streams:
                    group.create_task(stream.read(c, url))
                for stream in streams:
                    await stream.has_begun.wait()
                process.send_signal(signal.SIGTERM)
                refused = await _first_refusal(c, url)
                assert not all(stream.is_done for stream in streams)
        assert await asyncio.to_thread(process.wait, DEADLINE_S) == 0
        assert process.stderr is not None
        told = process.stderr.read()
    assert "streamer-demo" in announced
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    for stream in streams:
        assert (stream.error, stream.reason, stream.is_done) == (None, "length", True)
        assert f"output_tokens={stream.max_tokens} " in told
    assert "Traceback" not in told
