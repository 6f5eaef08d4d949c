"""serve: the uvicorn server around an engine, from the first open socket to a clean exit.

The socket opens at once and /health answers while the model loads. The first SIGTERM or Ctrl-C
drains: new work is refused, running streams get --drain-timeout to finish, and every wait after
that has a deadline, whatever hangs. A dead engine ends the process with an error. The command line
calls this and prints the address that `on_ready` receives.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Final

import uvicorn

from streamer.config import Config
from streamer.engine.refusals import CLOSE_S
from streamer.errors import ConfigError
from streamer.server.app import build_service_app
from streamer.server.responses.socket_events import MAX_MESSAGE_BYTES
from streamer.server.service import Service
from streamer.server.telemetry.logs import Line
from streamer.server.telemetry.tracing import make_tracer
from streamer.server.transport.http import limited
from streamer.server.transport.websocket import StreamingWebSocket

if TYPE_CHECKING:
    from streamer.engine.base import Engine
    from streamer.server.telemetry.records import Tracer

log = logging.getLogger(__name__)

TICK_S: Final = 0.1  # between uvicorn's ticks
FLUSH_S: Final = 2.0  # after the engine is done, for the last frames; and for the last spans
SEND_BUFFER_BYTES: Final = 64 << 10  # else the kernel hides megabytes of a reader's lag
BACKLOG: Final = 2048
# uvloop accepts one connection of a listening socket in a turn of its loop, so copies of it bound
# what waits in the kernel: at 2,500 connections a second beside 256 streams on 2 cores a refusal
# took 183 ms (p50; 1,421 p99) with one, 52 (760) with eight (EPYC Zen 5, uvloop 0.23, 2026-11-23).
ACCEPTS_A_TURN: Final = 8


class Started(Line, frozen=True, kw_only=True):
    """The line of a server that takes requests."""

    url: str
    model: str
    load_s: float


class Draining(Line, frozen=True, kw_only=True):
    """The line of a server that stops: `streams` have `timeout_s` to end."""

    streams: int
    timeout_s: float


class Stopped(Line, frozen=True, kw_only=True):
    """The last line of a server."""

    exit_code: int


class _NoDenials(logging.Filter):
    """Drops uvicorn's ERROR about each refused handshake: our server has answered it."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.msg != "ASGI callable returned without completing handshake."


class Server(uvicorn.Server):
    """uvicorn's server, which drains before it exits and watches the engine."""

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        stop: asyncio.Event | None,
    ) -> None:
        super().__init__(config)
        self._service = service
        self._stop = asyncio.Event() if stop is None else stop
        self._tick_s: float | None = None  # when the next tick is due
        self._num_signals = 0
        self._drain: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: drain. Second: exit at once. Neither is raised again at the end."""
        self._num_signals += 1
        if self._num_signals > 1:
            self.force_exit = self.should_exit = True

    async def main_loop(self) -> None:
        """uvicorn's, which also goes on as soon as `stop` is set and as the drain is over."""
        counter = 0
        while not await self.on_tick(counter):
            counter = (counter + 1) % 864_000
            await self._tick()

    async def _tick(self) -> None:
        """Wait for the time of the next tick, or for what it would notice."""
        if self._drain is not None:
            await asyncio.wait([self._drain], timeout=TICK_S)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TICK_S):
                await self._stop.wait()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: begin the drain that a signal asked for; notice a dead engine."""
        self._see_loop_lag()
        is_stopping = self._num_signals or self._stop.is_set()
        if is_stopping and self._drain is None:
            self._drain = asyncio.create_task(self._drain_all())
        if self._service.engine.is_dead:
            self._service.bodies.refuse(self._service.engine.unavailable())
            await self._service.wait_idle(FLUSH_S)  # every stream receives its error
            self.should_exit = True
        return await super().on_tick(counter)

    def _see_loop_lag(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._tick_s is not None:
            self._service.metrics.loop_late_s.observe(max(0.0, now - self._tick_s))
        self._tick_s = now + TICK_S

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's, in which connections end that have not taken everything within FLUSH_S: it
        would cancel their requests, each with a traceback."""
        timer = asyncio.get_running_loop().call_later(FLUSH_S, self._abort_all)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def _abort_all(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def _drain_all(self) -> None:
        try:
            drain_s = self._service.config.drain_timeout
            num_streams = len(self._service.metrics.live)
            log.info("draining %s", Draining(streams=num_streams, timeout_s=drain_s))
            self._service.begin_drain(drain_s)
            if self._service.engine.is_ready:
                await self._service.engine.drain(drain_s)
                await self._service.wait_idle(FLUSH_S)
        finally:
            self.should_exit = True


async def serve(
    engine: Engine,
    config: Config,
    *,
    on_ready: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
) -> int:
    """Open the socket, start the engine, serve until a signal; the process's exit code.

    Starts and closes the engine. `on_ready` receives the address once requests are taken; setting
    `stop` does what a first signal does, for callers on another thread than the main one. Raises
    ConfigError if the address can't be bound or TLS can't be set up, and whatever loading raised.
    """
    tracer = make_tracer(config.otlp_endpoint)
    service = Service(engine, config, tracer)
    prepared = _uvicorn_config(service, config)
    with contextlib.ExitStack() as closing:
        listener = closing.enter_context(bind(config))
        copies = (listener.dup() for _ in range(ACCEPTS_A_TURN - 1))
        listeners = [listener, *(closing.enter_context(copy) for copy in copies)]
        server = Server(prepared, service, stop)
        uvicorn_log, quiet = logging.getLogger("uvicorn.error"), _NoDenials()
        uvicorn_log.addFilter(quiet)
        starting = asyncio.create_task(_start(engine, server, on_ready, _url(listener, config)))
        try:
            await server.serve(sockets=listeners)
        finally:
            if not starting.done():
                starting.cancel()
            await asyncio.wait([starting])
            await engine.aclose(FLUSH_S if server.force_exit else CLOSE_S)
            if tracer is not None:
                await _close_tracer(tracer)
            uvicorn_log.removeFilter(quiet)
        if not starting.cancelled():
            starting.result()
    is_left_loading = engine.is_hung and starting.cancelled()
    if is_left_loading:  # a download, say; no request was taken
        log.info("stopped while the model was loading")
    elif engine.is_hung:
        log.error("a thread of the engine hangs and is left behind")
    code = int(engine.is_dead or (engine.is_hung and not is_left_loading))
    log.info("stopped %s", Stopped(exit_code=code))
    return code


async def _close_tracer(tracer: Tracer) -> None:
    """Send the last spans, to a collector that may not answer, in a thread that is never joined.

    The loop's own threads are joined at its end.
    """
    loop, is_closed = asyncio.get_running_loop(), asyncio.Event()

    def close() -> None:
        tracer.close()
        with contextlib.suppress(RuntimeError):  # the loop has closed before
            loop.call_soon_threadsafe(is_closed.set)

    threading.Thread(target=close, name="streamer-tracer", daemon=True).start()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FLUSH_S):
            await is_closed.wait()


async def _start(
    engine: Engine, server: Server, on_ready: Callable[[str], None] | None, url: str
) -> None:
    began = time.perf_counter()
    try:
        await engine.start()
    except BaseException:
        server.should_exit = True
        raise
    load_s = time.perf_counter() - began
    log.info("started %s", Started(url=url, model=engine.info.name, load_s=load_s))
    if on_ready is not None:
        on_ready(url)


def bind(config: Config) -> socket.socket:
    """The listening socket; accepted sockets inherit its small send buffer."""
    try:
        listener = _bind_path(config.uds) if config.uds is not None else _bind_port(config)
    except OSError as e:
        where = config.uds or f"{config.host}:{config.port}"
        name = "uds" if config.uds else "port"
        raise ConfigError(
            f"cannot listen on {where}: {e.strerror or e}; --{name} names another", param=name
        ) from e
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def _bind_port(config: Config) -> socket.socket:
    host = config.host.strip("[]") or None
    family, kind, proto, _, address = socket.getaddrinfo(
        host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def _bind_path(path: str) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
    except OSError:
        listener.close()
        raise
    return listener


def _remove_stale(path: str) -> None:
    """Remove a socket file that no server listens on any more."""
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        raise ConfigError(f"{path} exists and is not a socket", param="uds")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            os.unlink(path)


def _url(listener: socket.socket, config: Config) -> str:
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if config.ssl_certfile else "http"
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{port}"  # root_path is for what a proxy strips


def _uvicorn_config(service: Service, config: Config) -> uvicorn.Config:
    prepared = uvicorn.Config(
        build_service_app(service),
        http=limited(config.max_connections_per_address),
        ws=StreamingWebSocket,
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_ping_interval=20.0,
        ws_ping_timeout=20.0,
        ws_per_message_deflate=False,
        lifespan="off",
        root_path=config.root_path,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        timeout_graceful_shutdown=int(FLUSH_S) + 1,  # after `shutdown` has ended them
        access_log=False,
        log_config=None,
        server_header=False,
    )
    if config.ssl_keyfile is not None and config.ssl_certfile is None:
        raise ConfigError("ssl_keyfile needs ssl_certfile beside it", param="ssl_keyfile")
    try:
        prepared.load()  # reads the certificate and the key
    except OSError as e:  # SSLError is one
        what = f"{config.ssl_certfile} and {config.ssl_keyfile or 'the key in it'}"
        raise ConfigError(
            f"ssl_certfile, ssl_keyfile: {what} can't be used: {e.strerror or e}",
            param="ssl_certfile",
        ) from e
    return prepared
