"""litellm, unchanged: whole, streamed, at once, over chat, completions and responses, its errors.

Its own retries are off, and its list of models is the one it brings, so that nothing is fetched.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import litellm
import pytest

from streamer.fake.model import expected_text
from tests.clients.test_pages import EXAMPLES, run_example
from tests.server.support.counting import check_counting
from tests.server.support.running import Running

QUESTION = "What is paged attention?"
BUNDLED = "openai/streamer-demo"
# How litellm uses pydantic when it records a stream's cost is not ours to mend.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning"),
    pytest.mark.filterwarnings("ignore:Accessing the 'model_:DeprecationWarning"),
]


def asking(server: Running, text: str, model: str = "openai/fake", **fields: Any) -> dict[str, Any]:
    """The arguments of a chat."""
    given = {"model": model, "api_base": server.url + "/v1", "api_key": "none", "max_retries": 0}
    return {**given, "messages": [{"role": "user", "content": text}], **fields}


def responding(server: Running, text: str, **fields: Any) -> dict[str, Any]:
    """The arguments of a response."""
    given = asking(server, text, **fields)
    return {**given, "input": given.pop("messages")}


@pytest.fixture(autouse=True)
async def _none_left() -> AsyncIterator[None]:
    """litellm keeps its clients as long as the process lives: longer than a test's event loop."""
    yield
    kept = litellm.in_memory_llm_clients_cache
    for client in kept.cache_dict.values():
        closing = client.close()
        if closing is not None:
            await closing
    kept.flush_cache()


def joined(chunks: list[Any]) -> tuple[str, set[str], int]:
    """The text of a streamed chat, why it ended, and the tokens that it used."""
    choices = [choice for chunk in chunks for choice in chunk.choices]
    text = "".join(choice.delta.content or "" for choice in choices)
    (usage,) = (chunk.usage for chunk in chunks if getattr(chunk, "usage", None))
    return text, {c.finish_reason for c in choices if c.finish_reason}, usage.completion_tokens


def test_streamed_is_the_whole(server: Running) -> None:
    chat = asking(server, "count to 12")
    whole = litellm.completion(**chat)
    assert whole.choices[0].message.content == expected_text(12)
    assert whole.usage.completion_tokens == 13  # with the end of the turn
    usage = {"include_usage": True}
    chunks = list(litellm.completion(**chat, stream=True, stream_options=usage))
    assert sum(bool(c.choices and c.choices[0].delta.content) for c in chunks) > 1
    assert joined(chunks) == (expected_text(12), {"stop"}, 13)
    cut = litellm.completion(**chat, max_tokens=3)
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 3)


async def test_many_at_once(server: Running) -> None:
    whole = (litellm.acompletion(**asking(server, f"count to {n}")) for n in range(1, 9))
    texts = [answer.choices[0].message.content for answer in await asyncio.gather(*whole)]
    assert texts == [expected_text(n) for n in range(1, 9)]
    usage = {"include_usage": True}
    stream = await litellm.acompletion(
        **asking(server, "count to 9"), stream=True, stream_options=usage
    )
    assert joined([chunk async for chunk in stream]) == (expected_text(9), {"stop"}, 10)


def test_completions_and_log_probabilities(server: Running) -> None:
    body = asking(server, "", model="text-completion-openai/fake")
    del body["messages"]
    text = litellm.text_completion(**body, prompt="count to 4")
    assert text.choices[0].text == expected_text(4)
    chat = litellm.completion(**asking(server, "count to 3"), logprobs=True, top_logprobs=2)
    content = chat.choices[0].logprobs.content
    assert "".join(token.token for token in content).startswith(expected_text(3))
    assert all(len(token.top_logprobs) == 2 for token in content)


def test_responses(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """litellm fakes the streams of models that are not on its list."""
    known = {"openai/fake": {"litellm_provider": "openai", "supports_native_streaming": True}}
    monkeypatch.setattr(litellm, "model_cost", dict(litellm.model_cost))
    litellm.register_model(known)
    first = litellm.responses(**responding(server, "count to 5"))
    assert first.output[0].content[0].text == expected_text(5)
    following = responding(server, "count to 7", previous_response_id=first.id)
    events = list(litellm.responses(**following, stream=True))
    kinds = [event.type.value for event in events]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    numbers = [event.sequence_number for event in events[1:-1]]
    assert numbers == sorted(set(numbers))
    text = "".join(e.delta for e in events if e.type.value == "response.output_text.delta")
    final = events[-1].response
    assert text == final.output[0].content[0].text == expected_text(7)
    found = litellm.get_responses(
        final.id, api_base=following["api_base"], api_key="none", custom_llm_provider="openai"
    )
    assert found.output[0].content[0].text == text


async def test_leaving_a_stream_frees_its_place(slow: Running) -> None:
    chat = asking(slow, "count", max_tokens=30_000, stream=True)
    stream = await litellm.acompletion(**chat)
    async with aclosing(stream) as chunks:
        text = ""
        while len(text) < 20:
            text += (await anext(chunks)).choices[0].delta.content or ""
    check_counting(text)
    await asyncio.to_thread(slow.wait_idle)


def test_refusals_are_its_exceptions(server: Running, bundled: Running) -> None:
    with pytest.raises(litellm.NotFoundError, match="model 'other' is not served here"):
        litellm.completion(**asking(server, "x", model="openai/other"))
    with pytest.raises(litellm.BadRequestError, match="temperature must be from"):
        litellm.completion(**asking(server, "x", temperature=9))
    for text, max_tokens in (("x", 10_000_000), ("x " * 1100, 1), ("x" * 20_000, 1)):
        with pytest.raises(litellm.ContextWindowExceededError, match="maximum context length is"):
            litellm.completion(**asking(bundled, text, model=BUNDLED, max_tokens=max_tokens))


def test_bundled_streams_what_it_answers_whole(bundled: Running) -> None:
    settings = {"model": BUNDLED, "temperature": 0, "max_tokens": 60}
    chat = asking(bundled, QUESTION, **settings)
    whole = litellm.completion(**chat)
    text = whole.choices[0].message.content
    assert "block" in text
    usage = {"include_usage": True}
    chunks = list(litellm.completion(**chat, stream=True, stream_options=usage))
    assert joined(chunks)[::2] == (text, whole.usage.completion_tokens)


def test_the_example_of_the_pages(server: Running) -> None:
    (example,) = (each for each in EXAMPLES if "litellm" in each[1])
    assert run_example(server, *example).strip() == expected_text(9).strip()
