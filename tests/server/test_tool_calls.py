"""Tools and reasoning over the wire, with the fake model's script: whole, streamed and resumed.

OpenAI's package unchanged, and bare requests where a field is at fault.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from streamer.core.plan import Reasoning
from streamer.engine.requests import GenerateRequest
from streamer.engine.stream import TokenStream
from tests.server.support.running import Running

THOUGHT = "The weather of Zürich is asked for."
CALLS = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
SCRIPT = [
    {"when": "18 degrees", "answer": "<think>\nNow I know.\n</think>\n\nIt is 18 degrees. 🦊"},
    {"when": "weather", "answer": f"<think>\n{THOUGHT}\n</think>\n\nI look.\n{CALLS}"},
    {"when": "alone", "answer": '<tool_call>{"name": "now"}'},
    {"when": "broken", "answer": "<tool_call>\nnothing\n</tool_call>"},
]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "now"}},
    {"type": "web_search", "search_context_size": "low"},
]
ASKED: Any = [{"role": "user", "content": "How is the weather in Zürich?"}]
CHAT = "/v1/chat/completions"


@pytest.fixture
def client(scripted: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=scripted.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def post(server: Running, path: str = CHAT, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json={"messages": ASKED, **body}, timeout=20)


def names_and_arguments(calls: Any) -> list[tuple[str, Any]]:
    return [(c.function.name, json.loads(c.function.arguments)) for c in calls]


WANTED = [("get_weather", {"city": "Zürich"}), ("now", {})]


def test_a_tool_loop(client: openai.OpenAI) -> None:
    messages = list(ASKED)
    first = client.chat.completions.create(model="fake", messages=messages, tools=TOOLS)
    (choice,) = first.choices
    message = choice.message
    assert choice.finish_reason == "tool_calls"
    assert message.content == "I look."
    assert message.tool_calls is not None
    assert names_and_arguments(message.tool_calls) == WANTED
    assert message.model_extra == {"reasoning_content": THOUGHT, "reasoning": THOUGHT}
    assert len({c.id for c in message.tool_calls}) == 2
    messages.append(message.model_dump(exclude_none=True))
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}
        for call in message.tool_calls
    ]
    last = client.chat.completions.create(model="fake", messages=messages, tools=TOOLS)
    assert last.choices[0].message.content == "It is 18 degrees. 🦊"
    assert last.choices[0].finish_reason == "stop"


def test_the_stream_helper_sees_the_whole_answer(client: openai.OpenAI) -> None:
    settings: Any = {"model": "fake", "messages": ASKED, "tools": TOOLS}
    thought = ""
    with client.chat.completions.stream(**settings) as stream:
        kinds = []
        for event in stream:
            kinds.append(event.type)
            if event.type == "chunk" and event.chunk.choices:
                delta = event.chunk.choices[0].delta
                thought += getattr(delta, "reasoning_content", None) or ""
        final = stream.get_final_completion()
    assert thought == THOUGHT
    assert {"content.delta", "tool_calls.function.arguments.delta"} <= set(kinds)
    (choice,) = final.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert names_and_arguments(choice.message.tool_calls) == WANTED


def chunks(response: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    found, number = [], ""
    for line in response.text.splitlines():
        if line.startswith("id: "):
            number = line[4:]
        elif line.startswith("data: {"):
            found.append((number, json.loads(line[6:])))
    return found


def folded(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client has after these deltas."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for delta in deltas:
        found["content"] += delta.get("content") or ""
        found["reasoning"] += delta.get("reasoning") or ""
        for call in delta.get("tool_calls") or ():
            if "id" in call:
                assert call["index"] == len(found["calls"])
                found["calls"].append([call["id"], call["function"]["name"], ""])
            else:
                assert "name" not in call["function"]
            found["calls"][call["index"]][2] += call["function"]["arguments"]
    return found


def test_a_stream_is_resumed_anywhere(scripted: Running) -> None:
    options = {"include_event_ids": True}
    asked = post(scripted, tools=TOOLS, stream=True, stream_options=options)
    sent = chunks(asked)
    deltas = [chunk["choices"][0]["delta"] for _, chunk in sent]
    whole = folded(deltas)
    assert [c[1:] for c in whole["calls"]] == [
        [n, json.dumps(a, ensure_ascii=False)] for n, a in WANTED
    ]
    url = f"{scripted.url}{CHAT}/{sent[0][1]['id']}?stream=true"
    again = [c["choices"][0]["delta"] for _, c in chunks(httpx.get(url, timeout=20))]
    assert folded(again) == whole
    for place, (number, _) in enumerate(sent[:-1]):
        rest = chunks(httpx.get(f"{url}&starting_after={number}", timeout=20))
        more = [c["choices"][0]["delta"] for _, c in rest]
        assert folded(deltas[: place + 1] + more) == whole
        assert rest[-1][1]["choices"][0]["finish_reason"] == "tool_calls"


def test_parallel_calls_choices_and_what_is_no_call(scripted: Running) -> None:
    one = post(scripted, tools=TOOLS, parallel_tool_calls=False).json()["choices"][0]
    assert [c["function"]["name"] for c in one["message"]["tool_calls"]] == ["get_weather"]
    two = post(scripted, tools=TOOLS, n=2).json()["choices"]
    ids = {call["id"] for choice in two for call in choice["message"]["tool_calls"]}
    assert len(ids) == 4
    none = post(scripted, tools=TOOLS, tool_choice="none").json()["choices"][0]
    assert none["message"]["content"] == f"I look.\n{CALLS}"
    assert none["finish_reason"] == "stop"
    cut = post(scripted, tools=TOOLS, max_tokens=120).json()["choices"][0]
    assert (cut["finish_reason"], len(cut["message"]["tool_calls"])) == ("length", 1)
    for text, content in (("alone", None), ("broken", "<tool_call>\nnothing\n</tool_call>")):
        messages = [{"role": "user", "content": text}]
        got = post(scripted, messages=messages, tools=TOOLS).json()["choices"][0]
        assert got["message"]["content"] == content
    thought = post(scripted, stream=True)
    assert folded([c["choices"][0]["delta"] for _, c in chunks(thought)])["reasoning"] == THOUGHT


def call(name: str = "f", call_id: str = "call_1", arguments: str = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [function(name=f"f{i}") for i in range(10_000)]}, "tools"),
        ({"tools": [function(description="x" * (1 << 20), parameters={"a": 1})]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [function(name="")]}, "tools[0].function.name"),
        ({"tools": [function(), function()]}, "tools[1].function.name"),
        ({"tools": [function(parameters=[1])]}, "tools[0].function.parameters"),
        ({"tools": [function(name="my tool")]}, "tools[0].function.name"),
        ({"tools": [function(strict=True, parameters={"type": "string"})]},
         "tools[0].function.parameters"),
        ({"tools": TOOLS, "tool_choice": function()}, "tool_choice.function.name"),
        ({"tools": TOOLS, "tool_choice": 3}, "tool_choice"),
        ({"messages": [*ASKED, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        (
            {"messages": [*ASKED, {"role": "assistant", "tool_calls": [call()]},
                          {"role": "tool", "content": "x", "tool_call_id": "call_2"}]},
            "messages[2].tool_call_id",
        ),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [call()]}]},
         "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [call()] * 1025}]},
         "messages[0].tool_calls"),
        ({"messages": ASKED, "tools": TOOLS, "chat_template_kwargs": {"tools": 1}},
         "chat_template_kwargs.tools"),
    ],
)  # fmt: skip
def test_bad_input_names_the_field(scripted: Running, body: dict[str, Any], param: str) -> None:
    got = post(scripted, **body)
    assert (got.status_code, got.json()["error"]["param"]) == (400, param), got.text


def test_a_schema_nested_a_million_deep_is_refused(scripted: Running) -> None:
    deep = '{"a":' * 100_000 + "1" + "}" * 100_000
    body = '{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", '
    body += '"function": {"name": "f", "parameters": ' + deep + "}}]}"
    got = httpx.post(scripted.url + CHAT, content=body, timeout=20)
    assert (got.status_code, got.json()["error"]["param"]) == (400, "tools")
    assert post(scripted).status_code == 200


def test_earlier_calls_with_broken_arguments_are_accepted(scripted: Running) -> None:
    for arguments in ("{'a': 1", "", "[1]", '{"a": "🦊"}'):
        messages = [
            *ASKED,
            {"role": "assistant", "content": None, "tool_calls": [call(arguments=arguments)],
             "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "no"}]},
        ]  # fmt: skip
        got = post(scripted, messages=messages, tools=TOOLS, max_tokens=1)
        assert got.status_code == 200, got.text


def test_tools_where_the_format_is_unknown(server: Running) -> None:
    got = post(server, tools=TOOLS)
    assert (got.status_code, got.json()["error"]["param"]) == (400, "tools")
    assert "--tool-call-parser" in got.json()["error"]["message"]
    assert post(server, tools=TOOLS[2:], max_tokens=1).status_code == 200
    assert post(server, tools=TOOLS, tool_choice="none", max_tokens=1).status_code == 200


# ---------------------------------------------------------------- responses

RESPONSE_TOOLS: Any = [
    {"type": "function", "strict": False, **TOOLS[0]["function"]},
    {"type": "function", "name": "now", "parameters": None},
    {"type": "web_search"},
    {"type": "namespace", "tools": [{"type": "custom", "name": "x"}]},
]
INPUT = ASKED[0]["content"]


def calls_of(output: Any) -> list[tuple[str, Any]]:
    return [(i.name, json.loads(i.arguments)) for i in output if i.type == "function_call"]


@pytest.mark.parametrize("is_chained", [True, False])
def test_a_tool_loop_of_responses(client: openai.OpenAI, is_chained: bool) -> None:
    settings: Any = {"model": "fake", "tools": RESPONSE_TOOLS}
    first = client.responses.create(input=INPUT, **settings)
    assert [item.type for item in first.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert first.output_text == "I look."
    assert calls_of(first.output) == WANTED
    assert [tool.type for tool in first.tools] == ["function", "function"]
    given: Any = [] if is_chained else [{"role": "user", "content": INPUT}, *first.output]
    given += [
        {"type": "function_call_output", "call_id": item.call_id, "output": "18 degrees"}
        for item in first.output
        if item.type == "function_call"
    ]
    parent = first.id if is_chained else None
    last = client.responses.create(input=given, previous_response_id=parent, **settings)
    assert last.output_text == "It is 18 degrees. 🦊"
    kinds = [item.type for item in client.responses.input_items.list(last.id, order="asc")]
    assert kinds == ["message", "reasoning", "message", *["function_call"] * 2,
                     *["function_call_output"] * 2]  # fmt: skip
    again = client.responses.retrieve(first.id)
    assert again.output == first.output


def test_the_stream_helper_of_responses(client: openai.OpenAI) -> None:
    kinds: list[str] = []
    pieces: dict[str, str] = {}
    with client.responses.stream(model="fake", input=INPUT, tools=RESPONSE_TOOLS) as stream:
        for event in stream:
            kinds.append(event.type)
            if event.type.endswith(".delta"):
                found: Any = event
                pieces[found.item_id] = pieces.get(found.item_id, "") + found.delta
        final = stream.get_final_response()
    assert calls_of(final.output) == WANTED
    written = [THOUGHT, "I look.", *(json.dumps(a, ensure_ascii=False) for _, a in WANTED)]
    assert list(pieces.values()) == written
    firsts = [k for i, k in enumerate(kinds) if k not in kinds[:i]]
    assert firsts == [
        *("response.created", "response.in_progress", "response.output_item.added"),
        *("response.content_part.added", "response.reasoning_text.delta"),
        *("response.reasoning_text.done", "response.content_part.done"),
        *("response.output_item.done", "response.output_text.delta", "response.output_text.done"),
        *("response.function_call_arguments.delta", "response.function_call_arguments.done"),
        "response.completed",
    ]


def text_of(events: list[dict[str, Any]]) -> dict[str, str]:
    pieces: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            pieces[event["item_id"]] = pieces.get(event["item_id"], "") + event["delta"]
    return pieces


def frames(response: httpx.Response) -> list[dict[str, Any]]:
    lines = response.text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


def test_a_response_is_resumed_after_any_event(scripted: Running) -> None:
    settings = {"input": INPUT, "tools": RESPONSE_TOOLS}
    sent = frames(post(scripted, "/v1/responses", **settings, stream=True))
    numbers = [event["sequence_number"] for event in sent]
    assert numbers == sorted(set(numbers))
    whole = text_of(sent)
    url = f"{scripted.url}/v1/responses/{sent[0]['response']['id']}?stream=true"
    again = frames(httpx.get(url, timeout=20))
    assert [e["sequence_number"] for e in again] == list(range(numbers[-1] + 1))
    assert text_of(again) == whole
    for place, number in list(enumerate(numbers))[:-1:3]:
        rest = frames(httpx.get(f"{url}&starting_after={number}", timeout=20))
        assert rest[0]["sequence_number"] > number
        assert text_of(sent[: place + 1] + rest) == whole
        assert rest[-1]["response"]["output"] == sent[-1]["response"]["output"]


async def test_a_tool_loop_over_a_socket(scripted: Running) -> None:
    async with (
        openai.AsyncOpenAI(base_url=scripted.url + "/v1", api_key="none") as client,
        client.responses.connect() as connection,
    ):
        given: Any = INPUT
        parent = None
        for _ in range(2):
            await connection.response.create(
                model="fake", input=given, tools=RESPONSE_TOOLS, previous_response_id=parent
            )
            async for event in connection:
                assert event.type != "error", event
                if event.type == "response.completed":
                    break
            answer = event.response
            parent = answer.id
            if given == INPUT:
                assert calls_of(answer.output) == WANTED
            given = [
                {"type": "function_call_output", "call_id": i.call_id, "output": "18 degrees"}
                for i in answer.output
                if i.type == "function_call"
            ]
        assert answer.output_text == "It is 18 degrees. 🦊"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input"),
    ],
)
def test_bad_input_of_responses_names_the_field(
    scripted: Running, body: dict[str, Any], param: str
) -> None:
    got = post(scripted, "/v1/responses", **{"input": INPUT, **body})
    assert (got.status_code, got.json()["error"]["param"]) == (400, param), got.text


def test_usage_counts_the_reasoning(scripted: Running) -> None:
    """On every face, without the marks around it; a budget of Anthropic's is the same setting."""
    encode = scripted.engine.tokenizer.encode
    expected = len(encode(f"\n{THOUGHT}\n", add_special_tokens=False))
    chat = post(scripted, n=2).json()["usage"]["completion_tokens_details"]
    assert chat["reasoning_tokens"] == 2 * expected
    response = post(scripted, "/v1/responses", input=ASKED[0]["content"]).json()["usage"]
    assert response["output_tokens_details"]["reasoning_tokens"] == expected
    thinking = {"type": "enabled", "budget_tokens": 1}
    message = post(scripted, "/v1/messages", max_tokens=200, thinking=thinking, model="fake")
    assert message.json()["usage"]["output_tokens_details"]["thinking_tokens"] == expected
    thinking["budget_tokens"] = -1
    wrong = post(scripted, "/v1/messages", max_tokens=200, thinking=thinking, model="fake")
    assert wrong.status_code == 400
    assert "thinking.budget_tokens" in wrong.text


def test_usage_counts_the_reasoning_along(scripted: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    sent = chunks(post(scripted, n=2, stream=True, stream_options=options))
    whole = sent[-1][1]["usage"]["completion_tokens_details"]["reasoning_tokens"]
    seen: dict[int, list[int]] = {0: [0], 1: [0]}
    for _, chunk in sent[:-1]:
        details = chunk["usage"]["completion_tokens_details"]
        seen[chunk["choices"][0]["index"]].append(details["reasoning_tokens"])
    assert all(counts == sorted(counts) for counts in seen.values())
    assert sum(counts[-1] for counts in seen.values()) == whole > 2 * len(THOUGHT)


def test_the_engine_gets_the_place_of_the_reasoning(
    scripted: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For grammars and budgets: where the prompt ends, and what ends the reasoning."""
    seen, submit = [], scripted.engine.submit

    def recorded(request: GenerateRequest) -> TokenStream:
        seen.append(request)
        return submit(request)

    monkeypatch.setattr(scripted.engine, "submit", recorded)
    for end, stage in [("", "before"), ("<think>\n", "inside"), ("<think></think>\n", "after")]:
        said = [*ASKED, {"role": "assistant", "content": f"I {end}"}]
        settings = {"continue_final_message": True, "add_generation_prompt": False}
        answer = post(scripted, messages=said, thinking_token_budget=9, **settings)
        assert answer.status_code == 200
        encode = scripted.engine.tokenizer.encode
        closing = tuple(encode("</think>", add_special_tokens=False))
        assert seen[-1].reasoning == Reasoning(stage, "<think>", ("</think>",), closing)
        assert seen[-1].params.thinking_token_budget == 9
