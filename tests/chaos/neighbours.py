"""Streams beside a disturbance, on the bundled model: each must bring exactly its own tokens.

One reads the greedy answer over SSE, one a sampled one over a WebSocket (MessagePack), answer after
answer, on a thread and a loop of their own, as long as Neighbours is entered. What each answer must
be was told before.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from types import TracebackType
from typing import Any

import httpx
import msgspec
from websockets.asyncio.client import connect
from websockets.typing import Subprotocol

from tests.chaos.clients import ENDS, sse
from tests.server.support.greedy import telling
from tests.server.support.running import Running

NUM_TOKENS = 96
# A neighbour that waits so long for its next event has been held up by what is beside it.
GAP_S = 60.0
# A reader rests so many times as long as its answer took. Without rests the engine has none either,
# and inputs take 1.1 ms of processor time in place of 0.9 (2 busy cores, 2026-11-23).
REST = 1.0
GREEDY = telling(NUM_TOKENS, return_token_ids=True)
SAMPLED = {**GREEDY, "temperature": 1.0, "seed": 11}


class Neighbours:
    """A reader of the greedy answer and one of a sampled one; `compared` counts their answers."""

    def __init__(self, server: Running) -> None:
        self.compared: Counter[str] = Counter()
        self._url, self._ws_url = server.url, server.ws_url
        self._wanted: dict[str, list[int]] = {}
        self._errors: list[str] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> Neighbours:
        self._wanted = {
            "SSE": asyncio.run(self._one(GREEDY)),
            "WebSocket": asyncio.run(self._one(SAMPLED)),
        }
        greedy, sampled = self._wanted.values()
        assert len(greedy) == len(sampled) == NUM_TOKENS
        assert greedy != sampled
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join(GAP_S)

    def check(self) -> None:
        """Raise if an answer differed, did not come, or nothing reads any more."""
        assert not self._errors, self._errors[:5]
        assert self._thread.is_alive() or self._is_over.is_set()

    async def _run(self) -> None:
        both = {"SSE": self._over_sse(GREEDY), "WebSocket": self._over_socket()}
        await asyncio.gather(*(self._compare(name, each) for name, each in both.items()))

    async def _compare(self, name: str, answers: AsyncGenerator[list[int], None]) -> None:
        try:
            async with aclosing(answers):
                began = time.monotonic()
                async for tokens in answers:
                    if tokens != (wanted := self._wanted[name]):
                        self._errors.append(f"{name}: {tokens} in place of {wanted}")
                    self.compared[name] += 1
                    if self._is_over.is_set():
                        break
                    await asyncio.sleep(REST * (time.monotonic() - began))
                    began = time.monotonic()
        except Exception as e:
            self._errors.append(f"{name}: {e!r}")

    async def _one(self, body: dict[str, Any]) -> list[int]:
        async with aclosing(self._over_sse(body)) as answers:
            return await anext(answers)

    async def _over_sse(self, body: dict[str, Any]) -> AsyncGenerator[list[int], None]:
        async with httpx.AsyncClient(base_url=self._url, timeout=GAP_S) as client:
            while True:
                given = {**body, "stream": True}
                async with client.stream("POST", "/v1/responses", json=given) as response:
                    assert response.status_code == 200, await response.aread()
                    yield await _tokens(event async for _, event in sse(response))

    async def _over_socket(self) -> AsyncGenerator[list[int], None]:
        create = {"type": "response.create", **SAMPLED}
        offered = [Subprotocol("streamer.v1.msgpack")]
        async with connect(self._ws_url, subprotocols=offered) as socket:

            async def events() -> AsyncIterator[Any]:
                while True:
                    async with asyncio.timeout(GAP_S):
                        yield msgspec.msgpack.decode(await socket.recv())

            while True:
                await socket.send(msgspec.msgpack.encode(create))
                yield await _tokens(events())


async def _tokens(events: AsyncIterator[Any]) -> list[int]:
    """The token ids of the next answer among these events."""
    found: list[int] = []
    async for event in events:
        assert event["type"] != "error", json.dumps(event)
        found += event.get("token_ids", ())
        if event["type"] in ENDS:
            return found
    raise EOFError
