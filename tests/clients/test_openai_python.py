"""OpenAI's Python package, unchanged: its own reconnection, cut streams, the bundled model.

Other tests of it are beside what they test: tests/server/test_official_client.py (chat,
completions, lanes, forks), test_responses.py and test_steer.py in tests/server/responses.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from typing import Any

import openai
import pytest
from websockets.typing import Subprotocol

from streamer.core.plan import NoticeKind
from streamer.engine.refusals import SHUTDOWN
from streamer.fake.model import expected_text
from tests.server.support.counting import check_counting
from tests.server.support.relay import Relay
from tests.server.support.running import Running

FINAL = ("response.completed", "response.incomplete", "response.failed")
# Extensions, with our subprotocol: they take no numbers.
OURS = {"session.created", "response.resumed", *(f"response.{kind.value}" for kind in NoticeKind)}
MESSAGES: Any = [{"role": "user", "content": "What is paged attention?"}]


def sync(url: str, **settings: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="none", **{"max_retries": 0, **settings})


def asynchronous(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0)


class Received:
    """The standard events of one response, over as many connections as it took."""

    def __init__(self) -> None:
        self.id, self.text, self.last = "", "", -1
        self.final: Any = None

    def take(self, event: Any) -> None:
        assert event.type != "error", event
        if event.type in OURS:
            return
        number = event.sequence_number
        assert number > self.last, "a part is doubled"
        self.last = number
        if event.type == "response.created":
            self.id = event.response.id
        elif event.type == "response.output_text.delta":
            self.text += event.delta
        elif event.type in FINAL:
            self.final = event.response

    def check(self, num_tokens: int) -> None:
        assert self.final.id == self.id
        assert self.final.output_text == self.text
        assert self.final.usage.output_tokens == num_tokens
        check_counting(self.text)


def test_it_reconnects_and_the_answer_goes_on_over_the_socket(relay: Relay) -> None:
    """With our subprotocol: its handler sends `response.resume`, which waits for the new socket."""
    received, codes, statuses, num_cuts = Received(), [], [], 0

    def resume(event: Any) -> None:
        codes.append(event.close_code)
        connection.send_raw(
            json.dumps(
                {
                    "type": "response.resume",
                    "response_id": received.id,
                    "starting_after": received.last,
                }
            )
        )

    with (
        sync(relay.url) as client,
        client.responses.connect(
            on_reconnecting=resume,
            initial_delay=0.02,
            websocket_connection_options={"subprotocols": [Subprotocol("streamer.v1.json")]},
        ) as connection,
    ):
        # Of any length: it is made still at the last cut, however late the client reads.
        connection.response.create(model="fake", input="count", max_output_tokens=30_000)
        for event in connection:
            if event.type == "response.resumed":
                statuses.append(event.status)
                if len(statuses) == 3:
                    end = {"type": "response.cancel", "response_id": received.id}
                    connection.send_raw(json.dumps(end))
            received.take(event)
            if received.final is not None:
                break
            is_resumed = len(statuses) == num_cuts  # the cut before this one was survived
            if is_resumed and num_cuts < 3 and received.text.count(" ") > 40 * (num_cuts + 1):
                relay.cut()
                num_cuts += 1
    received.check(received.text.count(" "))
    assert codes == [1006] * 3
    assert statuses == ["live"] * 3
    assert relay.num_connections == 4


async def test_it_reconnects_and_the_answer_goes_on_over_http(relay: Relay) -> None:
    """Unchanged package: the answer is read over HTTP from the cut on, the next turn by socket."""
    received, attempts, is_reconnecting = Received(), [], asyncio.Event()

    def note(event: Any) -> None:
        attempts.append(event.attempt)
        is_reconnecting.set()

    async with (
        asynchronous(relay.url) as client,
        client.responses.connect(on_reconnecting=note, initial_delay=0.02) as connection,
    ):
        await connection.response.create(model="fake", input="count", max_output_tokens=200)
        while len(received.text) < 50:
            received.take(await connection.recv())
        relay.cut()
        stream = await client.responses.retrieve(
            received.id, stream=True, starting_after=received.last
        )
        async for event in stream:
            received.take(event)
        received.check(200)
        next_turn = asyncio.create_task(read_turn(connection))
        await is_reconnecting.wait()
        await connection.response.create(
            model="fake", input="count to 3", previous_response_id=received.id
        )
        final = await next_turn
    assert (final.output_text, final.previous_response_id) == (expected_text(3), received.id)
    assert attempts == [1]


async def read_turn(connection: Any) -> Any:
    """The end of the next answer; events in flight at the cut may come before it."""
    async for event in connection:
        assert event.type != "error", event
        if event.type == "response.completed":
            return event.response
    raise AssertionError("the socket closed")


def test_it_finds_the_server_that_took_the_place_of_one_that_stopped() -> None:
    """Its creates wait for the new server, which reports the lost answer and answers the rest."""
    first = Running(model="fake:tokens_per_s=400", drain_timeout=0.1).start()
    second = Running(port=int(first.url.rpartition(":")[2]))
    codes: list[int] = []
    ends: list[Any] = []
    errors: list[Any] = []
    lost = ""

    def ask_again(event: Any) -> None:
        codes.append(event.close_code)
        connection.response.create(model="fake", input="x", previous_response_id=lost)
        connection.response.create(model="fake", input="count to 4")

    try:
        with (
            sync(first.url) as client,
            client.responses.connect(on_reconnecting=ask_again, initial_delay=0.02) as connection,
        ):
            connection.response.create(model="fake", input="count", max_output_tokens=30_000)
            for event in connection:
                if event.type == "response.created" and not lost:
                    lost = event.response.id
                    first.stop()
                    second.start()
                elif event.type == "error":
                    errors.append(event.error)
                elif event.type in FINAL:
                    ends.append(event.response)
                    if event.type == "response.completed":
                        break
    finally:
        first.stop()
        second.stop()
    assert codes == [1012]
    assert [(e.code, e.param) for e in errors] == [
        ("previous_response_not_found", "previous_response_id")
    ]
    (cut,) = ends[:-1]
    assert (cut.id, cut.status, cut.incomplete_details.reason) == (lost, "incomplete", SHUTDOWN)
    assert ends[-1].output_text == expected_text(4)


def test_a_cut_stream_is_read_on(relay: Relay) -> None:
    received = Received()
    with sync(relay.url) as client:
        stream: Any = client.responses.create(
            model="fake",
            input="count",
            max_output_tokens=150,
            stream=True,
            extra_body={"detach_s": 20},
        )
        while len(received.text) < 40:
            received.take(next(stream))
        relay.cut()
        with pytest.raises(openai.APIConnectionError):
            deque(map(received.take, stream))
        with client.responses.stream(response_id=received.id, starting_after=received.last) as rest:
            for event in rest:
                received.take(event)
    received.check(150)


def test_bundled_chat_streams_what_it_answers_whole(bundled: Running) -> None:
    with sync(bundled.url) as client:
        settings: Any = {"model": "streamer-demo", "messages": MESSAGES, "temperature": 0}
        whole = client.chat.completions.create(**settings, max_tokens=60)
        text, usage = "", None
        for chunk in client.chat.completions.create(
            **settings, max_tokens=60, stream=True, stream_options={"include_usage": True}
        ):
            usage = chunk.usage or usage
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert "block" in text
    assert whole.usage is not None
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


async def test_bundled_lanes_and_lineage(bundled: Running) -> None:
    """Two lanes at once from one answer; each equals the same request run alone."""
    settings: Any = {"model": "streamer-demo", "temperature": 0, "max_output_tokens": 40}
    lanes = {"a": "Why?", "b": "What is a prefix cache?"}
    ends: dict[str, Any] = {}
    async with asynchronous(bundled.url) as client:
        parent = await client.responses.create(input="What is paged attention?", **settings)
        async with client.responses.connect() as connection:
            for lane, text in lanes.items():
                await connection.response.create(
                    input=text, stream_id=lane, previous_response_id=parent.id, **settings
                )
            async for event in connection:
                assert event.type != "error", event
                if event.type in FINAL:
                    ends[event.stream_id or ""] = event.response
                    if len(ends) == len(lanes):
                        break
        for lane, text in lanes.items():
            alone = await client.responses.create(
                input=text, previous_response_id=parent.id, **settings
            )
            assert ends[lane].output_text == alone.output_text
            assert ends[lane].usage.input_tokens == alone.usage.input_tokens
