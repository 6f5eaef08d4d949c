"""Chat completions: the body, its table of known fields, and the builder of its answers.

Pure: the builder turns Deltas into chunk frames or one whole body, for app.py and
transport/sse.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Protocol

import msgspec
from msgspec import UNSET

from streamer.core.plan import Finish
from streamer.core.sampling import SamplingParams
from streamer.errors import InvalidRequest, StreamerError
from streamer.server.errors import error_body
from streamer.server.openai.chat_types import (
    ChatCompletion,
    Choice,
    Chunk,
    ChunkChoice,
    ChunkDelta,
    Logprobs,
    Message,
)
from streamer.server.openai.common import (
    Effort,
    PromptFields,
    StreamOptions,
    TextPart,
    TokenText,
    Usage,
    by_choice,
    chat_logprobs,
    check_metadata,
    effort_variables,
    encode,
    failure,
    finish_reason,
    first_failure,
    named,
    only_if,
    sampling_params,
    scored_prompt,
    scores_of,
    stop_reason,
    token_id_text,
    usage_of,
    usage_so_far,
)
from streamer.server.openai.fields import (
    LABELS,
    SAMPLING,
    Reader,
    Table,
    refused,
    small,
)
from streamer.server.parsing.tools import (
    GivenChoice,
    GivenTool,
    ToolDefinition,
    ToolUse,
    call_for_template,
    definitions,
    tool_use,
)
from streamer.server.transport.frames import DONE, SSE, SSE_WITH_IDS, Framing, frame

if TYPE_CHECKING:
    from streamer.engine.stream import Delta, TokenStream

MAX_MESSAGES = 4096
MAX_CALLS = 1024  # of one message
MAX_NAME, MAX_VARIABLE = 512, 1 << 14  # characters: neither is counted as part of the prompt
NUMBER_HERE, TEXT_HERE = "(number)", "(text)"

FIELDS: Final[Table] = {
    **SAMPLING,
    **LABELS,
    "audio": refused(),
    "function_call": refused("none", "auto"),
    "functions": refused([]),
    "modalities": refused(["text"]),
    "moderation": refused(),
    "prompt_cache_options": refused(),
    "prompt_cache_retention": refused("in_memory"),
    "service_tier": refused("auto", "default"),
    "store": refused(False),
    "verbosity": refused("medium"),
    "web_search_options": refused(),
    # vLLM's
    "best_of": refused(1),
    "echo": refused(False),
    "add_special_tokens": refused(False),
    "documents": refused([]),
    "chat_template": refused(),
    "mm_processor_kwargs": refused(),
    "media_io_kwargs": refused(),
    "include_reasoning": refused(True, False),
}


class GivenFunction(msgspec.Struct):
    """The function of an earlier call."""

    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
    arguments: str = ""


class GivenCall(msgspec.Struct):
    """An earlier call of the assistant."""

    function: GivenFunction
    id: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] | None = None
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct):
    """A message. Media other than text is refused by name."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] | None = None
    tool_calls: Annotated[list[GivenCall], msgspec.Meta(max_length=MAX_CALLS)] | None = None
    tool_call_id: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    audio: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)

    def plain(self, path: str) -> dict[str, Any]:
        """The message as a chat template takes it."""
        for field in ("function_call", "audio"):
            if small(getattr(self, field)):
                raise InvalidRequest(
                    f"{path}.{field} is not supported by this server",
                    param=f"{path}.{field}",
                    code="unsupported_parameter",
                )
        is_assistant = self.role == "assistant"
        if self.content is None and not (is_assistant and self.tool_calls):
            raise InvalidRequest(
                f"{path}.content is required", param=f"{path}.content", code="missing_field"
            )
        if self.tool_calls and not is_assistant:
            raise InvalidRequest(
                f"{path}.tool_calls are the assistant's alone", param=f"{path}.tool_calls"
            )
        content = self.content or ""
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": content}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id and self.role == "tool":
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [
                call_for_template(c.id, c.function.name, c.function.arguments)
                for c in self.tool_calls
            ]
        thought = self.reasoning_content or self.reasoning
        if thought and is_assistant:
            message["reasoning_content"] = message["thinking"] = thought
        return message


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as a chat template takes them; InvalidRequest for what can't be done."""
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise InvalidRequest(
            f"messages has 1 to {MAX_MESSAGES} entries, got {len(messages)}", param="messages"
        )
    called: set[str | None] = set()
    for i, message in enumerate(messages):
        called |= {call.id for call in message.tool_calls or ()}
        if message.role == "tool" and message.tool_call_id not in called - {None}:
            raise InvalidRequest(
                f"messages[{i}] is a tool's, but no call before it has its tool_call_id",
                param=f"messages[{i}].tool_call_id",
            )
    return [m.plain(f"messages[{i}]") for i, m in enumerate(messages)]


# A variable of the template; no lists: a body may hold a million.
Variable = bool | int | float | Annotated[str, msgspec.Meta(max_length=MAX_VARIABLE)] | None
Variables = Annotated[dict[str, Variable], msgspec.Meta(max_length=32)]


class GivenToolFunction(msgspec.Struct):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class GivenToolOfChat(msgspec.Struct):
    """A tool; those of other types than function are skipped."""

    type: str
    function: GivenToolFunction | None = None


def tools_of(given: Sequence[GivenToolOfChat]) -> tuple[ToolDefinition, ...]:
    """The functions among the tools of a body, checked."""
    found = []
    for i, tool in enumerate(given):
        if tool.type != "function":
            continue
        path, function = f"tools[{i}].function", tool.function
        if function is None:
            raise InvalidRequest(f"{path} is required", param=path, code="missing_field")
        found.append(
            GivenTool(
                path, function.name, function.description, function.parameters, function.strict
            )
        )
    return definitions(found)


class Opening(Protocol):
    """The fields by which a body says how the template opens the answer."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None


def opened(body: Opening, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], bool, str]:
    """The messages before the answer, whether it is opened, and the text that it begins with."""
    if not body.continue_final_message:
        return messages, body.add_generation_prompt is not False, ""
    if body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message is not possible with add_generation_prompt: true",
            param="continue_final_message",
        )
    *before, last = messages
    if last["role"] != "assistant" or not before:
        raise InvalidRequest(
            "continue_final_message requires messages of which the last is the assistant's",
            param="continue_final_message",
        )
    return before, True, last["content"]


class ChatRequest(PromptFields, kw_only=True):
    """A conversation to continue, and how: the fields that have an effect."""

    messages: list[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream_options: StreamOptions | None = None
    metadata: dict[str, str] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Variables | None = None
    tools: list[GivenToolOfChat] | None = None
    tool_choice: GivenChoice = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None

    @property
    def variables(self) -> Mapping[str, Any] | None:
        """Variables of the chat template."""
        return effort_variables(self.reasoning_effort, self.chat_template_kwargs)

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages for the chat template."""
        return template_messages(self.messages)

    def tool_use(self) -> ToolUse:
        """The tools, and which may be called, checked."""
        max_calls = 1 if self.parallel_tool_calls is False else None
        return tool_use(tools_of(self.tools or ()), self.tool_choice, max_calls)

    def params(self, defaults: dict[str, float]) -> SamplingParams:
        """The sampling settings, checked."""
        if self.stream_options is not None:
            if not self.stream:
                raise InvalidRequest("stream_options requires stream: true", param="stream_options")
            self.stream_options.check()
        check_metadata(self.metadata)
        self.check_prompt_logprobs()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs requires logprobs: true", param="top_logprobs")
        given = self.max_completion_tokens
        with named(self.names):
            return sampling_params(
                self,
                defaults,
                max_tokens=self.max_tokens if given is None else given,
                logprobs=(self.top_logprobs or 0) if self.logprobs else None,
                prompt_logprobs=self.prompt_logprobs,
                n=1 if self.n is None else self.n,
            )

    @property
    def names(self) -> dict[str, str]:
        """The prompt is `messages` here, and the limit has two names."""
        names = {**super().names, "prompt": "messages", "logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names


READER: Final = Reader({ChatRequest: FIELDS})


# ---------------------------------------------------------------- answers


class ChatAnswer:
    """Frames and bodies of one chat completion, from after the numbers `after` on.

    A frame's number counts, per choice, the role chunk, every output token, text that only the end
    released, the finish and the usage chunk; with several choices the numbers are joined by dots.
    It is sent as the event's id where the body asks for ids, and on a resume (`after` is given).
    """

    def __init__(
        self,
        body: ChatRequest,
        streams: Sequence[TokenStream],
        model: str,
        text: TokenText,
        after: Sequence[int] | None = None,
        fingerprint: str = "",
    ) -> None:
        (self._stream,) = streams
        self._body = body
        self._model = model
        self._text = text
        self._names = token_id_text if body.return_tokens_as_token_ids else text
        self._fingerprint = fingerprint
        self._n = self._stream.params.n
        self._numbers = [0] * self._n if after is None else list(after)
        self._created = int(self._stream.created)
        options = body.stream_options
        self._include_usage = bool(options is not None and options.include_usage)
        self._counts_along = bool(options is not None and options.continuous_usage_stats)
        is_asked = bool(options is not None and options.include_event_ids)
        self._has_ids = is_asked or after is not None
        wants_more = body.logprobs or body.return_token_ids or self._counts_along
        self._is_plain = not wants_more
        self._around = [self._around_text(index) for index in range(self._n)]

    @property
    def request_id(self) -> str:
        """The id on the wire."""
        return self._stream.request_id

    @property
    def framing(self) -> Framing:
        """That of its events."""
        return SSE_WITH_IDS if self._has_ids else SSE

    @property
    def cursors(self) -> list[int]:
        """Tokens of each choice that the reader has."""
        return [max(0, number - 1) for number in self._numbers]

    @property
    def begins_at(self) -> list[int]:
        """The cursors from which deltas are needed."""
        return self.cursors

    def opening(self) -> bytes:
        """One role chunk a choice; the first brings seed and prompt token ids."""
        parts = []
        for index in range(self._n):
            if self._numbers[index] > 0:
                continue
            self._numbers[index] = 1
            choice = ChunkChoice(index, ChunkDelta(role="assistant", content=""))
            parts.append(self._frame([choice], is_first=index == 0, usage=self._so_far(index, 0)))
        return b"".join(parts)

    def deltas(self, source: int, deltas: Sequence[Delta]) -> bytes:
        """The chunks of the deltas of one step or several."""
        parts = []
        for d in deltas:
            number = 1 + d.start + len(d.token_ids)
            if d.finish is not None:
                number += self._stream.has_rest(d.choice)
            is_shown = d.text or (d.token_ids and (d.logprobs or self._body.return_token_ids))
            if is_shown and number > self._numbers[d.choice]:
                self._numbers[d.choice] = number
                parts.append(self._text_frame(d))
            if d.finish is not None and failure(d.finish) is None:
                number = self._end(d.choice, d.finish)
                if number > self._numbers[d.choice]:
                    self._numbers[d.choice] = number
                    reason = finish_reason(d.finish.reason)
                    why = stop_reason(d.finish, self._stream.params)
                    scores = scores_of(d.finish)
                    choice = ChunkChoice(d.choice, ChunkDelta(), None, reason, UNSET, why, *scores)
                    usage = self._so_far(d.choice, d.finish.num_tokens)
                    parts.append(self._frame([choice], usage=usage))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def failure(self, deltas: Sequence[Delta]) -> StreamerError | None:
        """The error that ends the answer, if a choice was cancelled or has failed."""
        return first_failure(deltas)

    def closing(self) -> bytes:
        """The usage chunk, if the body asks for it, and the end."""
        finishes = enumerate(self._stream.finishes)
        ends = [self._end(i, f) for i, f in finishes if f is not None]
        if not self._include_usage or self._numbers > ends:
            return DONE
        self._numbers = [n + 1 for n in ends]
        return self._frame([], usage=self._usage()) + DONE

    def error(self, error: StreamerError) -> bytes:
        """The last frame of a stream that failed after the 200."""
        return frame("", error_body(error))

    def whole(self, results: Sequence[Sequence[Delta]]) -> bytes:
        """The body of an answer that was not streamed."""
        choices: list[Choice] = []
        for index, mine in enumerate(by_choice(results[0], self._n)):
            finish = mine[-1].finish
            ids = tuple(t for d in mine for t in d.token_ids)
            values = [lp for d in mine for lp in d.logprobs or ()]
            message, reason = self._message(index, "".join(d.text for d in mine), finish)
            choices.append(
                Choice(
                    index,
                    message,
                    reason,
                    Logprobs(chat_logprobs(values, self._text, self._names))
                    if self._body.logprobs
                    else None,
                    only_if(bool(self._body.return_token_ids), ids),
                    stop_reason(finish, self._stream.params) if finish is not None else None,
                    *scores_of(finish),
                )
            )
        return encode(
            ChatCompletion(
                self.request_id,
                self._created,
                self._model,
                choices,
                self._usage(),
                self._stream.seed,
                self._fingerprint,
                metadata=only_if(self._body.metadata is not None, self._body.metadata),
                prompt_token_ids=only_if(bool(self._body.return_token_ids), self._stream.prompt),
                prompt_logprobs=self._prompt_logprobs(),
            )
        )

    def _message(self, choice: int, text: str, finish: Finish | None) -> tuple[Message, str]:
        """The message of a choice, and why it ended."""
        return Message(text), finish_reason(finish.reason) if finish is not None else "stop"

    def _prompt_logprobs(self) -> Any:
        if self._body.prompt_logprobs is None:
            return UNSET
        return scored_prompt(self._stream.prompt_logprobs, self._text)

    def _text_frame(self, d: Delta) -> bytes:
        if self._is_plain:
            head, before, after = self._around[d.choice]
            if not self._has_ids:
                return b"%b%b%b" % (before, encode(d.text), after)
            return b"".join((head, self._number().encode(), before, encode(d.text), after))
        choice = ChunkChoice(
            d.choice,
            ChunkDelta(content=d.text),
            Logprobs(chat_logprobs(d.logprobs, self._text, self._names)) if d.logprobs else None,
            None,
            only_if(bool(self._body.return_token_ids), d.token_ids),
        )
        return self._frame([choice], usage=self._so_far(d.choice, d.start + len(d.token_ids)))

    def _end(self, choice: int, finish: Finish) -> int:
        """The number of a choice's finish."""
        return 2 + finish.num_tokens + self._stream.has_rest(choice)

    def _so_far(self, choice: int, num_tokens: int) -> Usage | None:
        """For `continuous_usage_stats`: the tokens of the chunk's own choice, as vLLM counts."""
        if not self._counts_along:
            return None
        return usage_so_far(self._stream, num_tokens, self._num_reasoning(choice, num_tokens))

    def _num_reasoning(self, choice: int, num_tokens: int) -> int:
        """Tokens of reasoning among the first ones of a choice."""
        return 0

    def _usage(self) -> Usage:
        num_output = sum(f.num_tokens for f in self._stream.finishes if f is not None)
        return usage_of([self._stream], num_output)

    def _frame(
        self, choices: list[ChunkChoice], is_first: bool = False, usage: Usage | None = None
    ) -> bytes:
        return frame(self._number(), self._chunk(choices, is_first, usage))

    def _chunk(
        self, choices: list[ChunkChoice], is_first: bool = False, usage: Usage | None = None
    ) -> bytes:
        chunk = Chunk(
            self.request_id,
            self._created,
            self._model,
            choices,
            self._fingerprint,
            usage=only_if(self._include_usage or self._counts_along, usage),
            seed=only_if(is_first, self._stream.seed),
            prompt_token_ids=only_if(
                is_first and bool(self._body.return_token_ids), self._stream.prompt
            ),
        )
        return encode(chunk)

    def _number(self) -> str:
        if not self._has_ids:
            return ""
        return ".".join(map(str, self._numbers)) if self._n > 1 else str(self._numbers[0])

    def _around_text(self, index: int) -> tuple[bytes, bytes, bytes]:
        """The frame of a text around its number and the text, its only parts that change."""
        chunk = self._chunk([ChunkChoice(index, ChunkDelta(content=TEXT_HERE))])
        whole = frame(NUMBER_HERE if self._has_ids else "", chunk)
        before, _, after = whole.rpartition(encode(TEXT_HERE))
        if not self._has_ids:
            return b"", before, after
        head, _, before = before.partition(NUMBER_HERE.encode())
        return head, before, after
