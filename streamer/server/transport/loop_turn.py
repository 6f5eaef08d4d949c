"""TurnTransport: joins the writes of one loop turn, and splits large reads over several turns.

A socket with many lanes sends a frame for each lane in every step, and a system call for each frame
would be most of a frame's cost. Even with one part a socket, the calls are cheaper one after the
other than between the Python of two streams: by 2 us each, and by 4 us on a busy machine
(loadtest/inside/README.md). transport/http.py puts one around every connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

# in scope["extensions"]: writes a body part (bytes), or a message of a socket (bytes, is_text),
# at once; False: `send` has to be used instead
WRITE_PART: Final = "streamer.write_part"
MAX_PENDING_BYTES: Final = 64 << 10  # more is written before the turn ends, for flow control
READ_BYTES: Final = 16 << 10  # fed to the protocol in one turn
CLOSE_S: Final = 20.0  # in which the peer must read some of what is left after a close
MAX_DROPPED_BYTES: Final = 16 << 20  # of a request that comes in after its answer


class Turn:
    """The connections that have something to write at the end of this turn of their loop.

    One callback for all of them: beyond 250 waiting callbacks uvloop allocates each anew, and with
    them a step of 1,024 streams would begin a garbage collection.
    """

    __slots__ = ("_writing",)

    def __init__(self) -> None:
        self._writing: list[TurnTransport] = []

    def add(self, transport: TurnTransport, loop: asyncio.AbstractEventLoop) -> None:
        """Flush this one at the turn's end."""
        if not self._writing:
            loop.call_soon(self._flush)
        self._writing.append(transport)

    def _flush(self) -> None:
        writing, self._writing = self._writing, []
        for transport in writing:
            transport.flush()


def _drop(data: bytes) -> None:
    pass


class TurnTransport(asyncio.Transport):
    """A transport that writes everything of one loop turn together, at the turn's end.

    `close` first flushes what was written; all else is the inner transport's.

    is_coming  a request has begun and not ended
    """

    __slots__ = (
        "_feed",
        "_inner",
        "_is_answered",
        "_is_due",
        "_is_held",
        "_is_leaving",
        "_is_paused",
        "_loop",
        "_num_dropped",
        "_num_pending",
        "_on_lost",
        "_parts",
        "_turn",
        "_unread",
        "is_coming",
    )

    def __init__(
        self,
        inner: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        on_lost: Callable[[], None] = lambda: None,
        turn: Turn | None = None,
    ) -> None:
        super().__init__()
        self._turn = turn or Turn()
        self._inner = inner
        self._loop = loop
        self._on_lost = on_lost
        self._parts: list[bytes] = []
        self._num_pending = 0  # bytes
        self._unread = memoryview(b"")
        self._feed: Callable[[bytes], None]
        self._is_due = False  # a part is due to be fed in the next turn
        self._is_held = False  # the protocol has paused reading
        self._is_paused = False  # the inner transport does not read
        self.is_coming = False
        self._is_answered = False  # that request was
        self._is_leaving = False  # closed, but for the rest of that request
        self._num_dropped = 0  # bytes received since it was answered or closed

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write at the end of this turn, or at once beyond MAX_PENDING_BYTES."""
        if not self._parts:
            self._turn.add(self, self._loop)
        self._parts.append(bytes(data))
        self._num_pending += len(data)
        if self._num_pending > MAX_PENDING_BYTES:
            self.flush()

    def begin_request(self) -> None:
        """A close from now on waits for `end_request`.

        The system resets a connection that is closed with data unread, and a reset takes the answer
        from a client that is still sending (RFC 9112, 9.6).
        """
        self.is_coming = True

    def answered(self) -> None:
        """The newest request has its answer: aborts if MAX_DROPPED_BYTES more come of it."""
        self._is_answered = self.is_coming

    def end_request(self) -> None:
        """Nothing more comes of the request, or it is not waited for."""
        self.is_coming = self._is_answered = False
        self._num_dropped = 0
        if self._is_leaving:
            self.close()

    def write_eof(self) -> None:
        """After `close`: tell the peer that nothing more comes, and read on; TLS ends instead."""
        if self._inner.is_closing():
            return
        if self._inner.can_write_eof():
            self._inner.write_eof()
        else:
            self.end_request()

    def close(self) -> None:
        """Close once all is written and the request has ended.

        Aborts if the peer stops reading for CLOSE_S, or sends MAX_DROPPED_BYTES more.
        """
        self.flush()
        if self.is_coming and not self._inner.is_closing():
            self._is_leaving = True
            self.resume_reading()
            return
        num_left = 0 if self._inner.is_closing() else self._inner.get_write_buffer_size()
        self._inner.close()
        if num_left:
            self._loop.call_later(CLOSE_S, self._see_off, num_left)

    def abort(self) -> None:
        """Close now, without what is not sent yet."""
        self._inner.abort()

    def is_closing(self) -> bool:
        """Whether the transport was closed or the peer is gone."""
        return self._is_leaving or self._inner.is_closing()

    def receive(self, data: bytes, feed: Callable[[bytes], None]) -> None:
        """Feed the received data to the protocol: a part now, the rest in later turns."""
        if self._is_leaving or self._is_answered:
            self._num_dropped += len(data)
            if self._num_dropped > MAX_DROPPED_BYTES:
                self.abort()
        self._feed = feed
        self._unread = memoryview(bytes(self._unread) + data) if self._unread else memoryview(data)
        if not self._is_due:
            self._read_part()

    def lost(self) -> None:
        """The connection is lost: unread data is dropped, and the protocol let go, a cycle."""
        self._unread = memoryview(b"")
        self._feed = _drop
        self._on_lost()

    def pause_reading(self) -> None:
        """Stop feeding the protocol, and reading from the peer."""
        self._is_held = True
        self._pause()

    def resume_reading(self) -> None:
        """Feed what was received already, then read from the peer again."""
        self._is_held = False
        self._read_on()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._inner.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Replace the protocol; data that the last one has not read is dropped."""
        self._unread = memoryview(b"")
        self._inner.set_protocol(protocol)

    def flush(self) -> None:
        """Write what is pending, if anything is."""
        parts = self._parts
        if parts:
            data = parts[0] if len(parts) == 1 else b"".join(parts)
            parts.clear()
            self._num_pending = 0
            try:  # contextlib.suppress would cost 0.3 us
                self._inner.write(data)
            except RuntimeError:
                # The peer has left: uvloop's transports raise, asyncio's drop the write. The
                # protocol gets its connection_lost anyway.
                return

    def _read_part(self) -> None:
        self._is_due = False
        if self._is_held or not self._unread:
            return
        part, self._unread = self._unread[:READ_BYTES], self._unread[READ_BYTES:]
        self._feed(bytes(part))
        self._read_on()

    def _read_on(self) -> None:
        if self._inner.is_closing():
            self._unread = memoryview(b"")
        elif self._unread:
            self._pause()
            if not (self._is_held or self._is_due):
                self._is_due = True
                self._loop.call_soon(self._read_part)
        elif self._is_paused and not self._is_held:
            self._is_paused = False
            self._inner.resume_reading()

    def _pause(self) -> None:
        if not (self._is_paused or self._inner.is_closing()):
            self._is_paused = True
            self._inner.pause_reading()

    def _see_off(self, num_left: int) -> None:
        left = self._inner.get_write_buffer_size()
        if 0 < left < num_left:
            self._loop.call_later(CLOSE_S, self._see_off, left)
        elif left:
            self._inner.abort()
