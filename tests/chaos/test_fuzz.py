"""Changed inputs of every kind: each is answered or refused, and a neighbour's tokens stay.

The bundled model answers all that can be answered, and two streams beside the inputs, over SSE and
a WebSocket, answer after answer, which are compared with the undisturbed one token for token.
`make fuzz` runs a million; STREAMER_FUZZ_COUNT, _SEED and _SECONDS say how many, which, and for how
long at most: a count that was asked for and not reached is a failure. Most are decoded in process,
by the server's own application, a share goes over sockets. What a run did is printed with a digest
of its inputs: the same seed gives the same ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import json
import logging
import os
import re
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from starlette.routing import Route
from websockets.protocol import State

from streamer.config import Config
from streamer.engine.engine import AsyncEngine
from streamer.errors import ConfigError, InvalidRequest, ModelNotSupported
from streamer.model.checkpoint import _read_header
from streamer.model.gguf.header import read_header
from streamer.server.app import build_app
from streamer.server.transport.websocket import Frames
from streamer.tokenizer.chat import ChatTemplate
from tests.chaos.exchanges import LIMIT_S, answer, fault
from tests.chaos.fuzzing import BODIES, KNOWN, Maker, of_response
from tests.chaos.neighbours import Neighbours
from tests.checkpoints import make_checkpoint
from tests.model.gguf.test_header import is_refused, write_gguf
from tests.server.support.running import BUNDLED, Running

IS_COUNT_ASKED = "STREAMER_FUZZ_COUNT" in os.environ
COUNT = int(os.environ.get("STREAMER_FUZZ_COUNT", "3000"))
SEED = int(os.environ.get("STREAMER_FUZZ_SEED", "1"))
SECONDS = float(os.environ.get("STREAMER_FUZZ_SECONDS", "120"))
BATCH = 1000
BATCH_S = 120.0  # 600 requests, on a machine that does other work too
EVENTS_A_SOCKET = 20
AT_ONCE = 8
HEADERS = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
SCOPE: dict[str, Any] = {
    "asgi": {"version": "3.0"},
    "http_version": "1.1",
    "query_string": b"",
    "root_path": "",
    "headers": HEADERS,
    "client": ("127.0.0.1", 1),
    "server": ("127.0.0.1", 80),
}
NAME = re.compile(rb"resp_[0-9a-f]+")
UNAVAILABLE = (b"server_overloaded", b"queue_full")


class Fuzz:
    """A run: what was sent, what came of it, and what should not have."""

    def __init__(self, server: Running, folder: Path) -> None:
        names = httpx.get(server.url + "/openapi.json").json()["components"]["schemas"].values()
        fields = {name for each in names for name in each.get("properties", {})}
        self.maker = Maker(SEED, sorted(fields))
        self.counts: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.found: list[str] = []
        self.digest = hashlib.sha256()
        self._server, self._app = server, build_app(server.engine, server.config)
        self._newest = b""  # response of a body
        self._file = folder / "bad"
        made = make_checkpoint(
            folder / "m", "llama", hidden_size=32, intermediate_size=64, num_hidden_layers=1
        )
        good = write_gguf(made, folder / "good.gguf")
        self._gguf = good.read_bytes(), read_header(good).tensors[0].start

    @property
    def num_done(self) -> int:
        return self.counts.total()

    def took(self, kind: str, data: bytes) -> bytes:
        self.counts[kind] += 1
        self.digest.update(data)
        return data

    def wrong(self, kind: str, data: object, why: object) -> None:
        self.found.append(f"{kind}: {why!r:.300} of {data!r:.600}")

    # ------------------------------------------------------------ on the server's loop

    async def _post(self, path: str, body: bytes) -> None:
        received = [{"type": "http.request", "body": body, "more_body": False}]
        status, parts, is_over = 0, b"", False

        async def receive() -> Any:
            if received:
                return received.pop()
            return await asyncio.Future()

        async def send(message: Any) -> None:
            nonlocal status, parts, is_over
            status = message.get("status", status)
            parts += message.get("body", b"")
            is_over = message["type"] == "http.response.body" and not message.get("more_body")

        if self._newest:
            path = path.replace(KNOWN, self._newest.decode())
        scope = {**SCOPE, "type": "http", "method": "POST", "scheme": "http", "path": path}
        scope["raw_path"] = path.encode()
        try:
            async with asyncio.timeout(LIMIT_S):
                await self._app(scope, receive, send)
        except Exception as e:
            self.wrong(path, body, e)
        self.statuses[status] += 1
        found = NAME.findall(parts)
        self._newest = found[-1] if found else self._newest
        if not is_over:
            self.wrong(path, body, (status, parts, "its answer has no end"))
        if status >= 500 and not any(code in parts for code in UNAVAILABLE):
            self.wrong(path, body, (status, parts))

    async def _talk(self, events: list[bytes], is_packed: bool) -> None:
        kind = "bytes" if is_packed else "text"
        name, num_given = b"", -1

        async def receive() -> Any:
            nonlocal num_given
            num_given += 1
            for _ in range(3):
                await asyncio.sleep(0)  # the session writes its replies
            if not num_given:
                return {"type": "websocket.connect"}
            if num_given > len(events):
                return {"type": "websocket.disconnect", "code": 1001}
            if num_given % 4 == 0:
                await asyncio.sleep(0.004)  # the engine draws some tokens
            event = events[num_given - 1]
            if name:
                event = of_response(event, name, is_packed)
            return {
                "type": "websocket.receive",
                kind: event if is_packed else event.decode(errors="replace"),
            }

        async def send(message: Any) -> None:
            nonlocal name
            sent = message.get(kind)
            found = NAME.findall(sent.encode() if isinstance(sent, str) else sent or b"")
            name = found[-1] if found else name
            if "internal" in str(sent):
                self.wrong(kind, events, message)

        scope = {**SCOPE, "type": "websocket", "scheme": "ws", "path": "/v1/responses"}
        scope["raw_path"] = b"/v1/responses"
        scope["subprotocols"] = ["streamer.v1.msgpack" if is_packed else "streamer.v1.json"]
        try:
            await self._app(scope, receive, send)
        except Exception as e:
            self.wrong(kind, events, e)

    async def served(self, num: int) -> None:
        """HTTP bodies and events: `num` of them in process."""
        bodies = [self.maker.body() for _ in range(num // 2)]
        chats = [
            ([self.maker.event(is_packed) for _ in range(EVENTS_A_SOCKET)], is_packed)
            for is_packed in (False, False, True) * max(1, num // 6 // EVENTS_A_SOCKET)
        ]
        for path, body in bodies:
            self.took("HTTP bodies", path.encode() + body)
        for events, is_packed in chats:
            for event in events:
                self.took("MessagePack events" if is_packed else "JSON events", event)
        works = [self._post(*each) for each in bodies]
        works += [self._talk([*events], is_packed) for events, is_packed in chats]

        async def some() -> None:
            while works:
                await works.pop()

        await asyncio.gather(*(some() for _ in range(AT_ONCE)))

    # ------------------------------------------------------------ here

    def decoded(self, num: int) -> None:
        """Frames, files and templates."""
        loop = asyncio.new_event_loop()
        for _ in range(num // 2):
            data = self.took("WebSocket frames", self.maker.frames())
            conn = Frames(loop, state=State.OPEN, max_size=1 << 20)
            with self._watched("frames", data):
                conn.receive_data(data)
                conn.events_received()
        loop.close()
        for i in range(num // 2):
            if i % 3 == 0:
                source = self.maker.template()
                data = self.took("chat templates", source.encode())
                with self._watched("template", data, ConfigError, InvalidRequest):
                    template = ChatTemplate(source, {"bos_token": "<s>"})
                    template.render(
                        [{"role": "user", "content": "x"}], add_generation_prompt=True, tools=None
                    )
            elif i % 3 == 1:
                data = self.took("safetensors headers", self.maker.safetensors())
                self._file.write_bytes(data)
                with self._watched("safetensors", data, ModelNotSupported):
                    _read_header(self._file, 1 << 20)
            else:
                data = self.took("GGUF headers", self.maker.gguf(*self._gguf))
                self._file.write_bytes(data)
                with self._watched("GGUF", data, ModelNotSupported):
                    read_header(self._file)
                    if i % 60 == 2:
                        is_refused(self._file)

    @contextlib.contextmanager
    def _watched(self, kind: str, data: bytes, *allowed: type[Exception]) -> Any:
        try:
            yield
        except allowed:
            pass
        except Exception as e:
            self.wrong(kind, data, e)

    def sent(self, num: int) -> None:
        """Bodies and frames on sockets: each connection ends, and what is whole is answered."""
        host = self._server.url.removeprefix("http://")
        name, port = host.split(":")
        for i in range(num):
            is_whole = not i % 2 and i % 8 > 0
            if i % 2:
                parts = self.maker.handshake(host), self.maker.frames()
                self.took("sockets: frames", b"".join(parts))
            else:
                path, body = self.maker.body()
                head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
                head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                raw = head.encode() + body
                parts = (raw if is_whole else self.maker.scratched(raw),)
                self.took("sockets: HTTP", *parts)
            is_owed = is_whole or i % 4 == 1  # a handshake is a whole request
            parts = parts if is_owed else (b"".join(parts),)
            try:
                came = answer((name, int(port)), parts, is_whole=is_whole)
            except TimeoutError as e:
                self.wrong("socket", b"".join(parts), e)
                continue
            if why := fault(came, is_owed=is_owed):
                self.wrong("socket", b"".join(parts), (why, came))
            if came.startswith(b"HTTP/1.1 5") and not any(c in came for c in UNAVAILABLE):
                self.wrong("socket", b"".join(parts), came)


class Held(NamedTuple):
    """What the process holds at rest; the blocks and slots in use are 0 then."""

    resident_mib: float
    files: int
    tasks: int
    threads: int


async def num_tasks() -> int:
    return len(asyncio.all_tasks())


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / (1 << 20)


def held(server: Running) -> Held:
    server.wait_idle()
    gc.collect()
    return Held(
        resident_mib(),
        len(os.listdir("/proc/self/fd")),
        server.on_loop(num_tasks()),
        threading.active_count(),
    )


def go_on(fuzz: Fuzz, server: Running, count: int, seconds: float) -> Counter[str]:
    """Send inputs beside the neighbours; the answers that these compared."""
    began, first = time.monotonic(), fuzz.num_done
    with Neighbours(server) as neighbours:
        while fuzz.num_done < first + count and time.monotonic() - began < seconds:
            server.on_loop(fuzz.served(BATCH * 6 // 10), BATCH_S)
            fuzz.decoded(BATCH * 4 // 10 - 20)
            fuzz.sent(20)
            if fuzz.num_done % 50_000 < BATCH:
                passed_s = time.monotonic() - began
                says = f"{fuzz.num_done} inputs, {passed_s:.0f} s, {resident_mib():.0f} MiB"
                print(says, json.dumps(neighbours.compared), flush=True)
            assert not fuzz.found, "\n".join(fuzz.found[:20])
            neighbours.check()
    neighbours.check()
    return neighbours.compared


def test_whatever_comes_is_answered_or_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {**BUNDLED, "num_gpu_blocks_override": 256, "tool_call_parser": "hermes"}
    settings |= {"max_model_len": 256, "retain_s": 1.0, "max_wait_s": 0.0}
    server = Running(**settings).start()
    caplog.set_level(logging.ERROR)
    try:
        fuzz, began = Fuzz(server, tmp_path), time.monotonic()
        go_on(fuzz, server, BATCH, SECONDS)
        before = held(server)
        compared = go_on(fuzz, server, COUNT - BATCH, SECONDS)
        wait_s = time.monotonic() + 10.0
        while (after := held(server)).tasks > before.tasks:
            assert time.monotonic() < wait_s, "tasks are left"
        print(
            f"seed {SEED}: {json.dumps(fuzz.counts)}, statuses {json.dumps(fuzz.statuses)}; "
            f"{time.monotonic() - began:.0f} s, neighbours' answers {json.dumps(compared)}; "
            f"{before} and {after}, {fuzz.digest.hexdigest()}"
        )
        says = f"{fuzz.num_done} of {COUNT} inputs in {SECONDS:g} s"
        assert fuzz.num_done >= COUNT or not IS_COUNT_ASKED, says
        errors = [r.getMessage() for r in caplog.records if r.name.startswith("streamer")]
        assert errors == []
        assert after.resident_mib < before.resident_mib + 64 + COUNT / 20_000
        assert after.files <= before.files + 8
        assert after.threads <= before.threads + 4
        assert min(compared.values()) > 0
    finally:
        server.stop()


def test_every_route_that_takes_a_body_has_one() -> None:
    guard: Any = build_app(AsyncEngine.from_config(config := Config(model="fake")), config)
    routes = [each for each in guard._app._app.routes if isinstance(each, Route)]
    paths = {each.path for each in routes if "POST" in (each.methods or ())}
    given = {path.replace(KNOWN, "{id}") for path, _ in BODIES}
    assert "/v1/responses" in given
    assert given == paths


HEAD = b"HTTP/1.1 200 OK\r\n"
UPGRADED = b"HTTP/1.1 101 x\r\n\r\n"
ENDS = {
    b"": "no answer",
    b"{}": "no HTTP",
    HEAD + b"Content-Length: 9\r\n\r\n{}": "an answer that is not whole",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n": "an answer that is not whole",
    HEAD + b"Content-Length: 2\r\n\r\n{}": "",
    UPGRADED + b"\x81\x05{}": "a frame that is cut",
    UPGRADED + b"\x81\x82{}": "a frame that is none",
    UPGRADED + b"\x81\x02{}\x88\x00": "",
}


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("came", ENDS)
def test_what_is_wrong_with_an_answer_is_seen(came: bytes, is_whole: bool) -> None:
    """Of a server that sends this, and then closes or hangs."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(answer, server.getsockname(), (b"x",), is_whole=is_whole, limit_s=0.1)
        one, _ = server.accept()
        with one:
            one.sendall(came)
            with pytest.raises(TimeoutError, match="no end within"):
                asked.result()
        asked = pool.submit(answer, server.getsockname(), (b"x",), is_whole=is_whole)
        one, _ = server.accept()
        with one:
            assert one.recv(1) == b"x"
            one.sendall(came)
        assert asked.result() == came
    assert fault(came, is_owed=True).startswith(ENDS[came])
    assert bool(fault(came, is_owed=True)) == bool(ENDS[came])
    assert not fault(b"", is_owed=False)
