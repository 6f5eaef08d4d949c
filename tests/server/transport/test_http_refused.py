"""What is refused before its request is read whole, on bare sockets: its client reads why."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from streamer.server.transport import http as protocol
from streamer.server.transport.loop_turn import MAX_DROPPED_BYTES
from tests.server.support.running import Running
from tests.server.transport.test_http import LIMIT, POST, START, dial, next_answer, read_to_end


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(lambda i: START if i == 0 else b"x-a: %s\r\n" % (b"y" * 990), id="headers"),
        pytest.param(lambda i: START + b"x: " if i == 0 else b"y" * 1000, id="one header"),
        pytest.param(lambda i: b"\r\n" * 500, id="blank lines"),
    ],
)
def test_a_head_that_never_ends_is_refused(server: Running, head: Callable[[int], bytes]) -> None:
    """Its client reads so, whatever it has sent behind: a close with that unread is a reset."""
    with dial(server) as raw:
        raw.sendall(b"".join(map(head, range(8 * LIMIT // 1000))))
        answer = read_to_end(raw)
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b"request_too_large" in answer
        with pytest.raises(ConnectionError):
            raw.sendall(bytes(4 * MAX_DROPPED_BYTES))


def send_slowly(raw: socket.socket) -> None:
    for _ in range(100):
        raw.sendall(b"x")
        time.sleep(0.1)


def test_the_rest_of_a_refused_head_is_waited_for_as_long_as_for_a_head(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.3)
    with dial(server) as raw:
        raw.sendall(START + b"Host: twice\r\n\r\n")
        assert read_to_end(raw).startswith(b"HTTP/1.1 400 ")
        with pytest.raises(ConnectionError):
            send_slowly(raw)


def test_a_refused_connection_that_is_kept_does_not_hold_up_a_stop(
    server_with: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server = server_with(api_key=("mine",))
    with dial(server) as head, dial(server) as body:
        head.sendall(START + b"Host: twice\r\n\r\n")
        assert read_to_end(head).startswith(b"HTTP/1.1 400 ")
        body.sendall(POST % 9 + b"{")
        assert next_answer(body).split()[1] == b"401"
        server.stop()
    assert "timeout graceful shutdown exceeded" not in caplog.text
