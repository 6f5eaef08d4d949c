"""anthropic for Python: parse helper, the stream helper with a call, the tool runner, a count,
forced calls."""

from typing import Literal

import anthropic
from bundled import client as bundled
from configuration import client
from pydantic import BaseModel


class Reply(BaseModel):
    color: Literal["red", "blue"]
    is_sure: bool


@anthropic.beta_tool
def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return f"18 degrees in {city}"


color = {"max_tokens": 200, "messages": [{"role": "user", "content": "Which color?"}]}
parsed = bundled.messages.parse(model="streamer-demo", output_format=Reply, **color)
assert isinstance(parsed.parsed_output, Reply)
asked = {"model": "fake", "messages": [{"role": "user", "content": "How is the weather?"}]}
with client.messages.stream(
    **asked, max_tokens=999, tools=[get_weather.to_dict()], thinking={"type": "adaptive"}
) as stream:
    kinds = {event.type for event in stream}
    message = stream.get_final_message()
assert {"thinking", "input_json", "signature"} <= kinds, kinds
assert [block.type for block in message.content] == ["thinking", "tool_use"]
for is_streamed in (False, True):
    runner = client.beta.messages.tool_runner(
        **asked, max_tokens=999, tools=[get_weather], stream=is_streamed
    )
    assert runner.until_done().content[-1].text == "It is 18 degrees in Bern."
count = client.messages.count_tokens(**asked, tools=[get_weather.to_dict()])
assert count.input_tokens > 100
schema = {"type": "object", "properties": {"color": {"enum": ["red", "blue"]}}}
pick = {"name": "pick", "input_schema": {**schema, "required": ["color"]}}
for choice in ({"type": "any"}, {"type": "tool", "name": "pick"}):
    forced = bundled.messages.create(
        model="streamer-demo",
        tools=[pick],
        tool_choice={**choice, "disable_parallel_tool_use": True},
        **color,
    )
    (call,) = forced.content
    assert (call.type, forced.stop_reason) == ("tool_use", "tool_use")
    assert call.input["color"] in ("red", "blue")
print("\nparse helper, stream helper with thinking and a call, tool runner, a count, forced calls")
