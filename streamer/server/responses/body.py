"""Responses: the body of POST /v1/responses and of response.create, and its table of known fields.

Does no I/O: turns.py makes the prompt, events.py the answer.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from streamer.core.sampling import SamplingParams
from streamer.errors import InvalidRequest
from streamer.server.context import TurnItem
from streamer.server.openai.common import (
    MAX_METADATA_VALUE,
    MAX_SCHEMA_NAME,
    Body,
    Effort,
    Prediction,
    TextFormat,
    check_metadata,
    grammar_name,
    named,
    sampling_params,
)
from streamer.server.openai.fields import SAMPLING, Reader, Table, refused
from streamer.server.parsing.tools import (
    GivenChoice,
    GivenTool,
    ToolUse,
    definitions,
    tool_use,
)
from streamer.server.responses.sealed import unseal

MAX_ITEMS = 4096
MAX_STREAM_ID = 128
MAX_ID = 256
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
# What OpenAI's `include` accepts. Parts that this server never makes are accepted, to no effect.
Includable = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
ItemType = Literal[
    "message", "item_reference", "function_call", "function_call_output", "reasoning"
]
REQUIRED: Final = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}
ITEM_ROLES: Final = {
    "function_call": "call", "function_call_output": "tool", "reasoning": "reasoning"
}  # fmt: skip
Label = Annotated[str, Meta(max_length=MAX_METADATA_VALUE)]

FIELDS: Final[Table] = {
    **SAMPLING,
    "n": refused(1, instead="fork continues a response in several ways"),
    "best_of": refused(1),
    "truncate_prompt_tokens": refused(),
    "prompt_logprobs": refused(),
    "return_tokens_as_token_ids": refused(False),
    "access_programs": refused(),
    "background_options": refused(),
    "context_management": refused([]),
    "conversation": refused(),
    "image": refused(),
    "moderation": refused(),
    "prompt": refused(),
    "prompt_cache_options": refused(),
    "prompt_cache_retention": refused("in_memory"),
    "service_tier": refused("auto", "default"),
    "truncation": refused("disabled"),
}


class Format(msgspec.Struct):
    """OpenAI's `text.format`: a JSON schema is followed, `strict` or not."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Meta(max_length=MAX_SCHEMA_NAME)] | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextSettings(msgspec.Struct):
    """OpenAI's `text`."""

    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningSettings(msgspec.Struct):
    """OpenAI's `reasoning`.

    summary, generate_summary  without effect: the whole reasoning is part of the answer
    """

    effort: Effort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class InputText(msgspec.Struct, tag="input_text", tag_field="type"):
    """Text of a user, system or developer message."""

    text: str


class OutputText(msgspec.Struct, tag="output_text", tag_field="type"):
    """Text of an earlier answer."""

    text: str


class ReasoningText(msgspec.Struct, tag="reasoning_text", tag_field="type"):
    """Text of earlier reasoning."""

    text: str


class InputItem(msgspec.Struct):
    """An item of the input: a message, reasoning, a call, what it returned, or a reference.

    A reference names by `id` an earlier response's item, or one of its input.
    """

    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputText | OutputText | ReasoningText] | None = None
    type: ItemType | None = None
    id: Annotated[str, Meta(max_length=MAX_ID)] | None = None
    call_id: Annotated[str, Meta(max_length=MAX_ID)] | None = None
    name: Annotated[str, Meta(max_length=MAX_ID)] | None = None
    arguments: str | None = None
    output: str | list[InputText] | None = None
    encrypted_content: str | None = None

    def check(self, path: str) -> None:
        """InvalidRequest unless it has what its type requires."""
        names = REQUIRED.get(self.type or "message", ())
        for name in ("id",) if self.is_reference else names:
            if getattr(self, name) is None:
                raise InvalidRequest(
                    f"{path}.{name} is required", param=f"{path}.{name}", code="missing_field"
                )

    @property
    def is_reference(self) -> bool:
        """Whether this only names a message; OpenAI lets a reference leave out its type."""
        is_bare = self.type is None and self.role is None and self.id is not None
        return self.type == "item_reference" or is_bare

    @property
    def text(self) -> str:
        if self.type == "function_call":
            return self.arguments or ""
        given = self.output if self.type == "function_call_output" else self.content
        if isinstance(given, str):
            return given
        return "\n".join(part.text for part in given or ())

    def turn_item(self, item_id: str, tenant: str, path: str) -> TurnItem:
        """As an item of the conversation; InvalidRequest for `encrypted_content` not the tenant's.

        path  of the item, in errors
        """
        role, text = ITEM_ROLES.get(self.type or "message", self.role or "user"), self.text
        if self.type == "reasoning" and self.encrypted_content:
            text = unseal(self.encrypted_content, tenant, f"{path}.encrypted_content")
        return TurnItem(item_id, role, text, self.call_id or "", self.name or "")


class GivenToolOfResponse(msgspec.Struct):
    """A tool; those of other types than function are skipped."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CreateOptions(msgspec.Struct):
    """Options of a stream; obfuscation is not supported."""

    include_obfuscation: bool | None = None


class Fork(msgspec.Struct):
    """Continue the previous response's answer from the middle.

    at    the number of its tokens that are kept
    text  goes after them, before what is generated
    """

    at: int
    text: str | None = None


class ResponseCreate(Body, kw_only=True):
    """An input to respond to, and how: the fields that have an effect."""

    input: str | list[InputItem] | None = None
    text: TextSettings | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[Includable] | None = None
    metadata: dict[str, str] | None = None
    stream_id: str | None = None
    stream_options: CreateOptions | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    generate: bool | None = None
    fork: Fork | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    tools: list[GivenToolOfResponse] | None = None
    tool_choice: GivenChoice = None
    reasoning: ReasoningSettings | None = None
    prediction: Prediction | None = None

    @property
    def effort(self) -> Effort | None:
        """How much the model should think."""
        return None if self.reasoning is None else self.reasoning.effort

    def tool_use(self) -> ToolUse:
        """The tools, and which may be called, checked."""
        found = definitions(
            [
                GivenTool(f"tools[{i}]", t.name, t.description, t.parameters, t.strict)
                for i, t in enumerate(self.tools or ())
                if t.type == "function"
            ]
        )
        max_calls = 1 if self.parallel_tool_calls is False else self.max_tool_calls
        return tool_use(found, self.tool_choice, max_calls)

    def items(self) -> list[InputItem]:
        """The input as messages and references to messages, checked."""
        if self.input is None:
            if self.fork is not None:
                return []
            raise InvalidRequest("input is required", param="input", code="missing_field")
        if isinstance(self.input, str):
            return [InputItem("user", self.input)]
        if not 0 < len(self.input) <= MAX_ITEMS:
            raise InvalidRequest(
                f"input has 1 to {MAX_ITEMS} items, got {len(self.input)}", param="input"
            )
        for i, item in enumerate(self.input):
            item.check(f"input[{i}]")
        return self.input

    def params(self, defaults: dict[str, float]) -> SamplingParams:
        """The sampling settings, checked."""
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            raise _unsupported("stream_options.include_obfuscation")
        check_stream_id(self.stream_id)
        check_metadata(self.metadata)
        self._check_parent()
        self.tool_use()
        with named(self.names):
            return sampling_params(
                self,
                defaults,
                max_tokens=self.max_output_tokens,
                logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
            )

    def _check_parent(self) -> None:
        parent = self.previous_response_id
        if parent is not None and not 0 < len(parent) <= MAX_ID:
            raise InvalidRequest(
                f"previous_response_id has 1 to {MAX_ID} characters, got {len(parent)}",
                param="previous_response_id",
            )
        if self.fork is None:
            return
        if parent is None:
            raise InvalidRequest("fork requires previous_response_id", param="fork")
        if self.fork.at < 0:
            raise InvalidRequest(f"fork.at is 0 or more, got {self.fork.at}", param="fork.at")
        if self.generate is False:
            raise InvalidRequest("fork continues an answer: it requires generate", param="generate")

    @property
    def names(self) -> dict[str, str]:
        """Parameters of SamplingParams under their names in this body."""
        return {
            **grammar_name(self.format),
            "prompt": "input",
            "max_tokens": "max_output_tokens",
            "logprobs": "top_logprobs",
        }

    @property
    def format(self) -> TextFormat | None:
        """See SamplingFields."""
        given = None if self.text is None else self.text.format
        if given is None or given.type == "text":
            return None
        if given.type == "json_object":
            return TextFormat({"json_object": True}, "text.format")
        if given.schema is None:
            path = "text.format.schema"
            raise InvalidRequest(f"{path} is required", param=path, code="missing_field")
        return TextFormat({"json": given.schema}, "text.format.schema")

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer has log probabilities."""
        return LOGPROBS in (self.include or ()) or self.top_logprobs is not None

    @property
    def wants_encrypted(self) -> bool:
        """Whether its reasoning has `encrypted_content`."""
        return ENCRYPTED in (self.include or ())


READER: Final = Reader({ResponseCreate: FIELDS})


def check_stream_id(stream_id: str | None) -> None:
    """InvalidRequest for a lane's name that is empty or too long to echo."""
    if stream_id is not None and not 0 < len(stream_id) <= MAX_STREAM_ID:
        raise InvalidRequest(
            f"stream_id has 1 to {MAX_STREAM_ID} characters, got {len(stream_id)}",
            param="stream_id",
        )


def _unsupported(path: str) -> InvalidRequest:
    return InvalidRequest(
        f"{path} is not supported by this server", param=path, code="unsupported_parameter"
    )
