"""LangChain's ChatOpenAI, unchanged: whole, streamed, batched, over both APIs, its errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI

from streamer.fake.model import expected_text
from tests.server.support.running import Running

USAGE = ("input_tokens", "output_tokens", "total_tokens")
QUESTION = "What is paged attention?"


def chat(server: Running, **settings: Any) -> ChatOpenAI:
    given = {"model": "fake", "max_retries": 0, "stream_usage": True}
    return ChatOpenAI(base_url=server.url + "/v1", api_key="none", **{**given, **settings})


@pytest.fixture
async def http() -> AsyncIterator[openai.DefaultAsyncHttpxClient]:
    """LangChain keeps one client for all, which would outlive the test's event loop."""
    async with openai.DefaultAsyncHttpxClient() as client:
        yield client


def usage_of(message: BaseMessage) -> dict[str, int]:
    assert isinstance(message, AIMessage)
    assert message.usage_metadata is not None
    usage = {name: message.usage_metadata[name] for name in USAGE}
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    return usage


@pytest.mark.parametrize("use_responses_api", [False, True])
async def test_streamed_is_the_whole(
    server: Running, http: openai.DefaultAsyncHttpxClient, use_responses_api: bool
) -> None:
    model = chat(server, use_responses_api=use_responses_api, http_async_client=http)
    whole = await model.ainvoke("count to 12")
    assert whole.text == expected_text(12)
    assert usage_of(whole)["output_tokens"] == 13  # with the end of the turn
    pieces = [piece async for piece in model.astream("count to 12")]
    assert sum(bool(piece.text) for piece in pieces) > 1
    joined = pieces[0]
    for piece in pieces[1:]:
        joined += piece
    assert joined.text == whole.text
    assert usage_of(joined) == usage_of(whole)


def test_sync_with_roles_stop_and_finish_reason(server: Running) -> None:
    messages: list[BaseMessage] = [
        SystemMessage("be exact"),
        HumanMessage("count to 2"),
        AIMessage(" 1 2"),
        HumanMessage("count to 9"),
    ]
    model = chat(server)
    answer = model.invoke(messages, stop=[" 5"])
    assert answer.text == " 1 2 3 4"
    assert answer.response_metadata["finish_reason"] == "stop"
    assert "".join(piece.text for piece in model.stream(messages, stop=[" 5"])) == answer.text
    short = chat(server, max_tokens=3).invoke(messages)
    assert short.response_metadata["finish_reason"] == "length"
    assert usage_of(short)["output_tokens"] == 3


@pytest.mark.parametrize("use_previous_response_id", [False, True])
def test_a_next_turn_over_responses(server: Running, use_previous_response_id: bool) -> None:
    """The answer as LangChain keeps it goes back as items, or as an id."""
    model = chat(server, use_responses_api=True, use_previous_response_id=use_previous_response_id)
    talk: list[BaseMessage] = [SystemMessage("be exact"), HumanMessage("count to 3")]
    talk += [model.invoke(talk), HumanMessage([{"type": "text", "text": "count to 5"}])]
    second = model.invoke(talk)
    assert second.text == expected_text(5)
    stream = server.engine.get(second.response_metadata["id"])
    assert stream is not None
    prompt = server.engine.tokenizer.decode(stream.prompt, False)
    turns = "<|user|>count to 3<|end|><|assistant|> 1 2 3<|end|><|user|>count to 5<|end|>"
    assert prompt.endswith(turns + "<|assistant|>")
    assert prompt.count("be exact") == 1


def test_a_batch_runs_at_once(server: Running) -> None:
    answers = chat(server).batch([f"count to {n}" for n in range(1, 9)])
    assert [answer.text for answer in answers] == [expected_text(n) for n in range(1, 9)]


def test_logprobs(server: Running) -> None:
    answer = chat(server, logprobs=True, top_logprobs=2).invoke("count to 3")
    content = answer.response_metadata["logprobs"]["content"]
    assert "".join(token["token"] for token in content).startswith(answer.text)
    assert all(len(token["top_logprobs"]) == 2 for token in content)


async def test_leaving_a_stream_frees_its_place(
    slow: Running, http: openai.DefaultAsyncHttpxClient
) -> None:
    stream = chat(slow, max_tokens=30_000, http_async_client=http).astream("count")
    async with aclosing(stream) as pieces:  # type: ignore[type-var]
        while not (await anext(pieces)).text:
            pass
    await asyncio.to_thread(slow.wait_idle)  # this loop closes what LangChain left open


def test_refusals_are_openais_errors(server: Running, bundled: Running) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        chat(server, model="other").invoke("x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as tools:
        chat(server).bind_tools([{"type": "function", "function": {"name": "f"}}]).invoke("x")
    assert tools.value.param == "tools"
    for text in ("x " * 1100, "x" * 20_000):
        with pytest.raises(ContextOverflowError):
            chat(bundled, model="streamer-demo").invoke(text)


def test_bundled_streams_what_it_answers_whole(bundled: Running) -> None:
    model = chat(bundled, model="streamer-demo", temperature=0, max_tokens=60)
    whole = model.invoke(QUESTION)
    assert "block" in whole.text
    assert "".join(piece.text for piece in model.stream(QUESTION)) == whole.text
