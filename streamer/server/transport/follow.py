"""follow: writes the news of token streams to a connection, in the loop turn that brought them.

A write that may have to wait is an ordinary coroutine, started in the callback that brings the
news: while the connection accepts data, no task is woken for a token. When it does not, the
following task waits until it does, and news that came meanwhile are written merged. Every transport
reads through this.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamer.core.plan import Notice
    from streamer.engine.flow import Reader
    from streamer.engine.stream import Delta, TokenStream

Work = Coroutine[Any, Any, None]
Write = Callable[[int, list["Delta | Notice"]], Work | None]


async def follow(
    streams: Sequence[TokenStream],
    write: Write,
    *,
    readers: Sequence[int] | None = None,
    after: int | Sequence[int] = 0,
) -> None:
    """Call `write(index of the stream, its news)` for all news, until every stream has ended.

    write    returns the coroutine that writes, or None where it has written already
    readers  a number from `new_reader` for each stream, for readers that acknowledge or are dropped
    after    the cursor in each stream

    One write at a time. Raises what a write raised, what ended a stream without finishes, and
    ReaderTooSlow once everything is written to a dropped reader; on exit the readers detach. Until
    it first waits, a write runs outside of any task: it must not use what requires one, such as
    asyncio.timeout.
    """
    follower = _Follower(streams, write)
    try:
        follower.attach(readers or [None] * len(streams), after)
        await follower.run()
    finally:
        follower.close()


class _Follower:
    """Readers of some streams, and the one write that may be under way."""

    __slots__ = ("_error", "_held", "_is_due", "_readers", "_streams", "_write")

    def __init__(self, streams: Sequence[TokenStream], write: Write) -> None:
        self._streams = streams
        self._write = write
        self._readers: list[Reader] = []
        self._held: tuple[int, Work, object] | None = None  # a waiting write, what it awaits
        self._error: Exception | None = None
        self._is_due = asyncio.Event()  # the task has to look again

    def attach(self, numbers: Sequence[int | None], after: int | Sequence[int]) -> None:
        for source, (stream, number) in enumerate(zip(self._streams, numbers, strict=True)):
            on_update = partial(self._advance, source)
            self._readers.append(stream.attach(after, on_update, number))

    async def run(self) -> None:
        """Return when all streams have ended; raises as `follow` says."""
        while True:
            for source in range(len(self._streams)):
                self._advance(source)
            if self._held is not None:
                source, work, awaited = self._held
                await _rest(work, awaited)
                self._held = None
                self._streams[source].took(self._readers[source])
                continue
            if self._error is not None:
                raise self._error
            pairs = zip(self._streams, self._readers, strict=True)
            are_over = [stream.is_over(reader) for stream, reader in pairs]  # any may raise
            if all(are_over):
                return
            self._is_due.clear()
            await self._is_due.wait()

    def close(self) -> None:
        """Close a waiting write; detach the readers."""
        if self._held is not None:
            self._held[1].close()
        for stream, reader in zip(self._streams, self._readers, strict=False):
            stream.detach(reader)
        self._readers = []  # each refers to its follower

    def _advance(self, source: int) -> None:
        """Write a stream's news, unless a write waits or has failed; never raises."""
        if self._held is not None or self._error is not None:
            return
        stream, reader = self._streams[source], self._readers[source]
        items = stream.take(reader)
        if items:
            try:
                work = self._write(source, items)
                if work is not None:
                    self._held = (source, work, work.send(None))
                    self._is_due.set()
                    return
            except StopIteration:
                pass
            except Exception as error:
                self._error = error
                self._is_due.set()
                return
            stream.took(reader)
        if stream.is_finished or reader.is_dropped:
            self._is_due.set()


@types.coroutine
def _rest(work: Work, awaited: object) -> Generator[object, Any, None]:
    """`await work` for a coroutine that has started and waits for `awaited`."""
    try:
        while True:
            try:
                value = yield awaited
            except BaseException as error:  # this task is cancelled: cancel its write
                awaited = work.throw(error)
            else:
                awaited = work.send(value)
    except StopIteration:
        return
