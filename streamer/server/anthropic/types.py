"""The types of Anthropic's Messages API on the wire: the message, and the events of its stream.

Values alone, in the order and with the names of Anthropic's types; answer.py builds them.
"""

from __future__ import annotations

import msgspec


class TextContent(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Text of the answer."""

    text: str


class MessageUsage(msgspec.Struct, frozen=True):
    """Tokens of the prompt that were computed, those that were found computed, and the answer's.

    cache_creation_input_tokens  always 0: nothing is charged for being kept
    """

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class Message(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    """An answer: whole, or as its stream begins it."""

    id: str
    model: str
    content: list[TextContent]
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
    content_block: TextContent


class TextDelta(msgspec.Struct, frozen=True, tag_field="type", tag="text_delta"):
    """More text."""

    text: str


class ContentBlockDelta(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    """More of a block."""

    index: int
    delta: TextDelta


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
