"""What one socket may make the server hold: bytes of creates and of replies, and echoes."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from streamer.config import Config
from streamer.server import lanes, websocket
from streamer.server.socket_events import Pong
from streamer.server.websocket import Session
from tests.server.running import Running
from tests.server.test_websocket import ENDLESS, FINAL, dial, hear, say, until

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
        answer = hear(socket)
    assert answer["type"] == "error"
    assert len(json.dumps(answer)) < 2000


def test_the_bytes_of_waiting_creates_are_bounded(server: Running) -> None:
    with dial(server) as socket:
        say(socket, "response.create", input="x", **ENDLESS, detach_s=0)
        until(socket, "response.output_text.delta")
        for _ in range(9):  # half a MiB each, in the same lane
            say(socket, "response.create", input=LONG, max_output_tokens=1, detach_s=0)
        error = until(socket, "error")[-1]
    assert error["status"] == 429
    assert str(4 << 20) in error["error"]["message"]
    server.wait_idle()


def test_what_has_run_no_longer_counts(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MAX_QUEUED_BYTES", 5000)
    with dial(server) as socket:
        for _ in range(4):
            say(socket, "response.create", input="y" * 3000, max_output_tokens=1)
            assert until(socket, *FINAL, "error")[-1]["type"] != "error"
        say(socket, "response.create", input="x", model="not this one")
        assert hear(socket)["status"] == 404
        for _ in range(4):  # what the engine refuses is given back too
            say(socket, "response.create", input="y" * 3000, max_output_tokens=1 << 24)
            assert hear(socket)["error"]["code"] == "context_length_exceeded"


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
