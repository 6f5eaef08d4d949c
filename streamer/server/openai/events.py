"""The events of one response, as server events of the Responses API and our extensions.

Pure: Deltas and Notices in, encoded events out, each with its sequence number. `is_extended` adds
what only clients of our subprotocol see. websocket.py sends them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType

from streamer.core.plan import Finish, FinishReason, Notice, NoticeKind, TokenLogprob
from streamer.errors import StreamerError
from streamer.server.openai.common import (
    ChatLogprob,
    TokenText,
    chat_logprobs,
    encode,
    only_if,
)
from streamer.server.openai.responses import ResponseCreate

if TYPE_CHECKING:
    from streamer.engine.stream import Delta, TokenStream

OPENING = 4  # created, in_progress, output_item.added, content_part.added


class InputDetails(msgspec.Struct, frozen=True):
    """Input tokens by where they came from."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, frozen=True):
    """Output tokens by kind."""

    reasoning_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Part(msgspec.Struct, frozen=True, tag="output_text"):
    """An output_text part."""

    text: str
    annotations: tuple[()] = ()
    logprobs: list[ChatLogprob] = []


class Item(msgspec.Struct, frozen=True, tag="message"):
    """The one output item: the assistant's message."""

    id: str
    status: str
    content: list[Part]
    role: str = "assistant"


class Reasoning(msgspec.Struct, frozen=True):
    """No reasoning settings are honoured."""

    effort: None = None
    summary: None = None


class TextFormat(msgspec.Struct, frozen=True, tag="text"):
    """Plain text."""


class TextConfig(msgspec.Struct, frozen=True):
    """What the text is."""

    format: TextFormat = TextFormat()


class Response(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="response"):
    """OpenAI's response object; `seed` is ours."""

    id: str
    created_at: float
    status: str
    model: str
    output: list[Item]
    seed: int
    temperature: float
    top_p: float
    max_output_tokens: int | None
    instructions: str | None
    metadata: dict[str, str]
    top_logprobs: int
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    completed_at: float | None = None
    usage: Usage | None = None
    user: str | None = None
    background: bool = False
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: Reasoning = Reasoning()
    service_tier: str = "default"
    store: bool = False
    text: TextConfig = TextConfig()
    tool_choice: str = "auto"
    tools: list[str] = []
    truncation: str = "disabled"


class CacheUsage(msgspec.Struct, frozen=True):
    """Ours, on terminal events: prompt tokens not computed again."""

    cached_tokens: int
    shared_tokens: int


class ResponseEvent(msgspec.Struct, frozen=True):
    """created, in_progress and the terminal events."""

    type: str
    sequence_number: int
    response: Response
    stream_id: str | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    usage: CacheUsage | UnsetType = UNSET
    timing: Any = UNSET


class ItemEvent(msgspec.Struct, frozen=True):
    """output_item.added and .done."""

    type: str
    sequence_number: int
    item: Item
    output_index: int = 0
    stream_id: str | UnsetType = UNSET


class PartEvent(msgspec.Struct, frozen=True):
    """content_part.added and .done."""

    type: str
    sequence_number: int
    item_id: str
    part: Part
    output_index: int = 0
    content_index: int = 0
    stream_id: str | UnsetType = UNSET


class DeltaEvent(msgspec.Struct, frozen=True, tag="response.output_text.delta"):
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


class StateEvent(msgspec.Struct, frozen=True):
    """Ours: what happens while nothing streams. It repeats the last number."""

    type: str
    sequence_number: int
    response_id: str
    stream_id: str | UnsetType = UNSET
    position: int | UnsetType = UNSET
    done: int | UnsetType = UNSET
    total: int | UnsetType = UNSET
    how: str | UnsetType = UNSET


class ResponseEvents:
    """Builds the events of one response in order; `number` is the last one given out."""

    def __init__(
        self,
        body: ResponseCreate,
        stream: TokenStream,
        model: str,
        text: TokenText,
        *,
        is_extended: bool,
    ) -> None:
        self._body = body
        self._stream = stream
        self._model = model
        self._text = text
        self._is_extended = is_extended
        self._lane: str | UnsetType = UNSET if body.stream_id is None else body.stream_id
        self._item_id = "msg_" + stream.request_id.removeprefix("resp_")
        self._logprobs: list[TokenLogprob] = []
        self._num_tokens = 0
        self.number = -1

    def opening(self) -> list[bytes]:
        """created, in_progress, output_item.added, content_part.added."""
        response = self._response("in_progress", [])
        ids = only_if(bool(self._body.return_token_ids), self._stream.prompt)
        item = Item(self._item_id, "in_progress", [])
        self.number = OPENING - 1
        return [
            encode(ResponseEvent("response.created", 0, response, self._lane, ids)),
            encode(ResponseEvent("response.in_progress", 1, response, self._lane)),
            encode(ItemEvent("response.output_item.added", 2, item, 0, self._lane)),
            encode(
                PartEvent(
                    "response.content_part.added", 3, self._item_id, Part(""), 0, 0, self._lane
                )
            ),
        ]

    def deltas(self, deltas: Sequence[Delta]) -> list[bytes]:
        """The delta events, and after the last one what closes the response."""
        out = []
        for d in deltas:
            self._num_tokens = d.start + len(d.token_ids)
            if d.logprobs:
                self._logprobs.extend(d.logprobs)
            wants = d.token_ids and (d.logprobs or self._body.return_token_ids)
            if d.text or wants:
                self.number = OPENING - 1 + self._num_tokens
                event = DeltaEvent(
                    self.number,
                    self._item_id,
                    d.text,
                    logprobs=chat_logprobs(d.logprobs, self._text) if d.logprobs else [],
                    stream_id=self._lane,
                    token_ids=only_if(bool(self._body.return_token_ids), d.token_ids),
                )
                out.append(encode(event))
            if d.finish is not None:
                out.extend(self._finish(d.finish))
        return out

    def failed(self, error: StreamerError) -> list[bytes]:
        """response.failed, for an error that no finish reported."""
        return self._terminal("failed", error)

    def state(self, notice: Notice) -> bytes:
        """The extension event of a Notice."""
        event = StateEvent(
            "response." + notice.kind.value, self.number, self._stream.request_id, self._lane
        )
        if notice.kind in (NoticeKind.PREFILL, NoticeKind.RUNNING):
            event = msgspec.structs.replace(event, done=notice.done, total=notice.total)
        elif notice.kind is NoticeKind.PREEMPTED:
            event = msgspec.structs.replace(event, how=notice.how)
        return encode(event)

    def waiting(self, position: int) -> bytes:
        """response.waiting: so many requests are before this one."""
        return encode(
            StateEvent(
                "response.waiting",
                self.number,
                self._stream.request_id,
                self._lane,
                position=position,
            )
        )

    def _finish(self, finish: Finish) -> list[bytes]:
        self._num_tokens = finish.num_tokens
        if finish.reason is FinishReason.FAILED:
            return self._terminal("failed", StreamerError(finish.detail or "a step failed"))
        status = {
            FinishReason.STOP: "completed",
            FinishReason.LENGTH: "incomplete",
            FinishReason.CANCELLED: "cancelled",
        }[finish.reason]
        number = OPENING + self._num_tokens
        self.number = number + 2
        part = self._part()  # with the log probabilities of every token: once
        item = self._item(status, part)
        return [
            encode(
                TextDone(
                    number,
                    self._item_id,
                    part.text,
                    logprobs=part.logprobs,
                    stream_id=self._lane,
                )
            ),
            encode(
                PartEvent(
                    "response.content_part.done",
                    number + 1,
                    self._item_id,
                    part,
                    stream_id=self._lane,
                )
            ),
            encode(ItemEvent("response.output_item.done", number + 2, item, stream_id=self._lane)),
            *self._terminal(status, None, item),
        ]

    def _terminal(
        self, status: str, error: StreamerError | None, item: Item | None = None
    ) -> list[bytes]:
        kind = {"cancelled": "incomplete"}.get(status, status)
        if item is None and self._num_tokens > 0:
            item = self._item(status, self._part())
        response = self._response(status, [] if item is None else [item])
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        failure = None
        if error is not None:
            failure = {"code": "server_error", "message": error.message}
        response = msgspec.structs.replace(
            response,
            error=failure,
            incomplete_details=details,
            completed_at=time.time(),
            usage=self._usage(),
        )
        self.number = OPENING + self._num_tokens + (3 if error is None else 0)
        cache = CacheUsage(self._stream.cached_tokens, self._stream.shared_tokens)
        event = ResponseEvent(
            f"response.{kind}",
            self.number,
            response,
            self._lane,
            usage=only_if(self._is_extended, cache),
            timing=only_if(self._is_extended, self._stream.timing),
        )
        return [encode(event)]

    def _part(self) -> Part:
        return Part(self._stream.text(0), logprobs=chat_logprobs(self._logprobs, self._text))

    def _item(self, status: str, part: Part) -> Item:
        state = "completed" if status == "completed" else "incomplete"
        return Item(self._item_id, state, [part])

    def _usage(self) -> Usage:
        num_in, num_out = self._stream.num_prompt_tokens, self._num_tokens
        return Usage(
            num_in,
            InputDetails(self._stream.cached_tokens),
            num_out,
            OutputDetails(),
            num_in + num_out,
        )

    def _response(self, status: str, output: list[Item]) -> Response:
        body, params = self._body, self._stream.params
        return Response(
            id=self._stream.request_id,
            created_at=float(int(self._stream.created)),
            status=status,
            model=self._model,
            output=output,
            seed=self._stream.seed,
            temperature=params.temperature,
            top_p=params.top_p,
            max_output_tokens=body.max_output_tokens,
            instructions=body.instructions,
            metadata=body.metadata or {},
            top_logprobs=body.top_logprobs or 0,
        )
