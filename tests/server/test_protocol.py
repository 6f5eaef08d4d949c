"""Bounds on a request's head and trailers, on bare sockets; and that ordinary ones pass."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable
from types import SimpleNamespace
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


def test_streams_on_one_connection_are_each_answered_whole(server: Running) -> None:
    fields = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "stream": True}
    body = json.dumps(fields | {"ignore_eos": True}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\ncontent-length: %d\r\n"
    request = head % len(body) + b"content-type: application/json\r\n"
    with dial(server) as raw:  # the second waits in uvicorn's pipeline while the first streams
        raw.sendall(request + b"\r\n" + body + request + b"connection: close\r\n\r\n" + body)
        answers = read_to_end(raw).split(b"HTTP/1.1 200 OK\r\n")
    assert answers[0] == b""
    assert len(answers) == 3
    for answer in answers[1:]:
        text = unchunked(answer.partition(b"\r\n\r\n")[2])
        assert text.count(b'"content":" ') == 5
        assert text.endswith(b"data: [DONE]\n\n")


def unchunked(data: bytes) -> bytes:
    """A whole chunked body (RFC 9112, 7.1), with nothing after it."""
    text, size = b"", 1
    while size:
        line, _, data = data.partition(b"\r\n")
        size = int(line, 16)
        text += data[:size]
        assert data[size : size + 2] == b"\r\n"
        data = data[size + 2 :]
    assert data == b""
    return text


def cycle_that(**changes: bool) -> Any:
    written: list[bytes] = []
    open_ = {"chunked_encoding": True, "response_complete": False, "disconnected": False}
    return SimpleNamespace(
        **open_ | {k: v for k, v in changes.items() if k in open_},
        flow=SimpleNamespace(write_paused=changes.get("write_paused", False)),
        transport=SimpleNamespace(write=written.append),
        written=written,
    )


def test_a_part_is_one_chunk() -> None:
    cycle = cycle_that()
    assert protocol.write_part(cycle, b"x" * 26)
    assert cycle.written == [b"1a\r\n" + b"x" * 26 + b"\r\n"]


@pytest.mark.parametrize(
    "change",
    [
        {"chunked_encoding": False},  # a HEAD, a body of a known length, or no head so far
        {"response_complete": True},
        {"disconnected": True},
        {"write_paused": True},
    ],
)
def test_whatever_is_not_just_a_part_is_left_to_send(change: dict[str, bool]) -> None:
    cycle = cycle_that(**change)
    assert not protocol.write_part(cycle, b"x")
    assert cycle.written == []
