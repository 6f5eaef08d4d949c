"""Fair share on the wire: one key with fifty requests, and one that comes later with two."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from streamer.server.transport.frames import DONE
from tests.server.support.counting import CHAT
from tests.server.support.running import BUNDLED, Running

ROWS, MANY, FEW = 4, 50, 2
ANSWER = {**CHAT, "max_tokens": 8, "ignore_eos": True, "stream": True}


async def ends_before(server: Running, few_key: str) -> tuple[int, list[int]]:
    """How many of the fifty were left when the first of the two was queued, and how many answers
    ended between each one's own place in the queue and its end."""
    limits = httpx.Limits(max_connections=None)
    num_open = num_ended = 0
    left, waits = MANY, []
    are_queued = asyncio.Event()

    async def ask(client: httpx.AsyncClient, key: str, is_few: bool) -> None:
        nonlocal num_open, num_ended, left
        headers = {"authorization": f"Bearer {key}"}
        url = server.url + "/v1/chat/completions"
        async with client.stream("POST", url, json=ANSWER, headers=headers) as response:
            num_open += 1  # the head comes when the request is queued
            before = num_ended
            if num_open == MANY:
                are_queued.set()
            assert (await response.aread()).endswith(DONE)
        if is_few:
            left = min(left, MANY - before)
            waits.append(num_ended - before)
        num_ended += 1

    async with httpx.AsyncClient(limits=limits, timeout=60.0) as client, asyncio.TaskGroup() as all:
        for _ in range(MANY):
            all.create_task(ask(client, "many", is_few=False))
        await are_queued.wait()
        for _ in range(FEW):
            all.create_task(ask(client, few_key, is_few=True))
    return left, waits


@pytest.mark.parametrize(
    ("settings", "is_fair"),
    [
        ({"model": "fake:tokens_per_s=100"}, True),
        ({"model": "fake:tokens_per_s=100"}, False),
        (BUNDLED, True),
    ],
)
async def test_the_second_key_waits_a_turn_and_not_for_the_fifty(
    server_with: Any, settings: dict[str, Any], is_fair: bool
) -> None:
    server = server_with(**settings, max_num_seqs=ROWS, max_wait_s=0, api_key=("many", "few"))
    left, waits = await ends_before(server, "few" if is_fair else "many")
    keys = "two keys" if is_fair else "one key"
    print(f"{keys}: {waits} of the {left} queued answers ended before the {FEW} that came later")
    if is_fair:  # the current turn, and the requests that shared the next one
        assert max(waits) <= 3 * ROWS
    else:
        assert min(waits) > left - 3 * ROWS
