"""response.steer with OpenAI's client: the answer ends early, its successor goes on from there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from streamer.fake.model import expected_text
from tests.server.responses.test_socket import FINAL, dial, receive, send, until
from tests.server.support.counting import check_counting
from tests.server.support.greedy import story, telling
from tests.server.support.running import Running


@pytest.fixture
async def connection(slow: Running) -> AsyncIterator[Any]:
    async with (
        openai.AsyncOpenAI(base_url=slow.url + "/v1", api_key="none", max_retries=0) as client,
        client.responses.connect() as connection,
    ):
        yield connection


async def receive_until(connection: Any, *kinds: str) -> list[Any]:
    async with asyncio.timeout(20):
        events = [await connection.recv()]
        while events[-1].type not in kinds:
            events.append(await connection.recv())
    return events


async def test_steer_ends_the_answer_and_the_successor_goes_on(
    slow: Running, connection: Any
) -> None:
    await connection.response.create(
        model="fake",
        input="count",
        max_output_tokens=20_000,
        stream_id="a",
        instructions="be exact",
        metadata={"k": "v"},
    )
    await connection.response.create(
        model="fake", input="later", max_output_tokens=2, stream_id="a"
    )
    first = (await receive_until(connection, "response.output_text.delta"))[0].response.id
    await connection.response.steer(previous_response_id=first, input="count to 4")
    events = await receive_until(connection, "response.incomplete")
    accepted = next(e for e in events if e.type == "response.steer.accepted")
    assert accepted.steer.previous_response_id == first
    assert (accepted.stream_id, accepted.steer.id[:6]) == ("a", "steer_")
    ended = events[-1].response
    assert (ended.id, ended.status, ended.incomplete_details.reason) == (
        first,
        "incomplete",
        "steered",
    )
    check_counting(ended.output_text)
    events = await receive_until(connection, "response.completed")
    final = events[-1].response
    assert events[0].type == "response.created"
    assert (final.previous_response_id, final.output_text) == (first, " 1 2 3 4")
    assert (final.instructions, final.metadata, events[-1].stream_id) == (
        "be exact",
        {"k": "v"},
        "a",
    )
    stream = slow.engine.get(final.id)
    assert stream is not None
    text = slow.engine.tokenizer.decode(stream.prompt, False)
    assert text.endswith(f"{ended.output_text}<|end|><|user|>count to 4<|end|><|assistant|>")
    later = (await receive_until(connection, "response.incomplete"))[-1].response
    assert (later.previous_response_id, later.output_text) == (None, expected_text(2))


def test_several_steers_are_one_successor_in_order(server_with: Any) -> None:
    server = server_with(model="fake:tokens_per_s=1")  # both come before the next token
    message = {"role": "user", "content": [{"type": "input_text", "text": "count to 2"}]}
    with dial(server) as socket:
        send(socket, "response.create", input="count", max_output_tokens=100)
        first = until(socket, "response.output_text.delta")[0]["response"]["id"]
        send(socket, "response.steer", previous_response_id=first, input="stop")
        send(socket, "response.steer", previous_response_id=first, input=[message])
        events = until(socket, "response.completed")
        stream = server.engine.get(events[-1]["response"]["id"])
    assert sum(e["type"] == "response.steer.accepted" for e in events) == 2
    assert stream is not None
    text = server.engine.tokenizer.decode(stream.prompt, False)
    assert text.endswith("<|user|>stop<|end|><|user|>count to 2<|end|><|assistant|>")


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ([], "invalid_input"),
        (None, "invalid_input"),
        ([{"role": "system", "content": "x"}], "invalid_input"),
        ([{"role": "user", "content": "x", "extra": 1}], "invalid_input"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "invalid_input"),
    ],
)
def test_bad_input_comes_back(slow: Running, given: Any, code: str) -> None:
    with dial(slow) as socket:
        send(socket, "response.create", input="count", max_output_tokens=30_000, detach_s=0)
        first = until(socket, "response.output_text.delta")[0]["response"]["id"]
        send(socket, "response.steer", previous_response_id=first, input=given)
        failed = until(socket, "response.steer.failed")[-1]
    assert (failed["error"]["code"], failed["error"]["type"]) == (code, "invalid_request_error")
    assert failed["steer"] == {"previous_response_id": first, "input": given}


def test_steering_an_inactive_response_is_refused(slow: Running) -> None:
    with dial(slow) as socket:
        send(socket, "response.steer", previous_response_id="resp_x", input="x")
        assert receive(socket)["error"]["code"] == "response_not_found"
        send(socket, "response.create", input="count to 2")
        final = until(socket, *FINAL)[-1]["response"]["id"]
        send(socket, "response.steer", previous_response_id=final, input="x")
        assert receive(socket)["error"]["code"] == "response_not_found"
        send(socket, "response.steer", input="x")
        assert receive(socket)["error"]["param"] == "previous_response_id"


def test_a_successor_that_cannot_be_gives_the_input_back(slow: Running) -> None:
    with dial(slow) as socket:
        send(socket, "response.create", input="count", max_output_tokens=129_000)
        first = until(socket, "response.output_text.delta")[0]["response"]["id"]
        long = "y" * 4000
        send(socket, "response.steer", previous_response_id=first, input=long)
        events = until(socket, "response.steer.failed")
    assert events[-1]["error"]["code"] == "successor_creation_failed"
    accepted = next(e for e in events if e["type"] == "response.steer.accepted")
    assert events[-1]["steer"] == {**accepted["steer"], "input": long}


def test_bundled_a_steered_story_is_its_beginning_and_another_follows(bundled: Running) -> None:
    whole = story(bundled, 250)
    with dial(bundled, "streamer.v1.json") as socket:
        receive(socket)
        send(socket, "session.update", window=16)  # without an acknowledgement it cannot end
        send(socket, "response.create", **telling(250))
        first = until(socket, "response.output_text.delta")[0]["response"]["id"]
        question = "What is paged attention?"
        send(socket, "response.steer", previous_response_id=first, input=question)
        ended = until(socket, "response.incomplete")[-1]["response"]
        begun = ended["output"][0]["content"][0]["text"]
        assert (ended["id"], ended["incomplete_details"]) == (first, {"reason": "steered"})
        assert whole.startswith(begun)
        assert 0 < len(begun) < len(whole)
        event = until(socket, "response.created")[-1]
        name = event["response"]["id"]
        while event["type"] not in FINAL:
            number = event.get("sequence_number", 0)
            send(socket, "response.ack", response_id=name, sequence_number=number)
            event = receive(socket)
        final = event["response"]
    assert final["previous_response_id"] == first
    assert "block" in final["output"][0]["content"][0]["text"]
    stream = bundled.engine.get(final["id"])
    assert stream is not None
    text = bundled.engine.tokenizer.decode(stream.prompt, False)
    assert f"{begun}<|im_end|>" in text
    assert question in text
