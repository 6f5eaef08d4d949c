"""Connection: one socket between an ingress and a replica, of which both know the secret.

Framing, handshake and bounds: a stranger's bytes are counted and never decoded, a message that is
too long or malformed ends the connection. Lives on one loop; messages are given to `on_message` in
order, in the callback that received them.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable
from typing import Any, Final, cast

import msgspec

from streamer import handshake

LENGTH: Final = struct.Struct("<Q")
MAX_MESSAGE_BYTES: Final = 256 << 20  # a prompt of millions of tokens, with its context
MAX_UNSENT_BYTES: Final = 256 << 20  # of messages that can't wait: the other side reads nothing
HIGH_BYTES: Final = 1 << 20  # unsent, above which `is_full` is true
HANDSHAKE_S: Final = 5.0
FINISH_S: Final = 1.0  # for the other side to take what was sent

log = logging.getLogger(__name__)


class Connection(asyncio.Protocol):
    """One side of a connection.

    listens     it was accepted, not made
    messages    the union of what the other side sends
    on_open     called when the other side has proved itself
    on_message  called with each message; what it raises ends the connection
    on_lost     called once, also where it never opened
    on_drained  called when it is no longer full
    is_heard    bytes came since it was last set to False
    """

    def __init__(
        self,
        secret: bytes,
        messages: Any,
        on_open: Callable[[Connection], None],
        on_message: Callable[[Any], None],
        on_lost: Callable[[], None],
        *,
        listens: bool,
    ) -> None:
        self.is_open = self.is_full = False
        self.is_heard = True
        self.is_closed = False
        self.on_drained: Callable[[], None] = lambda: None
        self.on_message = on_message
        self.on_lost = on_lost
        self._secret = secret
        self._listens = listens
        self._on_open = on_open
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(messages).decode
        self._buffer = bytearray()
        self._own = handshake.challenge()
        self._is_greeted = False  # the connecting side has sent its hello
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    # ------------------------------------------------------------ sending

    def send(self, message: msgspec.Struct) -> None:
        """Write a message; nothing happens where the connection has ended."""
        transport = self._transport
        if transport is None or self.is_closed:
            return
        data = self._encode(message)
        transport.write(LENGTH.pack(len(data)) + data)
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            log.error("the other side of a connection takes nothing: it is closed")
            self.close()

    def close(self) -> None:
        """End the connection at once; what is unsent is dropped."""
        self.is_closed, self.is_open = True, False
        if self._transport is not None:
            self._transport.abort()

    def finish(self) -> None:
        """End the connection when what was sent has gone, after FINISH_S at the latest."""
        self.is_closed, self.is_open = True, False
        if self._transport is not None:
            self._transport.close()
            self._timer = self._loop.call_later(FINISH_S, self.close)

    # ------------------------------------------------------------ called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=HIGH_BYTES)
        self._timer = self._loop.call_later(HANDSHAKE_S, self.close)
        if self._listens:
            self._transport.write(self._own)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed, self.is_open = True, False
        if self._timer is not None:
            self._timer.cancel()
        self.on_lost()

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        self.on_drained()

    def data_received(self, data: bytes) -> None:
        self.is_heard = True
        self._buffer += data
        try:
            if not self.is_open:
                self._shake_hands()
            if self.is_open:
                self._read()
        except (ConnectionError, msgspec.MsgspecError, ValueError) as error:
            log.warning("a connection is closed: %s", error)
            self.close()
        except Exception:  # a bug of ours costs one connection, whose requests go on elsewhere
            log.exception("a message failed")
            self.close()

    # ------------------------------------------------------------ reading

    def _shake_hands(self) -> None:
        if self._listens:
            if (data := self._take(handshake.HELLO.size)) is None:
                return
            checked = handshake.check_hello(self._secret, self._own, data)
            if checked is None:
                raise ConnectionError("the other side does not know the secret")
            self._write(checked[1])
        else:
            if not self._is_greeted:
                theirs = self._take(handshake.CHALLENGE_BYTES)
                if theirs is None:
                    return
                self._is_greeted = True
                self._write(handshake.hello(self._secret, theirs, 0, self._own))
            if (data := self._take(handshake.PROOF_BYTES)) is None:
                return
            if not handshake.is_answer(self._secret, self._own, data):
                raise ConnectionError("the other side does not know the secret")
        self.is_open = True
        if self._timer is not None:
            self._timer.cancel()
        self._on_open(self)

    def _read(self) -> None:
        """Give on every message that is whole."""
        buffer, begin = self._buffer, 0
        while len(buffer) - begin >= LENGTH.size and not self.is_closed:
            (length,) = LENGTH.unpack_from(buffer, begin)
            if length > MAX_MESSAGE_BYTES:
                raise ConnectionError(f"a message of {length} bytes")
            end = begin + LENGTH.size + length
            if len(buffer) < end:
                break
            with memoryview(buffer) as view:
                message = self._decode(view[begin + LENGTH.size : end])
            self.on_message(message)
            begin = end
        del buffer[:begin]

    def _take(self, size: int) -> bytes | None:
        if len(self._buffer) < size:
            return None
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)
