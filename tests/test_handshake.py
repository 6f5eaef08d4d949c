"""The handshake: who knows the secret is let in, by both sides, and no one else."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamer import handshake
from streamer.errors import ConfigError

SECRET = b"only these hosts know this"


def test_both_prove_that_they_know_the_secret() -> None:
    ours, theirs = handshake.challenge(), handshake.challenge()
    sent = handshake.hello(SECRET, ours, 7, theirs)
    assert len(sent) == handshake.HELLO.size
    found = handshake.check_hello(SECRET, ours, sent)
    assert found is not None
    number, answer = found
    assert number == 7
    assert len(answer) == handshake.PROOF_BYTES
    assert handshake.is_answer(SECRET, theirs, answer)


def test_another_secret_challenge_or_number_proves_nothing() -> None:
    ours, theirs = handshake.challenge(), handshake.challenge()
    sent = handshake.hello(SECRET, ours, 7, theirs)
    assert handshake.check_hello(SECRET + b"x", ours, sent) is None
    assert handshake.check_hello(SECRET, handshake.challenge(), sent) is None  # a replay
    for i in (0, 4, 36):  # the number, the challenge, the proof
        altered = bytearray(sent)
        altered[i] ^= 1
        assert handshake.check_hello(SECRET, ours, altered) is None
    _, answer = handshake.check_hello(SECRET, ours, sent) or (0, b"")
    assert not handshake.is_answer(SECRET + b"x", theirs, answer)
    assert not handshake.is_answer(SECRET, ours, answer)
    assert not handshake.is_answer(SECRET, theirs, sent[-handshake.PROOF_BYTES :])  # a reflection


def test_the_secret_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"  " + SECRET + b"\n")
    assert handshake.read_secret(str(file), "field") == SECRET
    for content in (b"", b"short", b" " * 20, b"x" * 5000):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"field: .* must have 16 to 4096 bytes") as refusal:
            handshake.read_secret(str(file), "field")
        assert refusal.value.param == "field"
    with pytest.raises(ConfigError, match=r"field: .*No such file"):
        handshake.read_secret(str(tmp_path / "nothing"), "field")
