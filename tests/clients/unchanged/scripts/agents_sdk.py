"""OpenAI's Agents SDK over both APIs: an agent with a tool; answers of a type; required calls."""

import asyncio
from typing import Literal

import bundled
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool
from configuration import client, model
from pydantic import BaseModel


class Reply(BaseModel):
    color: Literal["red", "blue"]
    is_sure: bool


@function_tool(strict_mode=False)
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"18 degrees in {city}"


@function_tool
def pick(color: Literal["red", "blue"]) -> str:
    """Picks a color."""
    return f"picked {color}"


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
        must = ModelSettings(tool_choice="required", parallel_tool_calls=False)
        forced = Agent(
            name="c",
            model=each,
            tools=[pick],
            model_settings=must,
            tool_use_behavior="stop_on_first_tool",
        )
        result = await Runner.run(forced, "Which color?")
        assert result.final_output in ("picked red", "picked blue")


asyncio.run(main())
print("an agent with a tool, whole and streamed, answers of a type, a required call, both APIs")
