"""Admission: what each key may ask for: requests and tokens a minute, streams and sockets at once.

A limit a minute is a bucket: full at first, refilled evenly, its whole size in a minute. So a key
may begin with all of it at once, and in t seconds gets at most limit * (1 + t / 60).

requests  one is taken when a request comes, before any work; a request refused here costs nothing
tokens    a request is admitted if the bucket holds its prompts' tokens, or is full. These, cached
          or not, are taken once the engine has it. Output is taken at the key's next request and
          when an answer ends, as if drawn evenly since the last such moment. Output may overdraw
          the bucket; until that is refilled, nothing is admitted
streams   answers that have not ended, with or without readers: one per prompt, for any n
sockets   open WebSockets; one too many is closed with 1013, every other refusal is a 429

Retry-After is the time until the same request is admitted if the key sends no other meanwhile
(after an overdraft, until it is refilled; the prompt is not known yet). When a stream ends is not
known: one second. The queue that all keys share is the engine's; when it is full the answer is 503.
Without keys all callers count as one. Called by Service and app.py on the loop; takes no locks.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from streamer.config import Config, KeyLimits
from streamer.errors import InvalidRequest, RateLimited

if TYPE_CHECKING:
    from streamer.engine.stream import TokenStream

TENANT: Final = "tenant"  # in scope["state"]: a digest of the key, put there by the guard
MINUTE_S: Final = 60.0
STREAM_RETRY_S: Final = 1.0
NO_WAIT_S: Final = 1e-3  # a shorter wait counts as none
ROUNDING: Final = 1e-6

LIMITED: Final = (  # fields of KeyLimits that count something
    "max_requests_per_minute",
    "max_tokens_per_minute",
    "max_streams_per_key",
    "max_sockets_per_key",
)
DEADLINE: Final = "x-request-timeout"  # seconds
READ_TIMEOUTS: Final = ("x-stainless-read-timeout", "x-stainless-timeout")  # OpenAI's clients'
GRACE_S: Final = 1.0  # beyond those: the client is to end it first, with its own error
MAX_DEADLINE_S: Final = 86_400.0

Header = tuple[bytes, bytes]


def digest(key: str) -> str:
    """What replaces a key everywhere behind the guard, logs included."""
    return hashlib.sha256(key.encode()).hexdigest()


def tenant_of(scope: Scope) -> str:
    """The digest of the caller's key; "" where no keys are required."""
    tenant: str = scope.get("state", {}).get(TENANT, "")
    return tenant


def deadline_of(scope: Scope, *, is_whole: bool) -> float | None:
    """Seconds after which the client stops waiting for the answer; None: no header says.

    X-Request-Timeout, in seconds; for a whole answer also the headers of OpenAI's clients, which
    limit the wait for the next byte, and GRACE_S more. InvalidRequest if X-Request-Timeout is no
    number above 0.
    """
    headers = Headers(scope=scope)
    given = [(DEADLINE, headers[DEADLINE])] if DEADLINE in headers else []
    if is_whole and scope["type"] == "http":
        given += [(name, headers[name]) for name in READ_TIMEOUTS if name in headers]
    found = []
    for name, text in given:
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if seconds > 0:
            found.append(seconds if name == DEADLINE else seconds + GRACE_S)
        elif name == DEADLINE:
            raise InvalidRequest(f"{name}: expected seconds above 0", param=name)
    return min(*found, MAX_DEADLINE_S) if found else None


class Bucket:
    """One limit a minute of one key; `level` may be below 0."""

    def __init__(self, limit: int, now: float) -> None:
        self.limit = limit
        self.level = float(limit)
        self._since = now

    def settle(self, now: float, spent: int = 0) -> None:
        """Refill the bucket up to `now`, and take what was spent meanwhile."""
        refill = (now - self._since) * self.limit / MINUTE_S
        self.level = min(self.limit, self.level + refill - spent)
        self._since = now

    def take(self, amount: int) -> None:
        """Take `amount` at once."""
        self.level -= amount

    def wait_s(self, amount: int) -> float:
        """Seconds until the bucket holds `amount`, or is full."""
        return (min(amount, self.limit) - self.level) * MINUTE_S / self.limit

    def headers(self, name: str) -> list[Header]:
        """OpenAI's three headers of this limit."""
        values = {
            "limit": str(self.limit),
            "remaining": str(max(0, math.floor(min(self.level, self.limit) + ROUNDING))),
            "reset": duration(max(0.0, self.wait_s(self.limit))),
        }
        return [(f"x-ratelimit-{k}-{name}".encode(), v.encode()) for k, v in values.items()]


class Account:
    """One key's buckets, and its streams that have not ended: output tokens taken for each."""

    def __init__(self, limits: KeyLimits, now: float) -> None:
        num_requests, num_tokens = limits.max_requests_per_minute, limits.max_tokens_per_minute
        self.requests = Bucket(num_requests, now) if num_requests else None
        self.tokens = Bucket(num_tokens, now) if num_tokens else None
        self.max_streams = limits.max_streams_per_key or 0
        self.max_sockets = limits.max_sockets_per_key or 0
        self.num_sockets = 0
        self._live: dict[TokenStream, int] = {}

    def settle(self, now: float) -> None:
        """Bring both buckets up to now."""
        if self.requests is not None:
            self.requests.settle(now)
        if self.tokens is not None:
            spent = 0
            for stream, known in self._live.items():
                params = stream.params
                # of each hypothesis of a beam search, of which n are answers
                drawn = stream.num_output_tokens * params.num_sequences // params.n
                spent += drawn - known
                self._live[stream] = drawn
            self.tokens.settle(now, spent)

    def require(self, *, num_requests: int, num_tokens: int, num_streams: int) -> None:
        """Raise RateLimited, with the longest wait, if a limit has no room for these."""
        waits = [(0.0, "")]
        if self.requests is not None:
            limit = f"{self.requests.limit} requests a minute"
            waits.append((self.requests.wait_s(num_requests), limit))
        if self.tokens is not None:
            limit = f"{self.tokens.limit} tokens a minute"
            waits.append((self.tokens.wait_s(num_tokens), limit))
        if self.max_streams and len(self._live) + num_streams > self.max_streams:
            limit = f"{self.max_streams} streams at once, {len(self._live)} are open"
            waits.append((STREAM_RETRY_S, limit))
        wait_s, limit = max(waits)
        if wait_s > NO_WAIT_S:
            raise RateLimited(
                f"the limit is {limit}; try again in {math.ceil(wait_s)} s", retry_after_s=wait_s
            )

    def open(self, stream: TokenStream) -> None:
        """Count a submitted stream, and take its prompt's tokens."""
        self._live[stream] = 0
        if self.tokens is not None:
            self.tokens.take(stream.num_prompt_tokens)

    def close(self, stream: TokenStream) -> None:
        """Forget a stream that has ended, after `settle`."""
        del self._live[stream]


class Admission:
    """The accounts of the keys that have a limit."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        now = clock()
        limits = {digest(key): config.limits_of(key) for key in config.api_key}
        limits = limits or {"": config.limits_of("")}
        self._priorities = {tenant: each.priority or 0 for tenant, each in limits.items()}
        self._accounts = {
            tenant: Account(each, now)
            for tenant, each in limits.items()
            if any(getattr(each, name) for name in LIMITED)
        }

    def priority(self, tenant: str, requested: int | None = None) -> int:
        """The priority of a request of this key; InvalidRequest for one below the key's own.

        Lower runs first: a client may put its requests behind those of others, never before.
        """
        own = self._priorities[tenant]
        if requested is not None and requested < own:
            raise InvalidRequest(
                f"priority {requested} would run before others: this key's requests may have "
                f"{own} or more",
                param="priority",
            )
        return own if requested is None else requested

    def enter(self, tenant: str) -> None:
        """Count a request when it comes; RateLimited if the key can have none now."""
        account = self._settled(tenant)
        if account is not None:
            account.require(num_requests=1, num_tokens=1, num_streams=1)
            if account.requests is not None:
                account.requests.take(1)

    def accept(self, tenant: str, prompts: Sequence[Sequence[int]]) -> None:
        """Check a request's prompts before any is submitted; RateLimited if they do not fit now."""
        account = self._settled(tenant)
        if account is None:
            return
        if 0 < account.max_streams < len(prompts):
            raise InvalidRequest(
                f"{len(prompts)} prompts are as many streams; the limit of this key is "
                f"{account.max_streams}",
                param="prompt",
            )
        try:
            account.require(
                num_requests=0, num_tokens=sum(map(len, prompts)), num_streams=len(prompts)
            )
        except RateLimited:
            if account.requests is not None:
                account.requests.take(-1)
            raise

    def follow(self, tenant: str, stream: TokenStream) -> None:
        """Charge a submitted stream to its key until it ends."""
        account = self._accounts.get(tenant)
        if account is not None:
            account.open(stream)
            stream.observers.append(partial(self._see, account))

    def max_sockets(self, tenant: str) -> int:
        """How many sockets this key may have open; 0: any number."""
        account = self._accounts.get(tenant)
        return 0 if account is None else account.max_sockets

    @contextlib.contextmanager
    def socket(self, tenant: str) -> Iterator[None]:
        """One more open WebSocket of this key; RateLimited if that is one too many."""
        account = self._accounts.get(tenant)
        if account is None:
            yield
            return
        if 0 < account.max_sockets <= account.num_sockets:
            raise RateLimited(
                f"the limit is {account.max_sockets} open sockets, and as many are open"
            )
        account.num_sockets += 1
        try:
            yield
        finally:
            account.num_sockets -= 1

    def headers(self, tenant: str) -> list[Header]:
        """The x-ratelimit headers of an answer to this key; none where it has no limit a minute."""
        account = self._settled(tenant)
        found: list[Header] = []
        if account is not None and account.requests is not None:
            found += account.requests.headers("requests")
        if account is not None and account.tokens is not None:
            found += account.tokens.headers("tokens")
        return found

    def _settled(self, tenant: str) -> Account | None:
        account = self._accounts.get(tenant)
        if account is not None:
            account.settle(self._clock())
        return account

    def _see(self, account: Account, stream: TokenStream) -> None:
        if stream.is_finished:
            account.settle(self._clock())
            account.close(stream)


class LimitHeaders:
    """ASGI around a route: every answer has headers with what is left of its key's limits."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Add the headers to the head of the answer."""

        async def wrapped(message: Message) -> None:
            if message["type"] == "http.response.start":
                left = self._admission.headers(tenant_of(scope))
                message = {**message, "headers": [*message.get("headers", ()), *left]}
            await send(message)

        await self._app(scope, receive, wrapped)


def duration(seconds: float) -> str:
    """A time as OpenAI writes it: 6m0s, 1.5s, 20ms; rounded up to a millisecond."""
    total_ms = math.ceil(seconds * 1000 - ROUNDING)
    minutes, rest_ms = divmod(total_ms, 60_000)
    if minutes:
        return f"{minutes}m{rest_ms / 1000:g}s"
    return f"{rest_ms}ms" if 0 < rest_ms < 1000 else f"{rest_ms / 1000:g}s"
