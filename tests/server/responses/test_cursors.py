"""The builders by themselves: any number of a short answer can be resumed from; nothing is lost."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from streamer.core.plan import Drawn, Finish, FinishReason, TokenLogprob
from streamer.engine.requests import Progress
from streamer.engine.stream import Delta, TokenStream
from streamer.errors import EngineDead
from streamer.server.context import Context
from streamer.server.openai import chat
from streamer.server.parsing.formats import TOOL_FORMATS, ModelFormat
from streamer.server.parsing.tools import Parsing
from streamer.server.responses import body as responses
from streamer.server.responses.events import ResponseEvents
from streamer.server.responses.parsed import response_events
from streamer.server.responses.types import Event
from tests.engine.helpers import lone_stream
from tests.server.support.counting import Event as Frame

TEXT = "aé😀b"  # 8 bytes, a token each: several numbers have no text
HALF = b"\xf0\x9f"  # of a character: only the end releases it


def letter(token_id: int) -> bytes:
    return bytes([token_id])


def response_stream(reason: FinishReason | None, tail: bytes = b"", **fields: Any) -> TokenStream:
    """A response of TEXT and a tail; without a reason the engine died."""
    stream = lone_stream(logprobs=0 if "top_logprobs" in fields else None)
    body = msgspec.convert(
        {"input": "x", "return_token_ids": True, **fields}, responses.ResponseCreate
    )
    prefix = "kept " if "fork" in fields else ""
    stream.context = Context(kind="response", tenant="", body=body, model="m", prefix=prefix)
    data = TEXT.encode() + tail
    for i, byte in enumerate(data):
        is_last = i == len(data) - 1 and reason in (FinishReason.LENGTH, FinishReason.STOP)
        value = TokenLogprob(byte, -1.0) if "top_logprobs" in fields else None
        finish = Finish("r", 0, reason, len(data)) if is_last and reason is not None else None
        stream.push(0, byte, value, finish)
    if reason is None:
        stream.fail(EngineDead("it died"))
    elif stream.finishes[0] is None:
        stream.end(Finish("r", 0, reason, len(data), detail="it broke"))
    return stream


async def events_after(stream: TokenStream, after: int, is_split: bool = False) -> list[Any]:
    """The events of a reader that resumes after a number, as plain values."""
    events = response_events(stream, letter, after=after)
    out: list[Event] = events.opening()
    try:
        async with aclosing(stream.read(events.tokens_at(after))) as batches:
            async for items in batches:
                deltas = [d for d in items if isinstance(d, Delta)]
                pieces = [p for d in deltas for p in stream.split(d)] if is_split else deltas
                out += events.deltas(pieces)
    except EngineDead as e:
        out += events.failed(e)
    return [msgspec.to_builtins(e) for e in out]


def joined(events: list[Any]) -> tuple[str, list[int], list[Any]]:
    """Text, token ids and log probabilities of the deltas."""
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    return (
        "".join(e["delta"] for e in deltas),
        [t for e in deltas for t in e.get("token_ids", ())],
        [lp for e in deltas for lp in e["logprobs"]],
    )


CASES: list[tuple[FinishReason | None, bytes, dict[str, Any]]] = [
    (FinishReason.LENGTH, b"", {}),
    (FinishReason.STOP, HALF, {}),
    (FinishReason.CANCELLED, b"", {}),
    (FinishReason.CANCELLED, HALF, {}),
    (FinishReason.FAILED, HALF, {}),
    (None, HALF, {}),
    (FinishReason.LENGTH, b"", {"background": True}),
    (FinishReason.LENGTH, b"", {"top_logprobs": 0}),
    (FinishReason.CANCELLED, HALF, {"fork": {"at": 1}, "previous_response_id": "r0"}),
    (FinishReason.LENGTH, b"", {"generate": False}),
]


@pytest.mark.parametrize(("reason", "tail", "fields"), CASES)
async def test_every_number_is_a_cursor(
    reason: FinishReason | None, tail: bytes, fields: dict[str, Any]
) -> None:
    stream = response_stream(reason, tail, **fields)
    whole = await events_after(stream, -1, is_split=True)
    numbers = [e["sequence_number"] for e in whole]
    assert numbers == sorted(set(numbers))
    assert numbers[0] == 0
    text, ids, logprobs = joined(whole)
    for after in range(-1, numbers[-1] + 3):
        for is_split in (False, True):
            rest = await events_after(stream, after, is_split)
            have = [e for e in whole if e["sequence_number"] <= after]
            assert all(e["sequence_number"] > after for e in rest)
            assert joined(have + rest) == (text, ids, logprobs)
            plain = [e for e in rest if "delta" not in e]
            assert plain == [e for e in whole if "delta" not in e and e["sequence_number"] > after]
        if after >= numbers[-1]:
            assert rest == []
    if "generate" not in fields:
        final = whole[-1]["response"]
        assert (final["output"][0]["content"][0]["text"], final["usage"]["output_tokens"]) == (
            text,
            len(TEXT.encode() + tail),
        )


async def test_an_unmerged_replay_has_an_event_a_token_that_has_text() -> None:
    stream = response_stream(FinishReason.LENGTH)
    deltas = [e for e in await events_after(stream, -1, True) if "delta" in e]
    assert [e["delta"] for e in deltas] == ["a", "", "é", "", "", "", "😀", "b"]
    merged = [e for e in await events_after(stream, -1) if "delta" in e]
    assert [(e["delta"], e["sequence_number"]) for e in merged] == [(TEXT, 11)]


async def test_live_events_have_the_numbers_of_the_replay() -> None:
    """A reader that takes each token as it comes gets what a later replay brings."""
    stream = lone_stream()
    body = responses.READER.decode(b'{"input": "x", "return_token_ids": true}')
    stream.context = Context(kind="response", tenant="", body=body, model="m")
    events = ResponseEvents(stream, letter)
    live = events.opening()
    async with aclosing(stream.read()) as reader:
        for byte in TEXT.encode() + HALF:
            stream.push(0, byte, None, None)
            live += events.deltas([d for d in await anext(reader) if isinstance(d, Delta)])
        stream.end(Finish("r", 0, FinishReason.CANCELLED, 10))
        live += events.deltas([d for d in await anext(reader) if isinstance(d, Delta)])
    assert [msgspec.to_builtins(e) for e in live] == await events_after(stream, -1, True)


@pytest.mark.parametrize("is_parsed", [False, True])
async def test_an_end_before_what_was_seen_is_seen(is_parsed: bool) -> None:
    """Of a restored response that is cancelled before what a crash cut off is drawn again."""
    stream = lone_stream(progress=Progress(outputs=(Drawn((97, 98)),), created=1.0))
    body = msgspec.convert({"input": "x"}, responses.ResponseCreate)
    parsing = Parsing(ModelFormat(calls=TOOL_FORMATS["hermes"])) if is_parsed else None
    stream.context = Context(kind="response", tenant="", body=body, model="m", parsing=parsing)
    live = asyncio.create_task(events_after(stream, 30))
    await asyncio.sleep(0)
    stream.end(Finish("r", 0, FinishReason.CANCELLED, 2))
    stream.wake()
    end = (await events_after(stream, -1))[-1]
    assert end["type"] == "response.incomplete"
    assert await live == await events_after(stream, 30) == [{**end, "sequence_number": 31}]
    assert await events_after(stream, end["sequence_number"]) == []


async def test_the_object_is_the_last_events() -> None:
    for reason, tail, fields in CASES:
        stream = response_stream(reason, tail, **fields)
        whole = await events_after(stream, -1)
        now = ResponseEvents(stream, letter).response()
        assert msgspec.to_builtins(now) == whole[-1]["response"]


# ---------------------------------------------------------------- chat


def frames(data: bytes) -> list[Frame]:
    return [Frame(block.split("\n")) for block in data.decode().split("\n\n") if block]


async def frames_after(stream: TokenStream, body: Any, after: list[int], is_split: bool) -> Any:
    answer = chat.ChatAnswer(body, [stream], "m", letter, after)
    data = answer.opening()
    failure = None
    async with aclosing(stream.read([max(0, n - 1) for n in after])) as batches:
        async for items in batches:
            deltas = [d for d in items if isinstance(d, Delta)]
            pieces = [p for d in deltas for p in stream.split(d)] if is_split else deltas
            for piece in pieces:
                data += answer.deltas(0, [piece])
            failure = failure or answer.failure(deltas)
    return frames(data + (answer.closing() if failure is None else b""))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.CANCELLED])
async def test_every_number_of_a_chat_is_a_cursor(n: int, reason: FinishReason) -> None:
    stream = lone_stream(n=n)
    options = (
        b'{"messages": [], "return_token_ids": true, "stream_options": {"include_usage": true}}'
    )
    body = chat.READER.decode(options)
    data = TEXT.encode() + HALF
    for choice in range(n):
        for byte in data:
            stream.push(choice, byte, None, None)
        stream.end(Finish("r", choice, reason, len(data)))
    whole = await frames_after(stream, body, [0] * n, True)
    texts, _ = contents(whole, n)
    assert texts == [data.decode(errors="replace")] * n
    cursors = [[0] * n] + [[int(x) for x in f.id.split(".")] for f in whole if f.id]
    for k, cursor in enumerate(cursors):
        rest = await frames_after(stream, body, cursor, False)
        assert contents(whole[:k] + rest, n) == contents(whole, n), cursor
        assert [f.data for f in rest].count("[DONE]") == (reason is FinishReason.LENGTH)


def contents(got: list[Frame], n: int) -> Any:
    """Text of each choice, then everything else in order: roles, finishes, usage, token ids."""
    texts, ids, others = [""] * n, [[] for _ in range(n)], []  # type: ignore[var-annotated]
    for f in got:
        if f.is_done:
            continue
        for choice in f.json["choices"]:
            i = choice["index"]
            texts[i] += choice["delta"].get("content", "")
            ids[i] += choice.get("token_ids", ())
            others += [(i, choice["finish_reason"], choice["delta"].get("role"))] * (
                choice["finish_reason"] is not None or "role" in choice["delta"]
            )
        if f.json.get("usage"):
            others.append(f.json["usage"])
    return texts, (ids, others)
