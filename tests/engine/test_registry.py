"""Registry.distribute: which deltas a step's output becomes, and how often readers are woken."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from streamer.core.plan import Finish, FinishReason, Notice, NoticeKind, StepOutput
from streamer.engine.log import Delta
from streamer.engine.registry import Registry
from streamer.engine.requests import QueueNeeds
from streamer.engine.stream import TokenStream
from streamer.errors import EngineDead
from tests.engine.helpers import DEADLINE_S, lone_stream


def watched(registry: Registry, stream: TokenStream) -> list[Any]:
    """Each wake-up's news, of a reader that takes them at once."""
    taken: list[Any] = []
    registry.add(stream, QueueNeeds(n=stream.params.n))
    reader = stream.attach(0, lambda: taken.append(stream.take(reader)))
    return taken


def step(choices: tuple[int, ...], text: bytes, **fields: Any) -> StepOutput:
    return StepOutput(0, ("r",) * len(text), choices, tuple(text), **fields)


async def test_a_run_of_tokens_is_one_delta_of_one_wake_up() -> None:
    registry, stream = Registry(60.0, 1 << 20), lone_stream(n=2)
    taken = watched(registry, stream)
    registry.distribute(step((0, 0, 0, 1, 1), b"abcxy"))
    assert taken == [[Delta(0, 0, tuple(b"abc"), "abc"), Delta(1, 0, tuple(b"xy"), "xy")]]
    assert stream.num_output_tokens == 5


async def test_the_end_of_a_run_is_with_its_last_token() -> None:
    registry, stream = Registry(60.0, 1 << 20), lone_stream(n=2)
    taken = watched(registry, stream)
    first = Finish("r", 0, FinishReason.LENGTH, 2)
    second = Finish("r", 1, FinishReason.STOP, 2, text_bytes=1)
    registry.distribute(step((0, 0, 1, 1), b"abxy", finishes=(first, second)))
    assert taken == [
        [
            Delta(0, 0, tuple(b"ab"), "ab", None, first),
            Delta(1, 0, tuple(b"xy"), "x", None, second),
        ]
    ]
    assert registry.num_live == 0


async def test_notices_come_with_the_tokens_of_their_step() -> None:
    registry, stream = Registry(60.0, 1 << 20), lone_stream()
    taken = watched(registry, stream)
    running = Notice("r", NoticeKind.RUNNING)
    registry.distribute(step((0,), b"a", notices=(running,)))
    assert [items for items in taken if items] == [[running, Delta(0, 0, (97,), "a")]]


async def test_a_token_for_each_stream_ends_those_whose_last_it_is() -> None:
    registry = Registry(60.0, 1 << 20)
    taken = [watched(registry, lone_stream(request_id=name)) for name in "rs"]
    end = Finish("r", 0, FinishReason.LENGTH, 3)
    for text, finishes in ((b"ax", ()), (b"by", ()), (b"cz", (end,))):
        registry.distribute(StepOutput(0, ("r", "s"), (0, 0), tuple(text), finishes=finishes))
    registry.distribute(StepOutput(0, ("s",), (0,), tuple(b"!")))
    for found, text, last in zip(taken, ("abc", "xyz!"), (end, None), strict=True):
        deltas = [Delta(0, i, (ord(char),), char) for i, char in enumerate(text)]
        if last is not None:
            deltas[-1] = msgspec.structs.replace(deltas[-1], finish=last)
        assert found == [[delta] for delta in deltas]
    assert registry.num_live == 1


async def test_an_end_whose_distribution_fails_is_waited_for_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine dies of it, and ends what it has: readers were left whose stream had ended."""
    registry, whole, cut = Registry(60.0, 1 << 20), lone_stream(), lone_stream(request_id="s")
    for stream in (whole, cut):
        registry.add(stream, QueueNeeds())

    end = TokenStream.end

    def fails_for_one(stream: TokenStream, finish: Finish) -> None:
        if stream is cut:
            raise RuntimeError("a fault")
        end(stream, finish)

    async with asyncio.timeout(DEADLINE_S):
        waits = [asyncio.create_task(stream.wait()) for stream in (whole, cut)]
        await asyncio.sleep(0)
        ends = [Finish(name, 0, FinishReason.CANCELLED, 0) for name in "rs"]
        monkeypatch.setattr(TokenStream, "end", fails_for_one)
        with pytest.raises(RuntimeError):
            registry.distribute(StepOutput(0, finishes=tuple(ends)))
        registry.fail_all(EngineDead("it died"))
        found = await asyncio.gather(*waits, return_exceptions=True)
    assert (found[0], type(found[1])) == (None, EngineDead)
    assert registry.num_live == 0
