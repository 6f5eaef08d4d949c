"""TurnTransport: what a loop turn writes to a connection goes out at once, at the turn's end.

A socket with many lanes gets a frame a lane in every step, and a system call a frame would be most
of what a frame costs. Even with one part a socket the calls are cheaper together: 2 us each less
than between the Python of two streams, and 4 on a busy machine (bench/README.md).
protocol.py puts one around every connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Final

# in scope["extensions"]: writes a body part (bytes) at once, False where `send` is wanted instead
WRITE_PART: Final = "streamer.write_part"
MAX_PENDING_BYTES: Final = 64 << 10  # more is written before the turn ends: flow control sees it


class TurnTransport(asyncio.Transport):
    """A transport that writes what a loop turn brings at once, at the turn's end.

    `close` lets go first of what was written; all else is the inner transport's.
    """

    __slots__ = ("_inner", "_loop", "_num_pending", "_parts")

    def __init__(self, inner: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._inner = inner
        self._loop = loop
        self._parts: list[bytes] = []
        self._num_pending = 0  # bytes

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write at the end of this turn."""
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(bytes(data))
        self._num_pending += len(data)
        if self._num_pending > MAX_PENDING_BYTES:
            self._flush()

    def close(self) -> None:
        """Close once everything is written."""
        self._flush()
        self._inner.close()

    def abort(self) -> None:
        """Close now."""
        self._inner.abort()

    def is_closing(self) -> bool:
        """Whether it was closed or the peer is gone."""
        return self._inner.is_closing()

    def pause_reading(self) -> None:
        """Let the peer wait."""
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        self._inner.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Of the socket."""
        return self._inner.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Who is told from now on."""
        self._inner.set_protocol(protocol)

    def _flush(self) -> None:
        if self._parts:
            parts, self._parts, self._num_pending = self._parts, [], 0
            # uvloop's transports raise where asyncio's let the write go: the peer has left, of
            # which the protocol is being told.
            with contextlib.suppress(RuntimeError):
                self._inner.write(parts[0] if len(parts) == 1 else b"".join(parts))
