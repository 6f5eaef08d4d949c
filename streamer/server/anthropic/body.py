"""Bodies of Anthropic's Messages API: the conversation, its settings, and what is refused by name.

Pure: they become the same template messages and SamplingParams as a chat's; routes.py submits them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec

from streamer.core.sampling import SamplingParams
from streamer.errors import InvalidRequest
from streamer.server.errors import NO_THREADS
from streamer.server.openai.chat import MAX_MESSAGES, MAX_NAME
from streamer.server.openai.common import (
    Body,
    Effort,
    TextFormat,
    TextPart,
    effort_variables,
    encode,
    grammar_name,
    named,
    sampling_params,
)
from streamer.server.openai.fields import SAMPLING, Reader, Table, hint, refused, small
from streamer.server.parsing.tools import (
    GivenChoice,
    GivenTool,
    NamedChoice,
    ToolUse,
    call_for_template,
    definitions,
    tool_use,
)

# Claude Code begins the system prompt with this line. Its hashes are others in every request, so
# that no block of the prompt would be found in the prefix cache.
_ATTRIBUTION: Final = re.compile(r"\s*x-anthropic-billing-header:[^\n]*\n*")

FORMAT: Final = "output_config.format.schema"

FIELDS: Final[Table] = {
    **SAMPLING,
    # Labels, and wishes about Anthropic's machines and prices.
    "cache_control": hint(dict[str, Any]),
    "context_management": hint(dict[str, Any]),
    "diagnostics": hint(dict[str, Any]),
    "inference_geo": hint(str),
    "service_tier": hint(str),
    "speed": hint(str),
    "user_profile_id": hint(str),
    "container": refused(),
    "mcp_servers": refused([]),
}


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """Text."""

    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """What the model thought before an earlier answer."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    """Thinking of a model of Anthropic's, which only that can read: left out."""

    data: str = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """An earlier call of the assistant."""

    id: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
    input: dict[str, Any] = {}


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result"):
    """What a call brought.

    is_error  the text begins with "Error: "
    """

    tool_use_id: str
    content: str | list[TextPart] | None = None
    is_error: bool | None = None

    @property
    def text(self) -> str:
        """The whole content, as the model reads it."""
        text = self.content or ""
        if not isinstance(text, str):
            text = "\n".join(part.text for part in text)
        return f"Error: {text}" if self.is_error else text


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class InputMessage(msgspec.Struct):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    def plain(self, path: str, called: dict[str, str]) -> list[dict[str, Any]]:
        """The message as a chat template takes it: results of calls are messages of their own.

        called  id -> name of the calls before; those of this message are added
        """
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results, texts, thoughts, calls = [], [], [], []
        for i, block in enumerate(self.content):
            match block:
                case TextBlock():
                    texts.append(block.text)
                case ThinkingBlock():
                    thoughts.append(block.thinking)
                case ToolUseBlock():
                    self._require("assistant", f"{path}.content[{i}]")
                    called[block.id] = block.name
                    calls.append(
                        call_for_template(block.id, block.name, encode(block.input).decode())
                    )
                case ToolResultBlock():
                    where = f"{path}.content[{i}]"
                    self._require("user", where)
                    results.append(_result(block, called, where))
                case RedactedThinkingBlock():
                    pass
        message: dict[str, Any] = {"role": self.role, "content": "\n".join(texts)}
        if thoughts and self.role == "assistant":
            message["reasoning_content"] = message["thinking"] = "\n".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        return [*results, message] if texts or not results else results

    def _require(self, role: str, where: str) -> None:
        if self.role != role:
            raise InvalidRequest(
                f"{where}.type: only messages of the {role} have such blocks", param=f"{where}.type"
            )


def _result(block: ToolResultBlock, called: Mapping[str, str], where: str) -> dict[str, Any]:
    if block.tool_use_id not in called:
        raise InvalidRequest(
            f"{where}.tool_use_id: no call before it has this id", param=f"{where}.tool_use_id"
        )
    name = called[block.tool_use_id]
    return {"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": block.text}


def _joined(first: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """Two consecutive messages of one role as one."""
    texts: dict[str, Any] = {
        name: "\n".join(filter(None, (first.get(name), then.get(name))))
        for name in ("content", "reasoning_content", "thinking")
        if name in first or name in then
    }
    calls = [*first.get("tool_calls", ()), *then.get("tool_calls", ())]
    return {**first, **texts, **({"tool_calls": calls} if calls else {})}


class GivenToolOfMessages(msgspec.Struct):
    """A tool that the caller runs; those of Anthropic's own types are skipped."""

    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    type: str | None = None


class GivenToolChoice(msgspec.Struct):
    """Which tools may be called.

    disable_parallel_tool_use  one call at most
    """

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """Whether the model thinks before it answers, where its chat template leaves the choice.

    budget_tokens  the longest reasoning, where that of the model has a known form
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


CHOICES: Final[Mapping[str, GivenChoice]] = {"auto": "auto", "none": "none", "any": "required"}


class Metadata(msgspec.Struct):
    """A label of the caller's own user."""

    user_id: str | None = None


class OutputFormat(msgspec.Struct):
    """The schema that the answer's text follows."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    """How the answer should be written.

    effort  how much the model should think, where its chat template has a variable for that
    """

    effort: Effort | None = None
    format: OutputFormat | None = None


class Conversation(Body, kw_only=True):
    """What a message answers: the body of POST /v1/messages/count_tokens.

    thread    not supported: all messages are sent
    messages  of these, consecutive ones of one role are joined; where the last is the assistant's,
              the answer goes on from its end. A later one of the system is the user's for the chat
              template: many take the system's as the first alone, and refuse or drop others
    """

    messages: list[InputMessage]
    system: str | list[TextPart] | None = None
    metadata: Metadata | None = None
    output_config: OutputConfig | None = None
    tools: list[GivenToolOfMessages] | None = None
    tool_choice: GivenToolChoice | None = None
    thinking: Thinking | None = None
    thread: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)

    def params(self, defaults: dict[str, float]) -> SamplingParams:
        """The sampling settings, checked."""
        return self._params(defaults, max_tokens=None)

    @property
    def names(self) -> dict[str, str]:
        """The prompt is `messages` here."""
        return {**grammar_name(self.format), "prompt": "messages"}

    def opened(self) -> tuple[list[dict[str, Any]], str]:
        """The messages for the chat template, and the text with which the answer begins."""
        found: list[dict[str, Any]] = []
        if (system := self._system_text()) is not None:
            found.append({"role": "system", "content": system})
        called: dict[str, str] = {}
        for i, message in enumerate(self.messages):
            for plain in message.plain(f"messages[{i}]", called):
                if plain["role"] == "system" and found:
                    plain["role"] = "user"
                if found and found[-1]["role"] == plain["role"] != "tool":
                    found[-1] = _joined(found[-1], plain)
                else:
                    found.append(plain)
        last, prefill = found[-1], ""
        if len(found) > 1 and last["role"] == "assistant" and "tool_calls" not in last:
            prefill = found.pop()["content"]
        return found, prefill

    def tool_use(self) -> ToolUse:
        """The tools, and which may be called, checked."""
        found = definitions(
            [
                GivenTool(
                    f"tools[{i}]", t.name, t.description, t.input_schema, t.strict, "input_schema"
                )
                for i, t in enumerate(self.tools or ())
                if t.type in (None, "custom")
            ]
        )
        given = self.tool_choice
        if given is None:
            return tool_use(found, None)
        choice = CHOICES.get(given.type) or NamedChoice("function", name=given.name)
        return tool_use(found, choice, 1 if given.disable_parallel_tool_use else None)

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template: the effort, Qwen's and others' switch of reasoning."""
        effort = None if self.output_config is None else self.output_config.effort
        found = dict(effort_variables(effort) or {})
        if self.thinking is not None:
            found["enable_thinking"] = self.thinking.type != "disabled"
        return found

    @property
    def format(self) -> TextFormat | None:
        """See SamplingFields."""
        given = None if self.output_config is None else self.output_config.format
        return None if given is None else TextFormat({"json": given.schema}, FORMAT)

    def _system_text(self) -> str | None:
        """The system message without the attribution line; None: there is none."""
        if self.system is None:
            return None
        blocks = [self.system] if isinstance(self.system, str) else [b.text for b in self.system]
        return "\n".join(filter(None, map(_without_attribution, blocks))) or None

    def _params(self, defaults: dict[str, float], max_tokens: int | None) -> SamplingParams:
        if not 0 < len(self.messages) <= MAX_MESSAGES:
            raise InvalidRequest(
                f"messages has 1 to {MAX_MESSAGES} entries, got {len(self.messages)}",
                param="messages",
            )
        if small(self.thread):
            raise InvalidRequest(
                "thread is not supported by this server: send all messages",
                param="thread",
                code=NO_THREADS,
            )
        with named(self.names):
            return sampling_params(self, defaults, max_tokens=max_tokens, logprobs=None)

    def budget(self, params: SamplingParams) -> SamplingParams:
        """The settings with the budget of `thinking`, for a model that reasons."""
        given = None if self.thinking is None else self.thinking.budget_tokens
        if given is None or params.thinking_token_budget is not None:
            return params
        with named({"thinking_token_budget": "thinking.budget_tokens"}):
            return msgspec.structs.replace(params, thinking_token_budget=given)


def _without_attribution(text: str) -> str:
    match = _ATTRIBUTION.match(text)
    return text if match is None else text[match.end() :]


class MessagesRequest(Conversation, kw_only=True):
    """A conversation to answer.

    max_tokens      of the answer; where the context has room for fewer, so many
    stop_sequences  each ends the answer, and is not part of it
    """

    max_tokens: int
    stop: list[str] | None = msgspec.field(default=None, name="stop_sequences")

    def params(self, defaults: dict[str, float]) -> SamplingParams:
        """The sampling settings, checked."""
        return self._params(defaults, max_tokens=self.max_tokens)

    @property
    def names(self) -> dict[str, str]:
        """The prompt and the stop strings have other names here."""
        return {**super().names, "stop": "stop_sequences"}


READER: Final = Reader({MessagesRequest: FIELDS})
COUNT_READER: Final = Reader({Conversation: FIELDS})
