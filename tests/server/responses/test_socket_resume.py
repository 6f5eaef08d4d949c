"""Sockets: resume from and to anywhere, lanes that wait, lineage."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.sync.client import ClientConnection

from streamer.fake.model import expected_text, expected_tokens
from streamer.server.responses.lanes import Lanes
from tests.server.responses.test_resume import RESPONSE, check_response
from tests.server.responses.test_socket import FINAL, dial, receive, send, until
from tests.server.support.cutting import cut_after, follow
from tests.server.support.running import Running

JSON, MSGPACK = "streamer.v1.json", "streamer.v1.msgpack"


class Sent:
    """A socket's event in the form that `check_response` takes."""

    def __init__(self, event: dict[str, Any]) -> None:
        self.json = event
        self.kind = event["type"]
        self.id = str(event.get("sequence_number"))


def numbered(events: list[dict[str, Any]]) -> list[Any]:
    """The standard events among these: extensions have no numbers."""
    ours = ("response.waiting", "response.running", "response.prefill", "response.resumed")
    return [Sent(e) for e in events if e["type"] not in ours]


@pytest.fixture
def socket(slow: Running) -> Iterator[ClientConnection]:
    with dial(slow, JSON) as connection:
        assert receive(connection)["type"] == "session.created"
        yield connection


def ask(socket: ClientConnection, num_tokens: int, **fields: Any) -> None:
    body = {"input": "count", "max_output_tokens": num_tokens, "ignore_eos": True}
    send(socket, "response.create", **{**body, "return_token_ids": True, **fields})


# ---------------------------------------------------------------- resume


def test_from_sse_to_a_socket_and_back(slow: Running, socket: ClientConnection) -> None:
    body = {**RESPONSE, "max_output_tokens": 300}
    events: list[Any] = list(cut_after(slow, 3500, "POST", "/v1/responses", body))
    response_id = events[0].json["response"]["id"]
    send(
        socket, "response.resume", response_id=response_id, starting_after=int(events[-1].id)
    )  # fmt: skip
    got = [receive(socket)]
    while len(numbered(got)) < 20:
        got.append(receive(socket))
    events += numbered(got)
    path = f"/v1/responses/{response_id}?stream=true&starting_after={events[-1].id}"
    check_response(events + follow(slow, path), 300)


def test_from_a_socket_to_sse_after_it_has_closed(slow: Running) -> None:
    with dial(slow, JSON) as first:
        receive(first)
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
        receive(second)
        send(second, "response.resume", response_id=response_id)
        resumed, *replay = until(second, *FINAL)
    assert (resumed["from"], resumed["status"]) == (-1, "live")
    check_response(numbered(replay), 200)
    assert len(numbered(replay)) == 208  # without a number nothing is merged
    check_response(numbered(events + until(socket, *FINAL)), 200)


def test_finished_and_gone(slow: Running, socket: ClientConnection) -> None:
    ask(socket, 5)
    final = until(socket, *FINAL)[-1]
    response_id = final["response"]["id"]
    send(socket, "response.resume", response_id=response_id, starting_after=6)
    resumed, *rest = until(socket, *FINAL)
    assert resumed["status"] == "finished"
    assert rest[0]["token_ids"] == expected_tokens(3, 2)
    send(socket, "response.resume", response_id="resp_nobody", starting_after=3, stream_id="x")
    assert receive(socket) == {
        "type": "response.resumed",
        "response_id": "resp_nobody",
        "from": 3,
        "status": "gone",
        "stream_id": "x",
    }


def test_a_create_on_a_resumed_lane_waits_for_it(slow: Running) -> None:
    with dial(slow, JSON) as first:
        receive(first)
        ask(first, 60)
        response_id = until(first, "response.created")[-1]["response"]["id"]
    with dial(slow, JSON) as second:
        receive(second)
        send(second, "response.resume", response_id=response_id, starting_after=0, stream_id="a")
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
    answer = receive(socket)
    assert (answer["type"], answer["status"], answer["error"]["param"]) == ("error", 400, param)


@pytest.mark.parametrize("kind", ["response.resume", "response.ack", "session.update"])
def test_a_standard_client_has_no_extensions(slow: Running, kind: str) -> None:
    with dial(slow) as socket:
        send(socket, kind, response_id="r", sequence_number=1)
        error = receive(socket)["error"]
        assert error["code"] == "unknown_event"
        assert "the subprotocol streamer.v1.json" in error["message"]
        send(socket, "response.sing")
        assert "subprotocol" not in receive(socket)["error"]["message"]


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
    send(socket, "response.cancel", response_id=waiting[0]["response_id"])
    final = until(socket, *FINAL)[-1]
    assert (final["response"]["id"], final["response"]["status"], final["stream_id"]) == (
        waiting[0]["response_id"],
        "cancelled",
        "a",
    )
    send(socket, "response.cancel", response_id=running)
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
        receive(other)
        ask(other, 2, previous_response_id=response_id, stream_id="q")
        error = until(other, "error")[-1]
    assert (error["status"], error["stream_id"]) == (404, "q")
    assert error["error"]["code"] == "previous_response_not_found"
    assert error["error"]["param"] == "previous_response_id"


def test_the_same_parent_on_two_lanes_is_a_fork(socket: ClientConnection) -> None:
    send(socket, "response.create", input="a long story " * 9, generate=False)
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


def test_a_bug_costs_one_response(
    socket: ClientConnection, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = Lanes._run
    broken = ["once"]

    async def run(self: Lanes, job: Any) -> None:
        if broken:
            broken.clear()
            raise RuntimeError("a bug")
        await real(self, job)

    monkeypatch.setattr(Lanes, "_run", run)
    for _ in range(2):
        ask(socket, 3, stream_id="a")
    events = until(socket, *FINAL)
    errors = [e for e in events if e["type"] == "error"]
    assert [(e["error"]["code"], e["stream_id"]) for e in errors] == [("internal", "a")]
    assert "a response on a socket failed" in caplog.text
