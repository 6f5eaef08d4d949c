"""Bounds on a request's head and trailers, on bare sockets; and that ordinary ones pass."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from streamer.server import protocol
from tests.server.running import Running

START = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
LIMIT = protocol.MAX_HEAD_BYTES


def dial(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10.0)


def read_to_end(raw: socket.socket) -> bytes:
    parts = []
    while part := raw.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(lambda i: START if i == 0 else b"x-a: %s\r\n" % (b"y" * 990), id="headers"),
        pytest.param(lambda i: START + b"x: " if i == 0 else b"y" * 1000, id="one header"),
        pytest.param(lambda i: b"GET /" if i == 0 else b"y" * 1000, id="the target"),
        pytest.param(lambda i: b"\r\n" * 500, id="blank lines"),
    ],
)
def test_a_head_that_never_ends_is_refused(server: Running, head: Callable[[int], bytes]) -> None:
    sent, i = 0, 0
    with dial(server) as raw:
        while sent <= LIMIT:  # and not a byte that the server would not read
            sent += raw.send(head(i))
            i += 1
        answer = read_to_end(raw)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"request_too_large" in answer


def test_a_whole_head_over_the_limit_is_refused_and_one_below_passes(server: Running) -> None:
    url = server.url + "/health"
    assert httpx.get(url, headers={"x-long": "y" * (LIMIT - 4096)}).status_code == 200
    assert httpx.get(url, headers={"x-long": "y" * (LIMIT - 60)}).status_code == 431


def test_trailers_are_bounded_too(server: Running) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked"
    with dial(server) as raw:
        raw.sendall(head + b"\r\n\r\n1\r\n{\r\n0\r\nx: ")
        with contextlib.suppress(ConnectionError):  # it may be closed before all is sent
            for _ in range(20):
                raw.sendall(b"y" * (LIMIT // 2))
            assert read_to_end(raw) == b""  # there is no answer to half a request


def test_a_slow_head_is_closed(server_with: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.2)
    server = server_with()
    for head in (b"", START):
        with dial(server) as raw:
            raw.sendall(head)
            assert read_to_end(raw) == b""


def test_a_long_answer_is_no_slow_head(server_with: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.1)
    server = server_with(model="fake:tokens_per_s=50")
    body = {"prompt": "x", "max_tokens": 20, "ignore_eos": True}
    with httpx.Client() as client:  # the same connection twice
        for _ in range(2):
            answer = client.post(server.url + "/v1/completions", json=body)
            assert answer.json()["usage"]["completion_tokens"] == 20


@pytest.mark.parametrize("sent", [b"NONSENSE\r\n\r\n", b"GET / HTTP/1.1\r\nbad header\r\n\r\n"])
def test_what_is_not_http_gets_the_error_object(server: Running, sent: bytes) -> None:
    with dial(server) as raw:
        raw.sendall(sent)
        head, _, body = read_to_end(raw).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "invalid_http"
