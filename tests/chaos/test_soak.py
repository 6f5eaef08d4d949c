"""Everything at once, for long, on the bundled model: what the process holds does not grow.

Rounds of a random mix (every body of test_kills, completions, tools, clients that vanish, cancels).
Every step proves the sums of its engine (`Scheduler.check`); after each round it comes to rest and
is measured. Two minutes of it here, an hour by `make soak`; STREAMER_SOAK_MINUTES is how long.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import statistics
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from streamer.config import SpeculativeConfig
from streamer.core.plan import StepOutput
from streamer.engine.core import EngineCore
from tests.chaos.clients import Server, prompt
from tests.chaos.test_faults import vanish
from tests.chaos.test_kills import asks, outcomes
from tests.server.support.running import BUNDLED, Running

SOAK_S = 60 * float(os.environ.get("STREAMER_SOAK_MINUTES", "2"))
NUM_VANISHING = 10
# After this many rounds everything has been made that is kept: threads, pools, caches of grammars.
NUM_WARM = 2
TOOL = {
    "type": "function",
    "function": {
        "name": "get",
        "parameters": {
            "type": "object",
            "properties": {"days": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["days"],
            "additionalProperties": False,
        },
    },
}


class Held(NamedTuple):
    """What the process holds at rest; the blocks and slots in use are 0 then."""

    resident_mib: float
    files: int
    tasks: int
    threads: int
    journal_mib: float


async def num_tasks() -> int:
    return len(asyncio.all_tasks())


def held(server: Running, folder: Path) -> Held:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Held(
        pages * os.sysconf("SC_PAGESIZE") / (1 << 20),
        len(os.listdir("/proc/self/fd")),
        server.on_loop(num_tasks()),
        threading.active_count(),
        sum(f.stat().st_size for f in folder.iterdir()) / (1 << 20),
    )


async def others(url: str, chance: random.Random) -> None:
    """Completions, forced calls, a response that is cancelled and one that is deleted."""
    messages = [{"role": "user", "content": prompt(chance)}]
    async with httpx.AsyncClient(base_url=url, timeout=120.0) as client:

        async def post(path: str, **body: Any) -> Any:
            given = {"model": "streamer-demo", **body}
            return (await client.post(path, json=given)).raise_for_status().json()

        async def ended(is_deleted: bool) -> None:
            body = {"input": prompt(chance), "max_output_tokens": 200, "background": True}
            name = (await post("/v1/responses", **body))["id"]
            path = f"/v1/responses/{name}"
            async with client.stream("GET", path, params={"stream": "true"}) as events:
                async for line in events.aiter_lines():
                    if "output_text.delta" in line:
                        break
            if is_deleted:
                (await client.delete(path)).raise_for_status()
            else:
                assert (await post(path + "/cancel"))["status"] in ("cancelled", "completed")

        async def left(**body: Any) -> None:
            """Leave a streamed chat after a random number of lines."""
            given = {"model": "streamer-demo", "messages": messages, "stream": True, **body}
            num_lines = chance.randrange(1, 60)
            path = "/v1/chat/completions"
            async with client.stream("POST", path, json=given) as response:
                assert response.status_code == 200
                async for _ in response.aiter_lines():
                    num_lines -= 1
                    if not num_lines:
                        break

        call = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60}
        found = await asyncio.gather(
            post("/v1/completions", prompt="The", max_tokens=30, n=2, echo=True, logprobs=1),
            post("/v1/chat/completions", messages=messages, **call),
            ended(is_deleted=False),
            ended(is_deleted=True),
            left(use_beam_search=True, beam_width=3, max_tokens=60),
            left(tools=[TOOL], tool_choice="required", max_tokens=60),
            left(response_format={"type": "json_object"}, max_tokens=60),
            left(n=2, max_tokens=200, ignore_eos=True, temperature=0),
        )
        assert found[1]["choices"][0]["message"]["tool_calls"]


async def one_round(server: Running, seed: int) -> int:
    """The mix once; the answers that were complete."""
    port = int(server.url.rsplit(":", 1)[1])

    async def ready() -> None:
        raise AssertionError("the server lost a connection")

    mix = asks(seed)
    vanishing = [
        asyncio.to_thread(vanish, port, random.Random(seed * NUM_VANISHING + i))
        for i in range(NUM_VANISHING)
    ]
    client = Server(server.url, ready)
    await asyncio.gather(outcomes(client, mix), others(server.url, random.Random(seed)), *vanishing)
    return len(mix) + 4


def check_each_step(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have every step of an engine end with a check; the number of those, as its only item."""
    count, step = [0], EngineCore._step

    def checked(core: EngineCore) -> StepOutput | None:
        output = step(core)
        core._scheduler.check()
        count[0] += 1
        return output

    monkeypatch.setattr(EngineCore, "_step", checked)
    return count


async def test_what_the_process_holds_does_not_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_checks = check_each_step(monkeypatch)
    journal = tmp_path / "journal"
    settings = {**BUNDLED, "num_gpu_blocks_override": 160, "journal": str(journal)}
    settings |= {"speculative_config": SpeculativeConfig(method="suffix"), "max_wait_s": 0.0}
    settings |= {"retain_s": 20.0, "detach_timeout": 0.5, "tool_call_parser": "hermes"}
    server = Running(**settings).start()
    seen: list[Held] = []
    num_answers = 0
    try:
        began = time.monotonic()
        while time.monotonic() - began < SOAK_S or len(seen) <= NUM_WARM:
            num_answers += await one_round(server, len(seen))
            await asyncio.to_thread(server.wait_idle)
            seen.append(await asyncio.to_thread(held, server, journal))
            print(
                f"{time.monotonic() - began:.0f} s, {num_answers} answers: {seen[-1]}", flush=True
            )
        assert server.metric("streamer_rebuilds_total") == 0
        assert num_checks[0] >= server.metric("streamer_steps_total") > 100
    finally:
        await asyncio.to_thread(server.stop)
    check_flat(seen[NUM_WARM:])


def check_flat(seen: list[Held]) -> None:
    """The last third of the rounds holds what the first third did.

    The journal's own log (WAL) may take 16 MiB before it is written back.
    """
    part = max(1, len(seen) // 3)
    first, last = seen[:part], seen[-part:]
    allowed = Held(resident_mib=32, files=8, tasks=4, threads=4, journal_mib=20)
    for i, name in enumerate(Held._fields):
        before = statistics.median(each[i] for each in first)
        after = statistics.median(each[i] for each in last)
        assert after <= before + allowed[i], f"{name}: {before} -> {after}"
