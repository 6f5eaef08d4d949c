"""ollama for Python: a tool loop, whole and streamed, a schema, what is served."""

from typing import Literal

import bundled
from configuration import Client, server
from pydantic import BaseModel, ConfigDict


class Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")
    color: Literal["red", "blue"]
    is_sure: bool


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"18 degrees in {city}"


with Client(server) as client, Client(bundled.server) as other:
    messages = [{"role": "user", "content": "How is the weather?"}]
    whole = client.chat("fake", messages, tools=[get_weather], think="high").message
    assert whole.thinking == "I look."
    parts = list(client.chat("fake", messages, tools=[get_weather], stream=True))
    (call,) = [call for part in parts for call in part.message.tool_calls or ()]
    assert call == whole.tool_calls[0]
    result = get_weather(**call.function.arguments)
    messages += [whole, {"role": "tool", "tool_name": "get_weather", "content": result}]
    last = client.chat("fake", messages, tools=[get_weather])
    assert last.message.content == "It is 18 degrees in Bern."
    color = [{"role": "user", "content": "Which color?"}]
    typed = other.chat("streamer-demo", color, format=Reply.model_json_schema())
    Reply.model_validate_json(typed.message.content)
    assert "tools" in client.show("fake").capabilities
    assert [model.model for model in client.list().models] == ["fake"]
print("\na tool loop, whole and streamed, an answer of a schema, what is served")
