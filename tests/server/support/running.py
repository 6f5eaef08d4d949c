"""A server in a thread of its own, over the fake model or the bundled one, and ways to wait.

With TEST_REPLICAS=2 in the environment its engine is a cluster of so many replicas.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx

from streamer.config import Config
from streamer.engine.base import Engine
from streamer.engine.engine import AsyncEngine
from streamer.replicas.cluster import Cluster
from streamer.replicas.messages import Member
from streamer.replicas.replica import ReplicaServer
from streamer.server.lifecycle import serve

T = TypeVar("T")
DEADLINE_S = 20.0
REPLICA = re.compile(
    r',replica="[^"]*"|replica="[^"]*",?'
)  # in a sample's name: replicas' counts are added up
SECRET = b"tests/server, which is no secret"
STATES = ("waiting", "running", "paused", "preempted", "swapped")
IDLE = (  # 0 in /metrics while nothing is in the engine
    *(f'streamer_requests{{state="{state}"}}' for state in STATES),
    'streamer_blocks{pool="device",state="used"}',
    'streamer_blocks{pool="host",state="used"}',
)
# As many blocks as its context has; in float32, so that rounding never decides between two tokens
# (bfloat16 ties its best two every few hundred tokens).
BUNDLED: dict[str, Any] = {"model": None, "dtype": "float32", "num_gpu_blocks_override": 64}


class Running:
    """A server in a thread of its own, and its engine; `script` may be the file's entries."""

    num_replicas = int(os.environ.get("TEST_REPLICAS", "0"))

    def __init__(self, **settings: Any) -> None:
        self._files: tempfile.TemporaryDirectory[str] | None = None
        if isinstance(entries := settings.get("script"), list):
            self._files = tempfile.TemporaryDirectory()
            file = Path(self._files.name) / "script.json"
            file.write_text(json.dumps(entries))
            settings["script"] = str(file)
        given = {"model": "fake", "port": 0, "load_progress": False, "drain_timeout": 2.0}
        self.config = Config(**{**given, **settings})
        self.url = ""
        self.exit_code: int | None = None
        self.engine: Any  # an Engine, of which tests know what it is made of
        self.replicas: dict[str, ReplicaServer] = {}  # of a cluster, by name
        self._error: BaseException | None = None
        self._is_ready = threading.Event()
        # A daemon, so that pytest ends although a failed test never stopped it.
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event

    def start(self) -> Running:
        self._thread.start()
        if not self._is_ready.wait(DEADLINE_S) or self._error is not None:
            raise RuntimeError("the server did not start") from self._error
        return self

    def begin_stop(self) -> None:
        """The effect of a first signal."""
        self._loop.call_soon_threadsafe(self._stop.set)

    def stop(self) -> None:
        if self._thread.is_alive():
            self.begin_stop()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the server did not stop"
        if self._files is not None:
            self._files.cleanup()
        if self._error is not None:
            raise self._error

    def build(self) -> Engine:
        """The engine that the server serves."""
        return AsyncEngine.from_config(self.config)

    @asynccontextmanager
    async def _built(self) -> AsyncIterator[Engine]:
        """The same, or a cluster of replicas on this loop."""
        names = [f"r{number}" for number in range(self.num_replicas)]
        if not names:
            yield self.build()
            return

        async def members() -> Sequence[Member]:
            return [Member(name, each.address) for name, each in self.replicas.items()]

        try:
            for name in names:
                self.replicas[name] = ReplicaServer(self.config, name=name, secret=SECRET)
                await self.replicas[name].start()
            yield Cluster(self.config, members, SECRET)
        finally:
            for each in self.replicas.values():
                await each.aclose()

    def on_loop(self, work: Coroutine[Any, Any, T], deadline_s: float = DEADLINE_S) -> T:
        """Run the coroutine on the server's loop; returns its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(deadline_s)

    @property
    def ws_url(self) -> str:
        return self.url.replace("http://", "ws://") + "/v1/responses"

    def metrics(self, samples: Sequence[str]) -> dict[str, float]:
        """The values of samples in /metrics, 0 for those that are missing."""
        found = dict.fromkeys(samples, 0.0)
        for line in self._get("/metrics").text.splitlines():
            name, value = REPLICA.sub("", line).rsplit(" ", 1)
            if name in found:
                found[name] += float(value)
        return found

    def _get(self, path: str) -> httpx.Response:
        """A poll's deadline is the whole wait's: a busy machine may be slow to answer."""
        return httpx.get(self.url + path, timeout=DEADLINE_S)

    def metric(self, sample: str) -> float:
        return self.metrics([sample])[sample]

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Poll the server until `is_so` holds; each poll is a request, so there is no sleep."""
        end = time.monotonic() + DEADLINE_S
        while not is_so():
            self._get("/health")
            assert time.monotonic() < end, "it never came to hold"

    def wait_metric(self, sample: str, value: float) -> None:
        """Poll until the sample has this value; each poll is a request, so there is no sleep."""
        end = time.monotonic() + DEADLINE_S
        while (seen := self.metric(sample)) != value:
            assert time.monotonic() < end, f"{sample} stayed at {seen}, expected {value}"

    def wait_idle(self) -> None:
        """Wait until no request is in the engine and every block is free."""
        end = time.monotonic() + DEADLINE_S
        while self.engine.snapshot().live_streams:  # including those that no step has seen yet
            assert time.monotonic() < end, "a stream does not end"
            time.sleep(0.001)
        while any((seen := self.metrics(IDLE)).values()):
            assert time.monotonic() < end, f"it does not come to rest: {seen}"

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as e:
            self._error = e
        finally:
            self._is_ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()

        def ready(url: str) -> None:
            self.url = url
            self._is_ready.set()

        async with self._built() as self.engine:
            self.exit_code = await serve(self.engine, self.config, on_ready=ready, stop=self._stop)
