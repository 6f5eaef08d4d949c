"""Streamed answers of any server, read from bytes: complete ones and broken ones; no server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from streamer.loadtest.replies import read_reply
from streamer.loadtest.sse import BadAnswer, Read
from streamer.loadtest.target import Target

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
END = b'data: {"choices": [{"delta": {}, "finish_reason": "length"}]}\n\n'
USAGE = (
    b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2, '
    b'"prompt_tokens_details": {"cached_tokens": 8}}}\n\n'
)


def chat(text: str) -> bytes:
    return b'data: {"choices": [{"delta": {"content": "%s"}}]}\n\n' % text.encode()


def reads(*parts: bytes) -> Iterator[Read]:
    return ((float(i), part) for i, part in enumerate(parts))


def test_a_chat_with_usage() -> None:
    seen: list[float] = []
    thought = b'data: {"choices": [{"delta": {"reasoning_content": "b"}}]}\n\n'
    reply = read_reply(reads(HEAD, chat("a"), thought, END + USAGE), seen.append)
    assert (reply.text, reply.text_at, reply.ended_at) == ("ab", seen, 3.0)
    assert seen == [1.0, 2.0]
    assert (reply.num_tokens, reply.num_prompt_tokens, reply.num_cached_tokens) == (2, 9, 8)


def test_text_is_reported_before_more_is_read() -> None:
    seen: list[float] = []

    def live() -> Iterator[Read]:
        yield 0.0, HEAD + chat("a")
        assert seen == [0.0]
        yield 1.0, END

    assert read_reply(live(), seen.append).usage is None


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([HEAD, chat("a")], "without a finish_reason"),
        ([HEAD, chat("a"), b'data: {"error": {"message": "no room"}}\n\n'], "no room"),
        ([HEAD, b"data: {\n\n"], "truncated"),
        ([b"HTTP/1.1 503 Service Unavailable\r\n\r\n{busy}"], "503: {busy}"),
        ([b"hello"], "no HTTP answer"),
        ([], "unanswered"),
    ],
)
def test_malformed_replies_raise_bad_answer(parts: list[bytes], says: str) -> None:
    with pytest.raises(BadAnswer, match=says):
        read_reply(reads(*parts))


@pytest.mark.parametrize(
    ("url", "origin", "socket"),
    [
        ("http://a:8000", "a:8000", "ws://a:8000/v1/responses"),
        ("http://a/v1/", "a:80", "ws://a:80/v1/responses"),
        ("https://a/x/v1", "a:443", "wss://a:443/x/v1/responses"),
        ("http://[::1]:1", "[::1]:1", "ws://[::1]:1/v1/responses"),
    ],
)
def test_where_a_server_is(url: str, origin: str, socket: str) -> None:
    target = Target.of(url, "secret")
    assert (target.origin, target.socket_url) == (origin, socket)
    head, _, body = target.request("POST", "/v1/x", {"a": 1}).partition(b"\r\n\r\n")
    assert body == b'{"a":1}'
    assert b"\r\nHost: " + origin.encode() + b"\r\n" in head
    assert b"\r\nAuthorization: Bearer secret" in head
    assert b"Content-Length: 7" in head


@pytest.mark.parametrize("url", ["", "a:8000", "ftp://a", "http://"])
def test_no_url(url: str) -> None:
    with pytest.raises(ValueError, match="is not an http"):
        Target.of(url)
