"""Structured output over the wire: a real model's answers follow their schemas in any company.

n, stop strings, log probabilities, speculation and preemption together, as jsonschema sees it; and
what hostile schemas do to the server and to an answer beside them.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from streamer.core.plan import GAVE_UP
from streamer.core.sampling import SamplingParams
from tests.constraints.test_masks import CHECKED, schema
from tests.server.support.running import BUNDLED, Running

ASKED: Any = [{"role": "user", "content": "Say something."}]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def tight() -> Iterator[Running]:
    """The bundled model, which speculates, with blocks for a few of the answers."""
    running = Running(
        **{**BUNDLED, "num_gpu_blocks_override": 20},
        max_num_seqs=12,
        speculative_config={"method": "suffix"},
    ).start()
    yield running
    running.stop()


def valid(text: str, one: dict[str, Any]) -> None:
    checker = jsonschema.Draft202012Validator(one, format_checker=CHECKED)
    assert not list(checker.iter_errors(json.loads(text))), (one, text)


async def posted(server: Running, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        return await asyncio.gather(*(client.post(CHAT, json=body) for body in bodies))


async def test_answers_of_many_kinds_at_once_follow_their_schemas(tight: Running) -> None:
    rng, whole, stopped, bodies, schemas = random.Random(7), 0, 0, [], []
    for i in range(16):
        one = schema(rng)
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": one}}
        body = {"messages": ASKED, "response_format": form, "seed": i, "temperature": 1.0}
        body |= {"max_tokens": 90, "n": 1 + i % 2, "logprobs": True, "top_logprobs": i % 3}
        schemas.append(one)
        bodies.append(body | {"stop": ["true", "0"]} if i % 4 == 3 else body)
    for answer, one in zip(await posted(tight, bodies), schemas, strict=True):
        assert answer.status_code == 200, answer.text
        for choice in answer.json()["choices"]:
            text, reason = choice["message"]["content"], choice["finish_reason"]
            tokens = [bytes(t["bytes"]) for t in choice["logprobs"]["content"]]
            assert b"".join(tokens).startswith(text.encode())
            if reason == "stop" and choice.get("stop_reason") is None:
                valid(text, one)
                whole += 1
            stopped += isinstance(choice.get("stop_reason"), str)
    assert whole >= 12
    assert stopped
    found = tight.metrics(
        [f'streamer_preemptions_total{{kind="{how}"}}' for how in ("swap", "recompute")]
    )
    assert sum(found.values()) > 0, found


def test_in_process(tight: Running) -> None:
    """Each kind of grammar, of the engine that a program has."""

    async def said(**wanted: Any) -> str:
        params = SamplingParams(seed=3, max_tokens=80, structured_outputs=wanted)
        return "".join([d.text async for d in tight.engine.generate("Hm:", params)])

    def text(**wanted: Any) -> str:
        return tight.on_loop(said(**wanted))

    one = {"type": "object", "properties": {"a": {"enum": [1, "x"]}}, "required": ["a"]}
    closed = {**one, "additionalProperties": False}
    valid(text(json=closed), closed)
    assert text(json_object=True).startswith("{")
    assert re.fullmatch("[a-c]{3}-[0-9]{2}", text(regex="[a-c]{3}-[0-9]{2}"))
    assert text(choice=["fox", "wolf"]) in ("fox", "wolf")
    assert text(grammar='start: "a" ("b" | "c") "d"') in ("abd", "acd")
    tag = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema",
           "json_schema": closed}, "end": "</f>"}  # fmt: skip
    valid(text(structural_tag=json.dumps({"format": tag}))[3:-4], closed)


MILLION = '{"enum":' + "[" * 1_000_000 + "]" * 1_000_000 + "}"
DEEP = {
    "tools": (CHAT, '"tools":[{"type":"function","function":{"name":"f","parameters":%s}}]'),
    "response_format": (CHAT, '"response_format":{"type":"json_schema","json_schema":'
                        '{"name":"x","schema":%s}}'),
    "structured_outputs": ("/v1/completions", '"prompt":"x","structured_outputs":{"json":%s}'),
    "text": ("/v1/responses", '"input":"x","text":{"format":{"type":"json_schema","name":"x",'
             '"schema":%s}}'),
    "output_config": ("/v1/messages", '"max_tokens":9,"output_config":{"format":'
                      '{"type":"json_schema","schema":%s}}'),
    "format": ("/api/chat", '"format":%s'),
}  # fmt: skip


@pytest.mark.parametrize("field", DEEP)
def test_a_schema_a_million_deep_is_a_400(tight: Running, field: str) -> None:
    path, text = DEEP[field]
    asked = '"model":"streamer-demo","messages":[{"role":"user","content":"x"}],'
    if path in ("/v1/completions", "/v1/responses"):
        asked = '"model":"streamer-demo",'
    got = httpx.post(tight.url + path, content="{" + asked + text % MILLION + "}", timeout=30)
    assert got.status_code == 400, got.text[:300]
    assert field in got.text
    assert len(got.text) < 1000


def bombs() -> Iterator[dict[str, Any]]:
    """Bodies that take long to compile, or are refused after long; no two alike."""
    states, items = ".*a.{%d}$", {f"p{i}": {"enum": ["x" * 50]} for i in range(500)}
    for i in range(4):
        yield {"structured_outputs": {"regex": f"(a{{{900 + i}}}){{1000}}"}}
        yield {"structured_outputs": {"regex": states % (400 + i)}}
        yield {"structured_outputs": {"json": {"properties": {f"q{i}": {}, **items}}}}
        crossed = [{"pattern": f".*{chr(97 + i)}.{{{n}}}.*"} for n in range(12)]
        yield {"structured_outputs": {"json": {"allOf": crossed}}}


def resident_bytes() -> int:
    found = re.search(r"VmRSS:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) << 10 if found else 0


async def test_bombs_of_sixteen_clients_leave_their_neighbour_alone(tight: Running) -> None:
    """Its answer is the same, it goes on meanwhile, and the memory is bounded."""
    neighbour = {"messages": ASKED, "seed": 1, "max_tokens": 120, "ignore_eos": True}
    (alone,) = await posted(tight, [neighbour])
    before = resident_bytes()
    bodies = [{"messages": ASKED, "max_tokens": 2, **bomb} for bomb in bombs()]
    beside, *answers = await posted(tight, [neighbour, *bodies])
    assert beside.json()["choices"] == alone.json()["choices"]
    for body, answer in zip(bodies, answers, strict=True):
        assert answer.status_code in (200, 400), (body, answer.text)
        if answer.status_code == 400:
            error = answer.json()["error"]
            has_begun = error["message"].startswith(GAVE_UP)  # its matcher gave up midway
            assert has_begun or error["param"].startswith("structured_outputs.")
    assert resident_bytes() - before < 600 << 20
    tight.wait_idle()
