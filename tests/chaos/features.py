"""What a killed server is asked for besides answers that run to their end by themselves.

Calls and reasoning, grammars, answers that are cancelled, deleted or steered, and clients that come
back another way than they left. `SETTINGS` are those of a server that can do all of it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from streamer.demo import CHECKPOINT
from tests.chaos.clients import (
    LOST,
    Ask,
    Events,
    Server,
    Socket,
    by_header,
    by_messagepack,
    by_query,
    by_socket,
    call,
    chat,
    follow,
    prompt,
    scrubbed,
)

THINKS = "{% if reasoning_effort %}<think>\n{% endif %}"
PARAMETERS = {
    "type": "object",
    "properties": {"days": {"type": "integer"}, "city": {"type": "string", "maxLength": 20}},
    "required": ["days", "city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "get", "parameters": PARAMETERS}
CHAT_TOOL = {"type": "function", "function": {"name": "get", "parameters": PARAMETERS}}
GRAMMARS: dict[str, Any] = {
    "regex": {"regex": "([a-z]{2,9} ){12}end"},
    "choice": {"choice": ["PagedAttention keeps blocks", "a swap moves blocks", "a prefix"]},
    "lark": {"grammar": 'start: (WORD ", ")~9 "and " WORD\nWORD: /[a-z]{3,12}/'},
    "object": {"json_object": True},
}
# Each client leaves one way and comes back another.
WAYS = [by_query, by_socket, by_header, by_messagepack]
BASE: dict[str, Any] = {"model": "streamer-demo", "temperature": 1.0}
BIAS = {str(token): (token % 5 - 2) * 2.0 for token in range(300, 400)}
NUM_STEERED = 20  # events before the answer is steered


def settings(folder: Path) -> dict[str, Any]:
    """Settings of the server: forms of calls and reasoning, which begins where it has an effort."""
    config = json.loads((CHECKPOINT / "tokenizer_config.json").read_text())
    template = folder / "template.jinja"
    template.write_text(config["chat_template"] + THINKS)
    forms = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    return {"chat_template": template, **forms}


def features(seed: int) -> dict[str, Ask]:
    """Everything once; the ways to come back depend on the seed."""
    chance = random.Random(seed + 2)

    def body(max_tokens: int, **more: Any) -> dict[str, Any]:
        fields = {"seed": chance.randrange(1 << 40), "max_output_tokens": max_tokens}
        return {**BASE, "input": prompt(chance), **fields, **more}

    def turned() -> Callable[..., Any]:
        first = chance.randrange(len(WAYS))
        return partial(_outcome, WAYS[first:] + WAYS[:first])

    tools = {"tools": [TOOL], "tool_choice": "required"}
    thinks = {"reasoning": {"effort": "low"}, "thinking_token_budget": 30}
    bodies = {name: body(80, structured_outputs=grammar) for name, grammar in GRAMMARS.items()} | {
        "calls": body(120, **tools, parallel_tool_calls=False),
        "reasoning": body(80, **thinks),
        "reasoned call": body(150, **tools, **thinks, parallel_tool_calls=False),
        "wandering": body(100, ignore_eos=True, return_token_ids=True),
        "repetition": body(90, repetition_penalty=1.4, min_p=0.02, ignore_eos=True),
        "biased": body(90, logit_bias=BIAS, min_p=0.05, return_token_ids=True),
    }
    found: dict[str, Ask] = {n: partial(turned(), body=b) for n, b in bodies.items()}
    messages = [{"role": "user", "content": prompt(chance)}]
    base = {**BASE, "messages": messages, "max_tokens": 70, "seed": seed}
    stops = {"n": 3, "stop": ["ing t", "e s", "zzz"], "min_tokens": 20, "logprobs": True}
    called = {"tools": [CHAT_TOOL], "tool_choice": "required", "n": 2}
    thought = {"reasoning_effort": "low", "thinking_token_budget": 20}
    return found | {
        "stopped choices": partial(chat, body={**base, **stops}),
        "called choices": partial(chat, body={**base, **called}),
        "reasoned chat": partial(chat, body={**base, **thought}),
        "cancelled": partial(_cancelled, body=body(120, ignore_eos=True), by_event=False),
        "cancelled by event": partial(_cancelled, body=body(120, ignore_eos=True), by_event=True),
        "deleted": partial(_deleted, body=body(120, ignore_eos=True)),
        "steered": partial(_steered, body=body(120, ignore_eos=True)),
    }


async def _outcome(ways: list[Any], server: Server, body: dict[str, Any]) -> Any:
    return (await follow(server, body, *ways)).outcome


def text_of(response: dict[str, Any]) -> str:
    """The text of all messages of a response."""
    parts = (p for item in response["output"] for p in item.get("content", ()))
    return "".join(part.get("text", "") for part in parts)


async def _begun(server: Server, body: dict[str, Any]) -> Events:
    """A response in the background, of which a few events were seen."""
    given = {**body, "background": True}
    return await follow(server, given, by_query, is_enough=lambda seen: seen.last >= 20)


async def _cancelled(server: Server, body: dict[str, Any], by_event: bool) -> Any:
    """It ends as the beginning of what it would have been, and stays so."""
    whole = await follow(server, body, by_query)
    seen = await _begun(server, body)
    if by_event:
        await _cancel_by_event(server, seen)
    found = (await call(server, "POST", f"/v1/responses/{seen.id}/cancel")).json()
    server.ended[seen.id] = scrubbed(found)
    text = text_of(found)
    assert found["status"] in ("cancelled", "incomplete")
    assert text_of(whole.final).startswith(text)
    assert text.startswith("".join(seen.texts.values()))
    return whole.outcome


async def _cancel_by_event(server: Server, seen: Events) -> None:
    while seen.final is None:
        try:
            async with Socket(server) as socket:
                await socket.ask({}, seen)
                await socket.send("response.cancel", response_id=seen.id)
                async for event in socket.events():
                    seen.take(event)
                    server.read()
                    if seen.final is not None:
                        server.ended[seen.id] = seen.final
                        return
        except LOST:
            await server.lost()


async def _deleted(server: Server, body: dict[str, Any]) -> Any:
    """It is gone, and stays so; a response that runs on is not."""
    seen = await _begun(server, body)
    gone = await call(server, "DELETE", f"/v1/responses/{seen.id}")
    assert gone.status_code in (200, 404)  # its answer was lost with the server
    server.ended[seen.id] = None
    return None


async def _steered(server: Server, body: dict[str, Any]) -> Any:
    """It ends as the beginning of what it would have been; its successor answers the input.

    A socket that is lost takes its accepted input along: where no successor was seen, the client
    makes it, as protocol.md says.
    """
    whole = await follow(server, body, by_query)
    first, second = Events(), Events()
    asked = {"input": "And then? Go on."}
    while first.final is None:
        try:
            async with Socket(server) as socket:
                await socket.ask(body, first)
                await steer(server, socket, first, second, asked)
        except LOST:
            await server.lost()
    text = text_of(first.final)
    assert text_of(whole.final).startswith(text)
    server.ended[first.id] = first.final
    after = {**body, **asked, "previous_response_id": first.id}
    found = await follow(server, after, by_socket, seen=second)
    again = await follow(server, after, by_query)
    assert text_of(found.final) == text_of(again.final)
    return whole.outcome


async def steer(
    server: Server, socket: Socket, first: Events, second: Events, asked: dict[str, Any]
) -> None:
    """Follow the answer, steer it, and follow until it has ended and its successor began.

    None begins on this socket where it sent no steer, or one that was refused: the answer had ended
    by the steer of a socket before it, which took the input along.
    """
    is_asked = is_refused = False
    async for event in socket.events():
        kind = event["type"]
        if kind.startswith("response.steer."):
            server.num_steered += kind == "response.steer.accepted"
            is_refused = kind == "response.steer.failed"
        elif first.final is None:
            first.take(event)
        else:
            second.take(event)
        server.read()
        if first.final is None:
            if first.last >= NUM_STEERED and not is_asked:
                is_asked = True
                await socket.send("response.steer", previous_response_id=first.id, **asked)
        elif (
            second.id
            or is_refused
            or not is_asked
            or first.final["incomplete_details"]["reason"] != "steered"
        ):
            return
