"""What the first rank and each other one send each other: lengths and MessagePack over a socket.

Nothing is pickled. A rank proves that it knows the secret by the HMAC of a number that the first
one drew for it; what a stranger sends is bounded and never decoded. A Channel has one receiver; any
thread may send.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
from typing import Any, TypeVar

import msgspec

from streamer.core.plan import Plan, StepResult

PROOF_BYTES = 32
HELLO = struct.Struct("<I32s")  # the rank's index and its proof
LENGTH = struct.Struct("<Q")
MAX_BYTES = 1 << 31  # of a message


class Setup(msgspec.Struct, frozen=True, tag=True):
    """To a rank that has proved itself: what it loads, and where the ranks meet.

    config  the settings of the engine, as built-in types
    file    a new file that all ranks share
    """

    config: dict[str, Any]
    count: int
    file: str


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """From a rank: its part is loaded."""

    seconds: float


class Begin(msgspec.Struct, frozen=True, tag=True):
    """To all ranks, when every one has loaded: agree on the pools' sizes."""


class Launch(msgspec.Struct, frozen=True, tag=True):
    """To all ranks: carry this plan out. `drawn`: what the first rank drew before."""

    plan: Plan
    drawn: Checksum


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


class Failed(msgspec.Struct, frozen=True, tag=True):
    """From a rank, its last message."""

    error: str


M = TypeVar("M", bound=msgspec.Struct)
Message = Setup | Loaded | Begin | Launch | Beat | Failed


class Channel:
    """A connection between the first rank and another."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
        connection.settimeout(None)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

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

    def close(self) -> None:
        """End the connection, also for a thread that receives."""
        with contextlib.suppress(OSError):  # it has gone already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def greet(connection: socket.socket, index: int, secret: bytes) -> None:
    """A rank's part of the proof."""
    drawn = _exactly(connection, PROOF_BYTES)
    connection.sendall(HELLO.pack(index, _proof(secret, drawn, index)))


def admit(connection: socket.socket, secret: bytes) -> int | None:
    """The first rank's part: the other's index; None for one that does not know the secret."""
    drawn = secrets.token_bytes(PROOF_BYTES)
    connection.sendall(drawn)
    index, proof = HELLO.unpack(_exactly(connection, HELLO.size))
    return int(index) if hmac.compare_digest(proof, _proof(secret, drawn, index)) else None


def _proof(secret: bytes, drawn: bytes | bytearray, index: int) -> bytes:
    return hmac.digest(secret, drawn + LENGTH.pack(index), "sha256")


def _exactly(connection: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("the other rank has gone")
        view = view[count:]
    return data
