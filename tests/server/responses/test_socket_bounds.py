"""Limits of one socket: bytes it holds, responses, events a second; and of a key: open sockets."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from streamer.config import Config
from streamer.server.responses import lanes
from streamer.server.responses import socket as websocket
from streamer.server.responses.socket import Session
from streamer.server.responses.socket_events import Pong
from streamer.server.transport.websocket import EVENT_BURST, EVENTS_PER_S, FrameBudget
from tests.server.responses.test_socket import (
    ENDLESS,
    FINAL,
    dial,
    receive,
    send,
    until,
    until_lane,
)
from tests.server.support.running import Running

LONG = "y" * (1 << 19)


@pytest.mark.parametrize(
    "event",
    [
        {"type": LONG},
        {"type": "response.cancel", "response_id": LONG},
        {"type": "response.cancel", "stream_id": LONG},
        {"type": "response.create", "input": "x", "model": LONG},
        {"type": "response.create", "input": "x", "include": [LONG]},
        {"type": "response.create", "input": [{"role": LONG, "content": "x"}]},
        {"type": "response.create", "input": "x", "logit_bias": {LONG: 1}},
    ],
)
def test_a_refusal_is_shorter_than_what_it_refuses(server: Running, event: dict[str, Any]) -> None:
    with dial(server) as socket:
        socket.send(json.dumps(event))
        answer = receive(socket)
    assert answer["type"] == "error"
    assert len(json.dumps(answer)) < 2000


def test_the_bytes_of_waiting_creates_are_bounded(server: Running) -> None:
    with dial(server) as socket:
        send(socket, "response.create", input="x", **ENDLESS, detach_s=0)
        until(socket, "response.output_text.delta")
        for _ in range(9):  # half a MiB each, in the same lane
            send(socket, "response.create", input=LONG, max_output_tokens=1, detach_s=0)
        error = until(socket, "error")[-1]
    assert error["status"] == 429
    assert str(4 << 20) in error["error"]["message"]
    server.wait_idle()


def test_finished_creates_no_longer_count(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MAX_QUEUED_BYTES", 5000)
    with dial(server) as socket:
        for _ in range(4):
            send(socket, "response.create", input="y" * 3000, max_output_tokens=1)
            assert until(socket, *FINAL, "error")[-1]["type"] != "error"
        send(socket, "response.create", input="x", model="not this one")
        assert receive(socket)["status"] == 404
        for _ in range(4):  # a refused request gives its bytes back too
            send(socket, "response.create", input="y" * 3000, max_output_tokens=1 << 24)
            assert receive(socket)["error"]["code"] == "context_length_exceeded"


def test_the_bytes_of_waiting_replies_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: Any) -> Any: ...

    service: Any = SimpleNamespace(config=Config(model="fake"))
    monkeypatch.setattr(websocket, "MAX_REPLY_BYTES", 1000)
    session = Session(service, {}, nothing, nothing)
    for _ in range(10):
        session._reply(Pong("x" * 60))
    assert not session._is_flooded
    session._reply(Pong("x" * 150))
    assert session._is_flooded


# ---------------------------------------------------------------- responses


def test_responses_that_have_not_ended_are_bounded(
    slow: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "MAX_RESPONSES", 3)
    with dial(slow, "streamer.v1.json") as socket:
        assert receive(socket)["limits"]["responses"] == websocket.MAX_RESPONSES == 320
        for lane in ("a", "a", "b"):  # one of them waits
            send(socket, "response.create", input="x", stream_id=lane, detach_s=0, **ENDLESS)
        send(socket, "response.create", input="x", stream_id="c")
        error = until(socket, "error")[-1]
        assert (error["status"], error["stream_id"]) == (429, "c")
        assert error["error"]["type"] == "rate_limit_error"
        assert "limit is 3" in error["error"]["message"]
        send(socket, "response.steer", previous_response_id="unknown", input="x")
        until(socket, "response.steer.failed")  # the socket is open
        created = until(socket, "response.output_text.delta")[-1]["item_id"]
        send(socket, "response.cancel", response_id=created.replace("msg_", "resp_"))
        until(socket, *FINAL)
        send(socket, "response.create", input="x", stream_id="d", max_output_tokens=1)
        assert "error" not in {e["type"] for e in until_lane(socket, "d")}
    slow.wait_idle()


def test_a_response_that_lost_its_reader_still_counts(
    server_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "MAX_RESPONSES", 1)
    server = server_with(pause_timeout=0.1)
    with dial(server, "streamer.v1.json") as socket:
        receive(socket)
        send(socket, "session.update", window=50)
        send(socket, "response.create", input="x", **ENDLESS)
        response_id = until(socket, "response.created")[-1]["response"]["id"]
        send(socket, "response.ack", response_id=response_id, sequence_number=3)
        assert until(socket, "error")[-1]["error"]["code"] == "reader_too_slow"
        send(socket, "response.create", input="x", max_output_tokens=1)
        assert until(socket, "error")[-1]["error"]["code"] == "rate_limit_exceeded"
        send(socket, "response.cancel", response_id=response_id)
        server.wait_idle()
        send(socket, "response.create", input="x", max_output_tokens=1)
        until(socket, *FINAL)


# ---------------------------------------------------------------- events a second


def test_a_budget_refills_evenly_and_saves_no_more_than_a_burst() -> None:
    budget = FrameBudget(100.0)
    assert all(budget.take(100.0) for _ in range(EVENT_BURST))
    assert not budget.take(100.0)
    budget = FrameBudget(0.0)
    for i in range(1, 5 * EVENT_BURST):  # at the rate, for ever
        assert budget.take(i / EVENTS_PER_S)
    now = 1e6
    assert sum(budget.take(now, is_event=False) for _ in range(EVENT_BURST)) * 10 == 10_000
    now = 2e6
    assert sum(budget.take(now, 1 << 20) for _ in range(100)) == EVENT_BURST // 257
    now = 3e6
    assert sum(budget.take(now) for _ in range(2 * EVENT_BURST)) == EVENT_BURST


def test_a_flood_of_good_events_is_cut_and_names_the_limit(server: Running) -> None:
    ack = json.dumps({"type": "response.ack", "response_id": "resp_x", "sequence_number": 1})
    with dial(server, "streamer.v1.json") as socket:
        limits = receive(socket)["limits"]
        with pytest.raises(ConnectionClosed) as caught:  # noqa: PT012
            while True:
                socket.send(ack)
    assert limits["events_per_s"] == EVENTS_PER_S
    assert limits["event_burst"] == EVENT_BURST
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 4429
    assert "2000 events a second" in caught.value.rcvd.reason


def test_a_burst_of_acks_after_a_silence_is_no_flood(server: Running) -> None:
    with dial(server, "streamer.v1.json") as socket:
        receive(socket)
        for i in range(EVENT_BURST - 10):
            send(socket, "response.ack", response_id="resp_x", sequence_number=i)
        send(socket, "session.ping", t=1)
        assert receive(socket) == {"type": "session.pong", "t": 1}


# ---------------------------------------------------------------- sockets of a key


def test_sockets_of_a_key_are_bounded_and_one_too_many_gets_retry_after(
    server_with: Any,
) -> None:
    keys = {"mine": {"authorization": "Bearer mine"}, "theirs": {"authorization": "Bearer theirs"}}
    server = server_with(
        api_key=("mine", "theirs"),
        max_sockets_per_key=2,
        key_limits={"theirs": {"max_sockets_per_key": 1}},
    )

    def dial_as(key: str) -> Any:
        return connect(
            server.ws_url, additional_headers=keys[key], subprotocols=["streamer.v1.json"]
        )

    def refusal(key: str) -> str | None:
        """Why a new socket is closed, if it is."""
        with dial_as(key) as socket:
            try:
                receive(socket)
            except ConnectionClosed as closed:
                return f"{closed.rcvd and closed.rcvd.code} {closed.rcvd and closed.rcvd.reason}"
        return None

    with dial_as("mine") as first, dial_as("theirs") as other:
        assert receive(first)["limits"]["sockets"] == 2
        assert receive(other)["limits"]["sockets"] == 1
        with dial_as("mine") as second:
            receive(second)
            full = "1013 the limit is {} open sockets, and as many are open"
            assert refusal("mine") == full.format(2)
            assert refusal("theirs") == full.format(1)
            send(first, "session.ping", t=1)  # an open socket stays open
            assert receive(first)["type"] == "session.pong"
        server.wait_until(lambda: refusal("mine") is None)


def test_without_a_limit_any_number_may_be_open(server: Running) -> None:
    sockets = [dial(server, "streamer.v1.json") for _ in range(40)]
    try:
        assert {receive(s)["limits"]["sockets"] for s in sockets} == {0}
    finally:
        for each in sockets:
            each.close()


def test_a_deadline_of_the_handshake_is_every_responses_own(server_with: Any) -> None:
    """Each has all of it, from the start of its turn: also one made when the first's is over."""
    server = server_with(model="fake:tokens_per_s=100")
    given = {"x-request-timeout": "0.5"}
    with connect(server.ws_url, additional_headers=given) as socket:
        for _ in range(2):  # the second waits for the lane
            send(socket, "response.create", input="x", max_output_tokens=5000, ignore_eos=True)
        for _ in range(2):
            events = until(socket, *FINAL, "error")
            assert events[-1]["type"] == "response.failed"
            assert "0.5 s" in events[-1]["response"]["error"]["message"]
            assert any(e["type"] == "response.output_text.delta" for e in events)
    with connect(server.ws_url, additional_headers={"x-request-timeout": "soon"}) as socket:
        send(socket, "response.create", input="x")
        assert receive(socket)["error"]["param"] == "x-request-timeout"
