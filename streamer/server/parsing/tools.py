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
from streamer.server.parsing.call_fields import NAME
from streamer.server.parsing.formats import Calls, ModelFormat
from streamer.server.parsing.parser import Parser
from streamer.server.parsing.schemas import Schema
from streamer.server.parsing.templated import TemplateParser

MAX_TOOLS: Final = 1024
MAX_TOOLS_BYTES: Final = 1 << 20
MAX_TOOL_NAME: Final = 256

encode = msgspec.json.Encoder().encode


class ToolDefinition(msgspec.Struct, frozen=True):
    """A function that the model may call; `parameters` is a JSON schema.

    is_strict  its arguments must follow the schema
    path       of the schema in the body
    """

    name: str
    description: str | None
    parameters: Schema
    is_strict: bool = False
    path: str = "tools"

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it."""
        function: dict[str, Any] = {"name": self.name, "parameters": self.parameters}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


class GivenTool(msgspec.Struct, frozen=True):
    """A function as a body has it, and where: `path` names it in errors, `field` its schema."""

    path: str
    name: str | None
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None
    field: str = "parameters"


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
        if not NAME.fullmatch(tool.name):
            raise InvalidRequest(
                f"{tool.path}.name has letters, digits, and _ . : / - alone",
                param=f"{tool.path}.name",
            )
        schema = tool.parameters
        if schema is None:
            schema = {"type": "object", "properties": {}}
        path = f"{tool.path}.{tool.field}"
        found[tool.name] = ToolDefinition(
            tool.name, tool.description, schema, bool(tool.strict), path
        )
    return tuple(found.values())


class ChosenFunction(msgspec.Struct):
    """The function of a choice."""

    name: str


class ChosenTool(msgspec.Struct, omit_defaults=True):
    """A tool among those that are allowed, as chats or as Responses write it."""

    type: str
    function: ChosenFunction | None = None
    name: str | None = None


class AllowedTools(msgspec.Struct):
    """The tools that may be called, of all that are presented."""

    mode: Literal["auto", "required"]
    tools: list[ChosenTool]


class NamedChoice(msgspec.Struct, omit_defaults=True):
    """A choice of certain tools, by OpenAI's types of it: function and allowed_tools.

    A chat has the rest under `function` or `allowed_tools`, a response beside `type`.
    """

    type: str
    function: ChosenFunction | None = None
    allowed_tools: AllowedTools | None = None
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[ChosenTool] | None = None


GivenChoice = Literal["auto", "none", "required"] | NamedChoice | None


class ToolUse(msgspec.Struct, frozen=True):
    """The tools of a request.

    tools        presented to the model
    callable     those of them that it may call
    is_required  it must call one
    max_calls    further calls are left out; None: any number
    """

    tools: tuple[ToolDefinition, ...] = ()
    callable: tuple[ToolDefinition, ...] = ()
    is_required: bool = False
    max_calls: int | None = None

    @property
    def is_free(self) -> bool:
        """Whether calls may be any, or none at all."""
        return not (self.is_required or self._strict or len(self.callable) < len(self.tools))

    @property
    def param(self) -> str:
        """The field by which calls are forced."""
        return "tool_choice" if self.is_required or not self._strict else self._strict[0].path

    @property
    def _strict(self) -> list[ToolDefinition]:
        return [tool for tool in self.callable if tool.is_strict]


def tool_use(
    tools: tuple[ToolDefinition, ...], choice: GivenChoice, max_calls: int | None = None
) -> ToolUse:
    """The tools of a body under its choice; InvalidRequest for a choice that they can't serve."""
    if choice == "none":
        return ToolUse()
    if choice is None or choice == "auto":
        return ToolUse(tools, tools, max_calls=max_calls)
    if not tools:
        raise InvalidRequest("tool_choice requires tools that are functions", param="tool_choice")
    if isinstance(choice, str):
        return ToolUse(tools, tools, is_required=True, max_calls=max_calls)
    if choice.type == "function":
        name, path = _named(choice, "tool_choice")
        return ToolUse(tools, _of_names(tools, {name: path}), is_required=True, max_calls=1)
    if choice.type != "allowed_tools":
        raise InvalidRequest(
            f"tool_choice.type is function or allowed_tools, got {choice.type!r:.80}",
            param="tool_choice.type",
            code="unsupported_parameter",
        )
    path, mode, given = "tool_choice", choice.mode, choice.tools
    if choice.allowed_tools is not None:
        path += ".allowed_tools"
        mode, given = choice.allowed_tools.mode, choice.allowed_tools.tools
    if mode is None:
        raise InvalidRequest(f"{path}.mode is required", param=f"{path}.mode", code="missing_field")
    names = dict(
        _named(each, f"{path}.tools[{i}]")
        for i, each in enumerate(given or ())
        if each.type == "function"
    )
    if not names:
        raise InvalidRequest(f"{path}.tools has no function", param=f"{path}.tools")
    return ToolUse(tools, _of_names(tools, names), mode == "required", max_calls)


def _named(chosen: NamedChoice | ChosenTool, path: str) -> tuple[str, str]:
    """The name of a chosen function, and where it is."""
    if chosen.function is not None:
        return chosen.function.name, f"{path}.function.name"
    if chosen.name is None:
        raise InvalidRequest(f"{path}.name is required", param=f"{path}.name", code="missing_field")
    return chosen.name, f"{path}.name"


def _of_names(
    tools: Sequence[ToolDefinition], paths: Mapping[str, str]
) -> tuple[ToolDefinition, ...]:
    known = {tool.name for tool in tools}
    for name, path in paths.items():
        if name not in known:
            raise InvalidRequest(f"{path}: there is no tool {name!r:.80}", param=path)
    return tuple(tool for tool in tools if tool.name in paths)


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
    is_forced     a grammar makes the calls: there are none in the reasoning
    """

    format: ModelFormat
    tools: Mapping[str, Schema] = {}
    is_reasoning: bool = False
    max_calls: int | None = None
    shown: frozenset[int] = frozenset()
    reasoning: Reasoning | None = None
    beginning: str = ""
    is_forced: bool = False

    def parser(self) -> AnyParser:
        """A parser for one choice."""
        template = self.format.template
        if template is not None:
            tools = self.tools or None
            return TemplateParser(
                template, tools, beginning=self.beginning, max_calls=self.max_calls
            )
        return Parser(
            self.format,
            self.tools,
            is_reasoning=self.is_reasoning,
            max_calls=self.max_calls,
            is_forced=self.is_forced,
        )

    def call_id(self, request_id: str, choice: int, index: int) -> str:
        """The id of a call that the model gave none; the same for every reader of the answer."""
        calls = self.format.calls
        length = calls.id_length if isinstance(calls, Calls) else 24
        key = f"{request_id}:{choice}:{index}".encode()
        digest = blake2b(key, digest_size=12).hexdigest()
        return digest[:length] if length < 24 else f"call_{digest}"
