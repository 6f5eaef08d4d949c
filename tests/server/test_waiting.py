"""response.waiting: the place in the queue is sent, and sent again as the queue moves."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

from streamer.core.plan import NoticeKind
from streamer.engine import core
from tests.server.responses.test_socket import FINAL, dial, receive, send, until
from tests.server.support.running import Running

ASK: dict[str, Any] = {"input": "x", "max_output_tokens": 10, "ignore_eos": True}
FIRST = {**ASK, "max_output_tokens": 30_000}  # runs until all others have come: it is cancelled


@pytest.fixture
def narrow(server_with: Any, monkeypatch: pytest.MonkeyPatch) -> Running:
    """One answer at a time, and notices of places in every step."""
    monkeypatch.setattr(core, "POSITIONS_S", 0.0)
    server: Running = server_with(model="fake:tokens_per_s=200", max_num_seqs=1, max_wait_s=0)
    return server


def test_the_last_of_a_queue_sees_its_place_fall_to_the_start(narrow: Running) -> None:
    with ExitStack() as sockets:
        asked = [sockets.enter_context(dial(narrow, "streamer.v1.json")) for _ in range(6)]
        ids: list[str] = []
        for i, each in enumerate(asked):
            receive(each)
            send(each, "response.create", **(ASK if i else FIRST))
            ids.append(until(each, "response.waiting")[-1]["response_id"])
        send(asked[0], "response.cancel", response_id=ids[0])
        events = until(asked[-1], *FINAL)
    kinds = [e["type"] for e in events]
    places = [e["position"] for e in events if e["type"] == "response.waiting"]
    assert places == sorted(set(places), reverse=True)  # strictly falling
    assert places[-1] == 0
    assert len(places) >= 4
    assert kinds.index("response.running") == len(places)  # and then it runs
    assert all(e["response_id"] == events[0]["response_id"] for e in events[: len(places)])


def test_one_socket_with_many_lanes_gets_the_events_of_each(narrow: Running) -> None:
    with dial(narrow, "streamer.v1.json") as socket:
        receive(socket)
        for lane in "abcde":
            send(socket, "response.create", stream_id=lane, **(FIRST if lane == "a" else ASK))
        seen: dict[str, list[int]] = {lane: [] for lane in "abcde"}
        first, ended = "", 0
        while ended < 5:
            event = receive(socket)
            ended += event["type"] in FINAL
            if event["type"] == "response.waiting":
                seen[event["stream_id"]].append(event["position"])
                first = first or event["response_id"]
                if event["stream_id"] == "e" and len(seen["e"]) == 1:
                    send(socket, "response.cancel", response_id=first)
    for places in seen.values():
        assert places == sorted(set(places), reverse=True)
    assert seen["e"][0] in (3, 4)  # before the first runs or after
    assert seen["e"][-1] == 0


def test_standard_clients_get_no_state_events_and_none_are_counted(
    narrow: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[NoticeKind] = []
    on_output = narrow.engine.on_output

    def noted(output: Any, sent: float) -> None:
        seen.extend(n.kind for n in output.notices)
        on_output(output, sent)

    monkeypatch.setattr(narrow.engine, "on_output", noted)
    with dial(narrow) as socket:
        for lane in "abc":
            send(socket, "response.create", stream_id=lane, **ASK)
        ended = 0
        while ended < 3:
            event = receive(socket)
            ended += event["type"] in FINAL
            assert event["type"] != "response.waiting"
    assert NoticeKind.RUNNING in seen
    assert NoticeKind.WAITING not in seen


def test_a_resume_while_waiting_gets_the_queue_position(narrow: Running) -> None:
    with dial(narrow, "streamer.v1.json") as socket, dial(narrow, "streamer.v1.json") as other:
        receive(socket), receive(other)
        for lane, tokens in (("a", 400), ("b", 10), ("c", 10)):
            body = {**ASK, "max_output_tokens": tokens, "detach_s": 0}
            send(socket, "response.create", stream_id=lane, **body)
        created = [e for e in wait_for(socket, 3) if e["type"] == "response.created"]
        response_id = created[-1]["response"]["id"]
        send(other, "response.resume", response_id=response_id, starting_after=3)
        assert until(other, "response.waiting")[-1]["position"] in (1, 2)
    narrow.wait_idle()


def wait_for(socket: Any, number: int) -> list[dict[str, Any]]:
    """Events until `number` responses wait."""
    events: list[dict[str, Any]] = []
    while len({e["response_id"] for e in events if e["type"] == "response.waiting"}) < number:
        events.append(receive(socket))
    return events
