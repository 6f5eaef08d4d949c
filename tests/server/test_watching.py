"""GET /v1/engine on a real socket: one snapshot, the stream of them, keys, and the drain."""

from __future__ import annotations

import base64
import json
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from streamer.engine import view_feed
from tests.server.support.counting import CHAT, sse
from tests.server.support.running import Running

ONE, TWO = ({"authorization": f"Bearer {key}"} for key in ("first", "second"))


def events(response: httpx.Response) -> Iterator[Any]:
    return (e.json for e in sse(response))


def endless(server: Running, headers: dict[str, str] | None = None) -> Any:
    body = {**CHAT, "ignore_eos": True, "stream": True}
    url = server.url + "/v1/chat/completions"
    return httpx.stream("POST", url, json=body, headers=headers, timeout=20)


@pytest.mark.parametrize("model", ["server", "bundled"])
def test_one_snapshot_shows_pools_requests_and_tables(
    request: pytest.FixtureRequest, model: str
) -> None:
    server = request.getfixturevalue(model)
    with endless(server) as answer:
        opened = sse(answer)
        next(opened)
        got = httpx.get(server.url + "/v1/engine")
        body = got.json()
        scheduler = body["scheduler"]
        assert (got.status_code, body["object"]) == (200, "engine")
        assert body["model"] == server.engine.info.name
        assert body["engine"]["state"] == "ready"
        (found,) = scheduler["requests"]
        assert found["request_id"] == answer.headers["x-request-id"]
        (choice,) = found["sequences"]
        packed = base64.b64decode(choice["blocks"])
        table = struct.unpack(f"<{len(packed) // 4}I", packed)
        assert len(table) == choice["num_blocks"] > 0
        pool = scheduler["device"]
        cells = base64.b64decode(pool["cells"])
        assert len(cells) == -(-pool["num_blocks"] // pool["blocks_per_cell"])
        assert all(cells[b // pool["blocks_per_cell"]] >= 4 for b in table)
        assert scheduler["steps"] == []
        assert "owner_of" not in scheduler


def test_the_stream_brings_each_step_once(server: Running) -> None:
    url = server.url + "/v1/engine?stream=true"
    with httpx.stream("GET", url, timeout=20) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        snapshots = events(response)
        before = next(snapshots)["scheduler"]["step"]
        # the number of steps that one snapshot can carry, so that none is missing
        httpx.post(server.url + "/v1/completions", json={"prompt": "ab", "max_tokens": 100})
        seen: list[int] = []
        decoded = 0
        while not seen or seen[-1] < before + 100:
            steps = next(snapshots)["scheduler"]["steps"]
            seen += [s["number"] for s in steps]
            decoded += sum(len(s["decoded"]) for s in steps)
        assert seen[:100] == list(range(before + 1, before + 101))
        assert decoded == 99


def test_other_keys_requests_are_counts_only(server_with: Any) -> None:
    # slow enough that its reader, which takes nothing, does not get it paused
    server = server_with(api_key=("first", "second"), model="fake:tokens_per_s=100")
    url = server.url + "/v1/engine"
    assert httpx.get(url).status_code == 401
    with endless(server, ONE) as answer:
        opened = sse(answer)
        next(opened)
        name = answer.headers["x-request-id"]
        mine = httpx.get(url, headers=ONE)
        assert [r["request_id"] for r in mine.json()["scheduler"]["requests"]] == [name]
        with httpx.stream("GET", url + "?stream=true", headers=TWO, timeout=20) as response:
            for snapshot, _ in zip(events(response), range(2), strict=False):
                scheduler = snapshot["scheduler"]
                assert scheduler["requests"] == []
                assert sum(scheduler["unlisted"].values()) == 1
                assert all(not s["decoded"] and not s["prefilled"] for s in scheduler["steps"])
                assert name not in json.dumps(snapshot)


@pytest.mark.parametrize("value", ["maybe", "True", "2"])
def test_stream_is_true_or_false(server: Running, value: str) -> None:
    got = httpx.get(server.url + "/v1/engine", params={"stream": value})
    assert (got.status_code, got.json()["error"]["param"]) == (400, "stream")
    assert httpx.head(server.url + "/v1/engine?stream=true").status_code == 200


def test_a_follower_that_leaves_leaves_nothing(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_feed, "INTERVAL_S", 0.001)
    monkeypatch.setattr(view_feed, "MAX_FOLLOWERS", 4)
    for _ in range(12):  # more than the number of followers allowed at once
        with httpx.stream("GET", server.url + "/v1/engine?stream=true", timeout=20) as response:
            assert response.status_code == 200
            snapshots = events(response)
            assert "engine" in next(snapshots)


def test_one_follower_too_many_is_refused_before_the_200(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_feed, "MAX_FOLLOWERS", 0)
    got = httpx.get(server.url + "/v1/engine?stream=true")
    assert (got.status_code, got.json()["error"]["code"]) == (503, "server_overloaded")
    assert got.headers["retry-after"]


def test_a_follower_that_reads_nothing_gives_its_place_back(
    server_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_feed, "INTERVAL_S", 0.0)
    monkeypatch.setattr(view_feed, "MAX_FOLLOWERS", 1)
    server: Running = server_with(model="fake:tokens_per_s=2000", pause_timeout=0.2)
    host, port = server.url.removeprefix("http://").split(":")
    with endless(server), socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect((host, int(port)))
        raw.sendall(b"GET /v1/engine?stream=true HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert raw.recv(15) == b"HTTP/1.1 200 OK"
        until = time.monotonic() + 20
        while time.monotonic() < until:
            with httpx.stream("GET", server.url + "/v1/engine?stream=true", timeout=20) as other:
                if other.status_code == 200:
                    return
            time.sleep(0.05)
    pytest.fail("it is followed still")


def test_followers_end_with_the_server(server_with: Any) -> None:
    server: Running = server_with()
    with httpx.stream("GET", server.url + "/v1/engine?stream=true", timeout=20) as response:
        snapshots = events(response)
        assert next(snapshots)["engine"]["state"] == "ready"
        server.stop()
        rest = list(snapshots)
    assert rest[-1].get("engine", {}).get("state") == "draining" or "error" in rest[-1]
    assert server.exit_code == 0
