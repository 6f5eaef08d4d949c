"""TurnTransport: what is written, in which order, and in how many writes."""

from __future__ import annotations

import asyncio
from typing import Any

from streamer.server.loop_turn import MAX_PENDING_BYTES, TurnTransport


class Inner(asyncio.Transport):
    """Notes what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.is_gone = False

    def write(self, data: Any) -> None:
        if self.is_gone:
            raise RuntimeError("the handler is closed")
        self.calls.append(data)

    def close(self) -> None:
        self.calls.append("close")

    def abort(self) -> None:
        self.calls.append("abort")


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
