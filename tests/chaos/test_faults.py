"""Faults from outside: a process stopped, clients that vanish, no descriptors, no disk, clocks.

Streams are the fake model's, which counts: a lost or repeated token shows in the text.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from streamer.config import Config
from streamer.core.sampling import SamplingParams
from streamer.engine.base import time_left_s
from streamer.engine.journal.records import Accepted, Saved, Tail
from streamer.engine.journal.restoring import restored
from streamer.engine.requests import GenerateRequest
from tests.chaos.clients import sse
from tests.chaos.killable import Killable
from tests.server.support.counting import check_counting
from tests.server.support.running import BUNDLED, Running

NUM_VANISHING = int(os.environ.get("STREAMER_VANISHING", "200"))
AT_ONCE = 50
ABRUPT = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets the connection
WATCHDOG_S = 1.0
DEADLINE_S = 30.0
NUM_LEFT, NUM_NEW = 2, 10  # descriptors, and the connections that want one


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killable]:
    """A server over the fake model at 100 tokens a second, with a journal."""
    folder = tmp_path_factory.mktemp("faults")
    settings = {"model": "fake:tokens_per_s=100", "journal": folder / "journal"}
    settings |= {"watchdog_s": WATCHDOG_S, "max_wait_s": 0.0}
    with Killable(folder / "log", **settings) as it:
        it.start()
        it.wait_ready()
        yield it


async def count(url: str, num_tokens: int, begun: Callable[[], None] = lambda: None) -> list[int]:
    """A streamed chat to its end: the numbers that it counted."""
    body = {"messages": [{"role": "user", "content": "count"}], "stream": True}
    body |= {"max_tokens": num_tokens, "ignore_eos": True}
    text = ""
    async with (
        httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        assert response.status_code == 200
        with contextlib.suppress(EOFError):
            async for _, chunk in sse(response):
                if chunk is None:
                    break
                assert "error" not in chunk, chunk
                text += (chunk["choices"][0]["delta"].get("content") or "") if chunk else ""
                begun()
    numbers = check_counting(text)
    assert len(numbers) == num_tokens
    return numbers


def files(process: Killable) -> set[int]:
    """The numbers of its open descriptors."""
    return {int(number) for number in os.listdir(f"/proc/{process.pid}/fd")}


def num_open(process: Killable) -> int:
    return len(files(process))


def wait_for(is_so: Callable[[], bool], says: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < end, says
        time.sleep(0.02)


def is_idle(process: Killable) -> bool:
    """No request in the engine, no block in use."""
    lines = httpx.get(process.url + "/metrics").text.splitlines()
    held = [x for x in lines if x.startswith(("streamer_requests{", "streamer_blocks{"))]
    held = [x for x in held if "free" not in x and "cached" not in x]
    return bool(held) and all(float(x.rsplit(" ", 1)[1]) == 0 for x in held)


def is_journal_up(process: Killable) -> bool:
    return "streamer_journal_up 1.0" in httpx.get(process.url + "/metrics").text


async def during(process: Killable, num_streams: int, fault: Callable[[], None]) -> None:
    """Streams that have all begun when the fault comes, and are complete in spite of it."""
    waiting = set(range(num_streams))
    all_begun = asyncio.Event()

    def begun(i: int) -> None:
        waiting.discard(i)
        if not waiting:
            all_begun.set()

    def one(i: int) -> Callable[[], None]:
        return lambda: begun(i)

    streams = [asyncio.create_task(count(process.url, 120, one(i))) for i in range(num_streams)]
    async with asyncio.timeout(DEADLINE_S):
        await all_begun.wait()
        await asyncio.to_thread(fault)
        await asyncio.gather(*streams)


async def test_a_process_stopped_for_longer_than_the_watchdog_goes_on(process: Killable) -> None:
    """SIGSTOP, a frozen cgroup, a suspended machine: no hung step."""

    def stop() -> None:
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(2 * WATCHDOG_S)  # the fault itself
        os.kill(process.pid, signal.SIGCONT)

    await during(process, 20, stop)
    assert "hangs" not in process.lines()


def vanish(port: int, chance: random.Random) -> None:
    """One client that leaves at a random moment, by a reset, a close or half a close."""
    body = json.dumps(
        {
            "input": "count",
            "messages": [{"role": "user", "content": "count"}],
            "prompt": "count",
            "stream": chance.random() < 0.8,
            "max_tokens": 2000,
            "max_output_tokens": 2000,
        }
    )
    fields = {"completions": ("prompt",), "chat/completions": ("messages",)}
    path = chance.choice(("completions", "chat/completions", "responses", "ws"))
    if path == "ws":
        sent = b"GET /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\n"
        sent += b"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        sent += b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        event = json.dumps({"type": "response.create", "input": "count"}).encode()
        sent += bytes((0x81, 0x80 | len(event))) + bytes(4) + event
    else:
        given = json.loads(body)
        kept = fields.get(path, ("input",))
        others = {"messages", "prompt", "input"} - {*kept}
        others |= {"max_tokens"} if path == "responses" else {"max_output_tokens"}
        data = json.dumps({k: v for k, v in given.items() if k not in others}).encode()
        sent = f"POST /v1/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\n".encode()
        sent += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        sent += data
    if chance.random() < 0.3:
        sent = sent[: chance.randrange(len(sent))]
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as client:
        client.sendall(sent)
        client.settimeout(0.3)
        with contextlib.suppress(OSError):
            for _ in range(chance.randrange(4)):
                if not client.recv(chance.choice((1, 100, 10_000))):
                    break
        if chance.random() < 0.3:
            client.shutdown(socket.SHUT_WR)
        if chance.random() < 0.5:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABRUPT)


async def test_clients_that_vanish_leave_nothing(process: Killable) -> None:
    """Sockets, requests and blocks are as before; a stream beside them lost nothing."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(AT_ONCE))
    wait_for(lambda: is_idle(process), "the server is not idle")
    before = num_open(process)
    seeds = iter(range(NUM_VANISHING))

    async def some() -> None:
        for seed in seeds:
            await asyncio.to_thread(vanish, process.port, random.Random(seed))

    async with asyncio.timeout(DEADLINE_S + NUM_VANISHING / 10):
        await asyncio.gather(count(process.url, 200), *(some() for _ in range(AT_ONCE)))
    wait_for(lambda: is_idle(process), "their requests go on")
    wait_for(lambda: num_open(process) <= before + 2, "their sockets are open")
    assert "Traceback" not in process.lines()


def answer_of(one: socket.socket) -> bytes:
    """The beginning of the answer on a connection, or b"" where it was closed."""
    try:
        return one.recv(15)
    except ConnectionError:
        return b""


async def test_without_descriptors_streams_go_on_and_then_all_is_taken(process: Killable) -> None:
    """New connections are closed while no file can be opened."""
    limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    before, held = num_open(process), list[socket.socket]()

    def exhaust() -> None:
        at = num_open(process) + NUM_LEFT
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (at, limits[1]))
        for _ in range(NUM_NEW):
            one = socket.create_connection(("127.0.0.1", process.port), DEADLINE_S)
            held.append(one)
            one.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        # The next one that it opens would be at the limit: EMFILE.
        wait_for(lambda: files(process) >= {*range(at)}, "descriptors are left")

    try:
        await during(process, 5, exhaust)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limits)
        async with httpx.AsyncClient(base_url=process.url, timeout=DEADLINE_S) as client:
            (await client.get("/health")).raise_for_status()
        found = Counter([await asyncio.to_thread(answer_of, one) for one in held])
        # uvloop closes those for which there was no descriptor; the others have their answers.
        assert found.keys() == {b"HTTP/1.1 200 OK", b""}, found
    finally:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limits)
        for one in held:
            one.close()
    wait_for(lambda: num_open(process) <= before + 2, "their sockets are open")


async def test_a_full_disk_stops_no_stream(process: Killable) -> None:
    """No file may grow any more, neither the journal nor the log; the next start has both."""

    def fill() -> None:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

    body = {"model": "fake", "input": "Count.", "max_output_tokens": 8}
    async with httpx.AsyncClient(base_url=process.url, timeout=DEADLINE_S) as client:
        kept = (await client.post("/v1/responses", json=body)).raise_for_status().json()["id"]
        await during(process, 5, fill)
        (await client.post("/v1/responses", json=body)).raise_for_status()
        wait_for(lambda: not is_journal_up(process), "the journal did not fail")
        (await client.post("/v1/responses", json=body)).raise_for_status()
        await asyncio.to_thread(process.restart)
        assert is_journal_up(process)
        (await client.get(f"/v1/responses/{kept}")).raise_for_status()


@pytest.mark.parametrize("years", [-20, 20])
def test_the_clock_may_jump(years: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lasts is measured by the monotonic clock: streams, deadlines, what is retained."""
    server = Running(model="fake:tokens_per_s=200", retain_s=600.0).start()
    try:
        body = {"model": "fake", "input": "Count.", "max_output_tokens": 20, "ignore_eos": True}
        with httpx.Client(base_url=server.url, timeout=DEADLINE_S) as client:
            kept = client.post("/v1/responses", json=body).raise_for_status().json()["id"]
            headers = {"x-request-timeout": "25"}
            given = {**body, "stream": True, "max_output_tokens": 100}
            with client.stream("POST", "/v1/responses", json=given, headers=headers) as response:
                lines = response.iter_lines()
                assert next(lines)
                real = time.time
                monkeypatch.setattr(time, "time", lambda: real() + years * 365.25 * 86400)
                assert any("response.incomplete" in line for line in lines)
            client.get(f"/v1/responses/{kept}").raise_for_status()
            client.post("/v1/responses", json=body).raise_for_status()
    finally:
        server.stop()


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_deadline_over_a_restart_is_never_longer_than_it_was(hours: int) -> None:
    """A clock set back while the server was away adds nothing to it."""
    request = GenerateRequest(prompt=(1,), params=SamplingParams(), deadline_s=30.0)
    began = time.time()
    now = began + hours * 3600
    assert time_left_s(30.0, began, now) == (30.0 if hours < 0 else 0.0)
    again = restored(Saved(Accepted(request, b"", began), Tail(1)), Config(model="fake"), now)
    assert again.progress is not None
    (drawn,) = again.progress.outputs
    assert (drawn.finish is None) == (hours < 0)


class Panic(BaseException):
    """As a broken library of Rust raises it: no Exception."""


class Throwing:
    """A tokenizer that raises for what contains a word."""

    def __init__(self, inner: Any, error: BaseException) -> None:
        self._inner, self._error = inner, error

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not name.startswith("encode"):
            return found

        def encode(given: Any, *args: Any, **more: Any) -> Any:
            if "throw" in str(given):
                raise self._error
            return found(given, *args, **more)

        return encode


def throwing(word: str) -> list[tuple[str, dict[str, Any]]]:
    """A body of each API with this prompt."""
    messages = {"messages": [{"role": "user", "content": word}], "max_tokens": 4}
    return [
        ("/v1/completions", {"prompt": word, "max_tokens": 4}),
        ("/v1/chat/completions", messages),
        ("/v1/messages", messages),
        ("/v1/responses", {"input": word, "max_output_tokens": 4}),
    ]


@pytest.mark.parametrize(
    "error", [Panic("no"), MemoryError("no"), RecursionError("no"), KeyError(1)]
)
async def test_a_tokenizer_that_throws_fails_its_requests_alone(error: BaseException) -> None:
    server = Running(model="fake:tokens_per_s=200").start()
    try:
        server.engine._tokenizer = Throwing(server.engine.tokenizer, error)
        neighbour = asyncio.create_task(count(server.url, 100))
        async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE_S) as client:
            for path, body in throwing("throw"):
                for is_streamed in (False, True):
                    given = {**body, "model": "fake", "stream": is_streamed}
                    answer = await client.post(path, json=given)
                    assert answer.status_code == 500, (path, answer.text)
                    assert answer.json()["error"]["type"] in ("server_error", "api_error")
            for path, body in throwing("well"):
                given = {**body, "model": "fake"}
                (await client.post(path, json=given)).raise_for_status()
        await neighbour
        await asyncio.to_thread(server.wait_idle)
    finally:
        await asyncio.to_thread(server.stop)
    assert server.exit_code == 0


def test_a_template_that_throws_is_a_400_of_its_requests_alone(tmp_path: Path) -> None:
    template = tmp_path / "template"
    template.write_text("{{ 1 / (0 if messages[-1].content == 'throw' else 1) }}")
    server = Running(**BUNDLED, chat_template=str(template)).start()
    try:
        with httpx.Client(base_url=server.url, timeout=DEADLINE_S) as client:
            for (path, bad), (_, good) in zip(throwing("throw"), throwing("well"), strict=True):
                if path != "/v1/completions":  # which has no template
                    given = {**bad, "model": "streamer-demo"}
                    answer = client.post(path, json=given)
                    assert answer.status_code == 400, (path, answer.text)
                    assert "template" in answer.text
                given = {**good, "model": "streamer-demo"}
                client.post(path, json=given).raise_for_status()
        server.wait_idle()
    finally:
        server.stop()
