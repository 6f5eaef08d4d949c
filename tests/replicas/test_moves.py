"""Answers of every kind that move to another replica are those of an undisturbed run.

The same requests are made twice; the second time the replica with most of them drains, and then the
next one is lost, while clients read. They notice nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.chaos.clients import Server, chat, response_by_socket, response_by_sse, scrubbed, sse
from tests.chaos.test_kills import Ask, asks, outcomes
from tests.server.support.running import BUNDLED, Running
from tests.server.test_tool_calls import ASKED, INPUT, RESPONSE_TOOLS, SCRIPT, TOOLS, folded

SPECULATES = {"method": "suffix"}
TOLD = "Tell a story about a fox, a hen and the moon."


@pytest.fixture
def started() -> Iterator[Any]:
    """A function that starts a server over three replicas."""
    running: list[Running] = []

    def start(**settings: Any) -> Running:
        found = Running(**settings)
        found.num_replicas = 3
        running.append(found.start())
        return found

    yield start
    for each in running:
        each.stop()


async def whole(server: Server, path: str, body: dict[str, Any]) -> Any:
    """An answer in one piece."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60.0) as client:
        answer = (await client.post(path, json=body)).raise_for_status()
        server.read()
        found = scrubbed(answer.json())
        for name in ("input_tokens", "cache_read_input_tokens"):  # what a replica's cache had
            found["usage"].pop(name, None)
        return found


async def called(server: Server, body: dict[str, Any]) -> Any:
    """A streamed chat with its reasoning and calls."""
    ends, deltas = [], []
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=60.0) as client,
        client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response,
    ):
        async for _, chunk in sse(response):
            if chunk is None:
                break
            server.read()
            for choice in chunk["choices"]:
                deltas.append(choice["delta"])
                ends.append(choice["finish_reason"])
    found = folded(deltas)
    return found["content"], found["reasoning"], [call[1:] for call in found["calls"]], ends[-1]


def bundled_mix() -> dict[str, Ask]:
    """What test_kills.py asks for, and what can't be resumed by a client but moves all the same."""
    messages = [{"role": "user", "content": TOLD}]
    base = {"model": "streamer-demo", "messages": messages, "max_tokens": 70, "temperature": 1.0}
    stops = {**base, "seed": 11, "n": 3, "stop": ["ing t", "e s", "zzz"], "logprobs": True}
    biased = {**base, "seed": 12, "logit_bias": {"17": 3.0}, "presence_penalty": 0.5}
    told = {"type": "content", "content": "A fox lived in a forest. A hen lived in a house."}
    text = {"model": "streamer-demo", "prompt": TOLD, "max_tokens": 60, "seed": 14}
    echoed = {**text, "echo": True, "logprobs": 2, "n": 2, "temperature": 1.0}
    message = {**base, "seed": 15}
    return asks(0) | {
        "stops": lambda server: chat(server, stops),
        "bias": lambda server: chat(server, biased),
        "prediction": lambda server: chat(server, {**base, "seed": 13, "prediction": told}),
        "wide": lambda server: chat(
            server, {**base, "use_beam_search": True, "beam_width": 6, "n": 2, "temperature": 0}
        ),
        "echoed": lambda server: whole(server, "/v1/completions", echoed),
        "best": lambda server: whole(server, "/v1/completions", {**text, "best_of": 3}),
        "anthropic": lambda server: whole(server, "/v1/messages", message),
    }


def scripted_mix() -> dict[str, Ask]:
    """Reasoning and calls, in every form."""
    body: dict[str, Any] = {"messages": ASKED, "tools": TOOLS}
    response = {"input": INPUT, "tools": RESPONSE_TOOLS, "seed": 5}

    async def outcome(follow: Any, server: Server) -> Any:
        *others, final = (await follow(server, response)).outcome
        for item in final["output"]:
            item.pop("call_id", None)  # it has the response's id, and that its replica's name
        return [*others, final]

    return {
        "chat": lambda server: called(server, body),
        "one call": lambda server: called(server, {**body, "parallel_tool_calls": False}),
        "no tools": lambda server: called(server, {"messages": ASKED}),
        "whole": lambda server: whole(server, "/v1/chat/completions", {**body, "n": 2, "seed": 5}),
        "sse": lambda server: outcome(response_by_sse, server),
        "socket": lambda server: outcome(response_by_socket, server),
        "anthropic": lambda server: whole(
            server, "/v1/messages", {"model": "fake", "max_tokens": 400, "messages": ASKED}
        ),
    }


def end_busiest(running: Running, is_drained: bool) -> int:
    """End the replica with the most live requests; returns their number."""

    async def end() -> int:
        replicas = running.replicas
        name = max(replicas, key=lambda each: len(replicas[each].engine.live()))
        server = replicas.pop(name)
        num_live = len(server.engine.live())
        if is_drained:
            await server.drain(10.0)
        await server.aclose()
        return num_live

    return running.on_loop(end())


async def check_moves(running: Running, mix: dict[str, Ask], num_read: int) -> None:
    """The outcomes of the mix, undisturbed and with two moves after so many events each."""

    async def ready() -> None:
        raise AssertionError("a client has lost its server")

    server = Server(running.url, ready)
    expected = await outcomes(server, mix)
    again = asyncio.create_task(outcomes(server, mix))
    again.add_done_callback(lambda _: server.more.set())
    for is_drained in (True, False):
        at = server.num_read + num_read
        while server.num_read < at and not again.done():
            server.more.clear()
            await server.more.wait()
        assert not again.done(), again.result()
        assert await asyncio.to_thread(end_busiest, running, is_drained) > 0, "nothing moved"
    found = await again
    for name, outcome in found.items():
        assert outcome == expected[name], name


async def test_whatever_a_request_asks_for_goes_on_as_it_was(started: Any) -> None:
    settings = {**BUNDLED, "num_gpu_blocks_override": 320, "max_wait_s": 0}
    running = started(**settings, speculative_config=SPECULATES)
    await check_moves(running, bundled_mix(), 100)


async def test_reasoning_and_calls_go_on_as_they_were(started: Any) -> None:
    running = started(model="fake:tokens_per_s=150", script=SCRIPT)
    await check_moves(running, scripted_mix(), 100)
