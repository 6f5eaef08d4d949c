"""Tools of a request, whichever body they came in, and how its answer is parsed.

Values and checks: the wire's bodies make ToolDefinitions; the service makes a Parsing of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final, Literal

import msgspec

from streamer.core.plan import Reasoning
from streamer.errors import InvalidRequest
from streamer.server.parsing.formats import Calls, ModelFormat
from streamer.server.parsing.parser import Parser
from streamer.server.parsing.schemas import Schema
from streamer.server.parsing.templated import TemplateParser

MAX_TOOLS: Final = 1024
MAX_TOOLS_BYTES: Final = 1 << 20
MAX_TOOL_NAME: Final = 256

encode = msgspec.json.Encoder().encode


class ToolDefinition(msgspec.Struct, frozen=True):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str
    description: str | None
    parameters: Schema

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it."""
        function: dict[str, Any] = {"name": self.name, "parameters": self.parameters}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


class GivenTool(msgspec.Struct, frozen=True):
    """A function as a body has it, and where: `path` names it in errors."""

    path: str
    name: str | None
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


def definitions(given: Sequence[GivenTool]) -> tuple[ToolDefinition, ...]:
    """The tools, checked: how many, how large, and that each can be honoured."""
    if len(given) > MAX_TOOLS:
        raise InvalidRequest(f"at most {MAX_TOOLS} tools, got {len(given)}", param="tools")
    size = sum(len(encode((tool.parameters, tool.description))) for tool in given)
    if size > MAX_TOOLS_BYTES:
        raise InvalidRequest(
            f"tools have {size} bytes, the limit is {MAX_TOOLS_BYTES}", param="tools"
        )
    found: dict[str, ToolDefinition] = {}
    for tool in given:
        if not tool.name or len(tool.name) > MAX_TOOL_NAME:
            raise InvalidRequest(
                f"{tool.path}.name has 1 to {MAX_TOOL_NAME} characters", param=f"{tool.path}.name"
            )
        if tool.name in found:
            raise InvalidRequest(
                f"{tool.path}.name: there are two tools of this name", param=f"{tool.path}.name"
            )
        if tool.strict:
            raise _unsupported(f"{tool.path}.strict", "arguments are not forced into a schema")
        schema = tool.parameters
        if schema is None:
            schema = {"type": "object", "properties": {}}
        found[tool.name] = ToolDefinition(tool.name, tool.description, schema)
    return tuple(found.values())


class NamedChoice(msgspec.Struct):
    """A choice of certain tools, by OpenAI's types of it: function, allowed_tools and others."""

    type: str


GivenChoice = Literal["auto", "none", "required"] | NamedChoice | None


def is_called(choice: GivenChoice) -> bool:
    """Whether tools may be called: of "auto" or "none"; InvalidRequest for what forces a call."""
    if choice is None or choice == "auto":
        return True
    if choice == "none":
        return False
    raise _unsupported("tool_choice", 'it is "auto" or "none"')


def _unsupported(path: str, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"{path} is not supported by this server: {why}",
        param=path,
        code="unsupported_parameter",
    )


def with_tools(
    variables: Mapping[str, Any] | None, tools: Sequence[ToolDefinition]
) -> Mapping[str, Any] | None:
    """A template's variables with the tools that it presents, as engine.encode_chat takes them."""
    if not tools:
        return variables
    if variables is not None and "tools" in variables:
        raise InvalidRequest("tools is the chat template's own", param="chat_template_kwargs.tools")
    return {**(variables or {}), "tools": template_tools(tools)}


def template_tools(tools: Sequence[ToolDefinition]) -> list[dict[str, Any]] | None:
    """The tools as chat templates take them; None where there are none."""
    return [tool.for_template() for tool in tools] or None


# ---------------------------------------------------------------- calls given back


def arguments_for_template(text: str) -> Any:
    """Arguments of an earlier call as templates expect them: a mapping, or the text as it is."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text


def call_for_template(call_id: str | None, name: str, arguments: str) -> dict[str, Any]:
    """An earlier call as chat templates take it."""
    function = {"name": name, "arguments": arguments_for_template(arguments)}
    return {"id": call_id or "", "type": "function", "function": function}


# ---------------------------------------------------------------- how an answer is parsed


AnyParser = Parser | TemplateParser


class Parsing(msgspec.Struct, frozen=True):
    """How the text of one request's answer is read.

    tools         the schema of each tool's parameters
    is_reasoning  the prompt has opened the reasoning
    max_calls     further ones are left out; None: any number
    shown         special tokens that are part of the format, by id
    reasoning     what may stand before the answer's own text, for the engine
    beginning     of the answer, in the prompt; for a format that is the checkpoint's template
    """

    format: ModelFormat
    tools: Mapping[str, Schema] = {}
    is_reasoning: bool = False
    max_calls: int | None = None
    shown: frozenset[int] = frozenset()
    reasoning: Reasoning | None = None
    beginning: str = ""

    def parser(self) -> AnyParser:
        """A parser for one choice."""
        template = self.format.template
        if template is not None:
            tools = self.tools or None
            return TemplateParser(
                template, tools, beginning=self.beginning, max_calls=self.max_calls
            )
        return Parser(
            self.format, self.tools, is_reasoning=self.is_reasoning, max_calls=self.max_calls
        )

    def call_id(self, request_id: str, choice: int, index: int) -> str:
        """The id of a call that the model gave none; the same for every reader of the answer."""
        calls = self.format.calls
        length = calls.id_length if isinstance(calls, Calls) else 24
        key = f"{request_id}:{choice}:{index}".encode()
        digest = blake2b(key, digest_size=12).hexdigest()
        return digest[:length] if length < 24 else f"call_{digest}"
