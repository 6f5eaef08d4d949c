"""Our subprotocol streamer.v1.json: sessions, cancel, ping, refusals, close codes, detaching."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from streamer.server.responses.lanes import Lanes
from streamer.server.transport import websocket
from tests.server.support.counting import check_counting
from tests.server.support.greedy import NAME, story, telling
from tests.server.support.running import Running

PROPOSED = {"proposed_tokens": 0, "accepted_tokens": 0}
FINAL = ("response.completed", "response.incomplete", "response.failed")
ENDLESS = {"max_output_tokens": 30_000, "ignore_eos": True}


def dial(server: Running, *protocols: str) -> ClientConnection:
    offered = [Subprotocol(p) for p in protocols] or None
    # max_queue: close() would wait for a reader of what piled up here
    return connect(server.ws_url, subprotocols=offered, max_size=None, max_queue=None)


def send(socket: ClientConnection, kind: str, **fields: Any) -> None:
    socket.send(json.dumps({"type": kind, **fields}))


def receive(socket: ClientConnection) -> dict[str, Any]:
    event = json.loads(socket.recv(timeout=20))
    assert isinstance(event, dict)
    return event


def until(socket: ClientConnection, *kinds: str) -> list[dict[str, Any]]:
    """Every event up to the first of one of these kinds."""
    events = [receive(socket)]
    while events[-1]["type"] not in kinds:
        events.append(receive(socket))
    return events


@pytest.fixture
def extended(server: Running) -> Iterator[ClientConnection]:
    with dial(server, "streamer.v1.json") as socket:
        assert receive(socket)["type"] == "session.created"
        yield socket


def test_session_created_comes_first_and_only_to_our_clients(server: Running) -> None:
    with dial(server, "other", "streamer.v1.json") as ours:
        assert ours.subprotocol == "streamer.v1.json"
        session = receive(ours)
    assert session["type"] == "session.created"
    assert session["model"] == "fake"
    assert session["context_length"] == server.engine.info.max_model_len
    assert session["window"] == server.config.stream_window
    assert session["limits"]["message_bytes"] == 1 << 20
    with dial(server, "streamer.v1.json") as again:
        assert receive(again)["epoch"] == session["epoch"]
    with dial(server, "other") as standard:
        assert standard.subprotocol is None
        send(standard, "response.create", input="x", max_output_tokens=3)
        kinds = {e["type"] for e in until(standard, *FINAL)}
    extensions = {"session.created", "response.waiting", "response.running", "response.prefill"}
    assert kinds & extensions == set()


def test_extended_events_usage_and_timing(extended: ClientConnection) -> None:
    send(extended, "response.create", input="x", max_output_tokens=8, ignore_eos=True)
    events = until(extended, *FINAL)
    assert events[4]["type"] == "response.waiting"
    last = 0
    for event in events:
        if event["type"] in ("response.waiting", "response.running", "response.prefill"):
            assert event["sequence_number"] == last
            assert event["response_id"] == events[0]["response"]["id"]
        last = event["sequence_number"]
    assert set(events[-1]["usage"]) == {
        "cached_tokens",
        "shared_tokens",
        "copied_tokens",
        *PROPOSED,
    }
    assert events[-1]["timing"]["first_token_s"] > 0
    assert isinstance(events[-1]["response"]["seed"], int)


@pytest.mark.parametrize("at", [20, 30])
def test_a_fork_says_what_it_shared_and_what_it_copied(slow: Running, at: int) -> None:
    with dial(slow, "streamer.v1.json") as socket:
        receive(socket)
        send(socket, "response.create", input="x", stream_id="trunk", **ENDLESS)
        parent = until(socket, "response.created")[-1]["response"]["id"]
        number = 0
        while number < 50:  # all tokens that the fork shares are computed
            number = until(socket, "response.output_text.delta")[-1]["sequence_number"]
        body = {"previous_response_id": parent, "fork": {"at": at}, "max_output_tokens": 30}
        send(socket, "response.create", stream_id="branch", ignore_eos=True, **body)
        branch = [e for e in until_lane(socket, "branch") if e["stream_id"] == "branch"]
        send(socket, "response.cancel", response_id=parent)
        trunk = until_lane(socket, "trunk")[-1]
        final = branch[-1]
        send(socket, "response.resume", response_id=final["response"]["id"], starting_after=9)
        again = until(socket, *FINAL)[-1]
    kept = final["response"]["usage"]["input_tokens"] - 1  # the last one is computed again
    usage = {"cached_tokens": 0, "shared_tokens": kept, "copied_tokens": kept % 16, **PROPOSED}
    assert final["usage"] == again["usage"] == usage
    assert trunk["usage"]["copied_tokens"] == 0


def until_lane(socket: ClientConnection, lane: str) -> list[dict[str, Any]]:
    """Every event up to the last one of a lane's response."""
    events = until(socket, *FINAL)
    while events[-1]["stream_id"] != lane:
        events += until(socket, *FINAL)
    return events


def test_bundled_extensions_tell_what_happens_and_take_no_numbers(bundled: Running) -> None:
    with dial(bundled, "streamer.v1.json") as socket:
        session = receive(socket)
        assert (session["model"], session["context_length"]) == (NAME, 1024)
        send(socket, "response.create", **telling(40))
        events = until(socket, *FINAL)
    ours = [e for e in events if e["type"] in ("response.waiting", "response.running")]
    assert [e["type"] for e in ours] == ["response.waiting", "response.running"]
    assert {e["response_id"] for e in ours} == {events[0]["response"]["id"]}
    numbers = [e["sequence_number"] for e in events if e not in ours]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == 7 + 40  # eight structural events, forty tokens
    usage = {"cached_tokens": 0, "shared_tokens": 0, "copied_tokens": 0}
    assert {name: events[-1]["usage"][name] for name in usage} == usage
    assert events[-1]["timing"]["first_token_s"] > 0
    assert "".join(e.get("delta", "") for e in events) == story(bundled, 40)


def test_standard_clients_get_no_usage_or_timing_beside_the_response(server: Running) -> None:
    with dial(server) as socket:
        send(socket, "response.create", input="x", max_output_tokens=2)
        final = until(socket, *FINAL)[-1]
    assert set(final) == {"type", "sequence_number", "response"}


def test_numbers_and_token_ids_agree(extended: ClientConnection) -> None:
    send(
        extended,
        "response.create",
        input=[{"role": "user", "content": [{"type": "input_text", "text": "count"}]}],
        instructions="be exact",
        max_output_tokens=40,
        ignore_eos=True,
        return_token_ids=True,
    )
    events = until(extended, *FINAL)
    assert events[0]["prompt_token_ids"]
    seen, text = 0, ""
    for event in events:
        if event["type"] == "response.output_text.delta":
            seen += len(event["token_ids"])
            text += event["delta"]
            assert event["sequence_number"] == 3 + seen
    assert seen == 40
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == text
    check_counting(text)


def test_logprobs(extended: ClientConnection) -> None:
    send(
        extended,
        "response.create",
        input="x",
        max_output_tokens=5,
        top_logprobs=1,
        include=["message.output_text.logprobs"],
    )
    events = until(extended, *FINAL)
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    streamed = [lp for e in deltas for lp in e["logprobs"]]
    part = events[-1]["response"]["output"][0]["content"][0]
    assert part["logprobs"] == streamed
    assert bytes(b for lp in streamed for b in lp["bytes"]).decode() == part["text"]


def test_cancel_is_idempotent_and_ends_it_once(server: Running, extended: ClientConnection) -> None:
    send(extended, "response.create", input="x", **ENDLESS)
    response_id = until(extended, "response.output_text.delta")[0]["response"]["id"]
    for _ in range(3):
        send(extended, "response.cancel", response_id=response_id)
    final = until(extended, *FINAL)[-1]
    assert final["type"] == "response.incomplete"
    assert final["response"]["status"] == "cancelled"
    check_counting(final["response"]["output"][0]["content"][0]["text"])
    send(extended, "response.cancel", response_id=response_id)
    send(extended, "session.ping", t="after")
    assert receive(extended) == {"type": "session.pong", "t": "after"}
    server.wait_idle()


def test_cancel_of_something_else(extended: ClientConnection) -> None:
    send(extended, "response.cancel", response_id="resp_nobody", stream_id="z")
    event = receive(extended)
    assert (event["type"], event["status"], event["stream_id"]) == ("error", 404, "z")
    send(extended, "response.cancel")
    assert receive(extended)["error"]["param"] == "response_id"


@pytest.mark.parametrize(
    ("event", "param"),
    [
        ({"type": "nothing.like.this"}, "type"),
        ({"type": "response.create"}, "input"),
        ({"type": "response.create", "input": 5}, "input"),
        ({"type": "response.create", "input": "x", "temperature": 3}, "temperature"),
        ({"type": "response.create", "input": "x", "tools": [{}]}, "tools[0].type"),
        (
            {"type": "response.create", "input": "x", "max_output_tokens": 0},
            "max_output_tokens",
        ),
        ({"type": "response.create", "input": "x", "include": ["all"]}, "include[0]"),
        ({"type": "response.create", "input": "x", "stream_id": ""}, "stream_id"),
        ({"type": "response.create", "input": "x", "stream_id": 5}, "stream_id"),
        ({"type": 5}, "type"),
        ({"stream_id": "a"}, "type"),
        ({"type": "session.ping", "t": {"a": 1}}, "t"),
        ({"type": "session.ping", "t": "x" * 201}, "t"),
        ({"type": "session.ping", "t": 10**30}, "t"),
    ],
)
def test_a_bad_event_is_answered_and_the_socket_stays(
    extended: ClientConnection, event: dict[str, Any], param: str
) -> None:
    extended.send(json.dumps(event))
    answer = receive(extended)
    assert (answer["type"], answer["status"], answer["error"]["param"]) == ("error", 400, param)
    send(extended, "session.ping", t=1)
    assert receive(extended)["type"] == "session.pong"


def test_events_without_a_type_are_answered(extended: ClientConnection) -> None:
    for text in ("{}", "[]", '{"type": 4}', '"x"'):
        extended.send(text)
        assert receive(extended)["error"]["code"] == "invalid_event"


@pytest.mark.parametrize("message", ["{", "hello", "", b"\x80binary", '{"x":' + "[" * 100_000])
def test_a_frame_that_is_no_json_is_answered_and_the_lanes_go_on(
    server: Running, message: str | bytes
) -> None:
    with dial(server) as socket:
        send(socket, "response.create", input="x", max_output_tokens=2000, ignore_eos=True)
        until(socket, "response.output_text.delta")
        socket.send(message)
        error = until(socket, "error")[-1]
        assert (error["status"], error["error"]["code"]) == (400, "invalid_event")
        assert until(socket, *FINAL)[-1]["response"]["usage"]["output_tokens"] == 2000


def test_an_unknown_version_of_ours_closes_with_4406(server: Running) -> None:
    with dial(server, "streamer.v9.json") as socket, pytest.raises(ConnectionClosed) as caught:
        socket.recv(timeout=20)
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 4406
    assert "streamer.v1.json" in caught.value.rcvd.reason


def test_a_message_over_the_limit_closes_with_1009(server: Running) -> None:
    with dial(server) as socket:
        send(socket, "response.create", input="x" * (1 << 20))
        with pytest.raises(ConnectionClosed) as caught:
            socket.recv(timeout=20)
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1009


def test_closing_the_socket_lets_it_run_on_by_default(server: Running) -> None:
    with dial(server, "streamer.v1.json") as socket:
        send(socket, "response.create", input="x", max_output_tokens=300, ignore_eos=True)
        response_id = until(socket, "response.created")[-1]["response"]["id"]
        stream = server.engine.get(response_id)
        assert stream is not None
        until(socket, "response.output_text.delta")
    server.on_loop(stream.wait())
    assert [f.num_tokens for f in stream.finishes if f is not None] == [300]


def test_closing_the_socket_cancels_where_detach_is_0(server: Running, server_with: Any) -> None:
    strict = server_with(detach_timeout=0.0)
    for where, fields in ((strict, {}), (server, {"detach_s": 0})):
        with dial(where) as socket:
            for lane in ("a", "b"):
                send(socket, "response.create", input="x", stream_id=lane, **ENDLESS, **fields)
            until(socket, "response.output_text.delta")
        where.wait_idle()


def test_a_flood_of_bad_events_is_cut(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "EVENTS_PER_S", 0)  # however slow the machine is

    def flood(socket: ClientConnection) -> None:
        """Send without reading, then read to the end."""
        for _ in range(50_000):
            socket.send('{"type": "response.cancel"}')
        while True:
            socket.recv(timeout=20)

    with dial(server) as socket, pytest.raises(ConnectionClosed) as caught:
        flood(socket)
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 4429


def test_an_integer_of_400_digits_is_refused_by_name(extended: ClientConnection) -> None:
    extended.send('{"type": "response.create", "input": "x", "seed": 1' + "0" * 400 + "}")
    answer = receive(extended)
    assert (answer["status"], answer["error"]["param"]) == (400, "seed")
    send(extended, "session.ping", t=1)
    assert receive(extended)["type"] == "session.pong"


def test_a_bug_in_one_event_leaves_the_socket(
    extended: ClientConnection, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: Lanes, response_id: str | None) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Lanes, "cancel", broken)
    send(extended, "response.cancel", response_id="x", stream_id="lane")
    answer = receive(extended)
    assert (answer["status"], answer["stream_id"]) == (500, "lane")
    assert answer["error"]["code"] == "internal"
    assert "an event failed" in caplog.text
    send(extended, "session.ping", t=1)
    assert receive(extended)["type"] == "session.pong"


@pytest.mark.parametrize("path", ["/v1/nope", "/v1/models", "/"])
def test_a_handshake_on_another_path_is_a_404(server: Running, path: str) -> None:
    with pytest.raises(InvalidStatus) as refusal:
        connect(server.ws_url.replace("/v1/responses", path))
    response = refusal.value.response
    assert response.status_code == 404
    assert path in json.loads(response.body or b"")["error"]["message"]
