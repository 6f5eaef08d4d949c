"""The types of Anthropic's Messages API on the wire: the message, and the events of its stream.

Values alone, in the order and with the names of Anthropic's types; answer.py builds them.
"""

from __future__ import annotations

from typing import Any

import msgspec


class TextContent(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Text of the answer."""

    text: str


class ThinkingContent(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """What the model thought before the answer.

    signature  a digest of it: clients send only signed thoughts back
    """

    thinking: str
    signature: str


class ToolUseContent(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


Content = TextContent | ThinkingContent | ToolUseContent


class OutputDetails(msgspec.Struct, frozen=True):
    """Tokens of the answer by kind, and ours of speculation: as in OpenAI's usage."""

    thinking_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class MessageUsage(msgspec.Struct, frozen=True):
    """Tokens of the prompt that were computed, those that were found computed, and the answer's.

    cache_creation_input_tokens  always 0: nothing is charged for being kept
    """

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    output_tokens_details: OutputDetails = OutputDetails()


class Message(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    """An answer: whole, or as its stream begins it."""

    id: str
    model: str
    content: list[Content]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    role: str = "assistant"


class MessageStart(msgspec.Struct, frozen=True, tag_field="type", tag="message_start"):
    """The message without content."""

    message: Message


class ContentBlockStart(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_start"):
    """An empty block, which the next events fill."""

    index: int
    content_block: Content


class TextDelta(msgspec.Struct, frozen=True, tag_field="type", tag="text_delta"):
    """More text."""

    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    """More of a thought."""

    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag_field="type", tag="signature_delta"):
    """The thought is whole."""

    signature: str


class InputJsonDelta(msgspec.Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    """More of a call's arguments: all together are JSON."""

    partial_json: str


class ContentBlockDelta(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    """More of a block."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStop(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    """A block is whole."""

    index: int


class Stopped(msgspec.Struct, frozen=True):
    """Why the answer ended."""

    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, tag_field="type", tag="message_delta"):
    """The end of the answer, and its tokens in all."""

    delta: Stopped
    usage: MessageUsage


class MessageStop(msgspec.Struct, frozen=True, tag_field="type", tag="message_stop"):
    """Nothing more comes."""


class TokenCount(msgspec.Struct, frozen=True):
    """Tokens of a conversation."""

    input_tokens: int


Event = (
    MessageStart
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
)
