"""Tools and thinking over Anthropic's API, with the fake model's script; and the body alone."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

import httpx
import pytest

from streamer.errors import InvalidRequest
from streamer.server.anthropic.body import COUNT_READER
from tests.server.support.counting import sse
from tests.server.support.running import Running

THOUGHT = "The weather of Zürich is asked for."
CALLS = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
SCRIPT = [
    {"when": "18 degrees", "answer": "It is 18 degrees. 🦊"},
    {"when": "weather", "answer": f"<think>\n{THOUGHT}\n</think>\n\nI look.\n{CALLS}"},
]
TOOLS: Any = [
    {"name": "get_weather", "description": "Of a city", "input_schema": {"type": "object"}},
    {"type": "custom", "name": "now", "input_schema": {"type": "object", "properties": {}}},
    {"type": "web_search_20260209", "name": "web_search", "max_uses": 3},
]
ASKED: Any = [{"role": "user", "content": "How is the weather in Zürich?"}]
WANTED = [("get_weather", {"city": "Zürich"}), ("now", {})]


def body_of(**fields: Any) -> dict[str, Any]:
    return {"max_tokens": 900, "messages": ASKED, "tools": TOOLS, **fields}


def post(server: Running, **fields: Any) -> httpx.Response:
    return httpx.post(server.url + "/v1/messages", json=body_of(**fields), timeout=20)


def results(answer: list[Any], content: Any) -> list[Any]:
    """The conversation with the answer and what its calls brought."""
    calls = [block for block in answer if block["type"] == "tool_use"]
    brought = [
        {"type": "tool_result", "tool_use_id": call["id"], "content": content} for call in calls
    ]
    return [
        *ASKED,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": brought},
    ]


def test_a_tool_loop(scripted: Running) -> None:
    first = post(scripted).json()
    thought, text, *calls = first["content"]
    digest = blake2b(THOUGHT.encode(), digest_size=16).hexdigest()
    assert thought == {"type": "thinking", "thinking": THOUGHT, "signature": digest}
    assert text == {"type": "text", "text": "I look."}
    assert [(call["name"], call["input"]) for call in calls] == WANTED
    assert len({call["id"] for call in calls}) == 2
    assert first["stop_reason"] == "tool_use"
    content = [{"type": "text", "text": "18 degrees"}]
    last = post(scripted, messages=results(first["content"], content)).json()
    assert last["content"] == [{"type": "text", "text": "It is 18 degrees. 🦊"}]
    assert last["stop_reason"] == "end_turn"


def test_the_stream_is_the_whole(scripted: Running) -> None:
    whole = post(scripted).json()
    blocks: list[dict[str, Any]] = []
    arguments: dict[int, str] = {}
    url = scripted.url + "/v1/messages"
    with httpx.stream("POST", url, json=body_of(stream=True), timeout=20) as response:
        events = [event.json for event in sse(response)]
    is_open = False
    for event in events[1:-2]:
        index = event["index"]
        if event["type"] == "content_block_start":
            assert not is_open
            assert index == len(blocks)
            blocks.append(event["content_block"])
            is_open = True
        elif event["type"] == "content_block_stop":
            assert index == len(blocks) - 1
            is_open = False
        else:
            delta = event["delta"]
            assert index == len(blocks) - 1
            if delta["type"] == "input_json_delta":
                arguments[index] = arguments.get(index, "") + delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                blocks[index][name] += delta[name]
    assert not is_open
    for index, written in arguments.items():
        blocks[index]["input"] = json.loads(written)
    names = [block.pop("id", None) is None or block["name"] for block in blocks]
    assert names == [True, True, "get_weather", "now"]
    for block in whole["content"]:
        block.pop("id", None)
    assert blocks == whole["content"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_choices(scripted: Running) -> None:
    none = post(scripted, tool_choice={"type": "none"}).json()
    assert none["content"][-1]["text"].endswith("</tool_call>")  # prose, as it stands
    one = post(scripted, tool_choice={"type": "auto", "disable_parallel_tool_use": True}).json()
    assert [block["type"] for block in one["content"]] == ["thinking", "text", "tool_use"]
    for choice, name in (
        ({"type": "tool"}, "tool_choice.name"),
        ({"type": "tool", "name": "other"}, "tool_choice.name"),
    ):
        refused = post(scripted, tool_choice=choice)
        assert refused.status_code == 400
        assert name in refused.json()["error"]["message"]
    cut = post(scripted, max_tokens=len(f"<think>\n{THOUGHT}\n</think>\n\nI look.\n".encode()) + 56)
    kinds = [block["type"] for block in cut.json()["content"]]
    assert (kinds, cut.json()["stop_reason"]) == (["thinking", "text", "text"], "max_tokens")


def test_tools_require_a_known_format(server: Running) -> None:
    refused = post(server)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("tools: the chat template")


@pytest.mark.parametrize("kind", ["enabled", "adaptive", "disabled"])
def test_thinking_is_a_variable_of_the_template(scripted: Running, kind: str) -> None:
    thinking = {"type": kind, "budget_tokens": 2048}
    assert post(scripted, thinking=thinking).status_code == 200
    body = COUNT_READER.decode(json.dumps({"messages": ASKED, "thinking": thinking}).encode())
    assert body.variables == {"enable_thinking": kind != "disabled"}


def opened(messages: list[Any], **fields: Any) -> Any:
    body = {"messages": messages, **fields}
    return COUNT_READER.decode(json.dumps(body).encode()).opened()


def test_the_messages_of_a_tool_loop_for_the_template() -> None:
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}
    messages = [
        {"role": "user", "content": "Go."},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}],
        },
        {"role": "assistant", "content": [call, {**call, "id": "b"}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "1"},
                {"type": "tool_result", "tool_use_id": "b", "is_error": True, "content": "no"},
                {"type": "text", "text": "And?"},
            ],
        },
        {"role": "assistant", "content": "Well"},
    ]
    function = {"name": "f", "arguments": {"x": 1}}
    assert opened(messages) == (
        [
            {"role": "user", "content": "Go."},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "Hm.",
                "thinking": "Hm.",
                "tool_calls": [
                    {"id": "a", "type": "function", "function": function},
                    {"id": "b", "type": "function", "function": function},
                ],
            },
            {"role": "tool", "tool_call_id": "a", "name": "f", "content": "1"},
            {"role": "tool", "tool_call_id": "b", "name": "f", "content": "Error: no"},
            {"role": "user", "content": "And?"},
        ],
        "Well",
    )


CALL = {"type": "tool_use", "id": "a", "name": "f", "input": {}}


@pytest.mark.parametrize(
    ("role", "block", "param"),
    [
        ("user", {"type": "tool_result", "tool_use_id": "x"}, "messages[0].content[0].tool_use_id"),
        ("user", CALL, "messages[0].content[0].type"),
        ("assistant", {"type": "tool_result", "tool_use_id": "a"}, "messages[0].content[0].type"),
        ("assistant", {**CALL, "input": "x"}, "messages[0].content[0].input"),
        ("assistant", {**CALL, "id": None}, "messages[0].content[0].id"),
        (
            "user",
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]},
            "messages[0].content[0].content[0].type",
        ),
    ],
)
def test_a_malformed_block_is_named(role: str, block: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        opened([{"role": role, "content": [block]}])
    assert caught.value.param is not None
    assert caught.value.param.startswith(param.rpartition(".")[0])
    assert param.rpartition(".")[2] in str(caught.value)


def test_malformed_tools_are_named(scripted: Running) -> None:
    tool = TOOLS[0]
    for tools, name in (
        ([{**tool, "name": ""}], "tools[0].name"),
        ([tool, tool], "tools[1].name"),
        ([{"name": f"f{i}"} for i in range(10_000)], "tools"),
    ):
        refused = post(scripted, tools=tools)
        assert refused.status_code == 400
        assert name in refused.json()["error"]["message"]
    deep = '{"a":' * 100_000 + "1" + "}" * 100_000
    data = json.dumps(body_of(tools=[{**tool, "input_schema": "DEEP"}])).replace('"DEEP"', deep)
    refused = httpx.post(scripted.url + "/v1/messages", content=data, timeout=20)
    assert refused.status_code == 400
    assert "nested too deeply" in refused.json()["error"]["message"]
