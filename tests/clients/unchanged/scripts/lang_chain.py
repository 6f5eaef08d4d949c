"""LangChain: tools, streams, answers of a type and forced calls by three classes; its agent."""

from typing import Literal

import bundled
from configuration import model
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict


class Reply(BaseModel):
    """A color."""

    model_config = ConfigDict(extra="forbid")
    color: Literal["red", "blue"]
    is_sure: bool


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"18 degrees in {city}"


url = str(model.openai_api_base).removesuffix("/v1")
other = str(bundled.model.openai_api_base).removesuffix("/v1")
models = {
    "ChatOpenAI": (model, bundled.model),
    "ChatOpenAI with responses": (
        ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="fake", use_responses_api=True),
        ChatOpenAI(
            base_url=f"{other}/v1", api_key="none", model="streamer-demo", use_responses_api=True
        ),
    ),
    "ChatAnthropic": (
        ChatAnthropic(base_url=url, api_key="none", model_name="fake"),
        ChatAnthropic(base_url=other, api_key="none", model_name="streamer-demo"),
    ),
    "ChatOllama": (
        ChatOllama(base_url=url, model="fake", reasoning=True),
        ChatOllama(base_url=other, model="streamer-demo", temperature=0),
    ),
}
for name, (scripted, real) in models.items():
    with_tools = scripted.bind_tools([get_weather])
    (call,) = with_tools.invoke("How is the weather?").tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Bern"}), name
    pieces = list(with_tools.stream("How is the weather?"))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert whole.tool_calls[0]["args"] == {"city": "Bern"}, name
    agent = create_agent(scripted, [get_weather], system_prompt="Be brief.")
    state = agent.invoke({"messages": [("user", "How is the weather?")]})
    assert state["messages"][-1].text == "It is 18 degrees in Bern.", name
    typed = real.with_structured_output(Reply, method="json_schema")
    assert isinstance(typed.invoke("Which color?"), Reply), name
    if name != "ChatOllama":  # its API can't require a call
        called = real.with_structured_output(Reply, method="function_calling")
        assert isinstance(called.invoke("Which color?"), Reply), name
        forced = real.bind_tools([Reply], tool_choice="any").invoke("Which color?")
        assert {call["name"] for call in forced.tool_calls} == {"Reply"}, name
    print("ok", name)
print("tools, streams, an agent, answers of a type and forced calls by", ", ".join(models))
