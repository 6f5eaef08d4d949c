"""LlamaIndex: chats, streams, an agent with a tool, answers of a type, also by a call."""

import asyncio
from typing import Literal

import bundled
from configuration import model
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from pydantic import BaseModel, ConfigDict


class Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")
    color: Literal["red", "blue"]
    is_sure: bool


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"18 degrees in {city}"


question = [ChatMessage(role="user", content="What is a block table?")]
whole = bundled.model.chat(question, temperature=0).message.content
streamed = "".join(piece.delta for piece in bundled.model.stream_chat(question, temperature=0))
assert whole == streamed


async def main() -> None:
    agent = FunctionAgent(tools=[get_weather], llm=model, system_prompt="Be brief.")
    answer = await agent.run("How is the weather?")
    assert str(answer) == "It is 18 degrees in Bern.", answer


asyncio.run(main())
for is_by_schema in (True, False):  # else by a call that is required
    bundled.model.should_use_structured_outputs = is_by_schema
    reply = bundled.model.as_structured_llm(Reply).chat(
        [ChatMessage(role="user", content="Which color?")]
    )
    assert isinstance(reply.raw, Reply)
print("chats, a stream, an agent with a tool, answers of a type by a schema and by a call")
