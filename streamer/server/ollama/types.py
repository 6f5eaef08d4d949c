"""The types of Ollama's API on the wire: lines and bodies of answers, and what describes a model.

Values alone, with the names of Ollama's types; answer.py and models.py build them.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from streamer.server.openai.common import ChatLogprob


class CalledFunction(msgspec.Struct, frozen=True):
    """The function of a call, and what it is given."""

    name: str
    arguments: dict[str, Any]


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool, always whole."""

    function: CalledFunction


class Message(msgspec.Struct, frozen=True):
    """The assistant's message, or what a line adds to it."""

    content: str
    role: str = "assistant"
    thinking: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How an answer ended: tokens, and nanoseconds."""

    done_reason: str
    total_duration: int
    prompt_eval_count: int
    prompt_eval_duration: int
    eval_count: int
    eval_duration: int
    load_duration: int = 0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A line of an answer, or the whole; the last line and the whole have the fields of Ending."""

    model: str
    created_at: str
    done: bool
    logprobs: list[ChatLogprob] | UnsetType = UNSET
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class ChatAnswer(Answer, frozen=True, kw_only=True):
    """Of POST /api/chat."""

    message: Message


class GenerateAnswer(Answer, frozen=True, kw_only=True):
    """Of POST /api/generate."""

    response: str
    thinking: str | UnsetType = UNSET


class Version(msgspec.Struct, frozen=True):
    """The version of Ollama whose API this is."""

    version: str


class Details(msgspec.Struct, frozen=True):
    """What kind of model it is."""

    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    format: str
    parent_model: str = ""


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A served model.

    size  bytes of its weights, in its files
    """

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details


class Models(msgspec.Struct, frozen=True):
    """The names of the served model."""

    models: list[Model]


class Loaded(Model, frozen=True, kw_only=True):
    """A model that is in memory: always, so that it never expires.

    size       bytes of its weights in memory
    size_vram  of those, on a GPU
    """

    expires_at: str
    size_vram: int
    context_length: int


class LoadedModels(msgspec.Struct, frozen=True):
    """The models in memory."""

    models: list[Loaded]


class Shown(msgspec.Struct, frozen=True):
    """What a model is, and what it can do."""

    details: Details
    model_info: dict[str, str | int]
    capabilities: list[str]
    modified_at: str
    modelfile: str = ""
    parameters: str = ""
    template: str = ""
    license: str = ""
