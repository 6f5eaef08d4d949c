"""How a process ends, as its clients see it: drained under 50 streams, abandoned when it hangs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

import httpx
import openai
import pytest

from streamer.server.service import Service
from tests.engine.helpers import make_engine
from tests.server.support.bare import BareSocket
from tests.server.support.counting import CHAT, check_counting
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
    """Half finish whole, half are cut at the deadline with an error; nothing new; exit code 0."""
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
        output = process.stderr.read()
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "draining"
    assert int(refused.headers["retry-after"]) > 0
    for stream in streams:
        numbers = check_counting(stream.text)
        if stream.max_tokens == SHORT:
            assert (len(numbers), stream.reason, stream.is_done) == (SHORT, "length", True)
        else:
            assert stream.error is not None
            assert stream.error["code"] == "server_shutdown"
            assert len(numbers) > SHORT
    assert output.count("reason=length status=200") >= NUM_STREAMS // 2
    assert output.count("reason=server_shutdown status=503") == NUM_STREAMS // 2
    assert "Traceback" not in output


async def _first_refusal(client: httpx.AsyncClient, url: str) -> httpx.Response:
    """The signal takes effect at the next tick; each poll is a request, so there is no sleep."""
    while True:
        body = {**CHAT, "max_tokens": 1}
        response = await client.post(url + "/v1/chat/completions", json=body)
        if response.status_code != 200:
            assert (await client.get(url + "/ready")).status_code == 503
            assert (await client.get(url + "/health")).status_code == 200
            return response


async def test_drain_listeners_are_called_until_removed() -> None:
    service = Service(make_engine(), make_engine().config)
    calls: list[tuple[str, float]] = []
    service.on_drain(lambda s: calls.append(("stays", s)))
    forget = service.on_drain(lambda s: calls.append(("left", s)))
    forget()
    forget()
    service.begin_drain(3.5)
    assert calls == [("stays", 3.5)]


# ---------------------------------------------------------------- a hung step

HANGING = """
import sys, time
import streamer.fake.runner as fake
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


async def test_a_hung_step_fails_every_request_and_ends_the_process(
    hanging: tuple[subprocess.Popen[str], str],
) -> None:
    process, url = hanging
    async with asyncio.timeout(DEADLINE_S), httpx.AsyncClient(timeout=60) as client:
        streams = [Stream(3 * ENDLESS) for _ in range(3)]  # the fake's rate has no limit here
        reading = [asyncio.create_task(s.read(client, url)) for s in streams]
        for stream in streams:
            await stream.has_begun.wait()
        body = {**CHAT, **ENDLESS_BODY}
        async with client.stream("POST", url + "/v1/chat/completions", json=body):
            # This one takes nothing: the process waits a while for it, and /health can be asked.
            await _until_paused(client, url)
            prompt = {"prompt": "x" * 600, "max_tokens": 5}
            with _opened(url, _posted("/v1/completions", b"{", 100)) as half:
                whole = await client.post(url + "/v1/completions", json=prompt)
                health = await client.get(url + "/health")
                refused = await asyncio.to_thread(half.recv, 1 << 16)
            await asyncio.gather(*reading)
    assert refused.startswith(b"HTTP/1.1 503")
    assert b'"engine_dead"' in refused
    for answer in (whole, health):
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_dead"
        assert answer.json()["error"]["message"] == "the engine died of an internal error"
    for stream in streams:
        check_counting(stream.text)
        assert stream.error is not None
        assert stream.error["code"] == "engine_dead"
    _, output = await asyncio.to_thread(process.communicate, timeout=DEADLINE_S)
    assert process.returncode == 1
    assert output.count("StepHung: a step took longer than 0.5 s") == 1
    assert 'File "<string>"' in output  # the stack of the thread that hangs
    assert "in launch" in output
    assert output.count("reason=failed status=503") == 5


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


# ---------------------------------------------------------------- clients that do nothing


def _opened(url: str, asked: bytes) -> socket.socket:
    """A connection that has sent this, and reads no more than a kernel's smallest buffer."""
    host, port = url.removeprefix("http://").split(":")
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    found.settimeout(DEADLINE_S)
    found.connect((host, int(port)))
    found.sendall(asked)
    return found


def _posted(path: str, body: bytes, length: int) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize(
    ("path", "status"),
    [("/v1/completions", b"503"), ("/v1/messages", b"529"), ("/tokenize", b"503")],
)
def test_a_body_on_its_way_in_is_refused_when_the_server_stops(path: str, status: bytes) -> None:
    """Its request was cancelled in the end: a 500 that was no JSON, and a traceback."""
    with serving("fake:tokens_per_s=50", "--drain-timeout", "600") as (process, url, _):
        body = {**CHAT, **ENDLESS_BODY}
        with httpx.stream("POST", url + "/v1/chat/completions", json=body) as response:
            next(response.iter_lines())  # the drain waits for it
            with _opened(url, _posted(path, b"{", 100)) as half:
                process.send_signal(signal.SIGTERM)
                answer = half.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 " + status)
        assert b"the server is shutting down" in answer.partition(b"\r\n\r\n")[2]
        assert process.wait(DEADLINE_S) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


async def test_clients_that_read_nothing_end_quietly_with_the_server() -> None:
    with serving("fake", "--drain-timeout", "0.2") as (process, url, _):
        body = json.dumps({**CHAT, **ENDLESS_BODY}).encode()
        watch = b"GET /v1/engine?stream=true HTTP/1.1\r\nHost: localhost\r\n\r\n"
        chat = _posted("/v1/chat/completions", body, len(body))
        with _opened(url, chat), _opened(url, watch):
            async with asyncio.timeout(DEADLINE_S), httpx.AsyncClient(timeout=60) as client:
                await _until_paused(client, url)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, DEADLINE_S) == 0
        assert process.stderr is not None
        output = process.stderr.read()
    assert "Traceback" not in output
    assert "ERROR" not in output


# ---------------------------------------------------------------- a signal while it hangs

WEDGED = """
import sys, threading
import streamer.fake.runner as fake
import streamer.tokenizer.tokenizer as tokenizer
import streamer.engine.engine as engine
import streamer.server.lifecycle as lifecycle
from streamer.cli import main

where, *words = sys.argv[1:]
launch, encode_chat = fake.FakeRunner.launch, tokenizer.Tokenizer.encode_chat
engine.CANCEL_S, lifecycle.CLOSE_S = 0.3, 0.5

def hang():
    print("hanging", flush=True)
    threading.Event().wait()  # no signal, no exception and no join ends this

def launch_hanging(self, plan):
    if where == "step" and plan.number == 20 or where == "first step":
        hang()
    return launch(self, plan)

def encode_hanging(self, *args, **kwargs):
    if where == "template":
        hang()
    return encode_chat(self, *args, **kwargs)

fake.FakeRunner.launch = launch_hanging
tokenizer.Tokenizer.encode_chat = encode_hanging
sys.exit(main(["serve", "fake", "--port", "0", *words]))
"""


@contextlib.contextmanager
def wedged(where: str, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server whose part of that name hangs, and its URL."""
    child = subprocess.Popen(
        [sys.executable, "-c", WEDGED, where, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    try:
        yield child, next(u[0] for line in child.stdout if (u := re.search(r"http://\S+", line)))
    finally:
        child.kill()
        child.communicate(timeout=DEADLINE_S)


@pytest.mark.parametrize(("where", "code"), [("template", 0), ("first step", 1), ("step", 1)])
async def test_sigterm_ends_a_process_whatever_hangs_in_it(where: str, code: int) -> None:
    with wedged(where, "--drain-timeout", "0.2") as (process, url):
        async with asyncio.timeout(DEADLINE_S), httpx.AsyncClient(timeout=60) as client:
            streams = [Stream(ENDLESS) for _ in range(2)]
            reading = [asyncio.create_task(s.read(client, url)) for s in streams]
            assert process.stdout is not None
            await asyncio.to_thread(_lines_until, process.stdout, "hanging")
            assert (await client.get(url + "/health")).status_code == 200
            process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            _, output = await asyncio.to_thread(process.communicate, timeout=DEADLINE_S)
            took_s = time.monotonic() - began
            await asyncio.gather(*reading, return_exceptions=True)
    assert (process.returncode, took_s < 8) == (code, True), output
    if where != "template":
        assert "in launch_hanging" in output  # where it hangs
        assert [s.error and s.error["code"] for s in streams] == ["server_shutdown"] * 2


def _lines_until(lines: IO[str], expected: str) -> None:
    while expected not in lines.readline():
        pass


async def test_hung_templates_are_reported_and_end_the_process() -> None:
    """Both threads for prompts hang, so that no text can be served: the process ends."""
    with wedged("template", "--watchdog-s", "1.2") as (process, url):
        async with asyncio.timeout(DEADLINE_S), httpx.AsyncClient(timeout=60) as client:
            path, body = url + "/v1/chat/completions", {**CHAT, "max_tokens": 5}
            answers = await asyncio.gather(*(client.post(path, json=body) for _ in range(2)))
        for answer in answers:
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "prompt_timeout")
        _, output = await asyncio.to_thread(process.communicate, timeout=DEADLINE_S)
    assert process.returncode == 1
    assert output.count("PoolHung: every thread that prepares prompts has hung for 0.3 s") == 1


# ---------------------------------------------------------------- what is cut off says so


def test_what_a_shutdown_cuts_off_says_so_on_every_transport(server_with: Any) -> None:
    server = server_with(model="fake:tokens_per_s=200", drain_timeout=0.2)
    endless: dict[str, Any] = {"input": "x", "max_output_tokens": ENDLESS, "ignore_eos": True}
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    with ThreadPoolExecutor(1) as thread, BareSocket(server.url) as socket:
        body = {**CHAT, "max_tokens": ENDLESS, "ignore_eos": True}
        whole = thread.submit(httpx.post, server.url + "/v1/chat/completions", json=body)
        socket.send("response.create", **endless, stream_id="a")
        response = client.responses.create(
            model="fake", input="x", max_output_tokens=ENDLESS, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        chat = client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "x"}], max_tokens=ENDLESS,
            stream=True, extra_body={"ignore_eos": True},
        )  # fmt: skip
        next(iter(chat))
        server.wait_metric('streamer_requests{state="running"}', 4)
        server.begin_stop()
        *_, last = response
        assert last.type == "response.incomplete"
        details = last.response.incomplete_details
        assert details is not None
        assert (last.response.status, details.reason) == ("incomplete", "server_shutdown")
        with pytest.raises(openai.APIError) as caught:
            list(chat)
        assert caught.value.code == "server_shutdown"
        socket.read_until(lambda event: event["type"] == "response.incomplete")
        seen = next(e for e in socket.events if e["type"] == "response.incomplete")["response"]
        assert seen["incomplete_details"] == {"reason": "server_shutdown"}
        assert (seen["status"], seen["error"]) == ("incomplete", None)
        answer = whole.result(DEADLINE_S)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_shutdown")
        assert int(answer.headers["retry-after"]) > 0


# ---------------------------------------------------------------- the bundled model


async def test_bundled_sigterm_lets_20_streams_finish() -> None:
    """At SIGTERM it takes nothing new, finishes what it has begun, and exits with 0."""
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
        output = process.stderr.read()
    assert "streamer-demo" in announced
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    for stream in streams:
        assert (stream.error, stream.reason, stream.is_done) == (None, "length", True)
        assert f"output_tokens={stream.max_tokens} " in output
    assert "Traceback" not in output
