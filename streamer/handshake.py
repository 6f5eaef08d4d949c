"""Handshake: two processes of one server prove to each other that they know the same secret.

Sans-I/O, for blocking sockets and event loops alike. The side that listens sends a challenge, the
other answers with a hello, and gets an answer to a challenge of its own. The secret is never sent,
and no proof is good for a second connection. Used between ranks (model/ranks).
"""

from __future__ import annotations

import hmac
import secrets
import struct
from pathlib import Path

from streamer.errors import ConfigError

CHALLENGE_BYTES = PROOF_BYTES = 32
HELLO = struct.Struct("<I32s32s")  # a number that names the sender, its challenge, its proof
MIN_SECRET_BYTES, MAX_SECRET_BYTES = 16, 4096


def challenge() -> bytes:
    """Random bytes for one connection."""
    return secrets.token_bytes(CHALLENGE_BYTES)


def hello(secret: bytes, theirs: bytes, number: int, ours: bytes) -> bytes:
    """The connecting side's answer to the challenge `theirs`, with its own one, `ours`."""
    return HELLO.pack(number, ours, _proof(secret, b"hello", theirs, HELLO.pack(number, ours, b"")))


def check_hello(secret: bytes, ours: bytes, data: bytes | bytearray) -> tuple[int, bytes] | None:
    """The number in a hello of HELLO.size bytes, and the answer to send; None: another secret."""
    number, theirs, proof = HELLO.unpack(data)
    expected = _proof(secret, b"hello", ours, HELLO.pack(number, theirs, b""))
    if not hmac.compare_digest(proof, expected):
        return None
    return int(number), _proof(secret, b"answer", theirs)


def is_answer(secret: bytes, ours: bytes, data: bytes | bytearray) -> bool:
    """Whether the listening side knows the secret: `data` are its PROOF_BYTES."""
    return hmac.compare_digest(data, _proof(secret, b"answer", ours))


def _proof(secret: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"".join(parts), "sha256")


def read_secret(path: str, param: str) -> bytes:
    """The secret in a file, without white space around it; ConfigError that names `param`."""
    try:
        with Path(path).expanduser().open("rb") as file:
            secret = file.read(MAX_SECRET_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(f"{param}: {path}: {error.strerror}", param=param) from error
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        size = f"{MIN_SECRET_BYTES} to {MAX_SECRET_BYTES}"
        raise ConfigError(f"{param}: {path} must have {size} bytes", param=param)
    return secret
