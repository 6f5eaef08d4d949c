"""EventStream and ClientWatch by themselves: scripted streams, an ASGI client in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from streamer.config import Config
from streamer.core.plan import Finish, FinishReason
from streamer.core.sampling import SamplingParams
from streamer.engine.stream import Delta
from streamer.errors import EngineDead
from streamer.server.metrics import Metrics
from streamer.server.openai.chat import DECODER, ChatAnswer
from streamer.server.service import Service
from streamer.server.sse import ClientWatch, EventStream, merged
from streamer.server.stuck import ABORT

DEADLINE_S = 10.0


class Scripted:
    """A token stream that hands out batches as the test puts them."""

    def __init__(self) -> None:
        self.request_id = "chatcmpl-scripted"
        self.created, self.seed = 1.0, 7
        self.params = SamplingParams()
        self.prompt: tuple[int, ...] = (1, 2)
        self.num_prompt_tokens, self.cached_tokens, self.shared_tokens = 2, 0, 0
        self.finishes: list[Finish | None] = [None]
        self.num_readers = 0
        self.was_missed = False
        self.dropped: list[int] = []
        self.batches: asyncio.Queue[list[Any] | Exception | None] = asyncio.Queue()

    @property
    def is_finished(self) -> bool:
        return self.finishes[0] is not None

    def token(self, index: int) -> None:
        self.batches.put_nowait([Delta(0, index, (5,), f"{index} ", None, None)])

    def finish(self, reason: FinishReason, num_tokens: int) -> None:
        self.finishes[0] = Finish(self.request_id, 0, reason, num_tokens, detail="it broke")
        self.batches.put_nowait([Delta(0, num_tokens, (), "", None, self.finishes[0])])
        self.batches.put_nowait(None)

    def has_rest(self, choice: int = 0) -> bool:
        return False

    def new_reader(self) -> int:
        return 1

    def miss(self) -> None:
        self.was_missed = True

    def drop(self, reader: int) -> None:
        self.dropped.append(reader)

    async def read(self, after: int = 0, reader: int | None = None) -> AsyncIterator[list[Any]]:
        self.num_readers += 1
        try:
            while (batch := await self.batches.get()) is not None:
                if isinstance(batch, Exception):
                    raise batch
                yield batch
        finally:
            self.num_readers -= 1


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

    async def next(self) -> bytes:
        async with asyncio.timeout(DEADLINE_S):
            message = await self.sent.get()
        body: bytes = message.get("body", b"head")
        return body


class Bench:
    """One EventStream over a scripted stream, running."""

    def __init__(
        self, keep_alive_s: float = 60.0, pause_s: float = 60.0, after: list[int] | None = None
    ) -> None:
        self.stream: Any = Scripted()
        self.client = Client()
        self.cancelled: list[str] = []
        self.is_aborted = asyncio.Event()
        scope = {"extensions": {ABORT: self.is_aborted.set}}
        engine: Any = SimpleNamespace(cancel=self.cancelled.append, stats=None)
        service = Service.__new__(Service)
        service.engine = engine
        service.config = Config(model="fake", pause_timeout=pause_s)
        service.metrics = Metrics(engine)
        service._num_working = 0
        service._is_quiet = asyncio.Event()
        body = DECODER.decode(b'{"messages":[]}')
        answer = ChatAnswer(body, [self.stream], "m", lambda token: b"x", after)
        response = EventStream(service, answer, [self.stream], keep_alive_s)
        self.task = asyncio.create_task(response(scope, self.client.receive, self.client.send))

    async def done(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await self.task


async def test_a_stream_to_its_end() -> None:
    bench = Bench()
    assert await bench.client.next() == b"head"
    assert b'"role":"assistant"' in await bench.client.next()
    bench.stream.token(0)
    assert (await bench.client.next()).startswith(b"id: 2\n")
    bench.stream.finish(FinishReason.STOP, 1)
    assert b'"finish_reason":"stop"' in await bench.client.next()
    assert await bench.client.next() == b"data: [DONE]\n\n"
    await bench.done()
    assert bench.cancelled == []
    assert bench.stream.num_readers == 0


async def test_keep_alive_from_acceptance_on_and_not_between_tokens() -> None:
    bench = Bench(keep_alive_s=0.05)
    await bench.client.next()
    await bench.client.next()
    assert await bench.client.next() == b": keep-alive\n\n"
    assert await bench.client.next() == b": keep-alive\n\n"
    bench.stream.token(0)
    assert (await bench.client.next()).startswith(b"id: 2\n")
    assert await bench.client.next() == b": keep-alive\n\n"
    bench.client.gone.set()
    await bench.done()


async def test_a_client_that_takes_nothing_is_aborted_and_its_reader_dropped() -> None:
    bench = Bench(pause_s=0.05)
    for _ in range(2):
        await bench.client.next()
    bench.client.is_reading.clear()
    bench.stream.token(0)
    async with asyncio.timeout(DEADLINE_S):
        await bench.is_aborted.wait()
    assert bench.stream.dropped == [1]
    bench.client.gone.set()
    await bench.done()


async def test_a_resumed_stream_that_says_nothing_is_not_stuck() -> None:
    bench = Bench(keep_alive_s=0.3, pause_s=0.05, after=[1])
    assert await bench.client.next() == b"head"
    assert await bench.client.next() == b": keep-alive\n\n"
    assert not bench.is_aborted.is_set()
    bench.client.gone.set()
    await bench.done()


async def test_the_client_leaving_detaches_the_reader() -> None:
    bench = Bench()
    for _ in range(2):
        await bench.client.next()
    bench.stream.token(0)
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
    bench.stream.finish(reason, 0)
    last = await bench.client.next()
    assert last.startswith(b'data: {"error":{"message":')
    assert code.encode() in last
    assert await bench.client.next() == b""
    await bench.done()


async def test_a_dead_engine_is_one_error_and_the_end() -> None:
    bench = Bench()
    for _ in range(2):
        await bench.client.next()
    bench.stream.batches.put_nowait(EngineDead("the step failed"))
    assert b'"code":"engine_dead"' in await bench.client.next()
    assert await bench.client.next() == b""
    await bench.done()


async def test_merged_streams_end_with_the_last_and_detach_on_close() -> None:
    streams: list[Any] = [Scripted(), Scripted()]
    streams[0].token(0)
    streams[1].token(0)
    streams[0].finish(FinishReason.STOP, 1)
    seen = []
    iterator = merged(streams)
    async for source, items in iterator:
        seen.append((source, items[0].start))
        if len(seen) == 3:
            break
    assert sorted(seen) == [(0, 0), (0, 1), (1, 0)]
    assert streams[1].num_readers == 1
    await iterator.aclose()
    assert [s.num_readers for s in streams] == [0, 0]


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


async def test_a_bug_in_one_stream_of_a_batch_is_raised() -> None:
    good, bad = Scripted(), Scripted()
    bad.batches.put_nowait(RuntimeError("a bug"))
    streams: Any = [good, bad]

    async def follow() -> None:
        async with asyncio.timeout(DEADLINE_S):
            async for _ in merged(streams):
                pass

    with pytest.raises(RuntimeError, match="a bug"):
        await follow()
    assert good.num_readers == bad.num_readers == 0
