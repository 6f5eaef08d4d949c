"""OpenAI's Python package, unchanged: chat, completions, models, errors, responses.connect()."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

from streamer.fake.model import expected_text
from tests.server.support.counting import CHAT, check_counting
from tests.server.support.running import Running

MESSAGES: Any = CHAT["messages"]


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(server: Running) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=server.url + "/v1", api_key="none", max_retries=0
    ) as client:
        yield client


def test_chat_whole(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake",
        messages=MESSAGES,
        max_completion_tokens=30,
        metadata={"a": "b"},
        extra_body={"ignore_eos": True},
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 30
    assert answer.metadata == {"a": "b"}
    check_counting(answer.choices[0].message.content or "")


def test_chat_stream_equals_whole(client: openai.OpenAI) -> None:
    settings: Any = {
        "model": "fake",
        "messages": MESSAGES,
        "max_tokens": 25,
        "n": 2,
        "seed": 11,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.chat.completions.create(**settings)
    texts = ["", ""]
    for chunk in client.chat.completions.create(**settings, stream=True):
        assert chunk.model_extra is not None
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [c.message.content for c in whole.choices]
    assert whole.model_extra is not None
    assert whole.model_extra["seed"] == 11


def test_chat_helper_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="fake", messages=MESSAGES, stop=" 9") as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "content.delta" in kinds
    check_counting(final.choices[0].message.content or "")


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    joined = b"".join(bytes(token.bytes or []) for token in logprobs.content)
    assert joined.decode() == answer.choices[0].message.content
    for token in logprobs.content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) <= 2


def test_completions_stream_and_whole(client: openai.OpenAI) -> None:
    settings: Any = {"model": "fake", "prompt": "go", "max_tokens": 9, "logprobs": 1}
    whole = client.completions.create(**settings)
    choice = whole.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert choice.logprobs.text_offset is not None
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        assert choice.text[offset : offset + len(token)] == token
    chunks = list(client.completions.create(**settings, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == choice.text


def test_completions_default_length_and_token_prompts(client: openai.OpenAI) -> None:
    prompts: list[Any] = ["go", [1, 2, 3], ["a", "b"], [[1], [2, 3]]]
    for prompt, num in zip(prompts, (1, 1, 2, 2), strict=True):
        answer = client.completions.create(
            model="fake", prompt=prompt, extra_body={"ignore_eos": True}
        )
        assert [c.index for c in answer.choices] == list(range(num))
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 16 * num


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert client.models.retrieve(model.id).id == model.id
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("unknown/model")
    assert caught.value.code == "model_not_found"


def test_errors_map_to_the_clients_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="fake",
            messages=MESSAGES,
            tools=[{"type": "function", "function": {"name": "f"}}],
        )
    assert refused.value.param == "tools"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model="fake", prompt="x", max_tokens=1 << 23)
    assert too_long.value.code == "context_length_exceeded"


async def test_responses_connect(async_client: openai.AsyncOpenAI) -> None:
    kinds, numbers, text = [], [], ""
    async with async_client.responses.connect() as connection:
        await connection.response.create(model="fake", input="count", max_output_tokens=15)
        async for event in connection:
            assert event.type != "error", event
            kinds.append(event.type)
            numbers.append(getattr(event, "sequence_number", -1))
            if event.type == "response.output_text.delta":
                text += event.delta
            if event.type in ("response.completed", "response.incomplete"):
                assert event.response.output_text == text
                assert event.response.usage is not None
                assert event.response.usage.output_tokens == 15
                assert event.response.error is None
                break
    assert numbers == sorted(set(numbers))
    assert numbers[:4] == [0, 1, 2, 3]
    assert numbers[-1] == 4 + 15 + 3
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    check_counting(text)


async def test_lanes_run_in_parallel_and_in_order(async_client: openai.AsyncOpenAI) -> None:
    texts: dict[str, str] = {}
    lanes: dict[str, str] = {}
    order: list[tuple[str, int]] = []
    async with async_client.responses.connect() as connection:
        for length, lane in ((4000, "slow"), (6, "fast"), (7, "fast"), (5, "slow")):
            await connection.response.create(
                model="fake", input="count", max_output_tokens=length, stream_id=lane
            )
        running = ""
        async for event in connection:
            assert event.type != "error", event
            lane = event.stream_id or ""
            if event.type == "response.created":
                lanes[lane] = event.response.id
                texts[event.response.id] = ""
                running += lane[0]
            elif event.type == "response.output_text.delta":
                texts[lanes[lane]] += event.delta
            elif event.type == "response.incomplete":
                assert event.response.id == lanes[lane]
                assert event.response.output_text == texts[event.response.id]
                order.append((lane, event.response.max_output_tokens or 0))
                if len(order) == 4:
                    break
    assert order == [("fast", 6), ("fast", 7), ("slow", 4000), ("slow", 5)]
    for text in texts.values():
        check_counting(text)


async def test_a_refused_create_is_an_error_event_and_the_socket_lives(
    async_client: openai.AsyncOpenAI,
) -> None:
    async with async_client.responses.connect() as connection:
        await connection.response.create(model="fake", input="x", background=True, stream_id="a")
        event = await connection.recv()
        assert event.type == "error"
        assert (event.status, event.error.param, event.stream_id) == (400, "background", "a")
        await connection.response.create(model="fake", input="x", max_output_tokens=1)
        assert (await connection.recv()).type == "response.created"


async def test_lanes_lineage_and_forks_at_once(async_client: openai.AsyncOpenAI) -> None:
    """A prefilled parent, two lanes that both continue it, and a next turn on each."""
    ends: dict[str, list[Any]] = {"a": [], "b": []}
    async with async_client.responses.connect() as connection:
        await connection.response.create(model="fake", input="count to 3", generate=False)
        async for event in connection:
            if event.type == "response.completed":
                parent = event.response
                break
        assert parent.output == []
        for lane in ends:
            await connection.response.create(
                model="fake", input=f"count to {ord(lane) - 90}", stream_id=lane,
                previous_response_id=parent.id,
            )  # fmt: skip
        async for event in connection:
            assert event.type != "error", event
            if event.type != "response.completed":
                continue
            lane = event.stream_id or ""
            ends[lane].append(event.response)
            if len(ends[lane]) == 1:
                await connection.response.create(
                    model="fake", input="count to 2", stream_id=lane,
                    previous_response_id=event.response.id,
                )  # fmt: skip
            if all(len(each) == 2 for each in ends.values()):
                break
    for lane, (first, second) in ends.items():
        assert first.output_text == expected_text(ord(lane) - 90)
        assert first.previous_response_id == parent.id
        assert (second.output_text, second.previous_response_id) == (" 1 2", first.id)
        items = [
            item.content[0].text
            async for item in async_client.responses.input_items.list(second.id, order="asc")
        ]
        assert items == [
            "count to 3",
            f"count to {ord(lane) - 90}",
            first.output_text,
            "count to 2",
        ]
