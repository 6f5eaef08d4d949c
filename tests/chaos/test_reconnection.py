"""Clients whose server is killed while they read, and started again in the same place.

OpenAI's packages, unchanged, with their own reconnection; and every way to go on, whatever the way
an answer was begun. The answers count, and have the events of one that nothing disturbs.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import openai
import pytest
from websockets.typing import Subprotocol

from tests.chaos import features
from tests.chaos.clients import (
    Events,
    Server,
    Socket,
    by_header,
    by_messagepack,
    by_query,
    by_socket,
    follow,
)
from tests.chaos.killable import Killable
from tests.clients.test_openai_js import check_reconnected, run, script
from tests.clients.test_openai_python import OURS, Received, sync

__all__ = ["script"]  # a fixture

NUM = 600
BODY: dict[str, Any] = {"model": "fake", "input": "count", "max_output_tokens": NUM}
WAYS = [by_query, by_header, by_socket, by_messagepack]


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killable]:
    """A server over the fake model, which counts, at 200 tokens a second."""
    folder = tmp_path_factory.mktemp("reconnection")
    settings = {"model": "fake:tokens_per_s=200", "journal": folder / "journal"}
    with Killable(folder / "log", **settings) as it:
        it.start()
        it.wait_ready()
        yield it


@contextmanager
def restarting(process: Killable) -> Iterator[None]:
    """Killed now, started again meanwhile."""
    process.kill()
    thread = threading.Thread(target=process.start)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        process.wait_ready()


def test_openais_client_reads_on_over_http(process: Killable) -> None:
    """Its own retries wait for the server."""
    received = Received()
    with sync(process.url, max_retries=20) as client:
        whole = client.responses.create(**BODY).output_text
        stream: Any = client.responses.create(**BODY, stream=True, background=True)
        while len(received.text) < 100:
            received.take(next(stream))
        with restarting(process):
            with pytest.raises(openai.APIConnectionError):
                deque(map(received.take, stream))
            stream = client.responses.retrieve(
                received.id, stream=True, starting_after=received.last
            )
        deque(map(received.take, stream))
    received.check(NUM)
    assert received.text == whole


def test_openais_client_reconnects_its_socket(process: Killable) -> None:
    """With our subprotocol, by `response.resume`: what it sends waits for the new socket."""
    received, codes, asked = Received(), [], -2

    def resume(event: Any) -> None:
        """Called before every attempt; while the server loads, 1013 closes the new socket."""
        nonlocal asked
        if asked != received.last or event.close_code == 1013:
            asked = received.last
            codes.append(event.close_code)
            resumed = {"response_id": received.id, "starting_after": asked}
            connection.send_raw(json.dumps({"type": "response.resume", **resumed}))

    with (
        sync(process.url) as client,
        client.responses.connect(
            on_reconnecting=resume,
            initial_delay=0.1,
            max_delay=0.2,
            max_retries=100,
            websocket_connection_options={"subprotocols": [Subprotocol("streamer.v1.json")]},
        ) as connection,
    ):
        connection.response.create(**BODY)
        num_restarts = num_resumed = 0
        for event in connection:
            num_resumed += event.type == "response.resumed"
            # The package may keep what it failed to send, and then it has asked twice.
            is_twice = num_resumed > num_restarts and event.type not in OURS
            if is_twice and event.sequence_number <= received.last:
                continue
            received.take(event)
            if received.final is not None:
                break
            if num_restarts < 2 and len(received.text) > 200 * (num_restarts + 1):
                num_restarts += 1
                process.kill()
                process.start()
    received.check(NUM)
    assert codes.count(1006) == 2
    assert set(codes) <= {1006, 1013}


def test_openais_client_for_js_reconnects(process: Killable, script: Path) -> None:
    received = run(script, process.url, "fake", process.url, process.restart)
    check_reconnected(received["reconnected"])


async def test_an_answer_is_read_on_another_way(process: Killable) -> None:
    """Begun by each transport, and after the restart read on by all of them at once."""
    server = Server(process.url, process.ready)
    body = {**BODY, "seed": 5, "return_token_ids": True, "detach_s": 60}
    whole = await follow(server, body, by_query)
    begun = await asyncio.gather(*(follow(server, body, way, is_enough=has_begun) for way in WAYS))
    await asyncio.to_thread(process.restart)
    pairs = list(product(begun, WAYS))
    ends = await asyncio.gather(*(follow(server, {}, way, seen=deepcopy(b)) for b, way in pairs))
    for end in ends:
        assert end.outcome == whole.outcome
    assert not server.num_resumed


async def test_a_lost_socket_takes_its_steer_along(process: Killable) -> None:
    """Another socket brings the end of what was steered, and no successor."""
    server, asked = Server(process.url, process.ready), {"input": "And then?"}
    body = {**BODY, "max_output_tokens": 20 * NUM}  # a minute, or it has ended before the steer
    first, second = await follow(server, body, by_socket, is_enough=has_begun), Events()
    async with Socket(server) as socket:
        await socket.ask({}, first)
        await socket.send("response.steer", previous_response_id=first.id, **asked)
        async for event in socket.events():
            if event["type"].startswith("response.steer."):
                break
    assert event["type"] == "response.steer.accepted"
    await follow(server, {}, by_query, seen=deepcopy(first))
    async with asyncio.timeout(10), Socket(server) as socket:
        await socket.ask({}, first)
        await features.steer(server, socket, first, second, asked)
    assert first.final["incomplete_details"] == {"reason": "steered"}
    assert not second.id


def has_begun(seen: Events) -> bool:
    return seen.last >= 60
