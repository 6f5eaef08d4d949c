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


class ChunkDelta(msgspec.Struct, frozen=True):
    """What a chunk adds to a choice."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


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
    """The assistant's message."""

    content: str
    role: str = "assistant"
    refusal: None = None


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
