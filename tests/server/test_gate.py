"""Gate: what a full queue refuses, in each API's form, before a byte of the body is read."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest
from websockets.sync.client import connect

from streamer.server.gate import ANSWERING
from tests.server.support.counting import CHAT, ENDLESS, sse
from tests.server.support.running import Running

HEAD = "POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n"
PAGE = "https://chat.example"
REFUSED = 'streamer_requests_refused_total{code="server_overloaded"}'


@pytest.fixture(scope="module")
def full() -> Iterator[Running]:
    """A server whose only row is taken, and where nothing may wait."""
    limits = {"max_num_seqs": 1, "max_queue": 0, "allowed_origins": (PAGE,)}
    server = Running(model="fake:tokens_per_s=50", **limits).start()
    try:
        body = {**CHAT, **ENDLESS, "stream": True}
        with httpx.stream("POST", server.url + "/v1/chat/completions", json=body) as running:
            events = sse(running)
            next(events)
            server.wait_metric('streamer_requests{state="running"}', 1)
            yield server
    finally:
        server.stop()


def dial(server: Running) -> socket.socket:
    url = urlsplit(server.url)
    return socket.create_connection((url.hostname, url.port), 20)


def read_to_end(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def answer(connection: socket.socket) -> tuple[int, bytes, Any]:
    """Status, head and body of the next answer."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(1 << 16)
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    assert length is not None
    while len(body) < int(length[1]):
        body += connection.recv(1 << 16)
    return int(head.split()[1]), head, msgspec.json.decode(body)


@pytest.mark.parametrize("path", sorted(ANSWERING))
def test_a_full_queue_refuses_before_the_body_and_keeps_the_connection(
    full: Running, path: str
) -> None:
    before = full.metric(REFUSED)
    with dial(full) as connection:
        connection.sendall((HEAD % path).encode())
        status, head, body = answer(connection)
        assert status == (529 if path == "/v1/messages" else 503)
        assert re.search(rb"retry-after: [1-9]", head)
        assert re.search(rb"\r\nrequest-id: req_", head)
        assert b"connection: close" not in head
        if path.startswith("/api/"):
            assert "choices are waiting" in body["error"]
        else:
            assert "choices are waiting" in body["error"]["message"]
        connection.sendall(b"{    GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert answer(connection)[0] == 200
    assert full.metric(REFUSED) == before + 1


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens", "/v1/tickets"])
def test_what_does_not_wait_in_the_queue_is_not_refused_for_it(full: Running, path: str) -> None:
    assert httpx.post(full.url + path, content=b"{").status_code == 400


def test_refusals_and_answers_sent_ahead_come_in_order(full: Running) -> None:
    refused = (HEAD % "/v1/completions").encode() + b"{    "
    last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with dial(full) as connection:
        connection.sendall(refused + refused + last)
        statuses = re.findall(rb"HTTP/1.1 (\d+)", read_to_end(connection))
    assert statuses == [b"503", b"503", b"200"]


def test_nothing_behind_the_last_request_of_a_connection_counts(full: Running) -> None:
    before = full.metric(REFUSED)
    last = HEAD.replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n") % "/v1/completions"
    with dial(full) as connection:
        connection.sendall(2 * (last.encode() + b"{    "))
        assert read_to_end(connection).count(b"HTTP/1.1 503") == 1
    assert full.metric(REFUSED) == before + 1


def test_a_client_of_http_1_0_is_refused_and_closed(full: Running) -> None:
    head = (HEAD % "/v1/completions").replace("HTTP/1.1", "HTTP/1.0")
    with dial(full) as connection:
        connection.sendall(head.encode() + b"{    ")
        top, _, body = read_to_end(connection).partition(b"\r\n\r\n")
    assert b" 503 " in top
    assert b"retry-after: " in top
    assert msgspec.json.decode(body)["error"]["code"] == "server_overloaded"


def test_a_malformed_head_is_a_400_and_a_websocket_is_open_on_a_full_server(full: Running) -> None:
    with dial(full) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nno header\r\n\r\n")
        assert read_to_end(connection).startswith(b"HTTP/1.1 400")
    with connect(full.ws_url) as websocket:
        websocket.send('{"type":"response.create","input":"x","model":"fake"}')
        assert msgspec.json.decode(websocket.recv())["error"]["code"] == "server_overloaded"


def test_a_page_of_an_allowed_origin_can_read_a_refusal(full: Running) -> None:
    url = full.url + "/v1/chat/completions"
    asks = {"origin": PAGE, "access-control-request-method": "POST"}
    assert httpx.options(url, headers=asks).status_code == 204
    refusal = httpx.post(url, headers={"origin": PAGE}, json=CHAT)
    assert refusal.status_code == 503
    assert refusal.headers["access-control-allow-origin"] == PAGE
    assert "retry-after" in refusal.headers["access-control-expose-headers"]


def test_a_refusal_makes_no_task(full: Running) -> None:
    made: list[object] = []

    def make(loop: asyncio.AbstractEventLoop, work: Any, **settings: Any) -> Any:
        made.append(work)
        return asyncio.Task(work, loop=loop, **settings)

    async def count(is_on: bool) -> None:
        asyncio.get_running_loop().set_task_factory(make if is_on else None)

    full.on_loop(count(True))
    try:
        with httpx.Client(base_url=full.url) as client:
            client.get("/health")
            made.clear()
            assert client.post("/v1/completions", json=CHAT).status_code == 503
            assert made == []
            assert client.get("/health").status_code == 200
            assert len(made) == 1
    finally:
        full.on_loop(count(False))
