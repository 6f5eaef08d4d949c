"""Sockets: resume, acks, settings, lanes that wait, lineage, MessagePack, goaway, slow readers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from streamer.bench.fake import expected_text, expected_tokens
from tests.server.counting import sse
from tests.server.cutting import cut_after, follow
from tests.server.running import Running
from tests.server.test_resume import RESPONSE, check_response
from tests.server.test_websocket import FINAL, dial, hear, say, until

JSON, MSGPACK = "streamer.v1.json", "streamer.v1.msgpack"


class Sent:
    """A socket's event as `check_response` takes events."""

    def __init__(self, event: dict[str, Any]) -> None:
        self.json = event
        self.kind = event["type"]
        self.id = str(event.get("sequence_number"))


def numbered(events: list[dict[str, Any]]) -> list[Any]:
    """The standard events among these: extensions take no numbers."""
    ours = ("response.waiting", "response.running", "response.prefill", "response.resumed")
    return [Sent(e) for e in events if e["type"] not in ours]


@pytest.fixture
def socket(slow: Running) -> Iterator[ClientConnection]:
    with dial(slow, JSON) as connection:
        assert hear(connection)["type"] == "session.created"
        yield connection


def ask(socket: ClientConnection, num_tokens: int, **fields: Any) -> None:
    body = {"input": "count", "max_output_tokens": num_tokens, "ignore_eos": True}
    say(socket, "response.create", **{**body, "return_token_ids": True, **fields})


# ---------------------------------------------------------------- resume


@pytest.mark.parametrize("num_events", [1, 2, 4, 5, 6, 9, 14])
def test_cut_and_resumed_on_a_new_socket(slow: Running, num_events: int) -> None:
    with dial(slow, JSON) as first:
        hear(first)
        ask(first, 30)
        events: list[dict[str, Any]] = []
        while len(numbered(events)) < num_events:
            events.append(hear(first))
    last, response_id = numbered(events)[-1], events[0]["response"]["id"]
    with dial(slow, JSON) as second:
        hear(second)
        after = int(last.id)
        say(
            second, "response.resume", response_id=response_id, starting_after=after, stream_id="b"
        )  # fmt: skip
        rest = until(second, *FINAL)
    assert rest[0] == {
        "type": "response.resumed",
        "response_id": response_id,
        "from": after,
        "status": "live",
        "stream_id": "b",
    }
    assert {e["stream_id"] for e in rest} == {"b"}
    check_response(numbered(events + rest), 30)


def test_from_sse_to_a_socket_and_back(slow: Running, socket: ClientConnection) -> None:
    body = {**RESPONSE, "max_output_tokens": 300}
    events: list[Any] = list(cut_after(slow, 3500, "POST", "/v1/responses", body))
    response_id = events[0].json["response"]["id"]
    say(
        socket, "response.resume", response_id=response_id, starting_after=int(events[-1].id)
    )  # fmt: skip
    got = [hear(socket)]
    while len(numbered(got)) < 20:
        got.append(hear(socket))
    events += numbered(got)
    path = f"/v1/responses/{response_id}?stream=true&starting_after={events[-1].id}"
    check_response(events + follow(slow, path), 300)


def test_from_a_socket_to_sse_after_it_has_closed(slow: Running) -> None:
    with dial(slow, JSON) as first:
        hear(first)
        ask(first, 50)
        events = numbered(until(first, "response.output_text.delta"))
    path = f"/v1/responses/{events[0].json['response']['id']}?stream=true"
    check_response(events + follow(slow, path + f"&starting_after={events[-1].id}"), 50)
    check_response(follow(slow, path), 50)


def test_two_sockets_read_the_same(slow: Running, socket: ClientConnection) -> None:
    ask(socket, 200)
    events = until(socket, "response.output_text.delta")
    response_id = events[0]["response"]["id"]
    with dial(slow, JSON) as second:
        hear(second)
        say(second, "response.resume", response_id=response_id)
        resumed, *replay = until(second, *FINAL)
    assert (resumed["from"], resumed["status"]) == (-1, "live")
    check_response(numbered(replay), 200)
    assert len(numbered(replay)) == 208  # without a number nothing is merged
    check_response(numbered(events + until(socket, *FINAL)), 200)


def test_finished_and_gone(slow: Running, socket: ClientConnection) -> None:
    ask(socket, 5)
    final = until(socket, *FINAL)[-1]
    response_id = final["response"]["id"]
    say(socket, "response.resume", response_id=response_id, starting_after=6)
    resumed, *rest = until(socket, *FINAL)
    assert resumed["status"] == "finished"
    assert rest[0]["token_ids"] == expected_tokens(3, 2)
    say(socket, "response.resume", response_id="resp_nobody", starting_after=3, stream_id="x")
    assert hear(socket) == {
        "type": "response.resumed",
        "response_id": "resp_nobody",
        "from": 3,
        "status": "gone",
        "stream_id": "x",
    }


def test_a_create_on_a_resumed_lane_waits_for_it(slow: Running) -> None:
    with dial(slow, JSON) as first:
        hear(first)
        ask(first, 60)
        response_id = until(first, "response.created")[-1]["response"]["id"]
    with dial(slow, JSON) as second:
        hear(second)
        say(second, "response.resume", response_id=response_id, starting_after=0, stream_id="a")
        ask(second, 3, previous_response_id=response_id, stream_id="a")
        first_end = until(second, *FINAL)[-1]
        assert first_end["response"]["id"] == response_id
        final = until(second, *FINAL)[-1]["response"]
    assert final["previous_response_id"] == response_id
    assert final["usage"]["input_tokens"] > 60


@pytest.mark.parametrize(
    ("event", "param"),
    [
        ({"type": "response.resume"}, "response_id"),
        ({"type": "response.resume", "response_id": "r", "starting_after": "x"}, "starting_after"),
        ({"type": "response.resume", "response_id": "r", "starting_after": -2}, "starting_after"),
        ({"type": "response.resume", "response_id": "r", "stream_id": ""}, "stream_id"),
        ({"type": "response.ack", "response_id": "r"}, "sequence_number"),
        ({"type": "session.update", "window": -1}, "window"),
        ({"type": "session.update", "detach_s": "long"}, "detach_s"),
        ({"type": "session.update", "include": ["logprobs", "all"]}, "include[1]"),
        ({"type": "response.create", "input": "x", "background": True}, "background"),
        ({"type": "response.create", "input": "x", "stream": False}, "stream"),
        ({"type": "response.create", "previous_response_id": "r"}, "input"),
    ],
)
def test_bad_events_name_the_field(
    socket: ClientConnection, event: dict[str, Any], param: str
) -> None:
    socket.send(json.dumps(event))
    answer = hear(socket)
    assert (answer["type"], answer["status"], answer["error"]["param"]) == ("error", 400, param)


@pytest.mark.parametrize("kind", ["response.resume", "response.ack", "session.update"])
def test_a_standard_client_has_no_extensions(slow: Running, kind: str) -> None:
    with dial(slow) as socket:
        say(socket, kind, response_id="r", sequence_number=1)
        assert hear(socket)["error"]["code"] == "unknown_event"


# ---------------------------------------------------------------- lanes and lineage


def test_a_create_that_waits_for_its_lane_has_an_id_and_can_be_cancelled(
    socket: ClientConnection,
) -> None:
    ask(socket, 30_000, stream_id="a")
    running = until(socket, "response.output_text.delta")[0]["response"]["id"]
    ask(socket, 5, stream_id="a")
    ask(socket, 6, stream_id="a")
    waiting = [until(socket, "response.waiting")[-1] for _ in range(2)]
    assert [w["position"] for w in waiting] == [1, 2]
    say(socket, "response.cancel", response_id=waiting[0]["response_id"])
    final = until(socket, *FINAL)[-1]
    assert (final["response"]["id"], final["response"]["status"], final["stream_id"]) == (
        waiting[0]["response_id"],
        "cancelled",
        "a",
    )
    say(socket, "response.cancel", response_id=running)
    assert until(socket, *FINAL)[-1]["response"]["id"] == running
    final = until(socket, *FINAL)[-1]["response"]
    assert (final["id"], final["usage"]["output_tokens"]) == (waiting[1]["response_id"], 6)


def test_store_false_is_known_to_the_socket_that_made_it_alone(
    slow: Running, socket: ClientConnection
) -> None:
    ask(socket, 5, store=False)
    response_id = until(socket, *FINAL)[-1]["response"]["id"]
    ask(socket, 2, previous_response_id=response_id)
    assert until(socket, *FINAL, "error")[-1]["type"] == "response.incomplete"
    with dial(slow, JSON) as other:
        hear(other)
        ask(other, 2, previous_response_id=response_id, stream_id="q")
        error = until(other, "error")[-1]
    assert (error["status"], error["stream_id"]) == (404, "q")
    assert error["error"]["code"] == "previous_response_not_found"
    assert error["error"]["param"] == "previous_response_id"


def test_the_same_parent_on_two_lanes_is_a_fork(socket: ClientConnection) -> None:
    say(socket, "response.create", input="a long story " * 9, generate=False)
    events = until(socket, *FINAL)
    kinds = [e["type"] for e in numbered_dicts(events)]
    assert kinds == ["response.created", "response.in_progress", "response.completed"]
    parent = events[-1]["response"]["id"]
    for lane in ("a", "b"):
        ask(socket, 20, previous_response_id=parent, stream_id=lane)
    ends = [until(socket, *FINAL)[-1] for _ in range(2)]
    assert {e["stream_id"] for e in ends} == {"a", "b"}
    for end in ends:
        assert end["response"]["output"][0]["content"][0]["text"] == expected_text(20)
        assert end["usage"]["cached_tokens"] > 96


def numbered_dicts(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [e.json for e in numbered(events)]


# ---------------------------------------------------------------- flow control


def test_acks_hold_a_response_back_and_let_it_go(slow: Running, server: Running) -> None:
    with dial(server, JSON) as socket:
        hear(socket)
        say(socket, "session.update", window=100)
        ask(socket, 2000, stream_id="a")
        events = until(socket, "response.created")
        response_id = events[-1]["response"]["id"]
        say(socket, "response.ack", response_id=response_id, sequence_number=3)
        events += until(socket, "response.paused")
        assert server.metric('streamer_requests{state="paused"}') == 1
        while events[-1]["type"] not in FINAL:
            number = events[-1].get("sequence_number", 0)
            for _ in range(2):  # repeats and old news are harmless
                say(socket, "response.ack", response_id=response_id, sequence_number=number)
            say(socket, "response.ack", response_id=response_id, sequence_number=5)
            say(socket, "response.ack", response_id="resp_nobody", sequence_number=5)
            events.append(hear(socket))
    check_paused(events)
    check_response([e for e in numbered(events) if e.kind not in PAUSES], 2000)


PAUSES = ("response.paused", "response.preempted")


def check_paused(events: list[dict[str, Any]]) -> None:
    assert sum(e["type"] == "response.paused" for e in events) >= 1


def test_a_reader_that_lags_too_long_is_sent_away_and_may_come_back(server_with: Any) -> None:
    server = server_with(pause_timeout=0.2)
    with dial(server, JSON) as socket:
        hear(socket)
        say(socket, "session.update", window=50, detach_s=0)
        ask(socket, 400, stream_id="a")
        events = until(socket, "response.created")
        response_id = events[-1]["response"]["id"]
        say(socket, "response.ack", response_id=response_id, sequence_number=3)
        events += until(socket, "error")
        error = events.pop()
        assert (error["error"]["code"], error["stream_id"]) == ("reader_too_slow", "a")
        stream = server.engine.get(response_id)
        assert stream is not None
        assert (stream.num_readers, stream.is_paused, stream.is_finished) == (0, True, False)
        last = max(e["sequence_number"] for e in events)
        say(socket, "response.resume", response_id=response_id, starting_after=last)
        events += until(socket, *FINAL)
    check_response([e for e in numbered(events) if e.kind not in PAUSES], 400)


def test_after_the_detach_timeout_nobody_waits_for_it(server_with: Any) -> None:
    server = server_with(pause_timeout=0.1, detach_timeout=0.1)
    with dial(server, JSON) as socket:
        hear(socket)
        say(socket, "session.update", window=50)
        ask(socket, 30_000)
        response_id = until(socket, "response.created")[-1]["response"]["id"]
        say(socket, "response.ack", response_id=response_id, sequence_number=3)
        until(socket, "error")
        server.wait_idle()
    answer = httpx.get(server.url + f"/v1/responses/{response_id}").json()
    assert answer["status"] == "cancelled"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
def test_a_stuck_connection_is_aborted_and_its_stream_resumed(server_with: Any, path: str) -> None:
    """A client that takes nothing: its connection is dropped, its answer waits, paused."""
    server = server_with(pause_timeout=0.3)
    message = {"input": "x", "messages": [{"role": "user", "content": "x"}]}
    body = {**message, "stream": True, "max_tokens": 100_000, "max_output_tokens": 100_000}
    body |= {"ignore_eos": True, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    with httpx.stream("POST", server.url + path, json=body) as response:
        events = sse(response)
        first = next(events).json
        request_id = first.get("id") or first["response"]["id"]
        stream = server.engine.get(request_id)
        assert stream is not None
        server.wait_metric('streamer_requests{state="paused"}', 1)
        server.wait_until(lambda: stream.num_readers == 0)
        with pytest.raises(httpx.RemoteProtocolError):
            list(events)
    assert (stream.is_paused, stream.is_finished) == (True, False)
    server.engine_cancel(request_id)
    server.wait_idle()


# ---------------------------------------------------------------- settings, MessagePack, drain


def test_include_filters_what_the_body_asked_for(socket: ClientConnection) -> None:
    wanted: dict[str, Any] = {"top_logprobs": 1, "return_token_ids": True}
    seen = []
    for include in (["logprobs", "token_ids"], ["token_ids"], ["logprobs"], []):
        say(socket, "session.update", include=include)
        ask(socket, 4, **wanted)
        events = until(socket, *FINAL)
        deltas = [e for e in events if e["type"] == "response.output_text.delta"]
        (part,) = events[-1]["response"]["output"][0]["content"]
        assert bool(part["logprobs"]) is bool(deltas[0]["logprobs"])
        assert ("prompt_token_ids" in events[0]) is ("token_ids" in deltas[0])
        seen.append((bool(part["logprobs"]), "token_ids" in deltas[0]))
    assert seen == [(True, True), (False, True), (True, False), (False, False)]


def test_detach_s_of_the_session(slow: Running) -> None:
    with dial(slow, JSON) as socket:
        hear(socket)
        say(socket, "session.update", detach_s=0)
        ask(socket, 30_000)
        until(socket, "response.output_text.delta")
    slow.wait_idle()


def transcript(server: Running, protocol: str) -> list[Any]:
    """What a session says to the same events, without what no two sessions share."""
    is_packed = protocol == MSGPACK
    encode: Any = msgspec.msgpack.encode if is_packed else lambda e: json.dumps(e)
    decode: Any = msgspec.msgpack.decode if is_packed else json.loads
    out: list[Any] = []
    with dial(server, protocol) as socket:
        assert socket.subprotocol == protocol

        def tell(kind: str, **fields: Any) -> None:
            socket.send(encode({"type": kind, **fields}))

        def take(*kinds: str) -> None:
            while True:
                data = socket.recv(timeout=20)
                assert isinstance(data, bytes) is is_packed
                out.append(decode(data))
                if out[-1]["type"] in kinds:
                    return

        take("session.created")
        tell("session.ping", t=1.5)
        take("session.pong")
        body: dict[str, Any] = {"input": "é😀", "max_output_tokens": 9, "seed": 3, "stream_id": "a"}
        body |= {"top_logprobs": 1, "return_token_ids": True, "metadata": {"k": "ü"}}
        tell("response.create", **body)
        take(*FINAL)
        tell("response.resume", response_id=out[-1]["response"]["id"], starting_after=7)
        take(*FINAL)
        tell("response.create", **{**body, "temperature": 9})
        take("error")
        tell("nothing.like.this")
        take("error")
    return [plain(e) for e in out if e["type"] not in ("response.running", "response.prefill")]


def plain(event: Any) -> Any:
    """An event without ids and times; the deltas of one response may be merged otherwise."""
    volatile = ("id", "item_id", "response_id", "session_id", "created_at", "completed_at")
    if isinstance(event, dict):
        hidden = (*volatile, "timing", "usage", "input_tokens_details")
        return {k: plain(v) for k, v in event.items() if k not in hidden}
    return [plain(v) for v in event] if isinstance(event, list) else event


def joined(events: list[Any]) -> list[Any]:
    """Neighbouring deltas as one."""
    out: list[Any] = []
    for e in events:
        if out and e["type"] == out[-1]["type"] == "response.output_text.delta":
            last = out.pop()
            e = {**e, **{k: last[k] + e[k] for k in ("delta", "logprobs", "token_ids")}}
        out.append(e)
    return out


def test_messagepack_and_json_give_the_same_transcript(slow: Running) -> None:
    first, second = (joined(transcript(slow, p)) for p in (JSON, MSGPACK))
    assert len(first) > 15
    assert first == second


@pytest.mark.parametrize("message", ["text", b"\xc1", b"\x92", b"", b"\x91" * 5000])
def test_what_is_no_messagepack_closes_with_4400(slow: Running, message: str | bytes) -> None:
    with dial(slow, MSGPACK) as socket:
        socket.recv(timeout=20)
        socket.send(message)
        with pytest.raises(ConnectionClosed) as caught:
            socket.recv(timeout=20)
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 4400


def test_a_drain_says_goaway_and_lets_streams_finish(server_with: Any) -> None:
    server = server_with(model="fake:tokens_per_s=400")
    with dial(server, JSON) as socket, dial(server) as standard:
        hear(socket)
        ask(socket, 200)
        say(standard, "response.create", input="x", max_output_tokens=200, ignore_eos=True)
        events = until(socket, "response.output_text.delta")
        server.begin_stop()
        events += until(socket, "session.goaway")
        assert events.pop() == {"type": "session.goaway", "deadline_ms": 2000}
        ask(socket, 5, stream_id="late")
        assert until_error(socket, events)["code"] == "draining"
        events += until(socket, *FINAL)
        assert "session.goaway" not in {e["type"] for e in until(standard, *FINAL)}
    check_response(numbered(events), 200)


def until_error(socket: ClientConnection, events: list[dict[str, Any]]) -> Any:
    while (event := hear(socket))["type"] != "error":
        events.append(event)
    return event["error"]
