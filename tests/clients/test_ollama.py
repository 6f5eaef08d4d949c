"""Ollama's package, unchanged: chat, generate, streams of both, list, show, ps, tools, errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import ollama
import pytest
from pydantic import BaseModel

from streamer.demo import CHECKPOINT
from streamer.fake.model import expected_text
from tests.server.support.running import BUNDLED, Running


def asking(text: str) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": text}]}


@pytest.fixture
def client(server: Running) -> Iterator[ollama.Client]:
    with ollama.Client(server.url) as client:
        yield client


def test_streamed_is_the_whole(client: ollama.Client) -> None:
    whole = client.chat(**asking("count to 9"), options={"temperature": 0}, keep_alive="5m")
    assert whole.message.content == expected_text(9)
    assert (whole.done_reason, whole.eval_count) == ("stop", 10)
    parts = list(client.chat(**asking("count to 9"), stream=True))
    assert "".join(part.message.content or "" for part in parts) == expected_text(9)
    assert [part.done for part in parts[-2:]] == [False, True]
    text = client.generate("fake", "count to 4", options=ollama.Options(num_predict=2))
    assert (text.response, text.done_reason) == (expected_text(2), "length")
    pieces = list(client.generate("fake", "count to 4", stream=True))
    assert "".join(piece.response or "" for piece in pieces) == expected_text(4)


def test_what_is_served(client: ollama.Client) -> None:
    (listed,) = client.list().models
    assert listed.model == "fake"
    shown = client.show("fake")
    assert shown.capabilities is not None
    assert "completion" in shown.capabilities
    (loaded,) = client.ps().models
    assert (loaded.model, loaded.context_length) == ("fake", 1 << 24)


@pytest.mark.parametrize(
    ("quantization", "level", "most_bits"),
    [(None, "F32", 33), ("int8", "int8", 9.5), ("int4", "int4", 6)],
)
def test_sizes_are_those_of_the_weights(
    server_with: Any, quantization: str | None, level: str, most_bits: float
) -> None:
    running = server_with(**BUNDLED, quantization=quantization)
    files = CHECKPOINT.glob("*.safetensors")
    stored = sum(file.stat().st_size for file in files)
    with ollama.Client(running.url) as client:
        (listed,) = client.list().models
        (loaded,) = client.ps().models
        shown = client.show(listed.model or "")
    assert listed.size is not None
    assert stored * 0.99 < listed.size < stored  # less the header
    assert loaded.size is not None
    parameters = shown.modelinfo["general.parameter_count"]  # type: ignore[index]
    assert most_bits - 2 < 8 * loaded.size / parameters < most_bits
    for details in (listed.details, loaded.details, shown.details):
        assert details is not None
        assert (details.quantization_level or "").startswith(level)


def test_refusals_are_its_exceptions(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="model 'other' is not served here") as caught:
        client.chat(**{**asking("x"), "model": "other"})
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match=r"options\.temperature"):
        list(client.chat(**asking("x"), options={"temperature": 9}, stream=True))


async def test_leaving_a_stream_frees_its_place(slow: Running) -> None:
    async with ollama.AsyncClient(slow.url) as client:
        stream = await client.chat(**asking("count"), stream=True)
        assert (await anext(stream)).message.content
        await stream.aclose()
    await asyncio.to_thread(slow.wait_idle)


class Reply(BaseModel, extra="forbid"):
    color: Literal["red", "blue"]
    is_sure: bool


def test_the_bundled_model_follows_a_schema(bundled: Running) -> None:
    schema = Reply.model_json_schema()
    with ollama.Client(bundled.url) as client:
        messages = asking("Which color?")["messages"]
        options = {"temperature": 0}
        chat = client.chat("streamer-demo", messages, format=schema, options=options)
        Reply.model_validate_json(chat.message.content or "")
        text = client.generate(
            "streamer-demo", "Which color?", format="json", options={"num_predict": 9}
        )
        assert (text.response or "").startswith("{")


SCRIPT = [
    {"when": "18 degrees in Bern", "answer": "It is 18 degrees."},
    {
        "when": "weather",
        "answer": "<think>\nI look.\n</think>\n\nWait.<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>',
    },
]


def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return f"18 degrees in {city}"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_tool_loop(scripted: Running, is_streamed: bool) -> None:
    chat: dict[str, Any] = {"model": "fake", "tools": [get_weather], "think": True}
    messages: list[Any] = [{"role": "user", "content": "How is the weather?"}]
    with ollama.Client(scripted.url) as client:
        assert client.show("fake").capabilities == ["completion", "tools", "thinking"]
        if is_streamed:
            parts = list(client.chat(**chat, messages=messages, stream=True))
            said = [part.message for part in parts]
        else:
            said = [client.chat(**chat, messages=messages).message]
        assert "".join(message.thinking or "" for message in said) == "I look."
        assert "".join(message.content or "" for message in said) == "Wait."
        (call,) = [call for message in said for call in message.tool_calls or ()]
        assert call.function.name == "get_weather"
        brought = get_weather(**call.function.arguments)
        messages += [
            {"role": "assistant", "content": "Wait.", "thinking": "I look.", "tool_calls": [call]},
            {"role": "tool", "tool_name": "get_weather", "content": brought},
        ]
        last = client.chat(**chat, messages=messages)
        assert (last.message.content, last.message.tool_calls) == ("It is 18 degrees.", None)
        with pytest.raises(ollama.ResponseError, match="there is no call before it"):
            client.chat("fake", [{"role": "tool", "content": "x"}])
        cut = client.chat(**chat, messages=messages[:1], options={"num_predict": 90})
        assert cut.message.content == 'Wait.{"city": "'
        thought = client.generate("fake", "weather")
        assert (thought.thinking, (thought.response or "")[:5]) == ("I look.", "Wait.")
