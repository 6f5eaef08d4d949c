"""Responses: the body of response.create, its table of known fields, and the events of a response.

Pure: the builder turns Deltas and Notices into events with their sequence numbers; websocket.py
sends them. A number is a function of the response's tokens alone: four structural events open,
every output token takes one, four close. An event over several tokens carries the last number.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from streamer.core.sampling import SamplingParams
from streamer.errors import InvalidRequest
from streamer.server.openai.common import SamplingFields, check_metadata, named, sampling_params
from streamer.server.openai.fields import HONOURED, LABELS, SAMPLING, Table, refused

MAX_ITEMS = 4096
MAX_STREAM_ID = 128
LOGPROBS = "message.output_text.logprobs"

FIELDS: Final[Table] = {
    **SAMPLING,
    **LABELS,
    "model": HONOURED,
    "input": HONOURED,
    "instructions": HONOURED,
    "max_output_tokens": HONOURED,
    "top_logprobs": HONOURED,
    "include": HONOURED,
    "metadata": HONOURED,
    "stream_id": HONOURED,
    "stream_options": HONOURED,
    "access_programs": refused(),
    "background": refused(False),
    "background_options": refused(),
    "context_management": refused([]),
    "conversation": refused(),
    "generate": refused(True),
    "image": refused(),
    "max_tool_calls": refused(),
    "moderation": refused(),
    "parallel_tool_calls": refused(True, False),
    "previous_response_id": refused(),
    "prompt": refused(),
    "prompt_cache_options": refused(),
    "prompt_cache_retention": refused("in_memory"),
    "reasoning": refused({}, {"effort": None}, {"effort": "none"}),
    "service_tier": refused("auto", "default"),
    "store": refused(False),
    "stream": refused(True),
    "text": refused(
        {},
        {"format": {"type": "text"}},
        {"verbosity": "medium"},
        {"format": {"type": "text"}, "verbosity": "medium"},
    ),
    "tool_choice": refused("none", "auto"),
    "tools": refused([]),
    "truncation": refused("disabled"),
}


class InputText(msgspec.Struct, tag="input_text", tag_field="type"):
    """Text of a user, system or developer message."""

    text: str


class OutputText(msgspec.Struct, tag="output_text", tag_field="type"):
    """Text of an earlier answer, sent back."""

    text: str


class InputItem(msgspec.Struct):
    """A message of the input."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText]
    type: Literal["message"] = "message"


class CreateOptions(msgspec.Struct):
    """`stream_options` of a response: its one known option only at its default."""

    include_obfuscation: bool | None = None


class ResponseCreate(SamplingFields, kw_only=True):
    """The body of response.create, the honoured fields."""

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    stream_id: str | None = None
    stream_options: CreateOptions | None = None

    def template_messages(self) -> list[dict[str, Any]]:
        """The input as messages for the chat template, instructions first."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
            return messages
        if not 0 < len(self.input) <= MAX_ITEMS:
            raise InvalidRequest(
                f"input has 1 to {MAX_ITEMS} items, got {len(self.input)}", param="input"
            )
        for item in self.input:
            content = item.content
            if not isinstance(content, str):
                content = "\n".join(part.text for part in content)
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": content})
        return messages

    def params(self, defaults: dict[str, float]) -> SamplingParams:
        """The sampling settings, checked."""
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            raise _unsupported("stream_options.include_obfuscation")
        if self.stream_id is not None and not 0 < len(self.stream_id) <= MAX_STREAM_ID:
            raise InvalidRequest(
                f"stream_id has 1 to {MAX_STREAM_ID} characters, got {len(self.stream_id)}",
                param="stream_id",
            )
        check_metadata(self.metadata)
        for i, name in enumerate(self.include or ()):
            if name != LOGPROBS:
                raise _unsupported(f"include[{i}]")
        with named(self.names):
            return sampling_params(
                self,
                defaults,
                max_tokens=self.max_output_tokens,
                logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
            )

    @property
    def names(self) -> dict[str, str]:
        """The prompt is the input here."""
        return {
            "prompt": "input",
            "max_tokens": "max_output_tokens",
            "logprobs": "top_logprobs",
        }

    @property
    def wants_logprobs(self) -> bool:
        """Whether the text comes with log probabilities."""
        return LOGPROBS in (self.include or ()) or self.top_logprobs is not None


DECODER: Final = msgspec.json.Decoder(ResponseCreate)


def _unsupported(path: str) -> InvalidRequest:
    return InvalidRequest(
        f"{path} is not supported by this server", param=path, code="unsupported_parameter"
    )
