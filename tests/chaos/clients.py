"""Clients that lose their server and come back: each reads one answer, whatever it takes.

What an answer is, without what must differ between two runs of it, is an Outcome; two of them are
equal where nothing was lost, repeated or altered.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from itertools import cycle
from typing import Any

import httpx
import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException
from websockets.typing import Subprotocol

Ask = Callable[["Server"], Awaitable[Any]]

DELTA = ".delta"
ENDS = ("response.completed", "response.incomplete", "response.failed")
LOST = (httpx.HTTPError, OSError, WebSocketException, EOFError)
# Times, what the cache had, and what was proposed: they may differ.
CHANGING = ("id", "created_at", "completed_at", "created", "input_tokens_details", "stream_id")
CHANGING += ("previous_response_id", "prompt_tokens_details", "timing", "usage_details")
CHANGING += ("accepted_prediction_tokens", "rejected_prediction_tokens")


class Server:
    """Where the clients find their server, and how much they have read: `read` counts events."""

    def __init__(self, url: str, ready: Callable[[], Awaitable[None]]) -> None:
        self.url = url
        self.ready = ready
        self.num_read = 0
        self.num_resumed = 0
        self.num_steered = 0
        # by id, what its client knows to be stored; None: it was deleted
        self.ended: dict[str, Any] = {}
        self.more = asyncio.Event()

    def read(self) -> None:
        self.num_read += 1
        self.more.set()

    async def lost(self) -> None:
        """The connection was lost: wait until there is a server again."""
        self.num_resumed += 1
        await self.ready()

    async def check_stored(self) -> None:
        """Every answer that has ended is stored as its client saw it end, or is deleted."""
        while self.ended:
            name, final = self.ended.popitem()
            found = await call(self, "GET", f"/v1/responses/{name}")
            if final is None:
                assert found.status_code == 404, name
            else:
                assert scrubbed(found.json()) == final, name


def scrubbed(value: Any) -> Any:
    """The value without what differs from run to run."""
    if isinstance(value, dict):
        return {k: scrubbed(v) for k, v in value.items() if k not in CHANGING}
    if isinstance(value, list):
        return [scrubbed(v) for v in value]
    return re.sub(r"[0-9a-f]{20,}", "X", value) if isinstance(value, str) else value


class Events:
    """The events of one response so far, and what they amount to."""

    def __init__(self) -> None:
        self.id = ""
        self.last = -1
        self.kinds: list[tuple[int, str]] = []
        self.texts: dict[str, str] = {}
        self.tokens: list[int] = []
        self.logprobs: list[Any] = []
        self.final: Any = None

    def take(self, event: dict[str, Any]) -> None:
        kind, number = event["type"], event["sequence_number"]
        assert kind != "error", event
        assert number > self.last, f"{kind} {number} came after {self.last}"
        self.last = number
        if "response" in event:
            self.id = event["response"]["id"]
        if kind.endswith(DELTA):
            name = f"{kind} {event.get('output_index')}"
            self.texts[name] = self.texts.get(name, "") + event["delta"]
            self.tokens += event.get("token_ids", [])
            self.logprobs += event.get("logprobs") or []
        else:
            self.kinds.append((number, kind))
        if kind in ENDS:
            self.final = scrubbed(event["response"])

    @property
    def outcome(self) -> Any:
        return [self.kinds, self.texts, self.tokens, self.logprobs, self.final]


def http(server: Server) -> httpx.AsyncClient:
    """A client without TLS, whose certificates take 49 ms to read (one core of a slow Xeon)."""
    return httpx.AsyncClient(base_url=server.url, timeout=60.0, verify=False)


async def sse(response: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
    """The events of a body: their id lines and data; EOFError where it ends before its end."""
    name = ""
    async for line in response.aiter_lines():
        if line.startswith("id:"):
            name = line[3:].strip()
        elif line.startswith("data:"):
            data = line[5:].strip()
            yield name, None if data == "[DONE]" else json.loads(data)
    raise EOFError


async def _checked(response: httpx.Response) -> None:
    """Raise for a server that is not ready; anything else but 200 is a lost answer.

    A plain 500 is Ray Serve's proxy's, whose ingress was killed: official clients try again too.
    """
    if response.status_code == 500 and response.headers["content-type"].startswith("text/plain"):
        raise EOFError
    if response.status_code == 503:
        assert "retry-after" in response.headers
        raise EOFError
    if response.status_code != 200:
        raise AssertionError(f"{response.status_code}: {(await response.aread())!r}")


Way = Callable[["Server", dict[str, Any], Events], AsyncGenerator[dict[str, Any], None]]


async def by_query(
    server: Server, body: dict[str, Any], seen: Events, *, is_header: bool = False
) -> AsyncGenerator[dict[str, Any], None]:
    """The events over SSE that were not seen yet: `starting_after`, or Last-Event-ID."""
    given: dict[str, Any] = {"json": {**body, "stream": True}}
    method, path = "POST", "/v1/responses"
    if seen.id:
        after = {"headers": {"last-event-id": str(seen.last)}, "params": {"stream": "true"}}
        query = {"params": {"stream": "true", "starting_after": seen.last}}
        method, path, given = "GET", f"{path}/{seen.id}", after if is_header else query
    async with (
        http(server) as client,
        client.stream(method, path, **given) as response,
    ):
        await _checked(response)
        async for _, event in sse(response):
            yield event


def by_header(
    server: Server, body: dict[str, Any], seen: Events
) -> AsyncGenerator[dict[str, Any], None]:
    return by_query(server, body, seen, is_header=True)


class Socket:
    """Opens WebSockets and sends and receives events, as JSON or MessagePack."""

    def __init__(self, server: Server, *, is_packed: bool = False) -> None:
        kind = Subprotocol("streamer.v1.msgpack" if is_packed else "streamer.v1.json")
        url = server.url.replace("http", "ws", 1) + "/v1/responses"
        self._is_packed = is_packed
        self._connection = connect(url, subprotocols=[kind])
        self._socket: ClientConnection

    async def __aenter__(self) -> Socket:
        self._socket = await self._connection.__aenter__()
        await self._socket.recv()  # session.created
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._connection.__aexit__(*error)

    async def send(self, kind: str, **fields: Any) -> None:
        event = {"type": kind, "stream_id": "a", **fields}
        pack = msgspec.msgpack.encode
        await self._socket.send(pack(event) if self._is_packed else json.dumps(event))

    async def ask(self, body: dict[str, Any], seen: Events) -> None:
        """Begin the response, or go on after what was seen of it."""
        if seen.id:
            after = {"response_id": seen.id, "starting_after": seen.last}
            await self.send("response.resume", **after)
        else:
            await self.send("response.create", **body)

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """What comes, without what the server says of its own state."""
        while True:
            data = await self._socket.recv()
            assert isinstance(data, bytes) is self._is_packed
            event = msgspec.msgpack.decode(data) if self._is_packed else json.loads(data)
            assert event.get("status") != "gone", event
            if event["type"] == "error" and event["status"] == 503:
                raise EOFError
            if event["type"] not in STATES:
                yield event


async def by_socket(
    server: Server, body: dict[str, Any], seen: Events, *, is_packed: bool = False
) -> AsyncGenerator[dict[str, Any], None]:
    """The events over a WebSocket that were not seen yet."""
    async with Socket(server, is_packed=is_packed) as socket:
        await socket.ask(body, seen)
        async for event in socket.events():
            yield event


def by_messagepack(
    server: Server, body: dict[str, Any], seen: Events
) -> AsyncGenerator[dict[str, Any], None]:
    return by_socket(server, body, seen, is_packed=True)


async def follow(
    server: Server,
    body: dict[str, Any],
    *ways: Way,
    seen: Events | None = None,
    is_enough: Callable[[Events], bool] = lambda _: False,
) -> Events:
    """A streamed response, to its end or until `is_enough`; each connection is the next way's."""
    seen = seen or Events()
    for way in cycle(ways):
        try:
            async with aclosing(way(server, body, seen)) as events:
                async for event in events:
                    seen.take(event)
                    server.read()
                    if seen.final is not None:
                        server.ended[seen.id] = seen.final
                    if seen.final is not None or is_enough(seen):
                        return seen
        except LOST:
            await server.lost()
    raise AssertionError("there is no way")


async def response_by_sse(server: Server, body: dict[str, Any]) -> Events:
    return await follow(server, body, by_query)


async def response_by_socket(server: Server, body: dict[str, Any]) -> Events:
    return await follow(server, body, by_socket)


STATES = ("response.waiting", "response.running", "response.prefill", "response.preempted")
STATES += ("response.paused", "response.resumed", "session.goaway")


async def call(server: Server, method: str, path: str, **given: Any) -> httpx.Response:
    """One request, made until it is answered."""
    async with http(server) as client:
        while True:
            try:
                response = await client.request(method, path, **given)
                if response.status_code != 404:
                    await _checked(response)
                return response
            except LOST:
                await server.lost()


async def response_in_background(server: Server, body: dict[str, Any]) -> Any:
    """A background response, asked for until it has ended."""
    given = {**body, "background": True}
    found = (await call(server, "POST", "/v1/responses", json=given)).json()
    while found["status"] not in ("completed", "incomplete", "failed"):
        await asyncio.sleep(0.05)
        found = (await call(server, "GET", f"/v1/responses/{found['id']}")).json()
    return found


def _parts(delta: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What a delta of a chat adds, and to what."""
    for kind in ("content", "reasoning"):
        yield kind, delta.get(kind) or ""
    for each in delta.get("tool_calls") or ():
        function = each["function"]
        yield f"call {each['index']}", function.get("name", "") + function["arguments"]


async def chat(server: Server, body: dict[str, Any]) -> Any:
    """A chat with ids on its events, continued by Last-Event-ID."""
    name = last = ""
    texts: dict[str, str] = {}
    logprobs: dict[int, list[Any]] = {}
    ends: dict[int, str] = {}
    given = {**body, "stream": True, "stream_options": {"include_event_ids": True}}
    async with http(server) as client:
        is_over = False
        while not is_over:
            try:
                ask: dict[str, Any] = {"json": given}
                method, path = "POST", "/v1/chat/completions"
                if name:
                    method, path = "GET", f"{path}/{name}"
                    ask = {"params": {"stream": "true"}, "headers": {"last-event-id": last}}
                async with client.stream(method, path, **ask) as response:
                    await _checked(response)
                    async for number, chunk in sse(response):
                        if chunk is None:
                            is_over = True
                            break
                        assert "error" not in chunk, chunk
                        name, last = chunk["id"], number or last
                        server.read()
                        for choice in chunk["choices"]:
                            i = choice["index"]
                            for kind, text in _parts(choice["delta"]):
                                place = f"{i} {kind}"
                                texts[place] = texts.get(place, "") + text
                            found = choice.get("logprobs") or {}
                            logprobs.setdefault(i, []).extend(found.get("content") or [])
                            if choice["finish_reason"] is not None:
                                assert i not in ends
                                ends[i] = choice["finish_reason"]
            except LOST:
                await server.lost()
    return [sorted(texts.items()), sorted(logprobs.items()), sorted(ends.items())]


def prompt(chance: random.Random) -> str:
    """A question for the bundled model."""
    about = chance.choice(("PagedAttention", "continuous batching", "a swap", "the prefix cache"))
    return f"What is {about}? ({chance.randrange(10**6)})"
