"""litellm: a tool loop, whole and streamed, an answer of a type, forced calls, responses."""

import json
from typing import Literal

import bundled
import litellm
from configuration import server
from pydantic import BaseModel, ConfigDict


class Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")
    color: Literal["red", "blue"]
    is_sure: bool


JSON = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "get_weather", "description": "The weather of a city.", "parameters": JSON}
tools = [{"type": "function", "function": TOOL}]
messages = [{"role": "user", "content": "How is the weather?"}]

first = litellm.completion(**server, messages=messages, tools=tools).choices[0].message
chunks = list(litellm.completion(**server, messages=messages, tools=tools, stream=True))
built = litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message
for message in (first, built):
    (call,) = message.tool_calls
    assert (call.function.name, message.reasoning_content) == ("get_weather", "I look.")
messages += [
    first.model_dump(),
    {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "18 degrees in Bern"},
]
last = litellm.completion(**server, messages=messages, tools=tools)
assert last.choices[0].message.content == "It is 18 degrees in Bern."
color = [{"role": "user", "content": "Which color?"}]
typed = litellm.completion(**bundled.server, messages=color, response_format=Reply)
Reply.model_validate_json(typed.choices[0].message.content)
colors = {"type": "object", "properties": {"color": {"enum": ["red", "blue"]}}}
pick = {"name": "pick", "parameters": {**colors, "required": ["color"]}}
for choice in ("required", {"type": "function", "function": {"name": "pick"}}):
    forced = litellm.completion(
        **bundled.server,
        messages=color,
        tools=[{"type": "function", "function": pick}],
        tool_choice=choice,
        parallel_tool_calls=False,
    )
    (call,) = forced.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["color"] in ("red", "blue")
response = litellm.responses(
    **server, input="How is the weather?", tools=[{"type": "function", **TOOL}]
)
assert [item.type for item in response.output] == ["reasoning", "function_call"]
print("a tool loop, whole and streamed, an answer of a type, forced calls, responses")
