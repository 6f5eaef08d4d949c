"""Clients that lose their server and come back: each reads one answer, whatever it takes.

What an answer is, without what must differ between two runs of it, is an Outcome; two of them are
equal where nothing was lost, repeated or altered.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

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
        self.more = asyncio.Event()

    def read(self) -> None:
        self.num_read += 1
        self.more.set()

    async def lost(self) -> None:
        """The connection was lost: wait until there is a server again."""
        self.num_resumed += 1
        await self.ready()


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


async def response_by_sse(server: Server, body: dict[str, Any]) -> Events:
    """A streamed response, continued by number."""
    events = Events()
    async with httpx.AsyncClient(base_url=server.url, timeout=60.0) as client:
        while events.final is None:
            try:
                given: dict[str, Any] = {"json": {**body, "stream": True}}
                method, path = "POST", "/v1/responses"
                if events.id:
                    query = {"stream": "true", "starting_after": events.last}
                    method, path, given = "GET", f"{path}/{events.id}", {"params": query}
                async with client.stream(method, path, **given) as response:
                    await _checked(response)
                    async for _, event in sse(response):
                        events.take(event)
                        server.read()
                        if events.final is not None:
                            break
            except LOST:
                await server.lost()
    return events


async def response_by_socket(server: Server, body: dict[str, Any]) -> Events:
    """A response on a WebSocket, resumed on another."""
    events = Events()
    url = server.url.replace("http", "ws", 1) + "/v1/responses"
    while events.final is None:
        try:
            async with connect(url, subprotocols=["streamer.v1.json"]) as socket:  # type: ignore[list-item]
                await socket.recv()  # session.created
                ask = {"type": "response.create", "stream_id": "a", **body}
                if events.id:
                    ask = {"type": "response.resume", "stream_id": "a"}
                    ask |= {"response_id": events.id, "starting_after": events.last}
                await socket.send(json.dumps(ask))
                while events.final is None:
                    event = json.loads(await socket.recv())
                    assert event.get("status") != "gone", event
                    if event["type"] == "error" and event["status"] == 503:
                        raise EOFError
                    if event["type"] in STATES or event["type"] == "response.resumed":
                        continue
                    events.take(event)
                    server.read()
        except LOST:
            await server.lost()
    return events


STATES = ("response.waiting", "response.running", "response.prefill", "response.preempted")
STATES += ("response.paused", "session.goaway")


async def response_in_background(server: Server, body: dict[str, Any]) -> Any:
    """A background response, asked for until it has ended."""
    name, found = "", {"status": ""}
    async with httpx.AsyncClient(base_url=server.url, timeout=60.0) as client:
        while found["status"] not in ("completed", "incomplete", "failed"):
            try:
                if name:
                    response = await client.get(f"/v1/responses/{name}")
                else:
                    given = {**body, "background": True}
                    response = await client.post("/v1/responses", json=given)
                await _checked(response)
                found = response.json()
                name = found["id"]
                await asyncio.sleep(0.05)
            except LOST:
                await server.lost()
    return found


async def chat(server: Server, body: dict[str, Any]) -> Any:
    """A chat with ids on its events, continued by Last-Event-ID."""
    name = last = ""
    texts: dict[int, str] = {}
    logprobs: dict[int, list[Any]] = {}
    ends: dict[int, str] = {}
    given = {**body, "stream": True, "stream_options": {"include_event_ids": True}}
    async with httpx.AsyncClient(base_url=server.url, timeout=60.0) as client:
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
                            texts[i] = texts.get(i, "") + (choice["delta"].get("content") or "")
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
