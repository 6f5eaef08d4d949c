"""The thread pool that encodes texts: short texts never wait for long ones of other requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from streamer.engine.prompts import LONG, Prompts
from streamer.errors import EngineDead
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
