"""TurnTransport: what is written, in which order, and in how many writes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from streamer.server.transport import loop_turn
from streamer.server.transport.loop_turn import MAX_PENDING_BYTES, READ_BYTES, Turn, TurnTransport


class Inner(asyncio.Transport):
    """Records the calls it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.is_gone = False
        self.is_over = False
        self.num_left = 0

    def write(self, data: Any) -> None:
        if self.is_gone:
            raise RuntimeError("the handler is closed")
        self.calls.append(data)

    def close(self) -> None:
        self.is_over = True
        self.calls.append("close")

    def abort(self) -> None:
        self.is_over = True
        self.calls.append("abort")

    def is_closing(self) -> bool:
        return self.is_over

    def get_write_buffer_size(self) -> int:
        return self.num_left

    def pause_reading(self) -> None:
        self.calls.append("pause")

    def resume_reading(self) -> None:
        self.calls.append("resume")


async def test_the_connections_of_a_turn_are_written_one_after_the_other() -> None:
    turn, loop = Turn(), asyncio.get_running_loop()
    inners = [Inner(), Inner(), Inner()]
    inners[1].is_gone = True
    transports = [TurnTransport(inner, loop, turn=turn) for inner in inners]
    for word in (b"a", b"b"):
        for transport in transports:
            transport.write(word)
        await asyncio.sleep(0)
    assert [inner.calls for inner in inners] == [[b"a", b"b"], [], [b"a", b"b"]]


async def test_a_turn_is_one_write() -> None:
    inner = Inner()
    transport = TurnTransport(inner, asyncio.get_running_loop())
    for part in (b"a", b"b", b"c"):
        transport.write(part)
    assert inner.calls == []
    await asyncio.sleep(0)
    assert inner.calls == [b"abc"]
    transport.write(b"d")
    await asyncio.sleep(0)
    assert inner.calls == [b"abc", b"d"]


async def test_close_comes_after_what_was_written_and_abort_at_once() -> None:
    inner = Inner()
    transport = TurnTransport(inner, asyncio.get_running_loop())
    transport.write(b"a")
    transport.close()
    transport.write(b"b")
    transport.abort()
    assert inner.calls == [b"a", "close", "abort"]
    await asyncio.sleep(0)


async def test_a_peer_that_left_within_the_turn_is_no_error() -> None:
    inner, faults = Inner(), []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: faults.append(context))
    transport = TurnTransport(inner, loop)
    transport.write(b"a")
    inner.is_gone = True
    await asyncio.sleep(0)
    assert (inner.calls, faults) == ([], [])


async def test_much_does_not_wait_for_the_end_of_the_turn() -> None:
    inner = Inner()
    transport = TurnTransport(inner, asyncio.get_running_loop())
    transport.write(bytes(MAX_PENDING_BYTES))
    assert inner.calls == []
    transport.write(b"a")
    assert inner.calls == [bytes(MAX_PENDING_BYTES) + b"a"]
    transport.write(b"b")
    await asyncio.sleep(0)
    assert inner.calls[1:] == [b"b"]


# ---------------------------------------------------------------- reading


async def test_a_large_read_is_given_part_by_part_a_turn_each() -> None:
    inner, seen = Inner(), []
    transport = TurnTransport(inner, asyncio.get_running_loop())
    transport.receive(b"a" * (2 * READ_BYTES + 1), lambda part: seen.append(len(part)))
    assert (seen, inner.calls) == ([READ_BYTES], ["pause"])
    await asyncio.sleep(0)
    assert seen == [READ_BYTES] * 2
    await asyncio.sleep(0)
    assert (seen, inner.calls) == ([READ_BYTES, READ_BYTES, 1], ["pause", "resume"])


async def test_a_protocol_that_pauses_gets_no_more_until_it_resumes() -> None:
    inner, seen = Inner(), []
    transport = TurnTransport(inner, asyncio.get_running_loop())

    def feed(part: bytes) -> None:
        seen.append(len(part))
        transport.pause_reading()

    transport.receive(b"a" * (READ_BYTES + 1), feed)
    await asyncio.sleep(0)
    assert (seen, inner.calls) == ([READ_BYTES], ["pause"])
    transport.resume_reading()
    await asyncio.sleep(0)
    assert (seen, inner.calls) == ([READ_BYTES, 1], ["pause"])
    transport.resume_reading()
    assert inner.calls == ["pause", "resume"]


async def test_what_is_unread_when_the_connection_is_lost_is_forgotten() -> None:
    inner, seen, lost = Inner(), [], []
    transport = TurnTransport(inner, asyncio.get_running_loop(), lambda: lost.append(1))
    transport.receive(b"a" * (READ_BYTES + 1), seen.append)
    transport.lost()
    await asyncio.sleep(0)
    assert (len(seen), lost) == (1, [1])


async def test_a_peer_that_reads_nothing_cannot_keep_a_closed_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_turn, "CLOSE_S", 0.0)
    inner = Inner()
    inner.num_left = 9
    transport = TurnTransport(inner, asyncio.get_running_loop())
    transport.close()
    inner.num_left = 8  # it takes some bytes, and then no more
    for _ in range(10):
        await asyncio.sleep(0)
    assert inner.calls == ["close", "abort"]


@pytest.mark.parametrize("is_tls", [False, True])
async def test_a_peer_that_is_told_the_end_may_go_on_sending_where_it_can_be_told(
    is_tls: bool,
) -> None:
    inner = Inner()
    inner.can_write_eof = lambda: not is_tls  # type: ignore[method-assign]
    inner.write_eof = lambda: inner.calls.append("eof")  # type: ignore[method-assign]
    transport = TurnTransport(inner, asyncio.get_running_loop())
    transport.begin_request()
    transport.write(b"a")
    transport.close()
    transport.write_eof()
    assert inner.calls == ([b"a", "close"] if is_tls else [b"a", "eof"])
    transport.end_request()
    transport.write_eof()
    assert inner.calls[-1] == "close"


async def test_what_comes_of_a_request_after_its_answer_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_turn, "MAX_DROPPED_BYTES", 10)
    inner, seen = Inner(), bytearray()
    transport = TurnTransport(inner, asyncio.get_running_loop())
    for _ in range(2):
        transport.begin_request()
        transport.receive(bytes(20), seen.extend)  # before the answer others bound it
        transport.answered()
        transport.receive(bytes(10), seen.extend)
        transport.end_request()
    transport.answered()  # nothing of it is to come
    transport.receive(bytes(20), seen.extend)
    assert (len(seen), inner.calls) == (80, [])
    transport.begin_request()
    transport.answered()
    transport.receive(bytes(11), seen.extend)
    assert inner.calls == ["abort"]
