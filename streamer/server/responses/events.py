"""The events of one response: Deltas and Notices in, server events out, from any number on.

Does no I/O. A sequence number is a function of the response's tokens alone: each event of the
opening takes one number, each output token one, each event of the closing one; an event over
several tokens carries the number of the last. Final tokens that are on no event take none, so there
is no gap before the closing. So each number is a cursor, on each transport, at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import msgspec
from msgspec import UNSET, UnsetType

from streamer.core.plan import Finish, FinishReason, Notice, NoticeKind
from streamer.engine.refusals import SHUTDOWN, STEERED
from streamer.errors import StreamerError
from streamer.server.context import context_of
from streamer.server.openai.common import (
    ChatLogprob,
    TokenText,
    chat_logprobs,
    details_of,
    only_if,
    scores_of,
)
from streamer.server.responses.types import (
    DeltaEvent,
    Event,
    FunctionTool,
    InputDetails,
    Item,
    ItemEvent,
    ObjectFormat,
    OutputItem,
    OwnUsage,
    Part,
    PartEvent,
    Reasoning,
    Response,
    ResponseEvent,
    ResponseUsage,
    SchemaFormat,
    StateEvent,
    TextConfig,
    TextDone,
)

if TYPE_CHECKING:
    from streamer.core.sampling import SamplingParams
    from streamer.engine.stream import Delta, TokenStream
    from streamer.server.context import Context
    from streamer.server.responses.body import ResponseCreate

STATUSES = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.CANCELLED: "cancelled",
    FinishReason.FAILED: "failed",
}
LOGPROBS, TOKEN_IDS = "logprobs", "token_ids"
NO_LOGPROBS: list[ChatLogprob] = []
EVERYTHING = frozenset([LOGPROBS, TOKEN_IDS])


def item_id(response_id: str) -> str:
    """The id of a response's message."""
    return "msg_" + response_id.removeprefix("resp_")


def blank_response(
    context: Context, response_id: str, created: float, params: SamplingParams, status: str
) -> Response:
    """The object of a response without output so far."""
    body = context.body
    return Response(
        id=response_id,
        created_at=int(created),
        status=status,
        model=context.model,
        output=[],
        seed=params.seed or 0,
        temperature=params.temperature,
        top_p=params.top_p,
        max_output_tokens=body.max_output_tokens,
        instructions=body.instructions,
        metadata=body.metadata or {},
        top_logprobs=body.top_logprobs or 0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        tools=[
            FunctionTool(t.name, t.description, dict(t.parameters), t.is_strict)
            for t in body.tool_use().tools
        ],
        tool_choice=body.tool_choice or "auto",
        reasoning=Reasoning(body.effort),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        max_tool_calls=body.max_tool_calls,
        user=body.user,
        safety_identifier=body.safety_identifier,
        prompt_cache_key=body.prompt_cache_key,
        background=bool(body.background),
        previous_response_id=body.previous_response_id,
        store=body.store is not False,
        text=_text_of(body),
    )


def _text_of(body: ResponseCreate) -> TextConfig:
    given = None if body.text is None else body.text.format
    if given is not None and given.type == "json_object":
        return TextConfig(ObjectFormat())
    if given is not None and given.type == "json_schema":
        # `strict` as it holds: every schema is followed.
        name, schema = given.name or "", given.schema or {}
        return TextConfig(SchemaFormat(name, schema, description=given.description))
    return TextConfig()


class ResponseEvents:
    """Builds the events of one response in order, those after number `after`.

    number   the last sequence number given out, or passed over
    lane     echoed as stream_id by every event
    include  LOGPROBS, TOKEN_IDS: which of those that the body requests this reader gets
    """

    def __init__(
        self,
        stream: TokenStream,
        text: TokenText,
        *,
        after: int = -1,
        lane: str | None = None,
        is_extended: bool = False,
        include: frozenset[str] = EVERYTHING,
    ) -> None:
        context = self._context = context_of(stream)
        self._stream = stream
        self._text = text
        self._is_extended = is_extended
        self._after = self.number = after
        self._was_live = not stream.is_finished
        self._lane: str | UnsetType = UNSET if lane is None else lane
        self._has_ids = bool(context.body.return_token_ids) and TOKEN_IDS in include
        self._has_logprobs = LOGPROBS in include
        self._item_id = item_id(stream.request_id)
        self._is_silent = context.body.generate is False
        # Whether every token is on an event, of this reader or of another.
        self._shows_all = bool(context.body.return_token_ids) or stream.params.logprobs is not None
        opening = 2 if self._is_silent else 4
        self._num_opening = opening + bool(context.body.background) + bool(context.prefix)

    def tokens_at(self, number: int) -> int:
        """Output tokens of a reader that has every event up to this number."""
        return max(0, number - (self._num_opening - 1))

    # ------------------------------------------------------------ building

    def opening(self) -> list[Event]:
        """The events before the tokens: created, in_progress, output_item.added and so on."""
        out, lane = self._announced(), self._lane
        if not self._is_silent:
            item = Item(self._item_id, "in_progress", [])
            out.append(ItemEvent("response.output_item.added", len(out), item, 0, lane))
            out.append(
                PartEvent(
                    "response.content_part.added", len(out), self._item_id, Part(""), 0, 0, lane
                )
            )
        if self._context.prefix:
            out.append(
                DeltaEvent(len(out), self._item_id, self._context.prefix, stream_id=self._lane)
            )
        return self._beyond(out)

    def _announced(self) -> list[Event]:
        """response.created up to response.in_progress."""
        is_queued = bool(self._context.body.background)
        response = self._blank("queued" if is_queued else "in_progress")
        ids = only_if(self._has_ids, self._stream.prompt)
        lane = self._lane
        out: list[Event] = [ResponseEvent("response.created", 0, response, lane, ids)]
        if is_queued:
            out.append(ResponseEvent("response.queued", len(out), response, lane))
        response = self._blank("in_progress")
        out.append(ResponseEvent("response.in_progress", len(out), response, lane))
        return out

    def deltas(self, deltas: Sequence[Delta]) -> list[Event]:
        """The delta events, and the closing events after a delta that ends the response."""
        out: list[Event] = []
        for d in deltas:
            event = None if self._is_silent else self._delta(d)
            if event is not None:
                out.append(event)
            if d.finish is not None:
                out.extend(self._closing(d.finish))
        return self._beyond(out)

    def failed(self, error: StreamerError) -> list[Event]:
        """response.failed, for an error that no finish reported."""
        number = self._num_opening + self._num_tokens
        return self._beyond([self._terminal(number, self._final("failed", error.message))])

    def state(self, notice: Notice) -> Event:
        """The extension event of a Notice."""
        event = self._state("response." + notice.kind.value)
        if notice.kind is NoticeKind.WAITING:
            return msgspec.structs.replace(event, position=notice.position)
        if notice.kind in (NoticeKind.PREFILL, NoticeKind.RUNNING):
            return msgspec.structs.replace(event, done=notice.done, total=notice.total)
        if notice.kind is NoticeKind.PREEMPTED:
            return msgspec.structs.replace(event, how=notice.how)
        return event

    def response(self) -> Response:
        """The response object in its current state."""
        finish, error = self._stream.finishes[0], self._stream.error
        if finish is not None:
            return self._final(self._status(finish), finish.detail)
        if error is not None:
            return self._final("failed", error.message)
        is_queued = bool(self._context.body.background) and not self._stream.is_started
        response = self._blank("queued" if is_queued else "in_progress")
        text = self._context.prefix + self._stream.text(0)
        is_begun = bool(text) and not self._is_silent
        output = self._output("in_progress") if is_begun else []
        return msgspec.structs.replace(response, output=output)

    # ------------------------------------------------------------ parts

    def _beyond(self, events: Iterable[Event]) -> list[Event]:
        out = []
        for event in events:
            number = event.sequence_number
            if number is not UNSET and number > self._after:
                out.append(event)
                if number > self.number:
                    self.number = number
        return out

    def _delta(self, d: Delta) -> DeltaEvent | None:
        logprobs = d.logprobs if self._has_logprobs else None
        if not (d.text or (d.token_ids and (logprobs or self._has_ids))):
            return None
        number = self._num_opening - 1 + self._num_numbered(d.start + len(d.token_ids))
        if d.finish is not None:
            number += self._stream.has_rest()
        return DeltaEvent(
            number,
            self._item_id,
            d.text,
            logprobs=chat_logprobs(logprobs, self._text) if logprobs else NO_LOGPROBS,
            stream_id=self._lane,
            token_ids=d.token_ids if self._has_ids else UNSET,
        )

    def _closing(self, finish: Finish) -> list[Event]:
        status = self._status(finish)
        response = self._final(status, finish.detail)
        number = self._num_opening + self._num_tokens
        if self._is_silent or status == "failed":
            return [self._terminal(number, response)]
        (item,) = cast("list[Item]", response.output)  # of text alone; built once
        (part,) = item.content
        lane = self._lane
        return [
            TextDone(number, self._item_id, part.text, logprobs=part.logprobs, stream_id=lane),
            PartEvent(
                "response.content_part.done", number + 1, self._item_id, part, stream_id=lane
            ),
            ItemEvent("response.output_item.done", number + 2, item, stream_id=lane),
            self._terminal(number + 3, response),
        ]

    def _terminal(self, number: int, response: Response) -> Event:
        # A crash cuts off what was sent and not recorded; a response that is cancelled before that
        # is drawn again ends before what this reader has seen, and it has not seen that end.
        if self._was_live or (self._stream.is_restored and number < self._after):
            number = max(number, self._after + 1)
        kind = {"cancelled": "incomplete"}.get(response.status, response.status)
        s = self._stream
        own = OwnUsage(
            s.cached_tokens,
            s.shared_tokens,
            s.copied_tokens,
            s.proposed_tokens,
            s.accepted_tokens,
        )
        return ResponseEvent(
            f"response.{kind}",
            number,
            response,
            self._lane,
            usage=only_if(self._is_extended, own),
            timing=only_if(self._is_extended, self._stream.timing),
        )

    @property
    def _num_tokens(self) -> int:
        """Numbers between opening and closing, once the response has ended.

        Text that was held back until the end has a number of its own, after the last token's.
        """
        if self._is_silent:
            return 0
        return self._num_numbered(self._stream.num_output_tokens) + self._stream.has_rest()

    def _num_numbered(self, end: int) -> int:
        """Numbers of the first `end` tokens; one on no event, such as an end token, takes none."""
        return end if self._shows_all else self._stream.num_shown(end)

    def _status(self, finish: Finish) -> str:
        status = STATUSES[finish.reason]
        if self._is_silent and status == "incomplete":
            return "completed"
        is_cut_off = finish.detail in (SHUTDOWN, STEERED)
        return "incomplete" if is_cut_off and status == "cancelled" else status

    def _state(self, kind: str) -> StateEvent:
        number = self.number if self.number >= 0 else UNSET
        return StateEvent(kind, self._stream.request_id, number, self._lane)

    def _blank(self, status: str) -> Response:
        s = self._stream
        return blank_response(self._context, s.request_id, s.created, s.params, status)

    def _final(self, status: str, detail: str | None) -> Response:
        """The response object at the end."""
        stream = self._stream
        num_in = stream.num_prompt_tokens
        num_out = 0 if self._is_silent else stream.num_output_tokens
        ended = int(stream.created + (stream.timing.total_s or 0.0))
        reason = detail if detail in (SHUTDOWN, STEERED) else "max_output_tokens"
        has_item = not self._is_silent and (status != "failed" or num_out > 0)
        state = "completed" if status == "completed" else "incomplete"
        output = self._output(state) if has_item else []
        error = {"code": "server_error", "message": detail or "a step failed"}
        cumulative_logprob, score = scores_of(stream.finishes[0])
        return msgspec.structs.replace(
            self._blank(status),
            cumulative_logprob=cumulative_logprob,
            score=score,
            output=output,
            error=error if status == "failed" else None,
            incomplete_details={"reason": reason} if status == "incomplete" else None,
            completed_at=ended if status == "completed" else None,
            usage=ResponseUsage(
                num_in,
                InputDetails(stream.cached_tokens),
                num_out,
                details_of([stream]),
                num_in + num_out,
            ),
        )

    def _output(self, state: str) -> list[OutputItem]:
        """The items of the text so far."""
        return [Item(self._item_id, state, [self._part()])]

    def _part(self) -> Part:
        values = (self._stream.logprobs(0) or ()) if self._has_logprobs else ()
        text = self._context.prefix + self._stream.text(0)
        return Part(text, logprobs=chat_logprobs(values, self._text))
