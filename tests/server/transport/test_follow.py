"""follow: one write at a time, at once where the connection takes it, merged where it does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from streamer.core.plan import Notice
from streamer.engine.stream import Delta, TokenStream
from streamer.errors import EngineDead, ReaderTooSlow
from streamer.server.transport.follow import follow
from tests.engine.helpers import end, lone_stream, write

DEADLINE_S = 10.0


class Connection:
    """Records what is written while it is open."""

    def __init__(self) -> None:
        self.texts: list[tuple[int, str]] = []
        self.num_begun = 0
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.error: Exception | None = None

    async def put(self, source: int, items: list[Delta | Notice]) -> None:
        self.num_begun += 1
        if not self.is_open.is_set():
            await self.is_open.wait()
        if self.error is not None:
            raise self.error
        self.texts += [(source, item.text) for item in items if isinstance(item, Delta)]


@asynccontextmanager
async def following(
    connection: Connection, *streams: TokenStream
) -> AsyncIterator[asyncio.Task[None]]:
    async with asyncio.timeout(DEADLINE_S):
        task = asyncio.create_task(follow(streams, connection.put))
        await asyncio.sleep(0)
        yield task
        assert [stream.num_readers for stream in streams] == [0] * len(streams)


async def test_what_comes_is_written_before_anything_else_runs() -> None:
    stream, connection = lone_stream(), Connection()
    write(stream, "ab")
    async with following(connection, stream) as task:
        assert connection.texts == [(0, "ab")]
        write(stream, "c")
        assert connection.texts == [(0, "ab"), (0, "c")]
        end(stream)
        await task
    assert connection.texts == [(0, "ab"), (0, "c"), (0, "")]
    assert stream.lag() == 0


async def test_while_a_write_waits_the_rest_is_merged() -> None:
    stream, connection = lone_stream(window=64), Connection()
    async with following(connection, stream) as task:
        connection.is_open.clear()
        for letter in "abc":
            write(stream, letter)
        await asyncio.sleep(0)
        assert (connection.num_begun, connection.texts) == (1, [])
        assert stream.lag() == 3  # what is held does not count as taken
        write(stream, "d")
        end(stream)
        connection.is_open.set()
        await task
    assert connection.texts == [(0, "a"), (0, "bcd")]
    assert stream.lag() == 0


async def test_a_write_that_waits_no_more_when_its_task_comes() -> None:
    stream, connection = lone_stream(), Connection()
    async with following(connection, stream) as task:
        connection.is_open.clear()
        write(stream, "a")
        connection.is_open.set()  # within the same turn
        end(stream)
        await task
    assert connection.texts == [(0, "a"), (0, "")]


async def test_two_streams_have_one_write_at_a_time() -> None:
    streams, connection = [lone_stream(), lone_stream()], Connection()
    async with following(connection, *streams) as task:
        connection.is_open.clear()
        write(streams[0], "a")
        write(streams[1], "x")
        assert connection.num_begun == 1
        end(streams[0])
        connection.is_open.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not task.done()
        write(streams[1], "y")
        end(streams[1])
        await task
    by_source = [[t for s, t in connection.texts if s == source] for source in (0, 1)]
    assert ["".join(texts) for texts in by_source] == ["a", "xy"]


@pytest.mark.parametrize("is_waiting", [False, True])
async def test_a_failed_write_ends_it(is_waiting: bool) -> None:
    streams, connection = [lone_stream(), lone_stream()], Connection()
    connection.error = RuntimeError("a bug")
    async with following(connection, *streams) as task:
        if is_waiting:
            connection.is_open.clear()
        write(streams[1], "a")  # must not raise here: the engine writes this
        write(streams[1], "b")
        connection.is_open.set()
        with pytest.raises(RuntimeError, match="a bug"):
            await task
    assert connection.num_begun == 1


async def test_a_write_without_a_coroutine_is_done_when_it_returns() -> None:
    stream, texts = lone_stream(window=64), []

    def put(source: int, items: list[Delta | Notice]) -> None:
        texts.extend(item.text for item in items if isinstance(item, Delta))
        if texts[-1] == "!":
            raise RuntimeError("a bug")

    async with asyncio.timeout(DEADLINE_S):
        task = asyncio.create_task(follow([stream], put))
        await asyncio.sleep(0)
        write(stream, "a")
        assert (texts, stream.lag()) == (["a"], 0)
        write(stream, "!")  # must not raise here: the engine writes this
        with pytest.raises(RuntimeError, match="a bug"):
            await task
    assert stream.num_readers == 0


async def test_what_ended_the_stream_comes_after_its_text() -> None:
    stream, connection = lone_stream(), Connection()
    async with following(connection, stream) as task:
        connection.is_open.clear()
        write(stream, "a")
        write(stream, "b")
        stream.fail(EngineDead("boom"))
        connection.is_open.set()
        with pytest.raises(EngineDead, match="boom"):
            await task
    assert connection.texts == [(0, "a"), (0, "b")]


async def test_a_cursor_and_a_number_are_the_readers() -> None:
    stream, connection = lone_stream(window=4), Connection()
    number = stream.new_reader()
    write(stream, "abc")
    async with asyncio.timeout(DEADLINE_S):
        task = asyncio.create_task(follow([stream], connection.put, readers=[number], after=[2]))
        await asyncio.sleep(0)
        assert connection.texts == [(0, "c")]
        stream.acknowledge(number, 1)
        assert stream.lag() == 2
        end(stream)
        await task


async def test_a_dropped_reader_gets_the_buffered_text_and_an_error() -> None:
    stream, connection = lone_stream(window=4), Connection()
    number = stream.new_reader()
    connection.is_open.clear()
    async with asyncio.timeout(DEADLINE_S):
        task = asyncio.create_task(follow([stream], connection.put, readers=[number]))
        await asyncio.sleep(0)
        write(stream, "abcdef")
        assert stream.is_paused
        stream.drop(number)
        connection.is_open.set()
        with pytest.raises(ReaderTooSlow, match="more than 4 tokens"):
            await task
    assert "".join(text for _, text in connection.texts) == "abcdef"
    assert (stream.num_readers, stream.is_paused) == (0, True)  # another may come


async def test_a_reader_that_lagged_without_a_pending_write_is_notified_at_once() -> None:
    stream, connection = lone_stream(window=4, pause_s=0.0), Connection()
    number = stream.new_reader()
    async with asyncio.timeout(DEADLINE_S):
        task = asyncio.create_task(follow([stream], connection.put, readers=[number]))
        await asyncio.sleep(0)
        stream.acknowledge(number, 0)
        write(stream, "abcdef")
        with pytest.raises(ReaderTooSlow):
            await task


@pytest.mark.parametrize("is_waiting", [False, True])
@pytest.mark.parametrize("has_run", [False, True])
async def test_a_cancel_detaches_and_ends_the_write(is_waiting: bool, has_run: bool) -> None:
    stream, connection = lone_stream(), Connection()
    async with following(connection, stream) as task:
        if is_waiting:
            connection.is_open.clear()
        write(stream, "a")
        if has_run:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    connection.is_open.set()
    write(stream, "b")
    assert connection.texts == ([] if is_waiting else [(0, "a")])
