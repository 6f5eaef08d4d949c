"""POST /tokenize and /detokenize: bodies, their tables of known fields, and the answers.

vLLM's two routes. Pure: app.py decodes, has the engine's pool do the work, and sends what this
builds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from streamer.errors import InvalidRequest
from streamer.server.openai.chat import (
    ChatMessage,
    GivenToolOfChat,
    Variables,
    template_messages,
    tools_of,
)
from streamer.server.openai.common import TokenText, encode, show
from streamer.server.openai.fields import Reader, Table, refused
from streamer.server.parsing.tools import template_tools

TOKENIZE_FIELDS: Final[Table] = {
    "chat_template": refused(),
    "media_io_kwargs": refused(),
    "mm_processor_kwargs": refused(),
}
DETOKENIZE_FIELDS: Final[Table] = {}


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A prompt or messages whose token ids are requested.

    add_special_tokens      of a prompt; a chat template writes its own
    add_generation_prompt   of messages: whether the answer is begun
    continue_final_message  of messages: whether the last is the beginning of the answer
    chat_template_kwargs    of messages: variables of the chat template
    tools                   of messages: functions that the template presents
    return_token_strs       each token's text as well, as log probabilities write it
    """

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Variables | None = None
    tools: list[GivenToolOfChat] | None = None
    return_token_strs: bool | None = None

    def template_tools(self) -> list[dict[str, Any]] | None:
        """The tools for the chat template, checked."""
        return template_tools(tools_of(self.tools or ()))

    def template_messages(self) -> list[dict[str, Any]] | None:
        """The messages for the chat template; None where there is a prompt instead."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest(
                "exactly one of prompt and messages is required",
                param="prompt" if self.messages is None else "messages",
            )
        if self.messages is None:
            if self.tools:
                raise InvalidRequest("tools are for messages: a prompt has none", param="tools")
            return None
        if self.add_special_tokens:
            raise InvalidRequest(
                "add_special_tokens is for a prompt: a chat template writes its own",
                param="add_special_tokens",
            )
        return template_messages(self.messages)


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Token ids whose text is requested."""

    tokens: list[int]
    model: str | None = None


TOKENIZE: Final = Reader({TokenizeRequest: TOKENIZE_FIELDS})
DETOKENIZE: Final = Reader({DetokenizeRequest: DETOKENIZE_FIELDS})


class Tokenized(msgspec.Struct, frozen=True):
    """Token ids and their number.

    max_model_len  the longest context, in tokens
    """

    count: int
    max_model_len: int
    tokens: Sequence[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, frozen=True):
    """The text of the token ids."""

    prompt: str


def tokenized(tokens: Sequence[int], max_model_len: int, text: TokenText | None) -> bytes:
    """The body of POST /tokenize's answer; with `text` also each token's string."""
    strings = None if text is None else [show(text(t)) for t in tokens]
    return encode(Tokenized(len(tokens), max_model_len, tokens, strings))


def detokenized(text: str) -> bytes:
    """The body of POST /detokenize's answer."""
    return encode(Detokenized(text))
