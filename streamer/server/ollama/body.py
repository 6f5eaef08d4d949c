"""Bodies of Ollama's API: chats, generations, and the question what a model is.

Pure: they become the same template messages and SamplingParams as a chat's; routes.py submits them.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from streamer.core.sampling import SamplingParams
from streamer.errors import InvalidRequest
from streamer.server.openai.chat import (
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_NAME,
    GivenToolOfChat,
    tools_of,
)
from streamer.server.openai.common import (
    Body,
    Effort,
    TextFormat,
    effort_variables,
    encode,
    grammar_name,
    named,
    sampling_params,
)
from streamer.server.openai.fields import Reader, Table, hint, refused, small
from streamer.server.parsing.tools import ToolUse, call_for_template, tool_use

LATEST: Final = ":latest"  # the tag that Ollama adds to a name without one

FIELDS: Final[Table] = {
    "keep_alive": hint(str | int | float),  # the model is always loaded
}
GENERATE_FIELDS: Final[Table] = {
    **FIELDS,
    "context": refused([], instead="POST /api/chat continues a conversation"),
    "images": refused([]),
    "suffix": refused(""),
    "template": refused(""),
    "width": refused(0),
    "height": refused(0),
    "steps": refused(0),
}

# Options that would change the answer and are not supported, with what has no effect.
_REFUSED: Final[dict[str, tuple[Any, ...]]] = {
    "mirostat": (0,),
    "tfs_z": (1, 1.0),
    "typical_p": (1, 1.0),
}


class Options(msgspec.Struct, kw_only=True):
    """Settings of one answer.

    num_predict  tokens of the answer; below 1: as many as the context has room for
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    num_predict: int | None = None
    mirostat: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    tfs_z: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    typical_p: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)

    def check(self) -> None:
        """Refuse options that are known and not supported."""
        for name, harmless in _REFUSED.items():
            if small(getattr(self, name)) not in (None, *harmless):
                raise InvalidRequest(
                    f"options.{name} is not supported by this server",
                    param=f"options.{name}",
                    code="unsupported_parameter",
                )


# Ours -> Ollama's, of the options that become fields of every body.
_SAMPLING: Final = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "stop": "stop",
}


class OllamaBody(Body, kw_only=True):
    """What chats and generations share.

    stream  absent: yes
    think   whether the model thinks before it answers, or how much, where its chat template leaves
            the choice
    form    `format`: any JSON object, or a schema that the answer follows
    """

    options: Options | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    think: bool | Effort | None = None
    form: Literal["json", ""] | dict[str, Any] | None = msgspec.field(default=None, name="format")

    def __post_init__(self) -> None:
        """Ollama's defaults, and its options as the fields that they are in other bodies."""
        if self.stream is None:
            self.stream = True
        if self.model is not None:
            self.model = self.model.removesuffix(LATEST)
        for ours, name in _SAMPLING.items():
            value = None if self.options is None else getattr(self.options, name)
            if value is not None and (name, value) != ("seed", -1):  # -1: drawn, as if absent
                setattr(self, ours, value)

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template: Qwen's and others' switch of reasoning."""
        if self.think is None:
            return {}
        effort = None if isinstance(self.think, bool) else self.think
        return {"enable_thinking": bool(self.think), **(effort_variables(effort) or {})}

    @property
    def format(self) -> TextFormat | None:
        """See SamplingFields."""
        if isinstance(self.form, dict):
            return TextFormat({"json": self.form}, "format")
        return TextFormat({"json_object": True}, "format") if self.form else None

    def tool_use(self) -> ToolUse:
        """The tools, checked."""
        return ToolUse()

    @property
    def is_load(self) -> bool:
        """Whether it asks for no answer, only that the model is loaded."""
        raise NotImplementedError

    @property
    def names(self) -> dict[str, str]:
        """Fields that are options here."""
        found = {**grammar_name(self.format), "logprobs": "top_logprobs"}
        if self.options is not None:
            given = {ours: f"options.{name}" for ours, name in _SAMPLING.items()}
            found |= {o: n for o, n in given.items() if getattr(self, o) is not None}
        return found | {"max_tokens": "options.num_predict"}

    def params(self, defaults: dict[str, float]) -> SamplingParams:
        """The sampling settings, checked."""
        num_predict = None
        if self.options is not None:
            self.options.check()
            num_predict = self.options.num_predict
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs requires logprobs: true", param="top_logprobs")
        with named(self.names):
            return sampling_params(
                self,
                defaults,
                max_tokens=num_predict if num_predict is None or num_predict > 0 else None,
                logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            )


class CalledFunction(msgspec.Struct):
    """The function of a call, and what it was given."""

    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
    arguments: dict[str, Any] = {}


class OllamaCall(msgspec.Struct):
    """An earlier call of the assistant."""

    function: CalledFunction


class OllamaMessage(msgspec.Struct):
    """A message of a conversation.

    tool_name  of a tool's message: which one
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaCall], msgspec.Meta(max_length=MAX_CALLS)] | None = None
    tool_name: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] | None = None
    images: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)

    def plain(self, path: str) -> dict[str, Any]:
        """The message as a chat template takes it."""
        if small(self.images) not in (None, []):
            raise InvalidRequest(
                f"{path}.images is not supported by this server",
                param=f"{path}.images",
                code="unsupported_parameter",
            )
        message: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        is_assistant = self.role == "assistant"
        if self.tool_calls and not is_assistant:
            raise InvalidRequest(
                f"{path}.tool_calls are the assistant's alone", param=f"{path}.tool_calls"
            )
        if self.tool_calls:
            message["tool_calls"] = [
                call_for_template(None, c.function.name, encode(c.function.arguments).decode())
                for c in self.tool_calls
            ]
        if self.thinking and is_assistant:
            message["reasoning_content"] = message["thinking"] = self.thinking
        if self.role == "tool" and self.tool_name is not None:
            message["name"] = self.tool_name
        return message


class ChatRequest(OllamaBody, kw_only=True):
    """A conversation to answer; without messages it only asks that the model is loaded."""

    messages: list[OllamaMessage] | None = None
    tools: list[GivenToolOfChat] | None = None

    def tool_use(self) -> ToolUse:
        """The tools, checked."""
        return tool_use(tools_of(self.tools or ()), None)

    @property
    def is_load(self) -> bool:
        """Without messages."""
        return not self.messages

    @property
    def names(self) -> dict[str, str]:
        """The prompt is `messages` here."""
        return {**super().names, "prompt": "messages"}

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages for the chat template."""
        messages = self.messages or []
        if len(messages) > MAX_MESSAGES:
            raise InvalidRequest(
                f"messages has up to {MAX_MESSAGES} entries, got {len(messages)}", param="messages"
            )
        has_calls = False
        for i, message in enumerate(messages):
            has_calls = has_calls or bool(message.tool_calls)
            if message.role == "tool" and not has_calls:
                raise InvalidRequest(
                    f"messages[{i}] is a tool's, but there is no call before it",
                    param=f"messages[{i}].role",
                )
        return [m.plain(f"messages[{i}]") for i, m in enumerate(messages)]


class GenerateRequest(OllamaBody, kw_only=True):
    """A prompt to answer; without one it only asks that the model is loaded.

    raw  the prompt is continued as it is: without the chat template
    """

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None

    @property
    def is_load(self) -> bool:
        """Without a prompt."""
        return not self.prompt

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages for the chat template."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        return [*messages, {"role": "user", "content": self.prompt or ""}]


class ShowRequest(msgspec.Struct, kw_only=True):
    """The name of a model; `name` is the older field."""

    model: str | None = None
    name: str | None = None

    @property
    def asked(self) -> str | None:
        """The name without the tag; None: none was given."""
        given = self.model or self.name
        return None if given is None else given.removesuffix(LATEST)


CHAT_READER: Final = Reader({ChatRequest: FIELDS})
GENERATE_READER: Final = Reader({GenerateRequest: GENERATE_FIELDS})
SHOW_READER: Final = Reader({ShowRequest: {}})
