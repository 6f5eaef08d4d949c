"""Ranks that connect among strangers: each gets in at once, and strangers are closed."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from streamer import handshake
from streamer.model.ranks import reception as tested
from streamer.model.ranks import wire
from streamer.model.ranks.group import LOOPBACK
from streamer.model.ranks.reception import Reception

SECRET = b"only these hosts know this"
DEADLINE_S = 20.0


@pytest.fixture
def reception() -> Iterator[Reception]:
    with Reception(LOOPBACK, 0, SECRET) as found:
        yield found


def visit(reception: Reception, *sent: bytes) -> socket.socket:
    visitor = socket.create_connection((LOOPBACK, reception.port), timeout=DEADLINE_S)
    for data in sent:
        visitor.sendall(data)
    return visitor


def serve(reception: Reception, until: threading.Event) -> list[tuple[int, socket.socket]]:
    """Who came in until the event."""
    found: list[tuple[int, socket.socket]] = []
    end = time.monotonic() + DEADLINE_S
    while not until.is_set():
        assert time.monotonic() < end
        found += reception.arrivals(0.01)
    return found


def test_a_rank_gets_in_past_silent_and_slow_strangers(reception: Reception) -> None:
    """Who waits in no one's turn: the strangers' time is not over when the rank is in."""
    strangers = [visit(reception), visit(reception, b"abc"), visit(reception)]
    rank, is_in = visit(reception), threading.Event()

    def greet() -> None:
        wire.greet(rank, 3, SECRET)
        is_in.set()

    thread = threading.Thread(target=greet)
    began = time.monotonic()
    thread.start()
    ((index, connection),) = serve(reception, is_in)
    thread.join()
    assert index == 3
    assert time.monotonic() - began < tested.PROVE_S
    connection.sendall(b"x")
    assert rank.recv(2) == b"x"
    for each in (*strangers, rank, connection):
        each.close()


def test_strangers_are_closed(
    reception: Reception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One with another secret at once, and the first such one in the log; a silent one later."""
    monkeypatch.setattr(tested, "PROVE_S", 0.2)
    wrong = [visit(reception, b"x" * handshake.HELLO.size) for _ in range(2)]
    silent = visit(reception)
    ended = threading.Event()

    def wait() -> None:
        for each in (*wrong, silent):
            each.recv(handshake.CHALLENGE_BYTES)
            with contextlib.suppress(ConnectionResetError):
                assert each.recv(1) == b""
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert serve(reception, ended) == []
    thread.join()
    assert [r.message for r in caplog.records] == [
        "refused a connection to the ranks: it has another secret"
    ]
    for each in (*wrong, silent):
        each.close()


def test_beyond_so_many_strangers_the_oldest_is_closed(
    reception: Reception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tested, "MAX_GUESTS", 3)
    strangers = []
    for _ in range(5):
        strangers.append(visit(reception))
        list(reception.arrivals(DEADLINE_S))
    for i, each in enumerate(strangers):
        each.recv(handshake.CHALLENGE_BYTES)
        if i < 2:
            assert each.recv(1) == b""
        each.close()


def test_a_rank_does_not_trust_a_first_one_without_the_secret() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(handshake.challenge() + b"x" * handshake.PROOF_BYTES)
        with pytest.raises(ConnectionError, match="does not know the secret"):
            wire.greet(ours, 1, SECRET)
