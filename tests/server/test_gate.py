"""Gate: what a full queue refuses, in each API's form, before a byte of the body is read."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from streamer.server.gate import ANSWERING
from tests.server.support.counting import CHAT, ENDLESS, sse
from tests.server.support.running import Running

HEAD = "POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n"


@pytest.fixture(scope="module")
def full() -> Iterator[Running]:
    """A server whose only row is taken, and where nothing may wait."""
    server = Running(model="fake:tokens_per_s=50", max_num_seqs=1, max_queue=0).start()
    try:
        body = {**CHAT, **ENDLESS, "stream": True}
        with httpx.stream("POST", server.url + "/v1/chat/completions", json=body) as running:
            events = sse(running)
            next(events)
            server.wait_metric('streamer_requests{state="running"}', 1)
            yield server
    finally:
        server.stop()


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
    url = urlsplit(full.url)
    refused = 'streamer_requests_refused_total{code="server_overloaded"}'
    before = full.metric(refused)
    with socket.create_connection((url.hostname, url.port), 20) as connection:
        connection.sendall((HEAD % path).encode())
        status, head, body = answer(connection)
        assert status == (529 if path == "/v1/messages" else 503)
        assert re.search(rb"retry-after: [1-9]", head)
        assert b"connection: close" not in head
        if path.startswith("/api/"):
            assert "choices are waiting" in body["error"]
        else:
            assert "choices are waiting" in body["error"]["message"]
        connection.sendall(b"{    GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert answer(connection)[0] == 200
    assert full.metric(refused) == before + 1


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens", "/v1/tickets"])
def test_what_does_not_wait_in_the_queue_is_not_refused_for_it(full: Running, path: str) -> None:
    assert httpx.post(full.url + path, content=b"{").status_code == 400
