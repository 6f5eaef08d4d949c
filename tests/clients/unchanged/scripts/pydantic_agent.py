"""pydantic-ai: an agent with a tool over three APIs, streamed; answers of a type."""

import asyncio
from typing import Literal

import bundled
from configuration import model, provider
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider


class Reply(BaseModel):
    color: Literal["red", "blue"]
    is_sure: bool


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"18 degrees in {city}"


async def main() -> None:
    url = provider.base_url.rstrip("/").removesuffix("/v1")
    other = AnthropicProvider(base_url=url, api_key="none")
    responses = OpenAIResponsesModel("fake", provider=provider)
    for each in (model, responses, AnthropicModel("fake", provider=other)):
        agent = Agent(each, tools=[get_weather], instructions="Be brief.")
        result = await agent.run("How is the weather?")
        assert result.output == "It is 18 degrees in Bern."
        async with agent.run_stream("How is the weather?") as streamed:
            assert await streamed.get_output() == result.output
    for output in (NativeOutput(Reply), Reply):  # by a schema, and by a call that is required
        typed = Agent(bundled.model, output_type=output)
        assert isinstance((await typed.run("Which color?")).output, Reply)


asyncio.run(main())
print("an agent with a tool, whole and streamed, over three APIs; types by schema and by call")
