"""openai for Python: parse helpers of chats and responses, streams with tools, tool loops,
calls that are required."""

from typing import Literal

import openai
from bundled import client as bundled
from configuration import client
from openai.types.responses import ResponseFunctionToolCall
from pydantic import BaseModel


class Reply(BaseModel):
    color: Literal["red", "blue"]
    is_sure: bool


class GetWeather(BaseModel):
    """The weather of a city."""

    city: str


def said(city: str) -> str:
    return f"18 degrees in {city}"


COLOR = [{"role": "user", "content": "Which color?"}]
WEATHER = [{"role": "user", "content": "How is the weather?"}]
JSON = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "get_weather", "description": "The weather of a city.", "parameters": JSON}

chat = bundled.chat.completions.parse(model="streamer-demo", messages=COLOR, response_format=Reply)
assert isinstance(chat.choices[0].message.parsed, Reply)
with bundled.chat.completions.stream(
    model="streamer-demo", messages=COLOR, response_format=Reply
) as stream:
    assert isinstance(stream.get_final_completion().choices[0].message.parsed, Reply)
response = bundled.responses.parse(model="streamer-demo", input="Which color?", text_format=Reply)
assert isinstance(response.output_parsed, Reply)
print("chats and responses follow a schema:", response.output_parsed)

tools = [{"type": "function", "function": TOOL}]
with client.chat.completions.stream(model="fake", messages=WEATHER, tools=tools) as stream:
    kinds = {event.type for event in stream}
    message = stream.get_final_completion().choices[0].message
assert {"chunk", "tool_calls.function.arguments.done"} <= kinds, kinds
(call,) = message.tool_calls
assert (call.function.name, message.reasoning_content) == ("get_weather", "I look.")
result = {"role": "tool", "tool_call_id": call.id, "content": said("Bern")}
again = client.chat.completions.create(
    model="fake", messages=[*WEATHER, message, result], tools=tools
)
assert again.choices[0].message.content == "It is 18 degrees in Bern."

functions = [{"type": "function", "strict": None, **TOOL}]
with client.responses.stream(model="fake", input=WEATHER, tools=functions) as stream:
    kinds = [event.type for event in stream]
    first = stream.get_final_response()
assert "response.function_call_arguments.delta" in kinds
assert "response.reasoning_text.delta" in kinds
(call,) = (item for item in first.output if isinstance(item, ResponseFunctionToolCall))
assert GetWeather.model_validate_json(call.arguments).city == "Bern"
result = {"type": "function_call_output", "call_id": call.call_id, "output": said("Bern")}
for given in (
    {"input": [*WEATHER, *first.output, result]},
    {"input": [result], "previous_response_id": first.id},
):
    last = client.responses.create(
        model="fake", tools=functions, reasoning={"effort": "low", "summary": "auto"}, **given
    )
    assert last.output_text == "It is 18 degrees in Bern."

pick = openai.pydantic_function_tool(Reply, name="pick")
named = {"type": "function", "function": {"name": "pick"}}
asked = {"model": "streamer-demo", "tools": [pick], "parallel_tool_calls": False}
for choice in ("required", named):
    forced = bundled.chat.completions.parse(messages=COLOR, tool_choice=choice, **asked)
    (call,) = forced.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Reply)
for choice in ("required", {"type": "function", "name": "pick"}):
    forced = bundled.responses.parse(input=COLOR, tool_choice=choice, **asked)
    (call,) = forced.output
    assert isinstance(call.parsed_arguments, Reply)
print("parse helpers, streams with reasoning and calls, tool loops and forced calls of both APIs")
