"""Bodies of Anthropic's Messages API: the conversation, its settings, and what is refused by name.

Pure: they become the same template messages and SamplingParams as a chat's; routes.py submits them.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal

import msgspec

from streamer.core.sampling import SamplingParams
from streamer.errors import InvalidRequest
from streamer.server.openai.chat import MAX_MESSAGES
from streamer.server.openai.common import Body, TextPart, named, sampling_params
from streamer.server.openai.fields import SAMPLING, Reader, Table, hint, refused, small

# Claude Code begins the system prompt with this line. Its hashes are others in every request, so
# that no block of the prompt would be found in the prefix cache.
_ATTRIBUTION: Final = re.compile(r"\s*x-anthropic-billing-header:[^\n]*\n*")

FIELDS: Final[Table] = {
    **SAMPLING,
    # Labels, and wishes about Anthropic's machines and prices.
    "cache_control": hint(dict[str, Any]),
    "context_management": hint(dict[str, Any]),
    "diagnostics": hint(dict[str, Any]),
    "inference_geo": hint(str),
    "service_tier": hint(str),
    "speed": hint(str),
    "user_profile_id": hint(str),
    "container": refused(),
    "mcp_servers": refused([]),
    "thinking": refused({"type": "disabled"}),
    "tool_choice": refused({"type": "none"}, {"type": "auto"}),
    "tools": refused([]),
}


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """Text."""

    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """What the model thought before an earlier answer."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    """Thinking of a model of Anthropic's, which only that can read: left out."""

    data: str = ""


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock


class InputMessage(msgspec.Struct):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    def plain(self) -> dict[str, Any]:
        """The message as a chat template takes it."""
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        texts = [b.text for b in self.content if isinstance(b, TextBlock)]
        message: dict[str, Any] = {"role": self.role, "content": "\n".join(texts)}
        thoughts = [b.thinking for b in self.content if isinstance(b, ThinkingBlock)]
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        return message


class Metadata(msgspec.Struct):
    """A label of the caller's own user."""

    user_id: str | None = None


class OutputConfig(msgspec.Struct):
    """How the answer should be written.

    effort  without effect
    format  not supported
    """

    effort: str | None = None
    format: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class Conversation(Body, kw_only=True):
    """What a message answers: the body of POST /v1/messages/count_tokens.

    messages  of these, consecutive ones of one role are joined; where the last is the assistant's,
              the answer goes on from its end
    """

    messages: list[InputMessage]
    system: str | list[TextPart] | None = None
    metadata: Metadata | None = None
    output_config: OutputConfig | None = None

    def params(self, defaults: dict[str, float]) -> SamplingParams:
        """The sampling settings, checked."""
        return self._params(defaults, max_tokens=None)

    @property
    def names(self) -> dict[str, str]:
        """The prompt is `messages` here."""
        return {"prompt": "messages"}

    def opened(self) -> tuple[list[dict[str, Any]], str]:
        """The messages for the chat template, and the text with which the answer begins."""
        found: list[dict[str, Any]] = []
        if (system := self._system_text()) is not None:
            found.append({"role": "system", "content": system})
        for message in self.messages:
            plain = message.plain()
            if found and found[-1]["role"] == plain["role"]:
                plain["content"] = f"{found[-1]['content']}\n{plain['content']}"
                found[-1] |= plain
            else:
                found.append(plain)
        prefill = ""
        if len(found) > 1 and found[-1]["role"] == "assistant":
            prefill = found.pop()["content"]
        return found, prefill

    def _system_text(self) -> str | None:
        """The system message without the attribution line; None: there is none."""
        if self.system is None:
            return None
        blocks = [self.system] if isinstance(self.system, str) else [b.text for b in self.system]
        return "\n".join(filter(None, map(_without_attribution, blocks))) or None

    def _params(self, defaults: dict[str, float], max_tokens: int | None) -> SamplingParams:
        if not 0 < len(self.messages) <= MAX_MESSAGES:
            raise InvalidRequest(
                f"messages has 1 to {MAX_MESSAGES} entries, got {len(self.messages)}",
                param="messages",
            )
        if self.output_config is not None and small(self.output_config.format):
            raise InvalidRequest(
                "output_config.format is not supported by this server",
                param="output_config.format",
                code="unsupported_parameter",
            )
        with named(self.names):
            return sampling_params(self, defaults, max_tokens=max_tokens, logprobs=None)


def _without_attribution(text: str) -> str:
    match = _ATTRIBUTION.match(text)
    return text if match is None else text[match.end() :]


class MessagesRequest(Conversation, kw_only=True):
    """A conversation to answer.

    max_tokens      of the answer; where the context has room for fewer, so many
    stop_sequences  each ends the answer, and is not part of it
    """

    max_tokens: int
    stop: list[str] | None = msgspec.field(default=None, name="stop_sequences")

    def params(self, defaults: dict[str, float]) -> SamplingParams:
        """The sampling settings, checked."""
        return self._params(defaults, max_tokens=self.max_tokens)

    @property
    def names(self) -> dict[str, str]:
        """The prompt and the stop strings have other names here."""
        return {**super().names, "stop": "stop_sequences"}


READER: Final = Reader({MessagesRequest: FIELDS})
COUNT_READER: Final = Reader({Conversation: FIELDS})
