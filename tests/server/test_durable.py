"""Over a journal, a client sees neither a request nor a cancelled end that is not on disk yet."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from streamer.engine.journal.store import Store
from tests.server.responses.test_socket import dial, send, until
from tests.server.support.counting import CHAT
from tests.server.support.running import DEADLINE_S, Running

FULL = 2  # PRAGMA synchronous
BODY = {"model": "fake", "input": "Count.", "max_output_tokens": 50, "ignore_eos": True}


class Disk:
    """The journal's, which does not answer until it may: `synchronous` has each commit's mode."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_answer = threading.Event()
        self.synchronous: list[int] = []
        commit, disk = Store.commit, self

        def waiting(store: Store) -> None:
            disk.synchronous += store._db.execute("PRAGMA synchronous").fetchone()
            assert disk.may_answer.wait(DEADLINE_S)
            commit(store)

        monkeypatch.setattr(Store, "commit", waiting)


def by_sse(server: Running) -> Any:
    given = {**BODY, "stream": True}
    with httpx.stream("POST", server.url + "/v1/responses", json=given, timeout=20.0) as response:
        return next(line for line in response.iter_lines() if line)


def by_chat(server: Running) -> Any:
    given = {**CHAT, "max_tokens": 50, "ignore_eos": True, "stream": True}
    given["stream_options"] = {"include_event_ids": True}
    url = server.url + "/v1/chat/completions"
    with httpx.stream("POST", url, json=given, timeout=20.0) as response:
        return next(line for line in response.iter_lines() if line)


def by_socket(server: Running) -> Any:
    with connect(server.ws_url) as socket:
        socket.send(json.dumps({"type": "response.create", **BODY}))
        while (event := json.loads(socket.recv(timeout=20)))["type"].startswith("session"):
            pass
        return event


def in_background(server: Running) -> Any:
    given = {**BODY, "background": True}
    return httpx.post(server.url + "/v1/responses", json=given, timeout=20.0).json()


@pytest.mark.parametrize("ask", [by_sse, by_chat, by_socket, in_background])
def test_the_first_event_waits_for_the_disk(
    server_with: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Callable[[Running], Any]
) -> None:
    server = server_with(model="fake:tokens_per_s=500", journal=str(tmp_path))
    disk = Disk(monkeypatch)
    found: list[Any] = []
    client = threading.Thread(target=lambda: found.append(ask(server)))
    client.start()
    try:
        # the engine does not wait: all is drawn, and nothing was sent
        server.wait_until(lambda: server.metric("streamer_output_tokens_total") == 50)
        assert found == []
    finally:
        disk.may_answer.set()
    client.join(DEADLINE_S)
    assert found
    assert FULL in disk.synchronous


@pytest.mark.parametrize("kind", ["response.cancel", "response.steer"])
def test_a_cancelled_end_waits_for_the_disk(
    server_with: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    server = server_with(model="fake:tokens_per_s=500", journal=str(tmp_path))
    disk = Disk(monkeypatch)
    disk.may_answer.set()
    events: list[Any] = []
    with dial(server, "streamer.v1.json") as socket:
        send(socket, "response.create", **{**BODY, "max_output_tokens": 5000})
        events += until(socket, "response.output_text.delta")
        name = next(e["response"]["id"] for e in events if "response" in e)
        disk.may_answer.clear()
        del disk.synchronous[:]
        is_steer = kind == "response.steer"
        named = {"previous_response_id": name, "input": "x"} if is_steer else {"response_id": name}
        send(socket, kind, **named)
        # it has ended in the scheduler: its blocks are free
        server.wait_metric('streamer_blocks{pool="device",state="used"}', 0)
        assert not server.on_loop(is_finished(server, name))
        disk.may_answer.set()
        final = until(socket, "response.incomplete")[-1]["response"]
    assert final["status"] == ("incomplete" if is_steer else "cancelled")
    assert FULL in disk.synchronous


async def is_finished(server: Running, name: str) -> bool:
    found: bool = server.engine.get(name).is_finished
    return found
