"""LimitedHttpProtocol: uvicorn's, with bounds on what a connection may hold and for how long.

The application gets a request only when its head is complete, and uvicorn keeps heads of any size
for any time; the same holds for trailers, and for requests waiting for the answer to an earlier
one. lifecycle.py passes the class that `limited` makes to uvicorn. Every connection begins here,
and reads and writes through a TurnTransport (loop_turn.py).
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
from array import array
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, cast

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from streamer.errors import InvalidRequest, Overloaded, StreamerError, TooLarge
from streamer.server.errors import error_body
from streamer.server.transport.loop_turn import (
    MAX_DROPPED_BYTES,
    WRITE_PART,
    Turn,
    TurnTransport,
)
from streamer.server.transport.stuck import ABORT, REFUSAL

MAX_HEAD_BYTES: Final = 64 << 10
MAX_TARGET_BYTES: Final = 8 << 10  # a query of 64 KiB takes 30 ms to parse
MAX_HEADERS: Final = 100  # trailers included; websockets takes 128
HEAD_TIMEOUT_S: Final = 30.0
BODY_TIMEOUT_S: Final = 60.0  # from the head's end to the body's
IDLE_TIMEOUT_S: Final = 30.0  # from an answer, and the end of its request, to the next head
MAX_CONNECTIONS: Final = 16_384  # or what file descriptors allow
SPARE_FILES: Final = 64  # descriptors left for all else: without one, nothing can be opened or read
MAX_WAITING: Final = 8  # requests behind one that is being answered, on the same connection


class Addresses:
    """Open connections by client address; IPv6 by /64, since one client has a whole /64.

    limit  for one address; 0: any number. Unix sockets have no address and are not counted.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._counts: dict[str, int] = {}

    def enter(self, peer: Any) -> Callable[[], None] | None:
        """Count one more; returns the function that uncounts it, or None at the maximum."""
        if not self._limit or not isinstance(peer, tuple):
            return lambda: None
        address = _network(str(peer[0]))
        num_open = self._counts.get(address, 0)
        if num_open >= self._limit:
            return None
        self._counts[address] = num_open + 1
        return partial(self._leave, address)

    def _leave(self, address: str) -> None:
        self._counts[address] -= 1
        if not self._counts[address]:
            del self._counts[address]


def _network(address: str) -> str:
    if ":" not in address:
        return address
    whole = ipaddress.ip_address(address.partition("%")[0])
    return whole.exploded[:19]


class _Stop(Exception):
    """Raised in a parser's callback, to stop the parser."""


class _Parser(httptools.HttpRequestParser):
    """httptools' parser, but a request whose upgrade is declined keeps its body (RFC 9110, 7.8).

    httptools ends a request with an Upgrade header at its head. Java's client offers h2c with every
    first request: the body of its POST would be lost.

    on_offer  called at such a head with the bytes after it; False: the upgrade is made
    """

    on_offer: Callable[[bytes], bool]

    def feed_data(self, data: bytes | bytearray | memoryview | array[int]) -> None:
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self.on_offer(bytes(data)[upgrade.args[0] :]):
                raise


def _nothing() -> None:
    pass


class LimitedHttpProtocol(HttpToolsProtocol):
    """Refuses heads over the limits, and connections beyond `addresses` and `max_connections`.

    Closes a connection that does not send a head or body in time, or sends many requests ahead.

    Two counts of bytes: `_num_kept` is what the parser's callbacks got of this head, and
    `_num_swallowed` what it was fed since a callback last made progress (a header that never ends
    is in no callback).
    """

    addresses = Addresses(0)
    max_connections = MAX_CONNECTIONS
    turn: Turn | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = self._new_parser()
        self._is_declined = False  # the head offers an upgrade that is declined: it is parsed again
        self._num_kept = 0
        self._num_headers = 0
        self._num_hosts = 0
        self._num_swallowed = 0
        self._has_advanced = False
        self._has_begun = False  # a request, with this part of the data
        self._refusal: tuple[bytes, StreamerError] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due_s: float | None = None  # of the loop's time: when `_on_time` is called
        self._on_time: Callable[[], None]
        self._running: RequestResponseCycle | None = None  # its answer is being sent

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse a connection over the limits, else start the timer of its first head."""
        leave = self.addresses.enter(transport.get_extra_info("peername"))
        on_lost = leave if leave is not None else lambda: None
        super().connection_made(TurnTransport(transport, self.loop, on_lost, self.turn))
        if leave is None or len(self.connections) > self.max_connections:
            owner = "your address" if leave is None else "all clients"
            self._answer(
                b"503 Service Unavailable", Overloaded(f"{owner} have too many open connections")
            )
            self.transport.close()
        else:
            self._start_timer(HEAD_TIMEOUT_S, self._on_slow_head)

    def connection_lost(self, exc: Exception | None) -> None:
        """Disconnect every request of the connection: the one being answered and those waiting."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._on_time = _nothing  # else a cycle
        self._connection.lost()
        for cycle in (self._running, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """The server stops: a request that has its answer is not read to its end."""
        super().shutdown()
        if self.transport.is_closing():
            self._connection.end_request()

    def data_received(self, data: bytes) -> None:
        """Feed the parser, part by part."""
        self._connection.receive(data, self._parse)

    @property
    def _connection(self) -> TurnTransport:
        return cast("TurnTransport", self.transport)

    def _parse(self, data: bytes) -> None:
        """Feed the parser, then refuse a head that grows without progress."""
        if self._refusal is not None:  # nothing behind what was refused is read
            self._num_swallowed += len(data)
            if self._num_swallowed > MAX_DROPPED_BYTES:
                self.transport.abort()
            return
        self._has_advanced = self._has_begun = False
        super().data_received(data)
        self._num_swallowed = 0 if self._has_advanced else self._num_swallowed + len(data)
        is_open = self._refusal is None and not self.transport.is_closing()
        if is_open and self._num_swallowed > MAX_HEAD_BYTES:
            self._refusal = too_large(f"more than {MAX_HEAD_BYTES} bytes")
            self._refuse()

    def on_message_begin(self) -> None:
        """At the first byte of a head: reset the counts, start the timer."""
        self._num_kept = self._num_headers = self._num_hosts = 0
        self._is_declined = False
        self._start_timer(HEAD_TIMEOUT_S, self._on_slow_head)
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: self.transport.abort}  # type: ignore[dict-item]

    def on_url(self, url: bytes) -> None:
        """Count a piece of the target; refuse one over MAX_TARGET_BYTES."""
        self._keep(len(url))
        super().on_url(url)
        if len(self.url) > MAX_TARGET_BYTES:
            says = f"the request's target has more than {MAX_TARGET_BYTES} bytes"
            self._stop(b"414 URI Too Long", TooLarge(says))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header or a trailer."""
        self._keep(len(name) + len(value))
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            self._stop(*too_large(f"more than {MAX_HEADERS} headers"))
        if self._connection.is_coming:  # a trailer is no header (RFC 9110, 6.5.1)
            return
        name, value = name.lower(), value.rstrip(b" \t")
        self._num_hosts += name == b"host"
        super().on_header(name, value)
        if name == b"transfer-encoding" and value.lower() != b"chunked":  # RFC 9112, 6.1
            says = "a body may be chunked, and have no other transfer coding"
            self._stop(b"501 Not Implemented", InvalidRequest(says, code="invalid_http"))
        if name == b"expect":  # a list (RFC 9110, 10.1.1); uvicorn knows its one member alone
            members = [member.strip().lower() for member in value.split(b",")]
            self.expect_100_continue |= b"100-continue" in members

    def on_headers_complete(self) -> None:
        """At the end of a head: refuse it, decline its upgrade, or begin the request."""
        self._has_advanced = True
        version = self.parser.get_http_version()
        is_old, is_offered = version == "1.0", self.parser.should_upgrade()
        if self.transport.is_closing():  # after the connection's last request
            raise _Stop
        if version not in ("1.0", "1.1"):
            error = InvalidRequest(f"HTTP/{version} is not spoken here", code="invalid_http")
            # 0.9 is also what the parser calls a line without a version
            is_http = version != "0.9"
            self._stop(b"505 HTTP Version Not Supported" if is_http else b"400 Bad Request", error)
        if is_offered and self.parser.get_method() == b"CONNECT":  # upgrades without a header
            error = InvalidRequest("this is no proxy: it has no CONNECT", code="invalid_http")
            self._stop(b"501 Not Implemented", error)
        if self._num_hosts > 1 or not (self._num_hosts or is_old):  # RFC 9112, 3.2
            error = InvalidRequest("a request has one Host header", code="invalid_http")
            self._stop(b"400 Bad Request", error)
        if len(self.pipeline) >= MAX_WAITING:
            self.transport.abort()
            raise _Stop
        if self.url[:1] not in (b"/", b"*"):
            self._take_host()
        if is_old:  # its clients know no 100 (RFC 9110, 10.1.1)
            self.expect_100_continue = False
        self._is_declined = is_offered and not self._should_upgrade()
        if self._is_declined:
            return
        if not is_offered:
            self._connection.begin_request()
        self._start_timer(BODY_TIMEOUT_S, self._on_slow_body)
        super().on_headers_complete()

    def _take_host(self) -> None:
        """An absolute target says what the host is, whatever the header says (RFC 9112, 3.2.2)."""
        target = httptools.parse_url(self.url)
        if target.host is not None:
            host = target.host if target.port is None else b"%b:%d" % (target.host, target.port)
            others = (pair for pair in self.headers if pair[0] != b"host")
            self.headers[:] = [(b"host", host), *others]

    def on_body(self, body: bytes) -> None:
        """A piece of the body; security.py counts these."""
        self._has_advanced = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """At the end of a request: stop the timer of its body."""
        self._has_advanced = True
        if self._is_declined:
            return
        self._stop_timer()
        if not self.parser.should_upgrade():
            self._expect_next()
        super().on_message_complete()
        self._connection.end_request()

    def send_400_response(self, msg: str) -> None:
        """Called for every error of the parser: send the refusal of `_stop`, or a 400."""
        if self.transport.is_closing():
            self._connection.end_request()
            return
        if self._refusal is None:
            self._refusal = b"400 Bad Request", InvalidRequest(msg, code="invalid_http")
        self._refuse()

    def _should_upgrade(self) -> bool:
        """Not while an answer is being sent, and not for HTTP/1.0 (RFC 9110, 7.8)."""
        is_busy = self.cycle is not None and not self.cycle.response_complete
        is_old = self.parser.get_http_version() == "1.0"
        return not (is_busy or is_old) and super()._should_upgrade()

    def _new_parser(self) -> _Parser:
        parser = _Parser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        parser.on_offer = self._on_offer
        return parser

    def _on_offer(self, rest: bytes) -> bool:
        """Parse the request again without its Upgrade header, if the upgrade is declined."""
        if not self._is_declined:
            return False
        version = self.parser.get_http_version().encode()
        head = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        head += [b"%b: %b" % pair for pair in self.headers if pair[0] != b"upgrade"]
        self.parser = self._new_parser()  # after `Connection: close` the old one takes nothing
        self.parser.feed_data(b"\r\n".join((*head, b"", rest)))
        return True

    def handle_websocket_upgrade(self) -> None:
        """Drop `Content-Length: 0`, which Java's client sends and websockets takes for a body."""
        self.headers[:] = [pair for pair in self.headers if pair != (b"content-length", b"0")]
        super().handle_websocket_upgrade()

    def on_response_complete(self) -> None:
        """The end of a request: its scope no longer refers to what answered it, a cycle."""
        if self._running is not None:
            self._running.scope["extensions"].pop(WRITE_PART, None)
            if self._running is self.cycle:  # else this is the body of one that waits
                self._connection.answered()
        super().on_response_complete()
        self._unset_keepalive_if_required()  # uvicorn's ends with any byte
        if self._refusal is not None and not self.transport.is_closing():
            self._refuse()
        if self._due_s is None:
            self._expect_next()

    def _expect_next(self) -> None:
        """Once all is answered, a next head has to begin in time."""
        if self._running is not None and self._running.response_complete:
            self._start_timer(IDLE_TIMEOUT_S, self.transport.close)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Run the application up to where it first waits; only the rest of it is a task.

        What is refused before that costs no task and no further turn of the loop (gate.py). Of what
        comes together only the first: 16 KiB of requests would take 50 ms of one turn, and as tasks
        they wait for each other, up to MAX_WAITING.
        """
        self._running = cycle
        if cycle.scope["http_version"] == "1.0":
            app = without_chunks(app, cycle)
        elif cycle.waiting_for_100_continue:
            app = closing_unasked(app, cycle)
        cycle.scope["extensions"][WRITE_PART] = partial(write_part, cycle)  # type: ignore[assignment]
        work = cycle.run_asgi(app)
        # A current task is that of the answer before this one.
        if self._has_begun or asyncio.current_task() is not None:
            self._make_task(work)
            return
        self._has_begun = True
        try:
            waits_for = work.send(None)
        except StopIteration:
            return
        if waits_for is None:  # for the next turn
            self._make_task(work)
        else:  # a reader of earlier answers is slow
            waits_for._asyncio_future_blocking = False
            waits_for.add_done_callback(lambda _: self._make_task(work))

    def _make_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work)
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def _keep(self, size: int) -> None:
        self._num_kept += size
        if self._num_kept > MAX_HEAD_BYTES:
            self._stop(*too_large(f"more than {MAX_HEAD_BYTES} bytes"))

    def _stop(self, status: bytes, error: StreamerError) -> None:
        self._refusal = status, error
        raise _Stop

    def _refuse(self) -> None:
        """Answer with the refusal in its turn, after the requests before it, and close.

        A request that can't be read to its end is refused itself, unless its answer has begun.
        """
        running, refused = self._running, self.cycle
        if self._connection.is_coming:
            has_begun = refused is not None and refused.scope is self.scope  # its target was read
            if has_begun and refused is running:
                self._refuse_body(refused)
                return
            if has_begun:  # it waits: its place is the refusal's
                self.pipeline.popleft()
            self._connection.end_request()
        is_free = running is None or running.response_complete
        if is_free and self._refusal is not None:
            self._answer(*self._refusal)
            self._connection.begin_request()  # the rest of the head is read: see there
            self.transport.close()
            self._connection.write_eof()
            self._start_timer(HEAD_TIMEOUT_S, self._connection.end_request)

    def _refuse_body(self, cycle: RequestResponseCycle) -> None:
        """Refuse the request that is being answered, for its body."""
        is_begun = cycle.response_started and not cycle.response_complete
        if not cycle.response_started and self._refusal is not None:
            self._answer(*self._refusal, to=cycle)
        cycle.disconnected = True
        cycle.message_event.set()
        if is_begun:
            self._connection.end_request()
        self.transport.close()
        self._connection.write_eof()

    def _answer(
        self, status: bytes, error: StreamerError, to: RequestResponseCycle | None = None
    ) -> None:
        """Answer by itself; `to` is the request, where the application reads it."""
        if to is not None:
            error.status = int(status[:3])
            to.scope["extensions"][REFUSAL] = error  # type: ignore[assignment]
        body, more = error_body(error), b""
        if isinstance(error, Overloaded):
            more = b"retry-after: %d\r\n" % math.ceil(error.retry_after_s)
        self.transport.write(
            b"HTTP/1.1 %s\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"%scontent-length: %d\r\n\r\n%s" % (status, more, len(body), body)
        )

    def _start_timer(self, delay_s: float, on_time: Callable[[], None]) -> None:
        """Call `on_time` then, instead of what was to be called.

        A timer that runs is kept if it ends earlier: three timers for a request would be a tenth of
        the cost of refusing it (a shared EPYC core, 2026-11-23).
        """
        self._due_s, self._on_time = self.loop.time() + delay_s, on_time
        if self._timer is not None and self._timer.when() > self._due_s:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self.loop.call_later(delay_s, self._see_time)

    def _see_time(self) -> None:
        self._timer, due_s = None, self._due_s
        if due_s is None:
            return
        left_s = due_s - self.loop.time()
        if left_s > 0:
            self._timer = self.loop.call_later(left_s, self._see_time)
        else:
            self._stop_timer()
            self._on_time()

    def _stop_timer(self) -> None:
        self._due_s = None

    def _on_slow_head(self) -> None:
        if self._running is None or self._running.response_complete:
            self.transport.close()
        else:  # the next head has begun while an answer is still being sent
            self._start_timer(HEAD_TIMEOUT_S, self._on_slow_head)

    def _on_slow_body(self) -> None:
        cycle, is_closing = self.cycle, self.transport.is_closing()
        if cycle is not self._running and not is_closing:  # it waits: its body is not read yet
            self._start_timer(BODY_TIMEOUT_S, self._on_slow_body)
            return
        if not (cycle.response_started or is_closing):
            says = f"the body did not come within {BODY_TIMEOUT_S:.0f} s"
            error = InvalidRequest(says, code="request_timeout")
            self._answer(b"408 Request Timeout", error, to=cycle)
        cycle.disconnected = True
        cycle.message_event.set()
        self._connection.end_request()
        self.transport.close()


def limited(connections_per_address: int) -> type[LimitedHttpProtocol]:
    """The protocol class of one server; its connections share one Addresses and one Turn."""

    class Limited(LimitedHttpProtocol):
        addresses = Addresses(connections_per_address)
        turn = Turn()
        max_connections = connection_limit()

    return Limited


def connection_limit() -> int:
    """Maximum of open connections of all clients together."""
    try:
        import resource
    except ImportError:  # Windows
        return MAX_CONNECTIONS
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_bounded = num_files != resource.RLIM_INFINITY
    return min(MAX_CONNECTIONS, max(1, num_files - SPARE_FILES)) if is_bounded else MAX_CONNECTIONS


def too_large(what: str) -> tuple[bytes, StreamerError]:
    """The answer to a head that has `what`."""
    return b"431 Request Header Fields Too Large", TooLarge(f"the head of a request has {what}")


def without_chunks(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """`app` for an HTTP/1.0 client: closing the connection ends a body without a length."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        is_open = False

        async def send_plain(message: Message) -> None:
            nonlocal is_open
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", ())}
                if is_open := b"content-length" not in names:
                    cycle.chunked_encoding = False  # left alone, uvicorn chooses chunks
            elif is_open:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return wrapped


def closing_unasked(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """`app` for a client that waits for a 100 before its body (RFC 9110, 10.1.1).

    An answer that comes instead is the connection's last: the body may never come, and the next
    request would be taken for it.
    """

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        is_unasked = False

        async def send_last(message: Message) -> None:
            nonlocal is_unasked
            if cycle.waiting_for_100_continue and cycle.more_body:
                is_unasked, cycle.keep_alive = True, False
            await send(message)
            if is_unasked and cycle.response_complete:
                cycle.transport.write_eof()

        await app(scope, receive, send_last)

    return wrapped


def write_part(cycle: RequestResponseCycle, body: bytes) -> bool:
    """Write a non-empty piece of a chunked body (RFC 9112, 7.1), if the connection accepts it now.

    False: nothing was written, and uvicorn's `send` has to be used.
    """
    is_open = cycle.chunked_encoding and not (cycle.response_complete or cycle.disconnected)
    if not is_open or cycle.flow.write_paused:
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
    return True
