"""Answers of completions servers taken apart: chunks, events, times; no server."""

from __future__ import annotations

import socket

import msgspec
import pytest

from streamer.loadtest.compare.clients import Answer, Ask, Reads, Round, parse, run
from streamer.loadtest.sse import BadAnswer

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def event(text: str) -> bytes:
    return b'data: {"choices": [{"index": 0, "text": "%s"}], "usage": null}\n\n' % text.encode()


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 5}}\n\n'
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def test_a_plain_stream() -> None:
    reads = [(1.0, b""), (1.5, HEAD + b"\r\n" + event("a")), (2.0, event("b") + USAGE + DONE)]
    assert parse(reads) == Answer((0.5, 1.0), 5)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_chunks_cut_anywhere(size: int) -> None:
    whole = CHUNKED + chunk(event("a")) + chunk(event("b")[:9]) + chunk(event("b")[9:] + USAGE)
    whole += chunk(DONE) + b"0\r\n\r\n"
    pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
    reads: Reads = [(0.0, b""), *((1.0 + i, piece) for i, piece in enumerate(pieces))]
    answer = parse(reads)
    assert answer.tokens == 5
    ends = [whole.index(b"\n", whole.index(mark)) for mark in (b'"a"}', b'"b"}')]
    assert answer.at_s == tuple(1.0 + end // size for end in ends)


def test_events_without_text_are_no_first_token() -> None:
    reads = [(0.0, b""), (1.0, HEAD + b"\r\n" + event("")), (2.0, event("a")), (3.0, USAGE)]
    assert parse(reads).at_s == (2.0,)


def test_comments_numbers_and_blank_lines_are_skipped() -> None:
    data = b": ping\n\nid: 4\r\n" + event("a").replace(b"\n", b"\r\n") + USAGE
    assert parse([(0.0, b""), (1.0, HEAD + b"\r\n" + data)]) == Answer((1.0,), 5)


def test_a_whole_answer() -> None:
    body = b'{"choices": [{"text": "x"}], "usage": {"completion_tokens": 7}}'
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    assert parse([(0.0, b""), (3.0, head % len(body) + body)]) == Answer((3.0,), 7)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{}",
    ],
)
def test_errors_raise_bad_answer(data: bytes) -> None:
    with pytest.raises(BadAnswer):
        parse([(0.0, b""), (1.0, data)])


def test_a_server_that_sends_nothing_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError):
        run(silent.getsockname()[1], [[Ask("m", "text", 1)]], 0.05)


def test_first_tokens_and_gaps() -> None:
    measured = Round(2.0, (Answer((0.5, 0.75, 1.5), 3), Answer((0.25,), 1)))
    assert measured.tokens == 4
    assert measured.first_s == [0.5, 0.25]
    assert measured.gaps_s == [0.25, 0.75]


def test_a_request_on_the_wire() -> None:
    data = Ask("m", [1, 2], 3).bytes()
    head, body = data.split(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert b'"stream_options":{"include_usage":true}' in body
    plain = Ask("m", "text", 3, stream=False, ignore_eos=msgspec.UNSET).bytes()
    assert b"stream_options" not in plain
    assert b"ignore_eos" not in plain
