"""OpenAI's Agents SDK: an agent with a tool over both APIs, streamed; an answer of a type."""

import asyncio
from typing import Literal

import bundled
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool
from configuration import client, model
from pydantic import BaseModel


class Reply(BaseModel):
    color: Literal["red", "blue"]
    is_sure: bool


@function_tool(strict_mode=False)
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"18 degrees in {city}"


async def main() -> None:
    for each in (model, OpenAIChatCompletionsModel("fake", client)):
        agent = Agent(name="a", instructions="Be brief.", model=each, tools=[get_weather])
        result = await Runner.run(agent, "How is the weather?")
        assert result.final_output == "It is 18 degrees in Bern."
        streamed = Runner.run_streamed(agent, "How is the weather?")
        kinds = [event.type async for event in streamed.stream_events()]
        assert streamed.final_output == result.final_output
        assert "run_item_stream_event" in kinds
    chats = OpenAIChatCompletionsModel("streamer-demo", bundled.client)
    for each in (bundled.model, chats):
        typed = Agent(name="b", model=each, output_type=Reply)
        result = await Runner.run(typed, "Which color?")
        assert isinstance(result.final_output, Reply)


asyncio.run(main())
print("an agent with a tool, whole and streamed, and answers of a type, over both APIs")
