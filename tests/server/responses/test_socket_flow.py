"""Sockets: acks, lagging readers, session settings, MessagePack, and the goaway of a drain."""

from __future__ import annotations

import json
import re
import socket as socketlib
import struct
from typing import Any

import httpx
import msgspec
import pytest
from websockets.sync.client import ClientConnection

from tests.server.responses.test_resume import check_response
from tests.server.responses.test_socket import FINAL, dial, receive, send, until
from tests.server.responses.test_socket_resume import (
    JSON,
    MSGPACK,
    ask,
    numbered,
    socket,
)
from tests.server.support.counting import Event, check_counting
from tests.server.support.cutting import dechunk, follow
from tests.server.support.greedy import story, telling
from tests.server.support.running import DEADLINE_S, Running

__all__ = ["socket"]  # the fixture


# ---------------------------------------------------------------- flow control


def test_acks_hold_a_response_back_and_let_it_go(slow: Running, server: Running) -> None:
    with dial(server, JSON) as socket:
        receive(socket)
        send(socket, "session.update", window=100)
        ask(socket, 2000, stream_id="a")
        events = until(socket, "response.created")
        response_id = events[-1]["response"]["id"]
        send(socket, "response.ack", response_id=response_id, sequence_number=3)
        events += until(socket, "response.paused")
        assert server.metric('streamer_requests{state="paused"}') == 1
        while events[-1]["type"] not in FINAL:
            number = events[-1].get("sequence_number", 0)
            for _ in range(2):  # repeated and older acks are harmless
                send(socket, "response.ack", response_id=response_id, sequence_number=number)
            send(socket, "response.ack", response_id=response_id, sequence_number=5)
            send(socket, "response.ack", response_id="resp_nobody", sequence_number=5)
            events.append(receive(socket))
    check_paused(events)
    check_response([e for e in numbered(events) if e.kind not in PAUSES], 2000)


def test_bundled_acks_hold_the_story_back_and_it_is_whole(bundled: Running) -> None:
    expected = story(bundled, 150)
    with dial(bundled, JSON) as socket:
        receive(socket)
        send(socket, "session.update", window=20)
        send(socket, "response.create", **telling(150))
        events = until(socket, "response.created")
        response_id = events[-1]["response"]["id"]
        send(socket, "response.ack", response_id=response_id, sequence_number=3)
        events += until(socket, "response.paused")
        assert bundled.metric('streamer_requests{state="paused"}') == 1
        while events[-1]["type"] not in FINAL:
            number = events[-1]["sequence_number"]
            send(socket, "response.ack", response_id=response_id, sequence_number=number)
            events.append(receive(socket))
    assert "".join(e.get("delta", "") for e in events) == expected
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == expected


def test_tokens_without_an_event_count_as_consumed_after_the_newest_ack(server_with: Any) -> None:
    answer = f"Say {'a' * 80} and go on"  # the middle is held back: it may become the stop string
    server = server_with(script=[{"answer": answer}], pause_timeout=3.0)
    with dial(server, JSON) as socket:
        receive(socket)
        send(socket, "session.update", window=16)
        send(socket, "response.create", input="Say", max_output_tokens=200, stop=["a" * 90])
        events = until(socket, "response.created")
        response_id = events[-1]["response"]["id"]
        while events[-1]["type"] not in (*FINAL, "error"):
            events.append(receive(socket))
            if events[-1]["type"] == "response.output_text.delta":
                number = events[-1]["sequence_number"]
                send(socket, "response.ack", response_id=response_id, sequence_number=number)
    assert events[-1]["type"] == "response.completed", events[-1]
    assert "".join(e.get("delta", "") for e in events) == answer


PAUSES = ("response.paused", "response.preempted")


def check_paused(events: list[dict[str, Any]]) -> None:
    assert sum(e["type"] == "response.paused" for e in events) >= 1


def test_a_reader_that_lags_too_long_is_disconnected_and_may_resume(server_with: Any) -> None:
    server = server_with(pause_timeout=0.2)
    with dial(server, JSON) as socket:
        receive(socket)
        send(socket, "session.update", window=50, detach_s=0)
        ask(socket, 400, stream_id="a")
        events = until(socket, "response.created")
        response_id = events[-1]["response"]["id"]
        send(socket, "response.ack", response_id=response_id, sequence_number=3)
        events += until(socket, "error")
        error = events.pop()
        assert (error["error"]["code"], error["stream_id"]) == ("reader_too_slow", "a")
        stream = server.engine.get(response_id)
        assert stream is not None
        assert (stream.num_readers, stream.is_paused, stream.is_finished) == (0, True, False)
        last = max(e["sequence_number"] for e in events)
        send(socket, "response.resume", response_id=response_id, starting_after=last)
        events += until(socket, *FINAL)
    check_response([e for e in numbered(events) if e.kind not in PAUSES], 400)


def test_after_the_detach_timeout_the_response_is_cancelled(server_with: Any) -> None:
    server = server_with(pause_timeout=0.1, detach_timeout=0.1)
    with dial(server, JSON) as socket:
        receive(socket)
        send(socket, "session.update", window=50)
        ask(socket, 30_000)
        response_id = until(socket, "response.created")[-1]["response"]["id"]
        send(socket, "response.ack", response_id=response_id, sequence_number=3)
        until(socket, "error")
        server.wait_idle()
    answer = httpx.get(server.url + f"/v1/responses/{response_id}").json()
    assert answer["status"] == "cancelled"


def narrow(server: Running) -> socketlib.socket:
    """A bare connection with a receive buffer of 4096 bytes."""
    host, port = server.url.removeprefix("http://").split(":")
    raw = socketlib.socket()
    raw.setsockopt(socketlib.SOL_SOCKET, socketlib.SO_RCVBUF, 4096)
    raw.settimeout(20)
    raw.connect((host, int(port)))
    return raw


def first_bytes(raw: socketlib.socket) -> tuple[bytes, str]:
    """The bytes up to the first id of an answer, and that id."""
    got = b""
    while (found := re.search(rb'"id":"((?:resp_|chatcmpl-)\w+)"', got)) is None:
        part = raw.recv(512)
        assert part, got
        got += part
    return got, found[1].decode()


def begin(raw: socketlib.socket, path: str, body: dict[str, Any]) -> tuple[bytes, str]:
    """Send a request on it; the bytes up to its id, and that id."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    raw.sendall(head.encode() + data)
    return first_bytes(raw)


def begin_socket(raw: socketlib.socket, body: dict[str, Any]) -> tuple[bytes, str]:
    """Send a handshake and a create on it; the bytes up to its id, and that id."""
    raw.sendall(
        b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
        b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    while b"\r\n\r\n" not in raw.recv(4096, socketlib.MSG_PEEK):
        pass
    data = json.dumps({"type": "response.create", **body}).encode()
    head = struct.pack("!BBHI", 0x81, 0x80 | 126, len(data), 0)  # text, masked with zeros
    raw.sendall(head + data)
    return first_bytes(raw)


def texts(events: list[Event]) -> str:
    """Joined text of responses' or chat's events."""
    bodies = [e.json for e in events if not e.is_done]
    chat = [c["delta"].get("content", "") for b in bodies for c in b.get("choices", ())]
    return "".join([*chat, *(b["delta"] for b in bodies if "delta" in b)])


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
def test_a_stuck_connection_is_aborted_and_its_stream_resumed(server_with: Any, path: str) -> None:
    """The client reads nothing: its connection is dropped, its answer waits, paused."""
    server = server_with(pause_timeout=0.3)
    message = {"input": "x", "messages": [{"role": "user", "content": "x"}]}
    body = {**message, "stream": True, "max_tokens": 6000, "max_output_tokens": 6000}
    body |= {"ignore_eos": True, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    if path == "/v1/chat/completions":
        body["stream_options"] = {"include_event_ids": True}
    with narrow(server) as raw:
        got, request_id = begin(raw, path, body)
        stream = server.engine.get(request_id)
        assert stream is not None
        server.wait_metric('streamer_requests{state="paused"}', 1)
        server.wait_until(lambda: stream.num_readers == 0)
        while part := raw.recv(1 << 16):
            got += part
    assert (stream.is_paused, stream.is_finished) == (True, False)
    assert not got.endswith(b"0\r\n\r\n")
    blocks = dechunk(got.partition(b"\r\n\r\n")[2]).decode().split("\n\n")[:-1]
    events = [Event(block.split("\n")) for block in blocks]
    resume = f"{path}/{stream.request_id}?stream=true&starting_after={events[-1].id}"
    assert check_counting(texts(events + follow(server, resume)))[-1] == 6000


def test_a_stuck_socket_is_aborted_and_its_responses_wait(server_with: Any) -> None:
    server = server_with(pause_timeout=0.3)
    body = {"input": "x", "max_output_tokens": 6000, "ignore_eos": True, "top_logprobs": 1}
    with narrow(server) as raw:
        _, request_id = begin_socket(raw, {**body, "return_token_ids": True})
        stream = server.engine.get(request_id)
        assert stream is not None
        server.wait_metric('streamer_requests{state="paused"}', 1)
        server.wait_until(lambda: stream.num_readers == 0)
        while raw.recv(1 << 16):
            pass
    assert (stream.is_paused, stream.is_finished) == (True, False)
    events = follow(server, f"/v1/responses/{stream.request_id}?stream=true&starting_after=3")
    assert check_counting(texts(events))[-1] == 6000


# ---------------------------------------------------------------- settings, MessagePack, drain


def test_include_filters_what_the_body_requested(socket: ClientConnection) -> None:
    options: dict[str, Any] = {"top_logprobs": 1, "return_token_ids": True}
    seen = []
    for include in (["logprobs", "token_ids"], ["token_ids"], ["logprobs"], []):
        send(socket, "session.update", include=include)
        ask(socket, 4, **options)
        events = until(socket, *FINAL)
        deltas = [e for e in events if e["type"] == "response.output_text.delta"]
        (part,) = events[-1]["response"]["output"][0]["content"]
        assert bool(part["logprobs"]) is bool(deltas[0]["logprobs"])
        assert ("prompt_token_ids" in events[0]) is ("token_ids" in deltas[0])
        seen.append((bool(part["logprobs"]), "token_ids" in deltas[0]))
    assert seen == [(True, True), (False, True), (True, False), (False, False)]


def test_detach_s_of_the_session(slow: Running) -> None:
    with dial(slow, JSON) as socket:
        receive(socket)
        send(socket, "session.update", detach_s=0)
        ask(socket, 30_000)
        until(socket, "response.output_text.delta")
    slow.wait_idle()


def transcript(server: Running, protocol: str) -> list[Any]:
    """A session's answers to the same events, without what differs between any two sessions."""
    is_packed = protocol == MSGPACK
    encode: Any = msgspec.msgpack.encode if is_packed else lambda e: json.dumps(e)
    decode: Any = msgspec.msgpack.decode if is_packed else json.loads
    out: list[Any] = []
    with dial(server, protocol) as socket:
        assert socket.subprotocol == protocol

        def put(kind: str, **fields: Any) -> None:
            socket.send(encode({"type": kind, **fields}))

        def take(*kinds: str) -> None:
            while True:
                data = socket.recv(timeout=20)
                assert isinstance(data, bytes) is is_packed
                out.append(decode(data))
                if out[-1]["type"] in kinds:
                    return

        take("session.created")
        put("session.ping", t=1.5)
        take("session.pong")
        body: dict[str, Any] = {"input": "é😀", "max_output_tokens": 9, "seed": 3, "stream_id": "a"}
        body |= {"top_logprobs": 1, "return_token_ids": True, "metadata": {"k": "ü"}}
        put("response.create", **body)
        take(*FINAL)
        put("response.resume", response_id=out[-1]["response"]["id"], starting_after=7)
        take(*FINAL)
        put("response.create", **{**body, "temperature": 9})
        take("error")
        put("nothing.like.this")
        take("error")
    return [plain(e) for e in out if e["type"] not in ("response.running", "response.prefill")]


def plain(event: Any) -> Any:
    """An event without ids and times."""
    volatile = ("id", "item_id", "response_id", "session_id", "created_at", "completed_at")
    if isinstance(event, dict):
        hidden = (*volatile, "timing", "usage", "input_tokens_details")
        return {k: plain(v) for k, v in event.items() if k not in hidden}
    return [plain(v) for v in event] if isinstance(event, list) else event


def joined(events: list[Any]) -> list[Any]:
    """Neighbouring deltas merged into one."""
    out: list[Any] = []
    for e in events:
        if out and e["type"] == out[-1]["type"] == "response.output_text.delta":
            last = out.pop()
            e = {**e, **{k: last[k] + e[k] for k in ("delta", "logprobs", "token_ids")}}
        out.append(e)
    return out


@pytest.mark.parametrize("model", ["slow", "bundled"])
def test_messagepack_and_json_give_the_same_transcript(
    request: pytest.FixtureRequest, model: str
) -> None:
    server = request.getfixturevalue(model)
    first, second = (joined(transcript(server, p)) for p in (JSON, MSGPACK))
    assert len(first) > 15
    assert first == second


@pytest.mark.parametrize("message", ["text", b"\xc1", b"\x92", b"", b"\x91" * 5000])
def test_invalid_messagepack_is_answered_with_an_error(slow: Running, message: str | bytes) -> None:
    with dial(slow, MSGPACK) as socket:
        socket.recv(timeout=20)
        socket.send(message)
        assert packed(socket)["error"]["code"] == "invalid_event"
        socket.send(msgspec.msgpack.encode({"type": "session.ping", "t": 1}))
        assert packed(socket) == {"type": "session.pong", "t": 1}


def packed(socket: ClientConnection) -> Any:
    return msgspec.msgpack.decode(socket.recv(timeout=20))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": float("inf")}, "top_p"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty"),
        ({"min_p": float("nan")}, "min_p"),
        ({"detach_s": float("nan")}, "detach_s"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias.5"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"seed": b"x"}, "seed"),
        ({"tools": [[]] * 5000}, "tools[0]"),
        ({"input": [[]] * 5000}, "input[0]"),
    ],
)
def test_what_only_messagepack_can_say_is_refused_by_name(
    slow: Running, fields: dict[str, Any], param: str
) -> None:
    with dial(slow, MSGPACK) as socket:
        socket.recv(timeout=20)
        body = {"type": "response.create", "input": "x", "max_output_tokens": 1, **fields}
        socket.send(msgspec.msgpack.encode(body))
        answer = packed(socket)
    assert (answer["type"], answer["error"]["param"]) == ("error", param)


@pytest.mark.parametrize(
    ("event", "param", "code"),
    [
        ({"type": "response.create", "input": 5}, "input", "invalid_type"),
        (  # was an internal error
            {
                "type": "response.create",
                "input": "x",
                "tools": [
                    {"type": "function", "name": "f", "parameters": {"properties": {None: 1}}}
                ],
            },
            "tools",
            "invalid_type",
        ),
        (
            {"type": "response.create", "input": "x", "metadata": {b"a": "b"}},
            "metadata",
            "invalid_type",
        ),
        ({"type": "response.ack", "response_id": "resp_1"}, "sequence_number", "missing_field"),
        ({"window": "wide", "type": "session.update"}, "window", "invalid_type"),
        ({"type": "response.sing"}, "type", "unknown_event"),
    ],
)
def test_an_event_at_fault_is_answered_on_its_lane_in_messagepack(
    slow: Running, event: dict[str, Any], param: str, code: str
) -> None:
    with dial(slow, MSGPACK) as socket:
        socket.recv(timeout=20)
        socket.send(msgspec.msgpack.encode({**event, "stream_id": "left"}))
        answer = packed(socket)
    error = answer["error"]
    assert (answer["stream_id"], error["param"], error["code"]) == ("left", param, code)


def test_a_steer_whose_input_is_no_text_is_refused(slow: Running) -> None:
    """It was an internal error: with the event around it, the input is only skipped."""
    with dial(slow, MSGPACK) as socket:
        socket.recv(timeout=20)
        event = {"type": "response.steer", "previous_response_id": "resp_1", "input": "abc"}
        socket.send(msgspec.msgpack.encode(event).replace(b"abc", b"a\x87c"))
        error = packed(socket)["error"]
    assert (error["param"], error["code"]) == ("input", "invalid_event")


@pytest.mark.parametrize("token", [7, "7"])
def test_token_ids_of_a_bias_are_numbers_or_text_in_messagepack(slow: Running, token: Any) -> None:
    with dial(slow, MSGPACK) as socket:
        socket.recv(timeout=20)
        body = {"type": "response.create", "input": "x", "max_output_tokens": 1}
        socket.send(msgspec.msgpack.encode({**body, "logit_bias": {token: 1.0}}))
        while (event := packed(socket))["type"] not in (*FINAL, "error"):
            pass
    assert event["type"] != "error"


def test_a_drain_says_goaway_and_lets_streams_finish(server_with: Any) -> None:
    server = server_with(model="fake:tokens_per_s=400", drain_timeout=DEADLINE_S)
    with dial(server, JSON) as socket, dial(server) as standard:
        receive(socket)
        ask(socket, 200)
        send(standard, "response.create", input="x", max_output_tokens=200, ignore_eos=True)
        events = until(socket, "response.output_text.delta")
        server.begin_stop()
        events += until(socket, "session.goaway")
        assert events.pop() == {"type": "session.goaway", "deadline_ms": 1000 * DEADLINE_S}
        ask(socket, 5, stream_id="late")
        assert until_error(socket, events)["code"] == "draining"
        events += until(socket, *FINAL)
        assert "session.goaway" not in {e["type"] for e in until(standard, *FINAL)}
    check_response(numbered(events), 200)


def until_error(socket: ClientConnection, events: list[dict[str, Any]]) -> Any:
    while (event := receive(socket))["type"] != "error":
        events.append(event)
    return event["error"]
