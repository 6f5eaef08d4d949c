"""The thread pool that encodes texts: short texts never wait for long ones of other requests."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

import pytest

from streamer.engine.prompts import LONG, Prompts
from streamer.errors import EngineDead, InvalidRequest, RequestFailed
from tests.engine.helpers import DEADLINE_S


async def test_long_texts_leave_a_thread_for_short_ones_and_keys_take_turns() -> None:
    gate, order = threading.Event(), []

    def work(name: str) -> Callable[[], None]:
        def note() -> None:
            gate.wait(DEADLINE_S)
            order.append(name)

        return note

    prompts = Prompts(0.0, lambda _: None)
    try:
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as long:
            for i in range(8):
                long.create_task(prompts.run(work(f"many {i}"), LONG + 1, b"many:salt%d" % i))
            await asyncio.sleep(0)
            long.create_task(prompts.run(work("few"), LONG + 1, b"few:"))
            await prompts.run(lambda: None, LONG)
            assert order == []  # all of them still wait
            gate.set()
    finally:
        gate.set()
        prompts.close(EngineDead("closed"))
    assert order[:3] == ["many 0", "few", "many 1"]
    assert order[3:] == [f"many {i}" for i in range(2, 8)]


async def test_a_grammar_that_takes_too_long_is_its_callers_mistake() -> None:
    def spin() -> None:
        while True:
            pass

    prompts = Prompts(0.1, lambda _: None)
    try:
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(InvalidRequest, match="too long") as refused:
                await prompts.compiled(spin, "tools", 5, b"")
            assert (refused.value.status, refused.value.param) == (400, "tools")
            with pytest.raises(RequestFailed):
                await prompts.run(spin)
            assert await prompts.compiled(lambda: 7, "tools", 5, b"") == 7
    finally:
        prompts.close(EngineDead("closed"))


async def test_long_work_that_nothing_ends_has_its_turn_until_its_thread_is_free() -> None:
    """Two grammars of one key had both threads, which ended the engine."""
    gate, hung = threading.Event(), list[object]()
    prompts = Prompts(0.1, hung.append)
    try:
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(InvalidRequest, match="too long"):
                await prompts.compiled(lambda: stubborn(gate), "grammar", 5, b"one:")
            second = asyncio.create_task(prompts.compiled(lambda: 2, "grammar", 5, b"one:"))
            other = asyncio.create_task(prompts.compiled(lambda: 3, "grammar", 5, b"other:"))
            await asyncio.sleep(0.5)
            assert not any((second.done(), other.done(), hung))
            assert await prompts.run(lambda: 1) == 1
            gate.set()
            assert (await second, await other) == (2, 3)
    finally:
        gate.set()
        prompts.close(EngineDead("closed"))


def stubborn(gate: threading.Event) -> None:
    while not gate.is_set():
        with contextlib.suppress(BaseException):
            gate.wait(0.01)
