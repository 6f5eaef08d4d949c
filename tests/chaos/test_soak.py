"""Everything at once, for long, on the bundled model: what the process holds does not grow.

Rounds of a random mix: every body of test_kills, completions, tools, cancels, clients that vanish,
and a socket in MessagePack that steers, forks, pauses, is lost and resumes. Two of three rounds are
of an engine with a draft model and recent texts to speculate from, the third of two replicas.
Every step proves the sums of its engine (`Scheduler.check`); after each round it comes to rest and
is measured. Half a minute of it here, an hour by `make soak`; STREAMER_SOAK_MINUTES is how long.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import statistics
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest
from msgspec.structs import replace
from websockets.asyncio.client import ClientConnection, connect
from websockets.typing import Subprotocol

from streamer.config import SpeculativeConfig
from streamer.core.plan import StepOutput
from streamer.demo import DRAFT
from streamer.engine.core import EngineCore
from streamer.model.runner.costs import Costs
from streamer.model.runner.draft import Drafter
from tests.chaos.clients import DELTA, Server, prompt
from tests.chaos.test_faults import vanish
from tests.chaos.test_kills import asks, outcomes
from tests.server.support.running import BUNDLED, Running

SOAK_S = 60 * float(os.environ.get("STREAMER_SOAK_MINUTES", "0.5"))
NUM_VANISHING = 10
# After this many rounds everything has been made that is kept: threads, pools, caches of grammars.
NUM_WARM = 6
# Of those after them at least so many, however slow: the first and the last are compared.
NUM_COMPARED = 3
# What a model would have measured that takes a second a step, and its draft model a hundredth.
DEAR: dict[str, Any] = {"step_s": ((1, 1.0), (64, 1.1)), "verify_s": (), "draft_s": 0.01}
DEAR |= {"verified_s": 0.0, "num_verified": 0, "drafting_s": 0.0}
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


def held(servers: Sequence[Running], folder: Path) -> Held:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Held(
        pages * os.sysconf("SC_PAGESIZE") / (1 << 20),
        len(os.listdir("/proc/self/fd")),
        sum(each.on_loop(num_tasks()) for each in servers),
        threading.active_count(),
        sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / (1 << 20),
    )


async def others(url: str, chance: random.Random) -> None:
    """Completions, other faces, forced calls, responses that are cancelled or deleted."""
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
            post("/v1/messages", messages=messages, max_tokens=30),
            post("/api/chat", messages=messages, stream=False, options={"num_predict": 30}),
            post("/v1/embeddings", input=prompt(chance)),
            ended(is_deleted=False),
            ended(is_deleted=True),
            left(use_beam_search=True, beam_width=3, max_tokens=60),
            left(tools=[TOOL], tool_choice="required", max_tokens=60),
            left(response_format={"type": "json_object"}, max_tokens=60),
            left(n=2, max_tokens=200, ignore_eos=True, temperature=0),
        )
        assert found[1]["choices"][0]["message"]["tool_calls"]


class Packed:
    """A socket that speaks MessagePack.

    It acknowledges what it reads; without that, as on the lanes of `silent`, a response pauses once
    its window is full, and can't end before it is steered or cancelled.
    """

    def __init__(self, socket: ClientConnection, silent: Collection[str] = ()) -> None:
        self._socket = socket
        self.silent = silent
        self.ids: dict[str, str] = {}  # of each lane's newest response

    async def say(self, kind: str, **fields: Any) -> None:
        await self._socket.send(msgspec.msgpack.encode({"type": kind, **fields}))

    async def create(self, lane: str, **fields: Any) -> None:
        base = {"model": "streamer-demo", "stream_id": lane, "max_output_tokens": 60}
        await self.say("response.create", **{**base, **fields})

    async def until(self, *wanted: tuple[str, str]) -> list[Any]:
        """Read until each of these kinds came on its lane; the events that did."""
        found: dict[tuple[str, str], Any] = {}
        while len(found) < len(wanted):
            event = msgspec.msgpack.decode(await self._socket.recv())
            assert event["type"] != "error", event
            lane = event.get("stream_id", "")
            if event["type"] == "response.created":
                self.ids[lane] = event["response"]["id"]
            elif event["type"].endswith(DELTA) and lane not in self.silent:
                number, name = event["sequence_number"], self.ids[lane]
                await self.say("response.ack", response_id=name, sequence_number=number)
            key = lane, event["type"]
            if key in wanted:
                found.setdefault(key, event)
        return [found[key] for key in wanted]


async def by_messagepack(url: str, chance: random.Random) -> None:
    """Lanes of one socket: one is steered, one forked, one cancelled; one resumes on another."""
    ws_url = url.replace("http", "ws", 1) + "/v1/responses"
    offered = [Subprotocol("streamer.v1.msgpack")]
    text, ended = "response.output_text.delta", "response.incomplete"
    long = {"max_output_tokens": 150, "ignore_eos": True}
    async with connect(ws_url, subprotocols=offered) as socket:
        packed = Packed(socket, silent=("steered", "cancelled"))
        await packed.say("session.update", window=chance.choice((16, 64)), detach_s=20)
        for lane in ("steered", "forked", "cancelled", "lost"):
            await packed.create(lane, input=prompt(chance), **long)
        await packed.until(*((lane, text) for lane in ("steered", "forked", "cancelled", "lost")))
        first, lost = packed.ids["steered"], packed.ids["lost"]
        await packed.say("response.steer", previous_response_id=first, input="And now?")
        await packed.say("response.cancel", response_id=packed.ids["cancelled"])
        base = packed.ids["forked"]
        await packed.create("fork", previous_response_id=base, fork={"at": 1, "text": " But"})
        packed.silent = ()
        both = ("steered", ended), ("cancelled", ended)
        steered, cancelled = (each["response"] for each in await packed.until(*both))
        assert (steered["id"], steered["incomplete_details"]["reason"]) == (first, "steered")
        assert cancelled["status"] == "cancelled"
        while packed.ids["steered"] == first:
            await packed.until(("steered", "response.created"))
        await packed.until(("steered", text))
        socket.transport.abort()  # its lanes go on without a reader
    async with connect(ws_url, subprotocols=offered) as socket:
        packed = Packed(socket)
        for lane, name in {"lost": lost, "forked": base}.items():
            packed.ids[lane] = name
            after = {"response_id": name, "starting_after": chance.randrange(4)}
            await packed.say("response.resume", stream_id=lane, **after)
        for event in await packed.until(("lost", ended), ("forked", ended)):
            assert event["response"]["usage"]["output_tokens"] == 150


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
    beside = [
        others(server.url, random.Random(seed)),
        by_messagepack(server.url, random.Random(seed)),
    ]
    await asyncio.gather(outcomes(client, mix), *beside, *vanishing)
    return len(mix) + 13


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


def draft_often(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have drafts pay as with a dear model; the number of those made, as its only item."""
    count, propose, facts = [0], Drafter.propose, Costs.facts

    def counted(drafter: Drafter, *args: Any) -> Any:
        found = propose(drafter, *args)
        count[0] += sum(map(bool, found.values()))
        return found

    monkeypatch.setattr(Drafter, "propose", counted)
    monkeypatch.setattr(Costs, "facts", lambda *args: replace(facts(*args), **DEAR))
    return count


async def test_what_the_process_holds_does_not_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_checks, num_drafts = check_each_step(monkeypatch), draft_often(monkeypatch)
    settings = {**BUNDLED, "num_gpu_blocks_override": 160, "max_wait_s": 0.0}
    settings |= {"retain_s": 20.0, "detach_timeout": 0.5, "tool_call_parser": "hermes"}
    proposing = SpeculativeConfig(method="suffix")
    whole = {**settings, "speculative_config": proposing, "journal": str(tmp_path / "whole")}
    alone = Running(**whole, speculative_model=str(DRAFT))
    cluster = Running(**settings, journal=str(tmp_path / "replicas"))
    cluster.num_replicas = 2
    servers = [alone.start(), alone, cluster.start()]
    seen: list[Held] = []
    num_answers = 0
    try:
        began = time.monotonic()
        while time.monotonic() - began < SOAK_S or len(seen) < NUM_WARM + NUM_COMPARED:
            server = servers[len(seen) % len(servers)]
            num_answers += await one_round(server, len(seen))
            await asyncio.to_thread(server.wait_idle)
            seen.append(await asyncio.to_thread(held, (alone, cluster), tmp_path))
            print(
                f"{time.monotonic() - began:.0f} s, {num_answers} answers: {seen[-1]}", flush=True
            )
        steps, rebuilds = "streamer_steps_total", "streamer_rebuilds_total"
        num_steps = [alone.metric(steps), cluster.metric(steps + "{}")]
        print(f"{num_checks[0]} steps checked, {num_drafts[0]} proposals of the draft model")
        assert num_checks[0] >= sum(num_steps)
        assert min(*num_steps, num_drafts[0]) > 100
        assert alone.metric(rebuilds) == cluster.metric(rebuilds + "{}") == 0
    finally:
        for each in (cluster, alone):
            await asyncio.to_thread(each.stop)
    check_flat(seen[NUM_WARM:])


def check_flat(seen: list[Held]) -> None:
    """The last third of the rounds holds what the first third did; they are no rounds in common.

    The journal's own log (WAL) may take 16 MiB before it is written back.
    """
    assert len(seen) >= NUM_COMPARED
    part = len(seen) // NUM_COMPARED
    first, last = seen[:part], seen[-part:]
    allowed = Held(resident_mib=32, files=8, tasks=4, threads=4, journal_mib=20)
    for i, name in enumerate(Held._fields):
        before = statistics.median(each[i] for each in first)
        after = statistics.median(each[i] for each in last)
        assert after <= before + allowed[i], f"{name}: {before} -> {after}"


@pytest.mark.parametrize("num_rounds", [1, 2, 3, 4, 30])
@pytest.mark.parametrize("field", Held._fields)
def test_what_grows_is_seen_in_the_fewest_rounds(field: str, num_rounds: int) -> None:
    rest = Held(500.0, 40, 9, 30, 12.0)
    grown = rest._replace(**{field: getattr(rest, field) + 33})
    with pytest.raises(AssertionError):
        check_flat([rest] * (num_rounds // 2) + [grown] * (num_rounds - num_rounds // 2))
    if num_rounds >= NUM_COMPARED:
        check_flat([rest] * num_rounds)
