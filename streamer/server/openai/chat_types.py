"""The types of chat completions on the wire: chunks of a stream, and the whole answer.

Values alone, in the order and with the names of OpenAI's types; chat.py builds them.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from streamer.server.openai.common import ChatLogprob, PromptLogprobs, Usage


class Logprobs(msgspec.Struct, frozen=True):
    """Log probabilities of a choice's tokens."""

    content: list[ChatLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct, frozen=True):
    """The function of a call; in chunks the name comes once, the arguments in pieces."""

    arguments: str
    name: str | UnsetType = UNSET


class ChunkToolCall(msgspec.Struct, frozen=True):
    """A call in a chunk: id, type and name come once, with the first piece."""

    index: int
    function: CalledFunction
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ToolCall(msgspec.Struct, frozen=True):
    """A whole call."""

    id: str
    function: CalledFunction
    type: str = "function"


class ChunkDelta(msgspec.Struct, frozen=True):
    """What a chunk adds to a choice; reasoning under vLLM's name of it, and under DeepSeek's."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ChunkToolCall] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    """One choice in a chunk; stop_reason (vLLM's) and a beam search's scores come with its end."""

    index: int
    delta: ChunkDelta
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET
    stop_reason: int | str | UnsetType | None = UNSET
    cumulative_logprob: float | UnsetType = UNSET
    score: float | UnsetType = UNSET


class Chunk(msgspec.Struct, frozen=True, tag_field="object", tag="chat.completion.chunk"):
    """chat.completion.chunk; seed and prompt_token_ids are in the first one only."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    seed: int | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class Message(msgspec.Struct, frozen=True):
    """The assistant's message; its content is null where there are calls alone."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class Choice(msgspec.Struct, frozen=True):
    """One of the `n` answers."""

    index: int
    message: Message
    finish_reason: str
    logprobs: Logprobs | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET
    stop_reason: int | str | None = None
    cumulative_logprob: float | UnsetType = UNSET
    score: float | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, tag_field="object", tag="chat.completion"):
    """A whole chat completion."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    seed: int
    system_fingerprint: str
    metadata: dict[str, str] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
