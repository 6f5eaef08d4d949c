"""What the first rank and each other one send each other: lengths and MessagePack over a socket.

Nothing is pickled. Both prove that they know the secret (handshake.py) before anything is decoded,
and every message is bounded. A Channel has one receiver; any thread may send.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import struct
import threading
from typing import Any, TypeVar

import msgspec

from streamer import handshake
from streamer.config import Config
from streamer.core.plan import Plan, StepResult

LENGTH = struct.Struct("<Q")
MAX_BYTES = 1 << 31  # of a message
UNHEARD_S = 10.0  # that the other host may leave what was sent unacknowledged


class Setup(msgspec.Struct, frozen=True, tag=True):
    """To a rank that has proved itself: the settings of the engine, as built-in types."""

    config: dict[str, Any]


class Joined(msgspec.Struct, frozen=True, tag=True):
    """From a rank, its first message: which process it is, and what `dialect` is there."""

    process: int
    host: str
    dialect: bytes


class Put(msgspec.Struct, frozen=True, tag=True):
    """From a rank, while the ranks meet: what others need to reach it."""

    key: str
    value: bytes


class Ask(msgspec.Struct, frozen=True, tag=True):
    """From a rank: what is under this key, as soon as it is there."""

    key: str


class Value(msgspec.Struct, frozen=True, tag=True):
    """The answer to an Ask."""

    value: bytes


class Loading(msgspec.Struct, frozen=True, tag=True):
    """From a rank: it has loaded so many layers."""

    layers: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """From a rank: its part is loaded. `weights`: a digest of the checkpoint's description."""

    seconds: float
    weights: bytes


class Begin(msgspec.Struct, frozen=True, tag=True):
    """To all ranks, when every one has loaded: agree on the pools' sizes."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """From a rank: it waits for plans."""


class Launch(msgspec.Struct, frozen=True, tag=True):
    """To all ranks: carry this plan out.

    drawn        what the first rank drew before
    copies_done  the plan up to which its copies are done, so that their blocks may be used again
    """

    plan: Plan
    drawn: Checksum
    copies_done: int


class Reset(msgspec.Struct, frozen=True, tag=True):
    """To all ranks, after a step that failed: forget all rows and blocks, and meet anew.

    launched  the last plan before
    meeting   which one it is
    """

    launched: int
    meeting: int


class Checksum(msgspec.Struct, frozen=True, array_like=True):
    """Of the tokens of a plan: every rank draws the same."""

    plan: int = 0
    value: int = 0

    @classmethod
    def of(cls, result: StepResult) -> Checksum:
        return cls(result.number, hash((result.rows, result.tokens)))


class Beat(msgspec.Struct, frozen=True, tag=True):
    """From a rank, every BEAT_S: it is alive, and this was the last plan that it began."""

    plan: int


class Stumbled(msgspec.Struct, frozen=True, tag=True):
    """From a rank: its step failed, and it waits for a Reset.

    is_memory  for want of memory
    is_other   since another rank left a sum
    """

    error: str
    is_memory: bool
    is_other: bool


class Failed(msgspec.Struct, frozen=True, tag=True):
    """From a rank, its last message."""

    error: str


M = TypeVar("M", bound=msgspec.Struct)
ToFirst = Joined | Put | Ask | Loading | Loaded | Ready | Beat | Stumbled | Failed
Message = ToFirst | Setup | Value | Begin | Launch | Reset


def dialect() -> bytes:
    """A digest of what messages and settings consist of, which a newer program may have changed."""
    schema = [msgspec.json.schema(kind) for kind in (Message, Config)]
    return hashlib.blake2b(msgspec.json.encode(schema, order="deterministic")).digest()


class Channel:
    """A connection between the first rank and another.

    patience_s  that the other side may take for the rest of a message, or to take one; None: for
                ever, and so for the beginning of a message, too
    """

    def __init__(self, connection: socket.socket, patience_s: float | None = None) -> None:
        self._socket = connection
        self._lock = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
        connection.settimeout(patience_s)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # else a host without power is waited for
                unheard_ms = int(1000 * UNHEARD_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unheard_ms)

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Raises OSError where the other side has gone."""
        self.send_encoded(self.encode(message))

    def encode(self, message: Message) -> bytes:
        """The message with its length, to be sent to several."""
        data = self._encoder.encode(message)
        return LENGTH.pack(len(data)) + data

    def send_encoded(self, data: bytes) -> None:
        """What `encode` returned."""
        with self._lock:
            self._socket.sendall(data)

    def receive(self) -> Message:
        """The next message, waiting for it; OSError where the other side has gone."""
        (length,) = LENGTH.unpack(_exactly(self._socket, LENGTH.size))
        if length > MAX_BYTES:
            raise ConnectionError(f"a message of {length} bytes")
        return self._decoder.decode(_exactly(self._socket, length))

    def expect(self, kind: type[M]) -> M:
        """The next message, which is of this kind; ConnectionError where it is not."""
        message = self.receive()
        if not isinstance(message, kind):
            raise ConnectionError(f"{type(message).__name__} came instead of {kind.__name__}")
        return message

    def cut(self) -> None:
        """End the connection for threads of both sides that send or receive; `close` follows."""
        with contextlib.suppress(OSError):  # it has gone already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection."""
        self.cut()
        self._socket.close()


def greet(connection: socket.socket, index: int, secret: bytes) -> None:
    """A rank's part of the handshake; ConnectionError where the first rank has another secret."""
    drawn, own = _exactly(connection, handshake.CHALLENGE_BYTES), handshake.challenge()
    connection.sendall(handshake.hello(secret, bytes(drawn), index, own))
    if not handshake.is_answer(secret, own, _exactly(connection, handshake.PROOF_BYTES)):
        raise ConnectionError("the first rank does not know the secret")


def _exactly(connection: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("the other rank has gone")
        view = view[count:]
    return data
