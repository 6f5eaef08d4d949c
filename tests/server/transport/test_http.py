"""Bounds on a request's head and trailers, on bare sockets; ordinary requests pass."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from streamer.server.transport import http as protocol
from streamer.server.transport import loop_turn
from streamer.server.transport.loop_turn import MAX_DROPPED_BYTES
from tests.server.support.running import Running

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


def answer_to(server: Running, request: bytes) -> bytes:
    """The whole answer to these bytes, to the connection's end."""
    with dial(server) as raw:
        raw.sendall(request)
        return read_to_end(raw)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (START + b"a: b\r\n" * 200 + b"\r\n", b"431"),
        (b"GET /?" + b"a&" * 5000 + b" HTTP/1.1\r\n", b"414"),
        (START + b"Host: evil.example\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\n\r\n", b"400"),
        (START + b"Transfer-Encoding: gzip, chunked\r\n\r\n", b"501"),
    ],
    ids=["headers", "target", "hosts", "no host", "coding"],
)
def test_many_headers_a_long_target_and_two_hosts_or_none_are_refused(
    server: Running, request_: bytes, status: bytes
) -> None:
    head, _, body = answer_to(server, request_).partition(b"\r\n\r\n")
    assert head.split()[1] == status
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("target", "host", "status"), [("evil", "localhost", b"403"), ("localhost", "evil", b"200")]
)
def test_the_host_of_an_absolute_target_is_the_requests(
    server: Running, target: str, host: str, status: bytes
) -> None:
    line = f"GET http://{target}/v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    assert answer_to(server, line.encode()).split()[1] == status


# ---------------------------------------------------------------- requests ahead


STREAM = json.dumps({"prompt": "x", "max_tokens": 20_000, "ignore_eos": True, "stream": True})
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\ncontent-length: %d\r\n\r\n"
STREAMED = POST % len(STREAM) + STREAM.encode()


def test_requests_sent_ahead_are_bounded(slow: Running) -> None:
    with dial(slow) as raw:
        raw.sendall(STREAMED + (START + b"\r\n") * (protocol.MAX_WAITING + 1))
        got = b""
        with contextlib.suppress(ConnectionError):
            got = read_to_end(raw)
    assert not got.endswith(b"0\r\n\r\n")  # no other request got an answer
    slow.wait_idle()


def test_an_answer_ends_with_its_client_although_a_request_waits_behind_it(slow: Running) -> None:
    with dial(slow) as raw:
        raw.sendall(STREAMED + START + b"\r\n")
        raw.recv(100)
        slow.wait_metric('streamer_requests{state="running"}', 1)
    slow.wait_idle()  # 20,000 tokens would take 50 s


REFUSED = b"GET /v1/models HTTP/1.%d\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n"


def test_refused_requests_sent_ahead_are_bounded_too(server_with: Any) -> None:
    """They would all be answered in one turn, in which no other stream gets anything."""
    server, count = server_with(api_key=("mine",)), protocol.MAX_WAITING + 2
    with dial(server) as raw:
        raw.sendall(REFUSED % 1 * count)
        got = b""
        while got.count(b"HTTP/1.1 401 ") < count:
            got += raw.recv(1 << 16)
        raw.sendall(REFUSED % 1 * (count + 1))
        with contextlib.suppress(ConnectionError):
            read_to_end(raw)


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"{"])
def test_a_connection_without_a_request_is_closed(
    server_with: Any, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    for name in ("IDLE_TIMEOUT_S", "BODY_TIMEOUT_S"):
        monkeypatch.setattr(protocol, name, 0.2)
    server = server_with(api_key=("mine",))
    with dial(server) as raw:
        raw.sendall(POST % 1 if sent == b"{" else REFUSED % 1)
        assert raw.recv(1 << 16).split()[1] == b"401"
        raw.sendall(sent)
        assert read_to_end(raw) == b""


def test_a_socket_outlives_the_time_of_an_idle_connection(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "IDLE_TIMEOUT_S", 0.1)
    with dial(server) as raw:
        raw.sendall(START + b"\r\n")
        assert raw.recv(1 << 16)
        raw.sendall(UPGRADE % (b"1.1", b"13") + b"\r\n")
        assert raw.recv(1 << 16).split()[1] == b"101"
        raw.settimeout(0.3)
        with pytest.raises(TimeoutError):
            raw.recv(1)


def test_a_body_behind_the_last_answer_is_not_waited_for(
    server_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "BODY_TIMEOUT_S", 0.2)
    old = START.replace(b"1.1", b"1.0") + b"Connection: keep-alive\r\n\r\n"
    answer = answer_to(server_with(), old + POST % 9 + b"{")
    assert answer.endswith(b'{"status":"alive"}')


def test_a_handshake_behind_the_last_answer_is_ignored(
    server_with: Any, caplog: pytest.LogCaptureFixture
) -> None:
    sent = REFUSED % 0 + UPGRADE % (b"1.1", b"13") + b"\r\n"
    assert answer_to(server_with(api_key=("mine",)), sent).count(b"HTTP/1.1 ") == 1
    assert "Fatal error" not in caplog.text


# ---------------------------------------------------------------- bodies


@pytest.mark.parametrize("key", ["mine", "unknown"])
def test_a_body_that_never_ends_is_cut(
    server_with: Any, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr(protocol, "BODY_TIMEOUT_S", 0.3)
    server = server_with(api_key=("mine",))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\ncontent-length: 1000\r\n"
    answer = answer_to(server, head + b"authorization: Bearer %s\r\n\r\n{" % key.encode())
    assert answer.split()[1] == (b"408" if key == "mine" else b"401")
    assert (b"request_timeout" in answer) == (key == "mine")


def test_an_answer_before_the_body_reaches_a_client_that_sends_all_of_it_first(
    server_with: Any,
) -> None:
    """A connection closed with data unread is reset, and what the client has not read is lost."""
    server = server_with(api_key=("mine",))
    size = 4 << 20
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nconnection: close\r\n"
    with dial(server) as raw:
        raw.sendall(head + b"content-length: %d\r\n\r\n" % size)
        raw.sendall(bytes(size))
        answer = read_to_end(raw)
    assert answer.split()[1] == b"401"
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"]


def test_a_body_that_never_ends_is_not_read_for_ever_after_the_answer(server: Running) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\ncontent-length: %d\r\n\r\n"
    with dial(server) as raw:
        raw.sendall(head % (1 << 40))
        with pytest.raises(ConnectionError):
            raw.sendall(bytes(4 * MAX_DROPPED_BYTES))


def test_a_slow_body_is_not_waited_for_after_the_answer(
    server_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "BODY_TIMEOUT_S", 0.3)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nconnection: close\r\n"
    answer = answer_to(server_with(api_key=("mine",)), head + b"content-length: 9\r\n\r\n{")
    assert answer.split()[1] == b"401"


def next_answer(raw: socket.socket) -> bytes:
    """The next answer, which has a length."""
    got = b""
    while b"\r\n\r\n" not in got:
        part = raw.recv(1 << 16)
        assert part, "the connection has ended"
        got += part
    head, _, body = got.partition(b"\r\n\r\n")
    (length,) = (int(line.split()[1]) for line in head.split(b"\r\n") if b"content-length" in line)
    while len(body) < length:
        body += raw.recv(1 << 16)
    return head + b"\r\n\r\n" + body


@pytest.mark.parametrize(
    "framing", [b"content-length: %d" % (1 << 40), b"transfer-encoding: chunked"]
)
def test_a_body_without_end_behind_a_refusal_ends_a_kept_connection(
    server_with: Any, framing: bytes
) -> None:
    """It was read for 60 s, whatever came: nothing bounded it but the peer's network."""
    with dial(server_with(api_key=("mine",))) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n%b\r\n\r\n" % framing)
        if b"chunked" in framing:
            raw.sendall(b"%x\r\n" % (1 << 40))
        refusal = next_answer(raw)
        assert refusal.split()[1] == b"401"
        assert b"connection: close" not in refusal
        with pytest.raises(ConnectionError):
            raw.sendall(bytes(4 * MAX_DROPPED_BYTES))


def test_whole_bodies_behind_refusals_keep_a_connection(
    server_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is one of each body, not of all that a connection sends."""
    monkeypatch.setattr(loop_turn, "MAX_DROPPED_BYTES", 1 << 20)
    size = 600_000
    with dial(server_with(api_key=("mine",))) as raw:
        for _ in range(3):
            raw.sendall(POST % size + bytes(size // 2))
            assert next_answer(raw).split()[1] == b"401"
            raw.sendall(bytes(size // 2))
        for _ in range(3):  # sent ahead, each with its body
            raw.sendall(POST % 9 + bytes(9))
        raw.sendall(START + b"\r\n")
        statuses = next_statuses(raw, 4)
    assert statuses == [b"401", b"401", b"401", b"200"]


def next_statuses(raw: socket.socket, count: int) -> list[bytes]:
    """The statuses of the next answers, which may come together."""
    got = b""
    while got.count(b"HTTP/1.1 ") < count or not got.endswith(b"}"):
        part = raw.recv(1 << 16)
        assert part, "the connection has ended"
        got += part
    return [part.split()[0] for part in got.split(b"HTTP/1.1 ")[1:]]


# ---------------------------------------------------------------- bodies that wait for a 100


EXPECT = POST.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n")
KEYED = b"Authorization: Bearer mine\r\n\r\n"
SHORT = b'{"prompt":"x","max_tokens":3,"ignore_eos":true}'


@pytest.mark.parametrize("before", [b"", START + KEYED])
@pytest.mark.parametrize("after", [b"", START + KEYED])
def test_a_refusal_instead_of_a_100_is_the_last_of_its_connection(
    server_with: Any, before: bytes, after: bytes
) -> None:
    """Its client may send no body (RFC 9110, 10.1.1), and what comes next would be taken for one.

    The time for a body, 60 s, is more than `read_to_end` waits.
    """
    sent = before + EXPECT % 1000 + after
    answers = answer_to(server_with(api_key=("mine",)), sent).split(b"HTTP/1.1 ")[1:]
    assert [answer.split()[0] for answer in answers] == [b"200"] * bool(before) + [b"401"]
    assert b"connection: close" in answers[-1]


def test_a_refusal_reaches_a_client_that_did_not_wait_for_the_100(server_with: Any) -> None:
    size = 4 << 20
    with dial(server_with(api_key=("mine",))) as raw:
        raw.sendall(EXPECT % size + bytes(size))
        answer = read_to_end(raw)
    assert answer.split()[1] == b"401"
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"]


def test_a_body_that_came_before_its_refusal_keeps_the_connection(server_with: Any) -> None:
    server = server_with(api_key=("mine",), model="fake:tokens_per_s=100")
    fields = {"prompt": "x", "max_tokens": 20, "ignore_eos": True, "stream": True}
    body = json.dumps(fields).encode()
    first = POST[:-2] % len(body) + KEYED + body
    last = START + b"Connection: close\r\n\r\n"
    answer = answer_to(server, first + EXPECT % 9 + b"123456789" + last)
    statuses = [part.split()[0] for part in answer.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", b"401", b"200"]


def test_a_body_that_is_wanted_is_asked_for(server: Running) -> None:
    with dial(server) as raw:
        for _ in range(2):
            raw.sendall(EXPECT % len(SHORT))
            asked = b"HTTP/1.1 100 Continue\r\n\r\n"
            assert raw.recv(len(asked)) == asked
            raw.sendall(SHORT)
            assert next_answer(raw).endswith(b"}")


def test_an_old_client_is_not_asked_for_its_body(server: Running) -> None:
    old = EXPECT.replace(b"HTTP/1.1", b"HTTP/1.0") % len(SHORT)
    assert answer_to(server, old + SHORT).startswith(b"HTTP/1.1 200 ")


# ---------------------------------------------------------------- connections


def test_connections_of_an_address_are_bounded(server_with: Any) -> None:
    server = server_with(max_connections_per_address=3)
    with contextlib.ExitStack() as stack:
        first, *_ = [stack.enter_context(dial(server)) for _ in range(3)]
        with dial(server) as raw:
            answer = read_to_end(raw)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"your address" in answer
        assert b"\r\nretry-after: 1\r\n" in answer
        first.sendall(START + b"\r\n")  # an accepted connection stays
        assert first.recv(100).startswith(b"HTTP/1.1 200 ")
        first.close()
        server.wait_until(lambda: True)  # there is room again


@pytest.mark.parametrize(
    ("files", "expected"), [(1024, 1024 - 64), (1 << 20, 16_384), (-1, 16_384), (10, 1)]
)
def test_total_connections_leave_some_file_descriptors(
    monkeypatch: pytest.MonkeyPatch, files: int, expected: int
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (files, files))
    assert protocol.limited(0).max_connections == expected


def test_total_connections_are_bounded(server_with: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "connection_limit", lambda: 2)
    server = server_with()
    with dial(server) as first, dial(server) as second:
        for raw in (first, second):
            raw.sendall(START + b"\r\n")
            assert raw.recv(100).startswith(b"HTTP/1.1 200 ")
        with dial(server) as raw:
            assert b"all clients have too many" in read_to_end(raw)


def test_a_network_of_ipv6_is_one_client_and_a_unix_socket_none() -> None:
    addresses = protocol.Addresses(1)
    leave = addresses.enter(("2001:db8:0:1::5", 1, 0, 0))
    assert leave is not None
    assert addresses.enter(("2001:db8:0:1::6", 2, 0, 0)) is None
    assert addresses.enter(("2001:db8:0:2::5", 3, 0, 0)) is not None
    assert all(addresses.enter("") is not None for _ in range(5))
    leave()
    assert addresses.enter(("2001:db8:0:1::6%eth0", 4, 0, 0)) is not None


# ---------------------------------------------------------------- HTTP/1.0


def test_an_old_client_gets_no_chunks(server: Running) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 3, "ignore_eos": True, "stream": True})
    head = b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\nHost: localhost\r\n\r\n"
    answer = answer_to(server, head % len(body) + body.encode())
    head, _, events = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert events.startswith(b"data: {")
    assert events.endswith(b"data: [DONE]\n\n")
    whole = answer_to(server, b"GET /health HTTP/1.0\r\n\r\n")
    assert b"content-length: 18" in whole
    assert whole.endswith(b'{"status":"alive"}')


UPGRADE = (
    b"GET /v1/responses HTTP/%s\r\nHost: localhost\r\nConnection: Upgrade\r\n"
    b"Upgrade: websocket\r\nSec-WebSocket-Version: %s\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


def test_an_old_client_is_not_upgraded(server: Running) -> None:
    assert answer_to(server, UPGRADE % (b"1.0", b"13") + b"\r\n").split()[1] == b"405"


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_the_body_of_a_request_that_offers_http_2_is_read(
    server: Running, size: int, is_chunked: bool
) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 3, "ignore_eos": True}).encode()
    framing = b"content-length: %d" % len(body)
    if is_chunked:
        framing, body = b"transfer-encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    request = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: %b\r\n"
    offer = b"Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk"
    sent = request % offer + framing + b"\r\n\r\n" + body
    sent += request % (b"close, " + offer) + framing + b"\r\n\r\n" + body
    with dial(server) as raw:
        for i in range(0, len(sent), size):
            raw.sendall(sent[i : i + size])
        answer = read_to_end(raw)
    assert answer.count(b"HTTP/1.1 200 OK") == answer.count(b'"text":" 1 2 3"') == 2


def test_a_socket_is_not_opened_over_an_answer(slow: Running) -> None:
    with dial(slow) as raw:
        raw.sendall(STREAMED + UPGRADE % (b"1.1", b"13") + b"\r\n")
        got = b"".join(raw.recv(1 << 16) for _ in range(20))
    assert b" 101 " not in got
    slow.wait_idle()


def test_another_websocket_version_is_answered_with_the_supported_one(server: Running) -> None:
    head = answer_to(server, UPGRADE % (b"1.1", b"8") + b"\r\n").lower().split(b"\r\n")
    assert head[0].split()[1] == b"426"
    assert b"sec-websocket-version: 13" in head


def test_a_subprotocol_that_is_no_ascii_is_refused_and_its_ticket_not_logged(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    head = UPGRADE % (b"1.1", b"13") + b"Sec-WebSocket-Protocol: streamer.ticket.secret\xe9\r\n\r\n"
    assert answer_to(server, head).split()[1] == b"400"
    assert "secret" not in caplog.text


def test_a_handshake_with_a_header_too_long_for_websockets_is_answered(server: Running) -> None:
    head = UPGRADE % (b"1.1", b"13") + b"x-long: %s\r\n\r\n" % (b"y" * 10_000)
    assert answer_to(server, head).split()[1] == b"431"


@pytest.mark.parametrize(("length", "status"), [(0, b"101"), (5, b"400")])
def test_a_handshake_may_say_that_it_has_no_body(
    server: Running, length: int, status: bytes
) -> None:
    """As Java's client does."""
    head = UPGRADE % (b"1.1", b"13") + b"Content-Length: %d\r\n\r\n" % length
    with dial(server) as raw:
        raw.sendall(head)
        assert raw.recv(1 << 16).split()[1] == status


def test_a_whole_head_over_the_limit_is_refused_and_one_below_passes(server: Running) -> None:
    url = server.url + "/health"
    assert httpx.get(url, headers={"x-long": "y" * (LIMIT - 4096)}).status_code == 200
    assert httpx.get(url, headers={"x-long": "y" * (LIMIT - 60)}).status_code == 431


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


@pytest.mark.parametrize("is_future", [True, False])
async def test_an_application_that_waits_becomes_a_task(is_future: bool) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    future: asyncio.Future[int] = loop.create_future()
    tasks: list[object] = []

    async def app() -> None:
        tasks.append(asyncio.current_task())
        assert (await future if is_future else await asyncio.sleep(0, 5)) == 5
        tasks.append(asyncio.current_task())
        ended.set()

    handler = protocol.LimitedHttpProtocol.__new__(protocol.LimitedHttpProtocol)
    handler.loop, handler.tasks, handler._has_begun = loop, set(), False
    cycle: Any = SimpleNamespace(
        scope={"http_version": "1.1", "extensions": {}},
        waiting_for_100_continue=False,
        run_asgi=lambda _: app(),
    )
    loop.call_soon(handler._start_asgi_task, cycle, None)
    loop.call_soon(loop.call_soon, future.set_result, 5)
    async with asyncio.timeout(5.0):
        await ended.wait()
    assert tasks[0] is None
    assert tasks[1] is not None
