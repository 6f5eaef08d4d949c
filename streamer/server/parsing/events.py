"""What a parser finds in a model's text: prose, reasoning, and tool calls as they are written.

Values alone: parser.py makes them, the builders of answers read them.
"""

from __future__ import annotations

import msgspec


class Text(msgspec.Struct, frozen=True):
    """Text of the answer."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Text that the model thinks before it answers."""

    text: str


class ToolCallBegin(msgspec.Struct, frozen=True):
    """A call begins; its name is whole.

    id  as the model wrote it; None where the format has none
    """

    index: int
    id: str | None
    name: str


class ToolArguments(msgspec.Struct, frozen=True):
    """More of a call's arguments: all pieces together are a JSON object, if the call is whole."""

    index: int
    text: str


class ToolCallEnd(msgspec.Struct, frozen=True):
    """Nothing more comes of this call."""

    index: int


Event = Text | Reasoning | ToolCallBegin | ToolArguments | ToolCallEnd
