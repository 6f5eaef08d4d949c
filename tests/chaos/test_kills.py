"""A server that is killed at random moments, and started again: no accepted answer notices.

The same requests are made of a server that nothing disturbs; then of one that is killed over and
over, while its clients read and while it starts, and started again with too few blocks and another
way to speculate. Nothing may be lost, repeated or altered. `STREAMER_KILLS` is the number of
moments (`make chaos` sets 100).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Awaitable
from itertools import count
from pathlib import Path
from typing import Any

from streamer.demo import DRAFT
from tests.chaos import features
from tests.chaos.clients import (
    Ask,
    Server,
    chat,
    http,
    prompt,
    response_by_socket,
    response_by_sse,
    response_in_background,
    scrubbed,
)
from tests.chaos.killable import POLL_S, Killable

NUM_KILLS = int(os.environ.get("STREAMER_KILLS", "3"))
MANY = 20
NUM_MIXES = 3
NUM_STEPS = 30  # of restoring; a journal that has fewer is restored
ROUND_S = 900.0  # with thirty starts of a server, on a machine that does other work too
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "parts": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "parts"],
    "additionalProperties": False,
}
LOGPROBS = "message.output_text.logprobs"

# How a server differs from the one before it: by what proposes tokens, and by its pool of blocks,
# too small for all that runs.
SPECULATIVE = (
    {"method": "suffix"},
    {"method": "draft_model", "model": str(DRAFT)},
    {"method": "ngram"},
)
NUM_BLOCKS, NUM_SCARCE = 400, 64
PREEMPTIONS, DRAFTS = "streamer_preemptions_total", "streamer_spec_decode_num_drafts_total"
COUNTED = (PREEMPTIONS, DRAFTS)


def responses(seed: int) -> dict[str, dict[str, Any]]:
    """Bodies of responses, each with something that must go on as it was."""
    chance = random.Random(seed)
    base = {"model": "streamer-demo", "max_output_tokens": 90, "ignore_eos": True}

    def body(**more: Any) -> dict[str, Any]:
        return {**base, "input": prompt(chance), "seed": chance.randrange(1 << 40), **more}

    text = {"format": {"type": "json_schema", "name": "thing", "schema": SCHEMA}}
    return {
        "greedy": body(temperature=0),
        "sampled": body(temperature=1.0, top_p=0.95, top_k=40),
        "ids": body(temperature=0.9, return_token_ids=True),
        "penalties": body(temperature=0.8, frequency_penalty=0.7, presence_penalty=0.4),
        "stop": body(temperature=0.9, stop=["ing t", "zzz", "e s"], min_tokens=40),
        "minimum": body(temperature=1.0, ignore_eos=False, min_tokens=60),
        "logprobs": body(temperature=0.7, top_logprobs=3, include=[LOGPROBS]),
        "schema": body(temperature=1.0, text=text, ignore_eos=False),
        "repeats": body(temperature=0, input="Repeat: one two three four. " * 8),
    }


def asks(seed: int) -> dict[str, Ask]:
    """The mix: every body over some transport, chats, beams, conversations."""
    found: dict[str, Ask] = {}

    def add(name: str, ask: Ask) -> None:
        found[name] = ask

    for i, (name, body) in enumerate(responses(seed).items()):
        follow = response_by_socket if (i + seed) % 2 else response_by_sse
        add(name, lambda server, body=body, follow=follow: _outcome(follow(server, body)))  # type: ignore[misc]
    chance = random.Random(seed + 1)
    messages = [{"role": "user", "content": prompt(chance)}]
    base = {"model": "streamer-demo", "messages": messages, "max_tokens": 70, "seed": seed}
    add("choices", lambda server: chat(server, {**base, "n": 3, "logprobs": True}))
    beams = {"use_beam_search": True, "beam_width": 3, "max_tokens": 40}
    add("beams", lambda server: chat(server, {**base, **beams}))
    add("background", lambda server: _background(server, seed))
    add("conversation", lambda server: _conversation(server, seed))
    return found


async def _outcome(events: Awaitable[Any]) -> Any:
    return (await events).outcome


async def _background(server: Server, seed: int) -> Any:
    body = {"model": "streamer-demo", "input": "Tell a story.", "max_output_tokens": 100}
    found = await response_in_background(server, {**body, "seed": seed, "temperature": 1.0})
    return scrubbed(found)


async def _conversation(server: Server, seed: int) -> Any:
    """An answer, one that follows it, and one that forks from it."""
    base = {"model": "streamer-demo", "max_output_tokens": 40, "seed": seed, "temperature": 0.8}
    first = await response_by_sse(server, {**base, "input": "Tell a story about a fox."})
    more = {**base, "previous_response_id": first.id}
    second = await response_by_socket(server, {**more, "input": "And then?"})
    fork = {"at": 12, "text": " But"}
    third = await response_by_sse(server, {**more, "fork": fork})
    return [first.outcome, second.outcome, third.outcome]


async def outcomes(server: Server, mix: dict[str, Ask]) -> dict[str, Any]:
    async with asyncio.timeout(ROUND_S):
        found = await asyncio.gather(*(ask(server) for ask in mix.values()))
    return dict(zip(mix, found, strict=True))


def scarce(number: int) -> dict[str, Any]:
    """Settings of the server after so many kills."""
    method = json.dumps(SPECULATIVE[number % len(SPECULATIVE)])
    return {"speculative_config": method, "num_gpu_blocks_override": NUM_SCARCE}


class Kills:
    """Kills the server whenever its clients have read a random number of events more.

    Two kills of five come before the server is ready: one at a random moment from its start on, and
    the next while it restores what the journal has, at a random request of those.

    start_s  from a start until it was ready; that of the first one has more to read from the disk
    """

    def __init__(
        self, process: Killable, server: Server, chance: random.Random, start_s: float
    ) -> None:
        self.num_done = self.num_starting = self.num_restoring = 0
        self.counts = dict.fromkeys(COUNTED, 0.0)
        self._process, self._server, self._chance = process, server, chance
        self.start_s, self._began = start_s, 0.0

    async def go_on(self, num_kills: int) -> None:
        while self.num_done < num_kills:
            match self.num_done % 5:
                case 1:
                    await self._starting()
                case 2:
                    await self._restoring()
                case _:
                    await self._serving()
            self.num_done += 1
            self._restart()

    def _restart(self, dies_at: int | None = None) -> None:
        self._process.kill()
        self._process.start(dies_at, **scarce(self.num_done))
        self._began = time.monotonic()

    async def _serving(self) -> None:
        await self._process.ready()
        self.start_s = min(self.start_s, time.monotonic() - self._began)
        server = self._server
        at = server.num_read + self._chance.randrange(1, 100)
        while server.num_read < at:
            server.more.clear()
            await server.more.wait()
        await self.count()

    async def _starting(self) -> None:
        """A moment of a start: no event of the server's tells one from another."""
        await asyncio.sleep(self._chance.uniform(0.0, self.start_s))
        self.num_starting += not await asyncio.to_thread(self._process.is_ready)

    async def _restoring(self) -> None:
        """A start that ends while it restores; one that is given up is followed by another."""
        self._restart(self._chance.randrange(NUM_STEPS))
        try:
            while not (has_ended := self._process.has_ended()):
                if await asyncio.to_thread(self._process.is_ready):
                    break
                await asyncio.sleep(POLL_S)
        except asyncio.CancelledError:
            self._restart()
            raise
        self.num_restoring += has_ended

    async def count(self) -> None:
        """Add what the process has counted, which ends with it."""
        async with http(self._server) as client:
            found = (await client.get("/metrics")).text
        for line in found.splitlines():
            name, _, value = line.rpartition(" ")
            if (name := name.partition("{")[0]) in self.counts:
                self.counts[name] += float(value)


async def test_a_killed_server_loses_repeats_and_alters_no_answer(tmp_path: Path) -> None:
    chance = random.Random(NUM_KILLS)
    settings = {"model": None, "dtype": "float32", "num_gpu_blocks_override": NUM_BLOCKS}
    settings |= {"speculative_config": json.dumps(SPECULATIVE[0]), "journal": tmp_path / "j"}
    settings |= {"max_wait_s": 0.0, **features.settings(tmp_path)}
    with Killable(tmp_path / "log", **settings) as process:
        process.start()
        began = time.monotonic()
        await process.ready()
        start_s = time.monotonic() - began
        server = Server(process.url, process.ready)
        mixes = [asks(seed) | features.features(seed) for seed in range(NUM_MIXES)]
        wanted = [await outcomes(server, mix) for mix in mixes[: 1 + NUM_KILLS // 10]]
        await server.check_stored()
        kills = Kills(process, server, chance, start_s)
        num_answers = 0
        for i in count():
            seed = i % len(wanted)
            killing = asyncio.create_task(kills.go_on(NUM_KILLS))
            found = await outcomes(server, mixes[seed])
            killing.cancel()
            await asyncio.gather(killing, return_exceptions=True)
            await process.ready()
            for name, outcome in found.items():
                assert outcome == wanted[seed][name], name
            await server.check_stored()
            num_answers += len(found)
            if kills.num_done == NUM_KILLS:
                break
        await kills.count()
        async with http(server) as client:
            assert (await client.get("/health")).status_code == 200
    assert server.num_resumed > NUM_KILLS
    assert server.num_steered
    assert kills.counts[PREEMPTIONS]
    assert kills.num_restoring
    assert kills.num_starting or NUM_KILLS < MANY
    # Drafts are made where they pay, which is measured: on a busy machine nowhere in a short run.
    assert kills.counts[DRAFTS] or NUM_KILLS < MANY
    print(
        f"{kills.num_done} kills, {kills.num_starting} of them before it was ready "
        f"({kills.start_s:.2f} s), {kills.num_restoring} while it restored, {num_answers} answers, "
        f"{server.num_resumed} resumed, {server.num_steered} steered, {kills.counts}"
    )
