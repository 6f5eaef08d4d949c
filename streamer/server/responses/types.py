"""The wire's Structs of a response: the object, its items, and every server event about it.

Values alone: events.py builds them, the transports encode them as JSON or MessagePack.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from streamer.engine.stream import Timing
from streamer.server.openai.common import ChatLogprob, CompletionDetails
from streamer.server.parsing.tools import NamedChoice


class InputDetails(msgspec.Struct, frozen=True):
    """Input tokens: those found in the prefix cache, and those written to it."""

    cached_tokens: int
    cache_write_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: CompletionDetails
    total_tokens: int


class Part(msgspec.Struct, frozen=True, tag="output_text"):
    """Text of the answer."""

    text: str
    annotations: tuple[()] = ()
    logprobs: list[ChatLogprob] = []


class Item(msgspec.Struct, frozen=True, tag="message"):
    """The assistant's message."""

    id: str
    status: str
    content: list[Part]
    role: str = "assistant"


class ReasoningPart(msgspec.Struct, frozen=True, tag="reasoning_text"):
    """Text that the model thought."""

    text: str


class ReasoningItem(msgspec.Struct, frozen=True, tag="reasoning"):
    """What the model thought before it went on; it is never summarized.

    encrypted_content  the same, opaque, to be sent back; where it was asked for
    """

    id: str
    status: str
    content: list[ReasoningPart]
    summary: tuple[()] = ()
    encrypted_content: str | UnsetType = UNSET


class FunctionCall(msgspec.Struct, frozen=True, tag="function_call"):
    """A call of a tool; its arguments are the text of a JSON object."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: str


OutputItem = Item | ReasoningItem | FunctionCall


class FunctionTool(msgspec.Struct, frozen=True, tag="function"):
    """A tool that the response may call."""

    name: str
    description: str | None
    parameters: dict[str, Any]
    strict: bool = False


class Reasoning(msgspec.Struct, frozen=True):
    """Reasoning settings; there are no summaries."""

    effort: str | None = None
    summary: None = None


class TextFormat(msgspec.Struct, frozen=True, tag="text"):
    """Plain text."""


class ObjectFormat(msgspec.Struct, frozen=True, tag="json_object"):
    """Any JSON object."""


class SchemaFormat(msgspec.Struct, frozen=True, tag="json_schema"):
    """JSON of a schema."""

    name: str
    schema: dict[str, Any]
    strict: bool = True
    description: str | None = None


class TextConfig(msgspec.Struct, frozen=True):
    """The format of the text."""

    format: TextFormat | ObjectFormat | SchemaFormat = TextFormat()


class Response(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="response"):
    """A response.

    completed_at  unix seconds; null unless it is completed
    seed          of the random draws: the same seed gives the same answer
    cumulative_logprob, score  of a beam search's answer
    """

    id: str
    created_at: int
    status: str
    model: str
    output: list[OutputItem]
    seed: int
    temperature: float
    top_p: float
    max_output_tokens: int | None
    instructions: str | None
    metadata: dict[str, str]
    top_logprobs: int
    presence_penalty: float
    frequency_penalty: float
    parallel_tool_calls: bool
    max_tool_calls: int | None
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    completed_at: int | None = None
    usage: ResponseUsage | None = None
    background: bool = False
    previous_response_id: str | None = None
    reasoning: Reasoning = Reasoning()
    service_tier: str = "default"
    store: bool = True
    text: TextConfig = TextConfig()
    tool_choice: str | NamedChoice = "auto"
    tools: list[FunctionTool] = []
    truncation: str = "disabled"
    cumulative_logprob: float | UnsetType = UNSET
    score: float | UnsetType = UNSET


class OwnUsage(msgspec.Struct, frozen=True):
    """Ours, on terminal events: prompt tokens not computed again, and what speculation saved.

    copied_tokens  KV of a block shared with the fork's parent, copied before the fork wrote there
    proposed_tokens, accepted_tokens  by speculation, before they were drawn, and drawn as well
    """

    cached_tokens: int
    shared_tokens: int
    copied_tokens: int
    proposed_tokens: int
    accepted_tokens: int


class ResponseEvent(msgspec.Struct, frozen=True):
    """created, queued, in_progress and the terminal events."""

    type: str
    sequence_number: int
    response: Response
    stream_id: str | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    usage: OwnUsage | UnsetType = UNSET
    timing: Timing | UnsetType = UNSET


class ItemEvent(msgspec.Struct, frozen=True):
    """output_item.added and .done."""

    type: str
    sequence_number: int
    item: OutputItem
    output_index: int = 0
    stream_id: str | UnsetType = UNSET


class PartEvent(msgspec.Struct, frozen=True):
    """content_part.added and .done."""

    type: str
    sequence_number: int
    item_id: str
    part: Part | ReasoningPart
    output_index: int = 0
    content_index: int = 0
    stream_id: str | UnsetType = UNSET


class DeltaEvent(msgspec.Struct, frozen=True, gc=False, tag="response.output_text.delta"):
    """output_text.delta, the event that streams."""

    sequence_number: int
    item_id: str
    delta: str
    output_index: int = 0
    content_index: int = 0
    logprobs: list[ChatLogprob] = []
    stream_id: str | UnsetType = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET


class TextDone(msgspec.Struct, frozen=True, tag="response.output_text.done"):
    """output_text.done."""

    sequence_number: int
    item_id: str
    text: str
    output_index: int = 0
    content_index: int = 0
    logprobs: list[ChatLogprob] = []
    stream_id: str | UnsetType = UNSET


class ReasoningDelta(msgspec.Struct, frozen=True, tag="response.reasoning_text.delta"):
    """More reasoning."""

    sequence_number: int
    item_id: str
    delta: str
    output_index: int = 0
    content_index: int = 0
    stream_id: str | UnsetType = UNSET


class ReasoningDone(msgspec.Struct, frozen=True, tag="response.reasoning_text.done"):
    """The whole reasoning."""

    sequence_number: int
    item_id: str
    text: str
    output_index: int = 0
    content_index: int = 0
    stream_id: str | UnsetType = UNSET


class ArgumentsDelta(msgspec.Struct, frozen=True, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    sequence_number: int
    item_id: str
    delta: str
    output_index: int = 0
    stream_id: str | UnsetType = UNSET


class ArgumentsDone(msgspec.Struct, frozen=True, tag="response.function_call_arguments.done"):
    """A call's whole arguments."""

    sequence_number: int
    item_id: str
    arguments: str
    output_index: int = 0
    stream_id: str | UnsetType = UNSET


class StateEvent(msgspec.Struct, frozen=True):
    """Ours: the state while nothing streams; sequence_number repeats the last, if there is one."""

    type: str
    response_id: str
    sequence_number: int | UnsetType = UNSET
    stream_id: str | UnsetType = UNSET
    position: int | UnsetType = UNSET
    done: int | UnsetType = UNSET
    total: int | UnsetType = UNSET
    how: str | UnsetType = UNSET


Tagged = DeltaEvent | TextDone | ReasoningDelta | ReasoningDone | ArgumentsDelta | ArgumentsDone
Event = ResponseEvent | ItemEvent | PartEvent | Tagged | StateEvent


def type_of(event: Event) -> str:
    """The `type` of an event."""
    if isinstance(event, Tagged):
        return str(event.__struct_config__.tag)
    return event.type


# ---------------------------------------------------------------- answers of the routes by id


class Deleted(msgspec.Struct, frozen=True, tag_field="object", tag="response"):
    """A response that was deleted."""

    id: str
    deleted: bool = True


class InputTokens(msgspec.Struct, frozen=True, tag_field="object", tag="response.input_tokens"):
    """The number of tokens of a prompt."""

    input_tokens: int


class InputPart(msgspec.Struct, frozen=True):
    """A text of the input: input_text, or output_text of an earlier answer."""

    type: str
    text: str
    annotations: list[None] | UnsetType = UNSET


class InputItem(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    """A message of the input."""

    id: str
    role: str
    content: list[InputPart]
    status: str = "completed"


class CallOutput(msgspec.Struct, frozen=True, tag_field="type", tag="function_call_output"):
    """What a called tool returned."""

    id: str
    call_id: str
    output: str
    status: str = "completed"


class InputPage(msgspec.Struct, frozen=True, tag_field="object", tag="list"):
    """One page of the conversation that a response answers."""

    data: list[InputItem | ReasoningItem | FunctionCall | CallOutput]
    first_id: str | None
    last_id: str | None
    has_more: bool
