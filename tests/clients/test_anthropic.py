"""Anthropic's package, unchanged: create, the stream helper, counts, tool runner, errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import anthropic
import pytest
from pydantic import BaseModel

from streamer.fake.model import expected_text
from tests.server.support.counting import check_counting
from tests.server.support.running import Running


def asking(text: str, **fields: Any) -> dict[str, Any]:
    given = {"model": "fake", "max_tokens": 1000, "messages": [{"role": "user", "content": text}]}
    return {**given, **fields}


@pytest.fixture
def client(server: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(slow: Running) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=slow.url, api_key="none") as client:
        yield client


def test_streamed_is_the_whole(client: anthropic.Anthropic) -> None:
    asked = asking("count to 12", system="Count.", metadata={"user_id": "u"})
    whole = client.messages.create(**asked)
    assert [block.type for block in whole.content] == ["text"]
    assert whole.content[0].text == expected_text(12)  # type: ignore[union-attr]
    assert (whole.stop_reason, whole.usage.output_tokens) == ("end_turn", 13)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == stream.get_final_text() == expected_text(12)
    assert final.usage.cache_read_input_tokens
    sizes = [final.usage.input_tokens + final.usage.cache_read_input_tokens]
    sizes += [whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)]
    del asked["max_tokens"], asked["metadata"]
    sizes += [client.messages.count_tokens(**asked).input_tokens]
    assert len(set(sizes)) == 1


def test_a_conversation_goes_on_with_its_own_answers(client: anthropic.Anthropic) -> None:
    asked = asking("count to 5")
    first = client.messages.create(**asked)
    messages = [*asked["messages"], {"role": "assistant", "content": first.content}]
    messages.append({"role": "user", "content": "count to 6"})
    events = list(client.messages.create(**asking("", messages=messages, stream=True)))
    kinds = [event.type for event in events]
    assert kinds[:2] + kinds[-3:] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    stopped = client.messages.create(**asking("count", stop_sequences=[" 5"]))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " 5")


async def test_several_at_once_and_one_that_leaves(
    async_client: anthropic.AsyncAnthropic, slow: Running
) -> None:
    async def text(number: int) -> str:
        async with async_client.messages.stream(**asking(f"count to {number}")) as stream:
            return await stream.get_final_text()

    assert await asyncio.gather(*map(text, range(1, 7))) == [*map(expected_text, range(1, 7))]
    async with async_client.messages.stream(**asking("count", max_tokens=30_000)) as stream:
        read = ""
        async for piece in stream.text_stream:
            read += piece
            if len(read) > 20:
                break
    check_counting(read)
    await asyncio.to_thread(slow.wait_idle)


def test_refusals_are_its_exceptions(client: anthropic.Anthropic, server_with: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match="model 'other' is not served here"):
        client.messages.create(**asking("x", model="other"))
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(**asking("x", extra_body={"temperature": 9}))
    keyed = server_with(api_key=("secret",), max_requests_per_minute=1)
    for given in ({"api_key": "wrong"}, {"auth_token": "wrong"}):
        with (
            anthropic.Anthropic(base_url=keyed.url, max_retries=0, **given) as other,
            pytest.raises(anthropic.AuthenticationError),
        ):
            other.messages.create(**asking("count to 2"))
    with anthropic.Anthropic(base_url=keyed.url, api_key="secret", max_retries=0) as known:
        assert known.messages.create(**asking("count to 2")).usage.output_tokens == 3
        with pytest.raises(anthropic.RateLimitError):
            known.messages.create(**asking("count to 2"))


class Reply(BaseModel):
    color: Literal["red", "blue"]
    is_sure: bool


def test_the_bundled_model_follows_a_schema(bundled: Running) -> None:
    with anthropic.Anthropic(base_url=bundled.url, api_key="none", max_retries=0) as client:
        asked = asking("Which color?", model="streamer-demo", extra_body={"temperature": 0})
        parsed = client.messages.parse(**asked, output_format=Reply)
        assert isinstance(parsed.parsed_output, Reply)
        with client.messages.stream(**asked, output_format=Reply) as stream:
            assert isinstance(stream.get_final_message().parsed_output, Reply)


SCRIPT = [
    {"when": "18 degrees in Bern", "answer": "It is 18 degrees."},
    {
        "when": "weather",
        "answer": "<think>\nI look.\n</think>\n\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>',
    },
]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_tool_runner_runs_tools(scripted: Running, is_streamed: bool) -> None:
    seen: list[str] = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: its name
        """
        seen.append(city)
        return f"18 degrees in {city}"

    with anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0) as client:
        asked = asking("How is the weather?", tools=[get_weather])
        if is_streamed:
            messages = [
                stream.get_final_message()
                for stream in client.beta.messages.tool_runner(**asked, stream=True)
            ]
        else:
            messages = list(client.beta.messages.tool_runner(**asked))
    first, last = messages
    assert [block.type for block in first.content] == ["thinking", "tool_use"]
    assert first.stop_reason == "tool_use"
    assert [block.to_dict()["text"] for block in last.content] == ["It is 18 degrees."]
    assert seen == ["Bern"]
