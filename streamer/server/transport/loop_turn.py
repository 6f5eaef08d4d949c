"""TurnTransport: a connection's turn of the loop: writes go out together, reads come in parts.

A socket with many lanes gets a frame a lane in every step, and a system call a frame would be most
of what a frame costs. Even with one part a socket the calls are cheaper together: 2 us each less
than between the Python of two streams, and 4 on a busy machine (inside/README.md).
transport/http.py puts one around every connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final

# in scope["extensions"]: writes a body part (bytes) at once, False where `send` is wanted instead
WRITE_PART: Final = "streamer.write_part"
MAX_PENDING_BYTES: Final = 64 << 10  # more is written before the turn ends: flow control sees it
READ_BYTES: Final = 16 << 10  # that the protocol is given in a turn
CLOSE_S: Final = 20.0  # in which the peer must take something of what is left when we close


class TurnTransport(asyncio.Transport):
    """A transport that writes what a loop turn brings at once, at the turn's end.

    `close` lets go first of what was written; all else is the inner transport's.
    """

    __slots__ = (
        "_feed",
        "_inner",
        "_is_due",
        "_is_held",
        "_is_paused",
        "_loop",
        "_num_pending",
        "_on_lost",
        "_parts",
        "_unread",
    )

    def __init__(
        self,
        inner: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._inner = inner
        self._loop = loop
        self._on_lost = on_lost
        self._parts: list[bytes] = []
        self._num_pending = 0  # bytes
        self._unread = memoryview(b"")
        self._feed: Callable[[bytes], None]
        self._is_due = False  # a part is read in the next turn
        self._is_held = False  # the protocol wants nothing now
        self._is_paused = False  # the inner transport does not read

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write at the end of this turn."""
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(bytes(data))
        self._num_pending += len(data)
        if self._num_pending > MAX_PENDING_BYTES:
            self._flush()

    def close(self) -> None:
        """Close once everything is written, unless the peer stops taking it."""
        self._flush()
        num_left = 0 if self._inner.is_closing() else self._inner.get_write_buffer_size()
        self._inner.close()
        if num_left:
            self._loop.call_later(CLOSE_S, self._see_off, num_left)

    def abort(self) -> None:
        """Close now."""
        self._inner.abort()

    def is_closing(self) -> bool:
        """Whether it was closed or the peer is gone."""
        return self._inner.is_closing()

    def receive(self, data: bytes, feed: Callable[[bytes], None]) -> None:
        """Give the protocol what came: a part of it now, and the rest turn by turn."""
        self._feed = feed
        self._unread = memoryview(bytes(self._unread) + data) if self._unread else memoryview(data)
        if not self._is_due:
            self._read_part()

    def lost(self) -> None:
        """The connection is over: what was not read is forgotten."""
        self._unread = memoryview(b"")
        self._on_lost()

    def pause_reading(self) -> None:
        """Let the peer wait."""
        self._is_held = True
        self._pause()

    def resume_reading(self) -> None:
        """Read on: first what is here already."""
        self._is_held = False
        self._read_on()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Of the socket."""
        return self._inner.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Who is told from now on. What the last one has not read is not for this one."""
        self._unread = memoryview(b"")
        self._inner.set_protocol(protocol)

    def _flush(self) -> None:
        if self._parts:
            parts, self._parts, self._num_pending = self._parts, [], 0
            # uvloop's transports raise where asyncio's let the write go: the peer has left, of
            # which the protocol is being told.
            with contextlib.suppress(RuntimeError):
                self._inner.write(parts[0] if len(parts) == 1 else b"".join(parts))

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
