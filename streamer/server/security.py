"""The guard before every route: Origin, Host, keys and tickets; and the limits of bodies.

Plain ASGI around the app, HTTP and WebSocket alike. A browser page of another site can reach a
server on this machine, directly or by rebinding its name: the Origin and Host headers show both.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from streamer.config import Config
from streamer.engine.refusals import fresh_copy
from streamer.errors import (
    ClientLeft,
    Forbidden,
    InvalidRequest,
    NotAuthenticated,
    Overloaded,
    StreamerError,
    TooLarge,
)
from streamer.server.admission import TENANT, Header, digest
from streamer.server.errors import error_answer, id_headers
from streamer.server.tickets import Tickets, take_tickets
from streamer.server.transport.stuck import REFUSAL

MAX_BODY_BYTES: Final = 4 << 20
MAX_COMING_BYTES: Final = 64 << 20  # of all bodies that have begun and not ended, beyond FREE_BYTES
FREE_BYTES: Final = 64 << 10  # of each, not counted: a small body never gives way
# Of the large bodies of one key whose prompts are being made, one after the other: as text and
# tokens each takes five times as much (60 of 4 MiB took 1.2 GiB; a shared EPYC core, 2026-11-22).
MAX_USED_BYTES: Final = 32 << 20
USED_RETRY_S: Final = 2.0
OPEN_PATHS: Final = frozenset({"/", "/health", "/ready"})
METRICS: Final = "/metrics"
ASSETS: Final = "/assets/"  # of the page
LOCAL_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "::1"})
MAX_REQUESTED: Final = 4096  # characters of a preflight's list of headers
_HEADER_NAMES: Final = re.compile(
    r"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?:\s*,\s*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*"
)
EXPOSED: Final = (
    b"x-request-id, request-id, retry-after, "
    b"x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
    b"x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)
WILDCARDS: Final = frozenset({"", "0.0.0.0", "::"})


_HOST: Final = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:@/?#\s]*))(?::[0-9]*)?")


def split_host(value: str) -> str:
    """The name in a Host header, without port and brackets, lower case; "" for what is none."""
    value = value.strip().lower()
    if value.count(":") > 1 and not value.startswith("["):
        return value  # a bare IPv6 address
    match = _HOST.fullmatch(value)
    return "" if match is None else match[1] or match[2] or ""


class Guard:
    """Refuses requests from other sites or without a key, before any route sees them."""

    def __init__(
        self,
        app: ASGIApp,
        config: Config,
        on_refusal: Callable[[StreamerError], str],
        tickets: Tickets,
    ) -> None:
        self._app = app
        self._tickets = tickets
        self._on_refusal = on_refusal
        self._root = config.root_path.rstrip("/")
        self._hosts = LOCAL_HOSTS | {split_host(h) for h in config.allowed_hosts}
        if config.host not in WILDCARDS:
            self._hosts |= {split_host(config.host)}
        self._any_host = "*" in config.allowed_hosts
        self._origins = {o.rstrip("/").lower() for o in config.allowed_origins}
        self._keys = tuple(k.encode() for k in config.api_key)
        self._metrics_key = config.metrics_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 401 or 403."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        path = scope["path"].removeprefix(self._root) or "/"
        try:
            if path != "/health":
                self._check_host(scope, headers)
            foreign = self._check_origin(headers)
            if foreign is not None:
                send = _with_cors(send, foreign)
                if _is_preflight(scope, headers):
                    await _answer_preflight(headers, send)
                    return
            if path not in OPEN_PATHS and not path.startswith(ASSETS):
                tenant = self._check_caller(scope, headers, path)
                if tenant:
                    scope.setdefault("state", {})[TENANT] = tenant
        except StreamerError as e:
            await deny(scope, send, e, id_headers(self._on_refusal(e)))
            return
        await self._app(scope, receive, send)

    def _check_host(self, scope: Scope, headers: Headers) -> None:
        host = headers.get("host", "")
        name = split_host(host)
        if self._any_host or name in self._hosts:
            return
        # bound to every address: the one that this connection came to is the server's too
        server = scope.get("server")
        if server is not None and name and name == str(server[0]).lower():
            return
        raise Forbidden(f"Host {host!r} is not allowed here; see --allowed-hosts")

    def _check_origin(self, headers: Headers) -> str | None:
        """None for our own pages and for programs; the Origin for an allowed other site."""
        origin = headers.get("origin")
        if origin is None:
            return None
        host = headers.get("host", "").strip().lower()
        try:
            parts = urlsplit(origin.strip().lower())
        except ValueError:
            raise Forbidden(f"Origin {origin!r} is no address") from None
        if parts.scheme in ("http", "https") and host and parts.netloc == host:
            return None
        if "*" in self._origins or origin.rstrip("/").lower() in self._origins:
            return origin
        raise Forbidden(f"Origin {origin!r} is not allowed here; see --allowed-origins")

    def _check_caller(self, scope: Scope, headers: Headers, path: str) -> str:
        """A digest of the caller's key, given or by a ticket; "" where no keys are required."""
        if path == METRICS and self._metrics_key is not None:
            return _check_key(headers, (self._metrics_key.encode(),))
        tickets = take_tickets(scope) if scope["type"] == "websocket" else []
        if not self._keys:
            return ""
        if tickets and "authorization" not in headers:
            return self._tickets.redeem(tickets[0])
        return _check_key(headers, self._keys)


def _check_key(headers: Headers, keys: Sequence[bytes]) -> str:
    """A digest of the key that was given; NotAuthenticated if it is none of these."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        given = headers.get("x-api-key", "")  # as clients of Anthropic's API send it
    token = given.strip().encode()
    is_known = False
    for key in keys:  # all of them, so that the time does not depend on which
        is_known |= hmac.compare_digest(key, token)
    if not (is_known and token):
        raise NotAuthenticated(
            "this server requires an API key: Authorization: Bearer KEY"
            if not token
            else "the API key is not known here"
        )
    return digest(given.strip())


async def deny(scope: Scope, send: Send, error: StreamerError, more: Sequence[Header] = ()) -> None:
    """Answer with the error, on HTTP or instead of a WebSocket handshake; `more` are headers."""
    prefix = "http"
    if scope["type"] == "websocket":
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": 4000 + error.status})
            return
        prefix = "websocket.http"
    status, body = error_answer(error, scope["path"])
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-content-type-options", b"nosniff"),
        *more,
    ]
    if isinstance(error, Overloaded):
        headers.append((b"retry-after", str(math.ceil(error.retry_after_s)).encode()))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.status == 413:
        headers.append((b"connection", b"close"))
    await send({"type": f"{prefix}.response.start", "status": status, "headers": headers})
    await send({"type": f"{prefix}.response.body", "body": body})


class _Coming:
    """A body that is being received; `patience` ends when other bodies need its room."""

    def __init__(self, patience: asyncio.Timeout) -> None:
        self.patience = patience
        self.num_bytes = 0


class Bodies:
    """Bounds the bodies that are being received, and those whose prompts are being made.

    Beyond `max_bytes` the oldest unfinished body is refused: one that never ends blocks no
    others. transport/http.py bounds the time.
    """

    def __init__(self, max_bytes: int = MAX_COMING_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._coming: dict[_Coming, None] = {}  # the oldest first
        self._used: Counter[str] = Counter()  # bytes by tenant
        self._refusal: StreamerError | None = None  # of what is not there yet

    def refuse(self, error: StreamerError) -> None:
        """Wait for no body any more: those on their way in, and to come, are refused with this."""
        self._refusal = error
        for coming in list(self._coming):
            self._forget(coming)
            if not coming.patience.expired():
                coming.patience.reschedule(0.0)

    async def read(self, request: Request, limit: int = MAX_BODY_BYTES) -> bytes:
        """The whole body, counted while it comes in; TooLarge beyond `limit` bytes.

        InvalidRequest for a compressed one: a few bytes may stand for gigabytes.
        """
        coding = request.headers.get("content-encoding", "identity")
        if coding.strip().lower() != "identity":
            name = "content-encoding"
            raise InvalidRequest(
                f"{name} {coding!r} is not taken: send the body as it is",
                param=name,
                code="unsupported_encoding",
            )
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise TooLarge(f"the body has {declared} bytes, the limit is {limit}")
        try:
            async with asyncio.timeout(None if self._refusal is None else 0.0) as patience:
                coming = _Coming(patience)
                self._coming[coming] = None
                try:
                    return await self._read(request, limit, coming)
                finally:
                    self._forget(coming)
        except TimeoutError:
            if self._refusal is not None:
                raise fresh_copy(self._refusal) from None
            raise Overloaded("too many bodies are on their way in at once") from None

    @contextlib.contextmanager
    def used(self, tenant: str, num_bytes: int) -> Iterator[None]:
        """Count a body while its prompt is made; Overloaded if its key has too many such bytes."""
        num_bytes = num_bytes if num_bytes > FREE_BYTES else 0
        if num_bytes and self._used[tenant] + num_bytes > MAX_USED_BYTES:
            raise Overloaded("too many long texts wait to be read", retry_after_s=USED_RETRY_S)
        self._used[tenant] += num_bytes
        try:
            yield
        finally:
            self._used[tenant] -= num_bytes

    async def _read(self, request: Request, limit: int, coming: _Coming) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await request.receive()
            if message["type"] != "http.request":
                answered = request.scope.get("extensions", {}).get(REFUSAL)
                raise answered or ClientLeft("the client left while sending its body")
            part: bytes = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise TooLarge(f"the body has more than {limit} bytes")
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)
            self._count(coming, max(0, size - FREE_BYTES))

    def _count(self, coming: _Coming, num_bytes: int) -> None:
        if coming not in self._coming:
            return  # it has given way
        self._num_bytes += num_bytes - coming.num_bytes
        coming.num_bytes = num_bytes
        while self._num_bytes > self._max_bytes:
            oldest = next(each for each in self._coming if each.num_bytes)
            self._forget(oldest)
            oldest.patience.reschedule(0.0)

    def _forget(self, coming: _Coming) -> None:
        if coming in self._coming:
            del self._coming[coming]
            self._num_bytes -= coming.num_bytes


# ---------------------------------------------------------------- other origins, when allowed


def _is_preflight(scope: Scope, headers: Headers) -> bool:
    return (
        scope["type"] == "http"
        and scope["method"] == "OPTIONS"
        and "access-control-request-method" in headers
    )


async def _answer_preflight(request: Headers, send: Send) -> None:
    # Client libraries add headers of their own (x-stainless-...): an allowed site may send any.
    names = request.get("access-control-request-headers", "")
    if len(names) > MAX_REQUESTED or not _HEADER_NAMES.fullmatch(names):
        names = ""
    allowed = ", ".join(filter(None, ("authorization, content-type, last-event-id", names)))
    headers = [
        (b"access-control-allow-methods", b"GET, POST, DELETE"),
        (b"access-control-allow-headers", allowed.encode("ascii")),
        (b"access-control-max-age", b"600"),
        (b"content-length", b"0"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _with_cors(send: Send, origin: str) -> Send:
    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start":
            extra = [
                (b"access-control-allow-origin", origin.encode("latin-1")),
                (b"access-control-expose-headers", EXPOSED),
                (b"vary", b"Origin"),
            ]
            message = {**message, "headers": [*message.get("headers", ()), *extra]}
        await send(message)

    return wrapped
