"""The process: signals and exit codes in a subprocess; loading, death and binding in this one."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvloop

from streamer.config import Config
from streamer.core.plan import Plan, RowJoin
from streamer.core.sizes import ModelInfo
from streamer.engine.core import InFlight, Owner, Runner
from streamer.engine.engine import AsyncEngine
from streamer.engine.refusals import loading
from streamer.errors import ConfigError, EngineDead, StreamerError
from streamer.model.sampling.host import Sampler
from streamer.server.lifecycle import ACCEPTS_A_TURN, bind, serve
from streamer.server.transport.http import LimitedHttpProtocol
from tests.server.support.counting import CHAT, check_counting, sse
from tests.server.support.running import BUNDLED, Running

SCRIPT = """
import asyncio, sys
from streamer.engine.engine import AsyncEngine
from streamer.config import Config
from streamer.server.lifecycle import serve
config = Config(model="fake", port=0, load_progress=False, drain_timeout=5.0)
ready = lambda url: print(url, flush=True)
sys.exit(asyncio.run(serve(AsyncEngine.from_config(config), config, on_ready=ready)))
"""


@pytest.fixture
def process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    root = Path(__file__).parents[2]
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, cwd=root
    )
    assert child.stdout is not None
    try:
        yield child, child.stdout.readline().strip()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def test_sigterm_lets_running_streams_finish_and_exits_0(process: Any) -> None:
    child, url = process
    body = {**CHAT, "stream": True, "max_tokens": 3000, "ignore_eos": True}
    with httpx.stream("POST", url + "/v1/chat/completions", json=body) as response:
        events = sse(response)
        first = next(events)
        child.send_signal(signal.SIGTERM)
        *rest, done = events
    assert done.is_done
    chunks = [e.json for e in (first, *rest)]
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    check_counting(text)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert child.wait(20) == 0


class SlowEngine(SimpleNamespace):
    """An engine that loads until the test releases it, and can be made to die."""

    def __init__(self) -> None:
        super().__init__(is_ready=False, is_dead=False, is_draining=False, death=None, closed=0)
        self.is_hung, self.info = False, SimpleNamespace(name="slow")
        self.loaded = asyncio.Event()

    async def start(self) -> None:
        await self.loaded.wait()
        self.is_ready = True

    def unavailable(self) -> StreamerError:
        return loading()

    async def drain(self, deadline_s: float) -> None:
        self.is_draining = True

    async def aclose(self, deadline_s: float) -> None:
        self.closed += 1


async def _started(engine: Any, path: Path, stop: asyncio.Event | None = None) -> Any:
    config = Config(uds=str(path / "s"), load_progress=False)
    task = asyncio.create_task(serve(engine, config, stop=stop))
    transport = httpx.AsyncHTTPTransport(uds=config.uds, retries=50)
    return task, httpx.AsyncClient(transport=transport, base_url="http://localhost")


async def test_while_the_model_loads(tmp_path: Path) -> None:
    engine: Any = SlowEngine()
    stop = asyncio.Event()
    task, client = await _started(engine, tmp_path, stop)
    async with client:
        assert (await client.get("/health")).status_code == 200
        for method, path in (
            ("GET", "/ready"),
            ("GET", "/v1/models"),
            ("POST", "/v1/chat/completions"),
        ):
            response = await client.request(method, path)
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "model_loading"
            assert int(response.headers["retry-after"]) > 0
        assert (await client.get("/")).status_code == 200
    stop.set()
    assert await asyncio.wait_for(task, 20) == 0
    assert engine.closed == 1


async def test_a_load_that_can_not_be_interrupted_is_no_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A download, or transformers' own loading: a signal meanwhile ends the process as ever."""

    class Stuck(SlowEngine):
        async def aclose(self, deadline_s: float) -> None:
            self.is_hung = True

    engine: Any = Stuck()
    stop = asyncio.Event()
    task, client = await _started(engine, tmp_path, stop)
    async with client:
        assert (await client.get("/health")).status_code == 200
    stop.set()
    assert await asyncio.wait_for(task, 20) == 0
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_dead_engine_ends_the_process_with_an_error(tmp_path: Path) -> None:
    engine: Any = SlowEngine()
    engine.loaded.set()
    task, client = await _started(engine, tmp_path)
    async with client:
        assert (await client.get("/health")).status_code == 200
        engine.death = EngineDead("out of luck")
        engine.is_dead = True
        response = await client.get("/health")
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "out of luck"
    assert await asyncio.wait_for(task, 20) == 1


async def test_a_failure_to_load_is_raised(tmp_path: Path) -> None:
    class Broken(SlowEngine):
        async def start(self) -> None:
            raise ConfigError("no such model", param="model")

    engine: Any = Broken()
    with pytest.raises(ConfigError, match="no such model"):
        await asyncio.wait_for(serve(engine, Config(uds=str(tmp_path / "s"))), 20)
    assert engine.closed == 1


def test_a_taken_port_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=str(port)) as caught:
            bind(Config(port=port))
    assert caught.value.param == "port"


def test_a_stale_socket_file_is_replaced_and_nothing_else_is(tmp_path: Path) -> None:
    path = tmp_path / "s"
    bind(Config(uds=str(path))).close()
    assert path.exists()
    with (
        bind(Config(uds=str(path))),
        pytest.raises(ConfigError, match="cannot listen"),
    ):
        bind(Config(uds=str(path)))
    os.unlink(path)
    path.write_text("not a socket")
    with pytest.raises(ConfigError, match="not a socket"):
        bind(Config(uds=str(path)))
    assert path.read_text() == "not a socket"


@pytest.mark.parametrize(
    ("settings", "param", "text"),
    [
        ({"ssl_keyfile": "/nothing.pem"}, "ssl_keyfile", "ssl_certfile"),
        ({"ssl_certfile": "/nothing.pem"}, "ssl_certfile", "No such file"),
        ({"ssl_certfile": __file__}, "ssl_certfile", "can't be used"),
    ],
)
async def test_tls_that_cannot_be_set_up_is_refused(
    settings: dict[str, str], param: str, text: str
) -> None:
    config = Config(model="fake", port=0, load_progress=False, **settings)
    with pytest.raises(ConfigError, match=text) as refusal:
        await serve(AsyncEngine.from_config(config), config)
    assert refusal.value.param == param


# ---------------------------------------------------------------- the bundled model


class Breaking:
    """A runner whose steps fail when the test asks for it.

    is_broken  it fails always, and can't be reset
    num_to_fail  further steps that fail
    poison     a request of so many tokens has steps that fail
    """

    def __init__(self, inner: Runner) -> None:
        self._inner, self.is_broken, self.num_to_fail, self.poison = inner, False, 0, 0
        self._poisoned: set[int] = set()
        self.depth, self.facts, self.close = inner.depth, inner.facts, inner.close
        self.constrain = inner.constrain

    def reset(self, launched: int) -> None:
        if self.is_broken:
            raise RuntimeError("out of order")
        self._poisoned.clear()
        self._inner.reset(launched)

    def launch(self, plan: Plan) -> InFlight:
        self._poisoned.difference_update(plan.leaves)
        self._poisoned |= {j.row for j in plan.joins if j.params.max_tokens == self.poison}
        self.num_to_fail -= 1
        if self.is_broken or self.num_to_fail >= 0 or self._poisoned:
            raise RuntimeError("out of luck")
        return self._inner.launch(plan)


class Mortal(Running):
    """A server over such a runner."""

    runner: Breaking

    def build(self) -> AsyncEngine:
        engine = super().build()
        load = engine._load

        def load_breaking(owner: Owner) -> tuple[Runner, ModelInfo]:
            runner, info = load(owner)
            self.runner = Breaking(runner)
            return self.runner, info

        engine._load = load_breaking
        return engine


def test_bundled_a_step_that_fails_fails_every_request_and_ends_the_server() -> None:
    server = Mortal(**BUNDLED).start()
    body = {**CHAT, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=body) as response:
        events = sse(response)
        while not next(events).json["choices"][0]["delta"].get("content"):
            pass
        server.runner.is_broken = True
        last = list(events)[-1].json["error"]
    server.stop()
    assert (last["code"], server.exit_code) == ("engine_dead", 1)
    assert last["message"] == "the engine died of an internal error"


def test_bundled_a_step_that_fails_is_a_pause_and_a_poisoned_request_fails_alone() -> None:
    """Seeded answers are those of an undisturbed server, while steps fail beside them."""
    server = Mortal(**BUNDLED).start()
    body = {**CHAT, "stream": True, "ignore_eos": True, "seed": 7, "max_tokens": 60}
    url = server.url + "/v1/chat/completions"

    def answer(*disturbances: Callable[[], None]) -> str:
        """The text; what disturbs it happens after its first event."""
        text, left = "", list(disturbances)
        with httpx.stream("POST", url, json=body) as response:
            for event in sse(response):
                if event.data != "[DONE]":
                    assert "error" not in event.json
                    text += event.json["choices"][0]["delta"].get("content") or ""
                    while left:
                        left.pop()()
        return text

    def fail_once() -> None:
        server.runner.num_to_fail = 1

    poisoned = {**body, "stream": False, "max_tokens": 33}
    refused: list[httpx.Response] = []

    def send_poisoned() -> None:
        server.runner.poison = 33
        refused.append(httpx.post(url, json=poisoned, timeout=20))

    whole = answer()
    assert answer(fail_once) == whole
    assert "streamer_rebuilds_total 1.0" in httpx.get(server.url + "/metrics").text
    assert answer(send_poisoned) == whole
    assert refused[0].status_code == 500
    assert refused[0].json()["error"]["code"] == "request_failed"
    assert httpx.get(server.url + "/health").status_code == 200
    server.stop()
    assert server.exit_code == 0


def test_bundled_rows_that_are_not_finite_fail_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other request of eight at once; the rest have the answer of an undisturbed server."""
    sick: set[int] = set()
    join, sample = Sampler.join, Sampler.sample

    def joined(sampler: Sampler, given: RowJoin) -> None:
        (sick.add if given.params.max_tokens == 33 else sick.discard)(given.row)
        join(sampler, given)

    def sampled(sampler: Sampler, logits: Any, rows: Any, *more: Any) -> Any:
        logits[[i for i, row in enumerate(rows) if row in sick]] = math.nan
        return sample(sampler, logits, rows, *more)

    monkeypatch.setattr(Sampler, "join", joined)
    monkeypatch.setattr(Sampler, "sample", sampled)
    server = Running(**BUNDLED).start()
    try:
        with httpx.Client(base_url=server.url, timeout=20) as client, ThreadPoolExecutor(8) as pool:

            def ask(num_tokens: int) -> httpx.Response:
                body = {**CHAT, "ignore_eos": True, "seed": 7, "max_tokens": num_tokens}
                return client.post("/v1/chat/completions", json=body)

            whole = ask(60).json()["choices"]
            answers = list(pool.map(ask, [60, 33] * 4))
        for well, failed in zip(answers[::2], answers[1::2], strict=True):
            assert well.json()["choices"] == whole
            assert failed.status_code == 500
            assert failed.json()["error"]["code"] == "request_failed"
            assert "finite" in failed.json()["error"]["message"]
        assert server.metric("streamer_rebuilds_total") == 0
        server.wait_idle()
    finally:
        server.stop()
    assert server.exit_code == 0


def test_connections_do_not_wait_for_a_turn_of_the_loop_each() -> None:
    async def main() -> tuple[int, int]:
        accepted: list[int] = []
        turn = 0
        config = Config(model="fake", port=0, load_progress=False)
        engine, stop = AsyncEngine.from_config(config), asyncio.Event()
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(serve(engine, config, on_ready=ready.set_result, stop=stop))
        host, port = (await ready).removeprefix("http://").split(":")
        made = LimitedHttpProtocol.connection_made

        def count(protocol: LimitedHttpProtocol, transport: Any) -> None:
            accepted.append(turn)
            made(protocol, transport)

        with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as clients:
            patch.setattr(LimitedHttpProtocol, "connection_made", count)
            for _ in range(64):
                clients.enter_context(socket.create_connection((host, int(port))))
            while len(accepted) < 64:
                turn += 1
                await asyncio.sleep(0)
        stop.set()
        await serving
        return len(accepted), len(set(accepted))

    assert uvloop.run(main()) == (64, 64 // ACCEPTS_A_TURN)
