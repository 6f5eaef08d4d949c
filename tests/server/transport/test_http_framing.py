"""Requests whose framing is wrong or unusual, on bare sockets: one answer each, in its turn."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from streamer.server.transport import http as protocol
from tests.server.support.running import Running
from tests.server.transport.test_http import (
    EXPECT,
    KEYED,
    POST,
    SHORT,
    START,
    answer_to,
    dial,
    next_answer,
    read_to_end,
)

CHUNKED = POST.replace(b"content-length: %d", b"transfer-encoding: chunked")
GARBAGE = b"NONSENSE\r\n\r\n"
NEXT = START + b"\r\n"
STREAM = json.dumps({"prompt": "x", "max_tokens": 9, "ignore_eos": True, "stream": True}).encode()


def statuses_of(answers: bytes) -> list[bytes]:
    return [part.split()[0] for part in answers.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize(
    "request_",
    [
        CHUNKED + b"-5\r\n12345\r\n0\r\n\r\n",
        CHUNKED + b"3\r\n12345\r\n0\r\n\r\n",
        CHUNKED + b"5\n12345\n0\n\n",
        CHUNKED + b"0\r\nContent-Length: 5\r\n\r\n",
        POST.replace(b"content-length: %d", b"transfer-encoding: identity"),
    ],
    ids=["negative", "short", "bare LF", "a length behind it", "another coding"],
)
def test_a_body_that_can_not_be_read_is_answered(server: Running, request_: bytes) -> None:
    """Its connection ended without any answer."""
    head, _, body = answer_to(server, request_ + NEXT).partition(b"\r\n\r\n")
    assert head.split()[1] == (b"501" if b"identity" in request_ else b"400")
    assert b"connection: close" in head
    assert json.loads(body)["error"]["code"] == "invalid_http"


@pytest.mark.parametrize(
    ("rest", "code"),
    [(b"-5\r\n", "400 invalid_http"), (None, "499 client_left"), (b"", "408 request_timeout")],
    ids=["malformed", "left", "slow"],
)
def test_a_body_that_does_not_come_whole_is_logged_as_it_was_answered(
    server: Running,
    rest: bytes | None,
    code: str,
    monkeypatch: pytest.MonkeyPatch,
    refusal_log: pytest.LogCaptureFixture,
) -> None:
    """All of them were a 500, `client_left`."""
    if rest == b"":
        monkeypatch.setattr(protocol, "BODY_TIMEOUT_S", 0.1)
    status, name = code.split()
    counted = f'streamer_requests_refused_total{{code="{name}"}}'
    before = server.metric(counted)
    with dial(server) as raw:
        raw.sendall(CHUNKED + b"5\r\n12345\r\n")
        if rest is None:
            raw.close()
        else:
            raw.sendall(rest)
            assert statuses_of(read_to_end(raw)) == [status.encode()]
        server.wait_metric(counted, before + 1)
    assert f"status={status} code={name}" in refusal_log.records[-1].getMessage()


def test_a_refusal_reaches_a_client_that_sends_on(server: Running) -> None:
    with dial(server) as raw:
        raw.sendall(CHUNKED + b"-5\r\n" + bytes(4 << 20))
        assert statuses_of(read_to_end(raw)) == [b"400"]


def test_a_refused_request_whose_body_can_not_be_read_has_no_second_answer(
    server_with: Any,
) -> None:
    """A client would take that one for the answer to its next request."""
    with dial(server_with(api_key=("mine",))) as raw:
        raw.sendall(CHUNKED)
        assert next_answer(raw).split()[1] == b"401"
        raw.sendall(b"-5\r\n")
        assert read_to_end(raw) == b""


@pytest.mark.parametrize("body", [SHORT, STREAM], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("behind", "status"),
    [
        (GARBAGE, b"400"),
        (NEXT + CHUNKED + b"-5\r\n", b"400"),
        (NEXT + b"GET /health HTTP/1.1\r\n\r\n", b"400"),
        (NEXT + b"GET /?" + b"a&" * 5000 + b" HTTP/1.1\r\n", b"414"),
    ],
    ids=["garbage", "body", "no host", "target"],
)
def test_what_is_refused_waits_for_the_answers_before_it(
    slow: Running, body: bytes, behind: bytes, status: bytes
) -> None:
    """They were cut, or not sent at all."""
    answers = answer_to(slow, POST % len(body) + body + behind + b"x" * 100)
    expected = [b"200"] * (1 + behind.startswith(NEXT)) + [status]
    assert statuses_of(answers) == expected
    assert (b"data: [DONE]\n\n\r\n0\r\n\r\nHTTP/1.1 " in answers) == (body is STREAM)


def test_what_comes_behind_garbage_is_bounded(
    slow: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "MAX_DROPPED_BYTES", 1 << 20)
    long = json.dumps({"prompt": "x", "max_tokens": 20_000, "ignore_eos": True, "stream": True})
    with dial(slow) as raw:
        raw.sendall(POST % len(long) + long.encode() + GARBAGE)
        with pytest.raises(ConnectionError):
            raw.sendall(bytes(32 << 20))
    slow.wait_idle()


def test_trailers_are_no_headers(server_with: Any) -> None:
    """Those of a request that waited were taken for headers, its key included."""
    server = server_with(api_key=("mine",))
    whole = POST[:-2] % len(SHORT) + KEYED + SHORT
    body = b"%x;a=b\r\n%b\r\n0;c\r\n" % (len(SHORT), SHORT)
    keyless = CHUNKED + body + KEYED
    keyed = CHUNKED[:-2] + KEYED + body + b"Content-Encoding: gzip\r\n\r\n"
    last = START + b"Connection: close\r\n\r\n"
    answers = answer_to(server, whole + keyless + keyed + last)
    assert statuses_of(answers) == [b"200", b"401", b"200", b"200"]


@pytest.mark.parametrize(
    "value",
    [b"100-continue ", b" 100-CONTINUE\t", b"100-continue, 100-continue", b"a, 100-continue"],
)
def test_a_100_is_asked_for_in_each_way(server: Running, value: bytes) -> None:
    with dial(server) as raw:
        raw.sendall(EXPECT.replace(b" 100-continue", value) % len(SHORT))
        asked = b"HTTP/1.1 100 Continue\r\n\r\n"
        assert raw.recv(len(asked)) == asked
        raw.sendall(SHORT)
        assert next_answer(raw).split()[1] == b"200"


def test_connect_is_refused_at_once(server: Running) -> None:
    """Its head was parsed again and again, up to Python's depth: 0.2 s of the loop for 64 KB."""
    heads = b"".join(b"x-%d: %b\r\n" % (i, b"y" * 600) for i in range(90))
    answer = answer_to(
        server, b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n" + heads + b"\r\n"
    )
    assert statuses_of(answer) == [b"501"]


@pytest.mark.parametrize("before", [[], [b"200"]])
def test_a_target_that_is_none_is_refused(server: Running, before: list[bytes]) -> None:
    answers = answer_to(server, NEXT * len(before) + NEXT.replace(b"/health", b"http://[::1/"))
    assert statuses_of(answers) == [*before, b"400"]


@pytest.mark.parametrize(
    ("version", "status"), [(b" HTTP/0.9", b"400"), (b"", b"400"), (b" HTTP/2.0", b"505")]
)
def test_other_versions_are_refused(server: Running, version: bytes, status: bytes) -> None:
    """A line without one is a bad request, no fault of the server's."""
    answers = answer_to(server, NEXT + NEXT.replace(b" HTTP/1.1", version))
    assert statuses_of(answers) == [b"200", status]


def test_a_trailer_without_end_is_refused(server: Running) -> None:
    with dial(server) as raw:
        raw.sendall(CHUNKED + b"1\r\n{\r\n0\r\nx: ")
        with contextlib.suppress(ConnectionError):  # it may be closed before all is sent
            for _ in range(20):
                raw.sendall(b"y" * (protocol.MAX_HEAD_BYTES // 2))
        assert statuses_of(read_to_end(raw)) == [b"431"]
