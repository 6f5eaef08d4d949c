"""Forced calls over the wire, of a model that was never taught to call: the official clients.

The bundled model at temperature 1, under formats that its template knows nothing of.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import Enum
from typing import Any, Literal

import anthropic
import httpx
import jsonschema
import ollama
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.server.support.running import BUNDLED, Running


class Unit(Enum):
    """Of a temperature."""

    CELSIUS = "celsius"
    KELVIN = "kelvin"


class GetWeather(BaseModel):
    """The weather of a city."""

    city: Literal["Zürich", "Bern"]
    unit: Unit | None
    days: int = Field(ge=1, le=9)


class Answer(BaseModel):
    """What is said instead of a call."""

    model_config = ConfigDict(extra="forbid")
    degrees: Literal[17, 18]


SCHEMA = GetWeather.model_json_schema()
NOW: dict[str, Any] = {"type": "object", "properties": {}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now", "parameters": NOW}},
]
RESPONSE_TOOLS: Any = [{"type": "function", "strict": False, **t["function"]} for t in TOOLS]
SCHEMAS = {"get_weather": SCHEMA, "now": NOW}
ASKED: Any = [{"role": "user", "content": "How is the weather?"}]
CHAT: Any = {"model": "bundled", "messages": ASKED, "tools": TOOLS, "max_tokens": 300}


@pytest.fixture(scope="module", params=["hermes", "qwen3_coder"])
def forced(request: pytest.FixtureRequest) -> Iterator[Running]:
    settings = {"tool_call_parser": request.param, "served_model_name": "bundled"}
    running = Running(**BUNDLED, **settings).start()
    yield running
    running.stop()


@pytest.fixture
def client(forced: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=forced.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def checked(calls: Any, *, is_cut: bool = False) -> list[str]:
    """Names of a chat's calls, whose arguments are valid; `is_cut`: not of the last."""
    for call in calls[: len(calls) - is_cut]:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    return [call.function.name for call in calls]


NAMED: Any = {"type": "function", "function": {"name": "now"}}
ALLOWED: Any = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "required", "tools": [NAMED, {"type": "mcp"}]},
}


def test_chats_call_what_is_required(client: openai.OpenAI) -> None:
    for choice, parallel, names in (
        ("required", False, {"get_weather", "now"}),
        ("required", True, {"get_weather", "now"}),
        (NAMED, True, {"now"}),
        (ALLOWED, False, {"now"}),
    ):
        settings: Any = {**CHAT, "tool_choice": choice, "parallel_tool_calls": parallel}
        got = client.chat.completions.create(**settings, n=3, seed=3)
        for each in got.choices:
            found = checked(each.message.tool_calls, is_cut=each.finish_reason == "length")
            assert found
            assert set(found) <= names
            if choice == NAMED or not parallel:
                assert (each.finish_reason, each.message.content) == ("tool_calls", None)
                assert len(found) == 1


def test_a_streamed_call_is_the_whole_one(client: openai.OpenAI) -> None:
    for seed in range(3):
        settings: Any = {**CHAT, "tool_choice": "required", "parallel_tool_calls": False}
        settings["seed"] = seed
        whole = client.chat.completions.create(**settings).choices[0].message
        with client.chat.completions.stream(**settings) as stream:
            for _ in stream:
                pass
            last = stream.get_final_completion().choices[0].message
        assert last.tool_calls is not None
        assert whole.tool_calls is not None
        assert [c.function.arguments for c in last.tool_calls] == [
            c.function.arguments for c in whole.tool_calls
        ]
        assert checked(last.tool_calls)


def test_strict_tools_of_pydantic_are_parsed(client: openai.OpenAI) -> None:
    tool: Any = openai.pydantic_function_tool(GetWeather, name="get_weather")
    assert tool["function"]["strict"] is True
    settings = {**CHAT, "tools": [tool], "parallel_tool_calls": False}
    got = client.chat.completions.parse(**settings, tool_choice="required")
    (call, *_) = got.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, GetWeather)
    parsed = client.chat.completions.parse(**settings, response_format=Answer, seed=5)
    said = parsed.choices[0].message
    assert said.tool_calls or isinstance(said.parsed, Answer)


def test_responses_call_what_is_required(client: openai.OpenAI) -> None:
    settings: Any = {"model": "bundled", "input": "Hm?", "max_tool_calls": 2}
    for choice, names in (
        ("required", {"get_weather", "now"}),
        ({"type": "function", "name": "now"}, {"now"}),
        (
            {"type": "allowed_tools", "mode": "required",
             "tools": [{"type": "function", "name": "get_weather"}]},
            {"get_weather"},
        ),
    ):  # fmt: skip
        got = client.responses.create(**settings, tools=RESPONSE_TOOLS, tool_choice=choice)
        assert got.status == "completed"
        echoed = got.tool_choice
        assert echoed == choice or echoed.model_dump(exclude_none=True) == choice
        calls = [item for item in got.output if item.type == "function_call"]
        assert len(calls) == len(got.output) > 0
        for call in calls:
            assert call.name in names
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    tool: Any = openai.pydantic_function_tool(GetWeather, name="get_weather")
    parsed = client.responses.parse(**settings, tools=[tool], tool_choice="required")
    (item, *_) = parsed.output
    assert item.type == "function_call"
    assert isinstance(item.parsed_arguments, GetWeather)
    assert parsed.tools[0].strict is True  # type: ignore[union-attr]


async def test_a_required_call_over_a_socket(forced: Running) -> None:
    async with (
        openai.AsyncOpenAI(base_url=forced.url + "/v1", api_key="none") as client,
        client.responses.connect() as connection,
    ):
        await connection.response.create(
            model="bundled",
            input="Hm?",
            tools=RESPONSE_TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
        )
        async for event in connection:
            assert event.type != "error", event
            if event.type in ("response.completed", "response.incomplete"):
                assert event.response.output[0].type == "function_call"
                break


def test_messages_call_what_is_required(forced: Running) -> None:
    tools: Any = [{"name": n, "input_schema": s} for n, s in SCHEMAS.items()]
    settings: Any = {"model": "bundled", "max_tokens": 200, "messages": ASKED, "tools": tools}
    with anthropic.Anthropic(base_url=forced.url, api_key="none", max_retries=0) as client:
        for choice, names in (
            ({"type": "any", "disable_parallel_tool_use": True}, {"get_weather", "now"}),
            ({"type": "tool", "name": "now"}, {"now"}),
        ):
            got = client.messages.create(**settings, tool_choice=choice)
            (call,) = got.content
            assert call.type == "tool_use"
            assert call.name in names
            jsonschema.validate(call.input, SCHEMAS[call.name])
            assert got.stop_reason == "tool_use"
            with client.messages.stream(**settings, tool_choice=choice) as stream:
                assert stream.get_final_message().content[0].type == "tool_use"


def test_ollamas_format_is_followed(forced: Running) -> None:
    options = {"num_predict": 200, "temperature": 1.0, "seed": 3}
    schema: Any = Answer.model_json_schema()
    given: Any = {"model": "bundled", "options": options, "format": schema}
    with ollama.Client(host=forced.url) as client:
        for stream in (False, True):
            chat: Any = client.chat(messages=ASKED, stream=stream, **given)
            text = "".join(p.message.content for p in chat) if stream else chat.message.content
            assert Answer.model_validate_json(text)
        made = client.generate(prompt="Hm?", **given)
        assert Answer.model_validate_json(made.response)
        called = client.chat(messages=ASKED, tools=TOOLS, **given).message
        assert called.tool_calls or Answer.model_validate_json(called.content or "")
    for path, body in (("chat", {"messages": ASKED}), ("generate", {"prompt": "x"})):
        for form, status in (("json", 200), ("", 200), ("yaml", 400), ({"not": {}}, 400)):
            settings = {**given, "format": form, "stream": False}
            got = httpx.post(f"{forced.url}/api/{path}", json={**body, **settings}, timeout=20)
            assert got.status_code == status, got.text
            assert status == 200 or "format" in got.json()["error"]


def test_reasoning_does_not_end_an_answer_that_must_call(server_with: Any) -> None:
    """A model that was never taught to reason ends right after the mark, if it may."""
    server = server_with(**BUNDLED, tool_call_parser="hermes", reasoning_parser="qwen3")
    for seed in range(3):
        body = {"messages": ASKED, "tools": TOOLS[1:], "tool_choice": "required", "seed": seed}
        settings = {"parallel_tool_calls": False, "thinking_token_budget": 8, "max_tokens": 200}
        got = httpx.post(
            f"{server.url}/v1/chat/completions", json={**body, **settings}, timeout=20
        ).json()["choices"][0]
        assert (got["finish_reason"], checked_names(got["message"])) == ("tool_calls", ["now"])


def checked_names(message: dict[str, Any]) -> list[str]:
    return [call["function"]["name"] for call in message.get("tool_calls", ())]


BAD: dict[str, Any] = {"type": "object", "properties": {"a": {"uniqueItems": True}}}


def test_a_schema_that_cannot_be_followed(forced: Running) -> None:
    """A strict tool's is refused by name; another's is followed as far as it can be."""

    def post(path: str, **body: Any) -> httpx.Response:
        return httpx.post(forced.url + path, json=body, timeout=20)

    function = {"name": "f", "parameters": BAD}
    fine, strict = TOOLS[1], {"type": "function", "function": {**function, "strict": True}}
    got = post("/v1/chat/completions", messages=ASKED, tools=[fine, strict])
    assert (got.status_code, got.json()["error"]["param"]) == (400, "tools[1].function.parameters")
    assert "uniqueItems" in got.json()["error"]["message"]
    got = post("/v1/responses", input="x", tools=[{"type": "function", **function, "strict": True}])
    assert (got.status_code, got.json()["error"]["param"]) == (400, "tools[0].parameters")
    tool = {"name": "f", "input_schema": BAD, "strict": True}
    got = post("/v1/messages", max_tokens=9, messages=ASKED, tools=[tool])
    assert got.status_code == 400
    assert got.json()["error"]["message"].startswith("tools[0].input_schema can't be honoured")
    for parameters in (BAD, {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}):
        loose = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        settings = {"tool_choice": "required", "max_tokens": 40}
        got = post("/v1/chat/completions", messages=ASKED, tools=[loose], **settings)
        assert got.status_code == 200, got.text


CHOSEN: list[tuple[Any, str]] = [
    ({"type": "function", "function": {"name": "other"}}, "tool_choice.function.name"),
    ({"type": "function"}, "tool_choice.name"),
    ({"type": "custom", "custom": {"name": "now"}}, "tool_choice.type"),
    ({"type": "allowed_tools"}, "tool_choice.mode"),
    ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}, "tool_choice.tools"),
    ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
        {"type": "function", "function": {"name": "x"}}]}},
     "tool_choice.allowed_tools.tools[0].function.name"),
    ({"type": "allowed_tools", "mode": "all", "tools": []}, "tool_choice.mode"),
]  # fmt: skip


@pytest.mark.parametrize(("choice", "param"), CHOSEN, ids=[c[1] for c in CHOSEN])
def test_a_choice_at_fault_is_named(server: Running, choice: Any, param: str) -> None:
    for path, tools in (("chat/completions", TOOLS), ("responses", RESPONSE_TOOLS)):
        body = {"messages": ASKED, "input": "x", "tools": tools, "tool_choice": choice}
        got = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=20)
        assert (got.status_code, got.json()["error"]["param"]) == (400, param), got.text


def test_what_cannot_be_forced_beside_a_call(forced: Running) -> None:
    for fields, param in (
        ({"tools": None}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tool_choice"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
        ({"use_beam_search": True, "temperature": 0}, "tool_choice"),
    ):
        body = {"messages": ASKED, "tools": TOOLS, "tool_choice": "required", **fields}
        got = httpx.post(f"{forced.url}/v1/chat/completions", json=body, timeout=20)
        assert (got.status_code, got.json()["error"]["param"]) == (400, param), got.text


def tool(parameters: Any, name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


def text(**limits: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "string", **limits}}}


def deep(depth: int) -> Any:
    return json.loads('{"a":' * depth + "1" + "}" * depth)


MANY = {"type": "object", "properties": {f"p{i}": {"enum": ["x" * 300]} for i in range(2500)}}
BOMBS: dict[str, tuple[dict[str, Any], str | None]] = {
    "many": ({"tools": [tool(text(), f"f{i}") for i in range(1000)]}, None),
    "unknown": ({"tools": [tool(text()), {"type": "custom", "custom": {"name": "x"}}]}, None),
    "repeats": (
        {"tools": [tool(text(pattern="((a{1,1000}){1,1000}){1,1000}"), strict=True)]}, None,
    ),
    "states": ({"tools": [tool(text(pattern=".*a.{300}$"), strict=True)]}, None),
    "look": (
        {"tools": [tool(text(pattern="(?=a)b"), strict=True)]}, "tools[0].function.parameters",
    ),
    "brackets": (
        {"tools": [tool(text(pattern="(" * 50_000 + ")" * 50_000), strict=True)]},
        "tools[0].function.parameters",
    ),
    "large": ({"tools": [tool(MANY, strict=True)]}, None),
    "deep": ({"tools": [tool(deep(900))]}, "tools"),
    "no_schema": (
        {"tools": [tool({"type": 5}, strict=True)]}, "tools[0].function.parameters",
    ),
    "arguments": (
        {"messages": [
            *ASKED,
            {"role": "assistant", "tool_calls": [
                {"id": "a", "function": {"name": "f", "arguments": json.dumps(deep(900))}}]},
            {"role": "tool", "tool_call_id": "a", "content": "x"},
        ], "tools": [tool(text())]},
        "messages",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_followed_or_refused_by_name(forced: Running, name: str) -> None:
    fields, param = BOMBS[name]
    body = {"messages": ASKED, "tool_choice": "required", "max_tokens": 4, **fields}
    got = httpx.post(f"{forced.url}/v1/chat/completions", json=body, timeout=20)
    expected = (200, None) if param is None else (400, param)
    if name in ("repeats", "states") and got.status_code == 400:  # text forms are written anew
        expected = (400, "tools[0].function.parameters")
    error = got.json().get("error") or {}
    assert (got.status_code, error.get("param")) == expected, got.text
    assert len(error.get("message", "")) < 700
