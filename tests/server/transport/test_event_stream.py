"""EventStream and ClientWatch by themselves: scripted streams, an ASGI client in memory."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import convert

from streamer.config import Config
from streamer.core.plan import Finish, FinishReason
from streamer.core.sampling import SamplingParams
from streamer.engine.flow import Limits
from streamer.engine.requests import GenerateRequest
from streamer.engine.stream import TokenStream
from streamer.errors import EngineDead
from streamer.server.openai.chat import ChatAnswer, ChatRequest
from streamer.server.service import Service
from streamer.server.telemetry.metrics import Metrics
from streamer.server.transport.frames import SPLIT
from streamer.server.transport.loop_turn import WRITE_PART
from streamer.server.transport.pace import Pace
from streamer.server.transport.sse import ClientWatch, EventStream
from streamer.server.transport.stuck import ABORT
from tests.engine.helpers import LETTERS, Calls

DEADLINE_S = 10.0


class Scripted(TokenStream):
    """A token stream that the test writes."""

    def __init__(self) -> None:
        params = SamplingParams(seed=7)
        request = GenerateRequest(prompt=(1, 2), params=params, request_id="chatcmpl-scripted")
        super().__init__(request, Limits(detach_s=None), Calls(), LETTERS, {})
        self.was_missed = False
        self.dropped: list[int] = []

    def miss(self) -> None:
        self.was_missed = True
        super().miss()

    def drop(self, reader: int) -> None:
        self.dropped.append(reader)

    def token(self) -> None:
        self.push(0, ord("a"), None, None)
        self.wake()

    def finish(self, reason: FinishReason) -> None:
        num_tokens = self.num_output_tokens
        self.end(Finish(self.request_id, 0, reason, num_tokens, detail="it broke"))
        self.wake()

    def die(self) -> None:
        self.fail(EngineDead("the step failed"))


class Client:
    """The other end of an ASGI response."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.gone = asyncio.Event()
        self.is_reading = asyncio.Event()
        self.is_reading.set()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.is_reading.wait()
        self.sent.put_nowait(message)

    def write_part(self, body: bytes) -> bool:
        if self.is_reading.is_set():
            self.sent.put_nowait({"body": body})
        return self.is_reading.is_set()

    async def next(self) -> bytes:
        async with asyncio.timeout(DEADLINE_S):
            message = await self.sent.get()
        body: bytes = message.get("body", b"head")
        return body


class Bench:
    """One EventStream over a scripted stream, running."""

    def __init__(
        self,
        keep_alive_s: float = 60.0,
        pause_s: float = 60.0,
        after: list[int] | None = None,
        has_short_way: bool = False,
        has_ids: bool = True,
        num_tokens: int = 0,
        is_split: bool = False,
    ) -> None:
        self.stream = Scripted()
        for _ in range(num_tokens):
            self.stream.token()
        self.client = Client()
        self.cancelled: list[str] = []
        self.is_aborted = asyncio.Event()
        extensions: dict[str, Any] = {ABORT: self.is_aborted.set}
        if has_short_way:
            extensions[WRITE_PART] = self.client.write_part
        scope = {"extensions": extensions}
        engine: Any = SimpleNamespace(cancel=self.cancelled.append, stats=None)
        service = Service.__new__(Service)
        service.engine = engine
        service.config = Config(model="fake", pause_timeout=pause_s)
        service.metrics = Metrics(engine)
        service.pace = Pace()
        service._num_working = 0
        service._is_quiet = asyncio.Event()
        options = {"include_event_ids": has_ids}
        body = convert({"messages": [], "stream_options": options}, ChatRequest)
        answer = ChatAnswer(body, [self.stream], "m", lambda token: b"x", after)
        response = EventStream(service, answer, [self.stream], keep_alive_s, is_split=is_split)
        self.task = asyncio.create_task(response(scope, self.client.receive, self.client.send))

    async def done(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await self.task


@pytest.mark.parametrize("has_short_way", [False, True])
async def test_a_stream_to_its_end(has_short_way: bool) -> None:
    bench = Bench(has_short_way=has_short_way)
    assert await bench.client.next() == b"head"
    assert b'"role":"assistant"' in await bench.client.next()
    bench.stream.token()
    assert (await bench.client.next()).startswith(b"id: 2\n")
    bench.stream.finish(FinishReason.STOP)
    assert b'"finish_reason":"stop"' in await bench.client.next()
    assert await bench.client.next() == b"data: [DONE]\n\n"
    await bench.done()
    assert bench.cancelled == []
    assert bench.stream.num_readers == 0


async def test_a_replay_leaves_the_loop_to_others_after_each_portion() -> None:
    bench = Bench(has_short_way=True, num_tokens=8 * SPLIT, is_split=True)
    num_events = [0]  # both came between two turns of the loop
    async with asyncio.timeout(DEADLINE_S):
        while sum(num_events) < 8 * SPLIT:
            await asyncio.sleep(0)
            num_events.append(0)
            while not bench.client.sent.empty():
                num_events[-1] += bench.client.sent.get_nowait().get("body", b"").count(b"id: ")
    assert max(num_events) <= SPLIT + 1  # and the opening
    assert bench.stream.num_readers == 1
    bench.client.gone.set()
    await bench.done()


async def test_the_short_way_is_taken_again_once_the_client_reads() -> None:
    bench = Bench(has_short_way=True)
    for _ in range(2):
        await bench.client.next()
    bench.client.is_reading.clear()
    for _ in range(3):
        bench.stream.token()  # the first waits in `send`, the others are merged behind it
    bench.client.is_reading.set()
    assert (await bench.client.next()).startswith(b"id: 2\n")
    assert (await bench.client.next()).startswith(b"id: 4\n")
    bench.stream.token()
    assert bench.client.sent.get_nowait()["body"].startswith(b"id: 5\n")
    bench.client.gone.set()
    await bench.done()


@pytest.mark.parametrize(
    ("has_ids", "start", "sign"), [(True, b"id: 2\n", b": keep-alive\n"), (False, b"data: ", b"\n")]
)
async def test_keep_alive_from_acceptance_on_and_not_between_tokens(
    has_ids: bool, start: bytes, sign: bytes
) -> None:
    bench = Bench(keep_alive_s=0.05, has_ids=has_ids)
    await bench.client.next()
    await bench.client.next()
    assert await bench.client.next() == sign
    assert await bench.client.next() == sign
    bench.stream.token()
    assert (await bench.client.next()).startswith(start)
    assert await bench.client.next() == sign
    bench.client.gone.set()
    await bench.done()


@pytest.mark.parametrize("has_short_way", [False, True])
async def test_a_client_that_reads_nothing_is_aborted_and_its_reader_dropped(
    has_short_way: bool,
) -> None:
    bench = Bench(pause_s=0.05, has_short_way=has_short_way)
    for _ in range(2):
        await bench.client.next()
    bench.client.is_reading.clear()
    bench.stream.token()
    async with asyncio.timeout(DEADLINE_S):
        await bench.is_aborted.wait()
    assert bench.stream.dropped == [1]
    bench.client.gone.set()
    await bench.done()


async def test_a_resumed_stream_that_says_nothing_is_not_stuck() -> None:
    bench = Bench(keep_alive_s=0.3, pause_s=0.05, after=[1])
    assert await bench.client.next() == b"head"
    assert await bench.client.next() == b": keep-alive\n"
    assert not bench.is_aborted.is_set()
    bench.client.gone.set()
    await bench.done()


async def test_the_client_leaving_detaches_the_reader() -> None:
    bench = Bench()
    for _ in range(2):
        await bench.client.next()
    bench.stream.token()
    await bench.client.next()
    bench.client.gone.set()
    await bench.done()
    assert bench.stream.num_readers == 0


async def test_leaving_before_anything_was_read_counts_as_leaving() -> None:
    bench = Bench()
    bench.client.is_reading.clear()
    bench.client.gone.set()
    await bench.done()
    assert bench.stream.was_missed


@pytest.mark.parametrize(
    ("reason", "code"), [(FinishReason.CANCELLED, "cancelled"), (FinishReason.FAILED, "it broke")]
)
async def test_a_cancel_or_failure_is_one_error_and_the_end(
    reason: FinishReason, code: str
) -> None:
    bench = Bench()
    for _ in range(2):
        await bench.client.next()
    bench.stream.finish(reason)
    last = await bench.client.next()
    assert last.startswith(b'data: {"error":{"message":')
    assert code.encode() in last
    assert await bench.client.next() == b""
    await bench.done()


async def test_a_dead_engine_is_one_error_and_the_end() -> None:
    bench = Bench()
    for _ in range(2):
        await bench.client.next()
    bench.stream.die()
    assert b'"code":"engine_dead"' in await bench.client.next()
    assert await bench.client.next() == b""
    await bench.done()


async def test_a_cancel_from_outside_is_not_absorbed() -> None:
    async def never() -> Any:
        await asyncio.Event().wait()

    entered = asyncio.Event()

    async def body() -> None:
        async with ClientWatch(never):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
