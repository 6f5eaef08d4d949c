"""The HTTP routes of responses: create, and everything by id; and the resume of chat streams.

A response is found by its id in the engine, live or retained; respond.py checks whose it is. A
cursor is `starting_after` or Last-Event-ID; where a browser sends both, Last-Event-ID is newer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from streamer.core.plan import FinishReason
from streamer.errors import InvalidRequest, NotFound, StreamerError
from streamer.server.answering import chat_answer
from streamer.server.context import TurnItem, context_of
from streamer.server.errors import api_error, id_headers
from streamer.server.openai.common import encode, new_id
from streamer.server.prepared import Form
from streamer.server.responses.body import READER, Includable
from streamer.server.responses.events import ResponseEvents
from streamer.server.responses.parsed import response_events
from streamer.server.responses.respond import find, find_chat, respond, turn_of
from streamer.server.responses.types import (
    CallOutput,
    Deleted,
    Event,
    FunctionCall,
    InputItem,
    InputPage,
    InputPart,
    InputTokens,
    ReasoningItem,
    ReasoningPart,
    type_of,
)
from streamer.server.transport.frames import SSE_WITH_IDS, Framing, frame, whole_entries
from streamer.server.transport.sse import EventStream, read_whole

if TYPE_CHECKING:
    from streamer.engine.stream import Delta, TokenStream
    from streamer.server.service import Service

RESPONSE = Form("responses", READER)
CANCEL_S = 10.0  # a cancel takes a step; a hung step must not hang the route
MAX_DIGITS = 16
MAX_PAGE, DEFAULT_PAGE = 100, 20


class ResponseAnswer:
    """The Answer (transport/sse.py) of a response."""

    def __init__(self, events: ResponseEvents, stream: TokenStream) -> None:
        self._events = events
        self._stream = stream

    @property
    def request_id(self) -> str:
        return self._stream.request_id

    @property
    def framing(self) -> Framing:
        """With ids: OpenAI's clients parse a response's events as the SSE standard says."""
        return SSE_WITH_IDS

    def opening(self) -> bytes:
        """The events before the first token."""
        return _frames(self._events.opening())

    def deltas(self, source: int, deltas: Sequence[Delta]) -> bytes:
        """The events of a step's deltas, and the closing events after the last."""
        return _frames(self._events.deltas(deltas))

    def failure(self, deltas: Sequence[Delta]) -> StreamerError | None:
        """Always None: a failed response ends with an event."""
        return None

    def closing(self) -> bytes:
        """Empty: the terminal event is the end."""
        return b""

    def error(self, error: StreamerError) -> bytes:
        """response.failed where the response has failed; else an `error` event of this stream."""
        if self._stream.error is not None:
            return _frames(self._events.failed(error))
        body = msgspec.structs.asdict(api_error(error)) | {"type": "error"}
        return frame("", encode(body), "error")

    def whole(self, results: Sequence[Sequence[Delta]]) -> bytes:
        return encode(self._events.response())


def _frames(events: Sequence[Event]) -> bytes:
    return b"".join(frame(str(e.sequence_number), encode(e), type_of(e)) for e in events)


class ResponseRoutes:
    """The handlers of the routes, over one Service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> ASGIApp:
        """POST /v1/responses."""
        service = self._service
        prepared = await service.read(request, RESPONSE)
        body = prepared.body
        if body.background and body.store is False:
            raise InvalidRequest(
                "background requires store: its answer is read later", param="store"
            )
        stream = await respond(service, prepared, new_id("resp_"))
        answer = ResponseAnswer(self._events(stream), stream)
        if body.stream:
            return EventStream(service, answer, [stream])
        if body.background:
            return _json(answer.whole(()), stream)
        with service.working():
            whole = await read_whole(service, answer, [stream], request)
        return Response(status_code=499) if whole is None else _json(whole, stream)

    async def input_tokens(self, request: Request) -> ASGIApp:
        """POST /v1/responses/input_tokens: the number of prompt tokens of such a response."""
        service = self._service
        prepared = await service.read(request, RESPONSE)
        with service.bodies.used(prepared.tenant, prepared.num_bytes):
            turn = await turn_of(service, prepared, new_id("resp_"))
        return _body(encode(InputTokens(len(turn.prompt))))

    async def compact(self, request: Request) -> ASGIApp:
        """POST /v1/responses/compact: always refused."""
        raise InvalidRequest(
            "compaction is not supported by this server: ask for a summary, and begin a new "
            "conversation with it",
            code="unsupported_operation",
        )

    async def retrieve(self, request: Request) -> ASGIApp:
        """GET /v1/responses/{id}: the object, or with stream=true the events after a number."""
        _check_query(request)
        stream = await self._find(request)
        if not _is_streamed(request):
            return await self._whole(request, stream)
        self._service.metrics.resumed("finished" if stream.is_finished else "live")
        cursor = _cursor(request)
        after = -1 if cursor is None else _number(cursor)
        events = self._events(stream, after)
        return EventStream(
            self._service,
            ResponseAnswer(events, stream),
            [stream],
            after=events.tokens_at(after),
            is_split=cursor is None,
        )

    async def cancel(self, request: Request) -> ASGIApp:
        """POST /v1/responses/{id}/cancel: idempotent; returns the object as it ended.

        A response that ended by itself is refused, unless it ran in the background, where its
        client could not know of the end.
        """
        stream = await self._find(request)
        reasons = {f.reason for f in stream.finishes if f is not None}
        is_late = stream.is_finished and FinishReason.CANCELLED not in reasons
        if is_late and not context_of(stream).is_background:
            raise InvalidRequest(
                f"response {stream.request_id} has ended: only one made with background may be "
                f"cancelled then",
                code="response_already_completed",
            )
        if not stream.is_finished:
            self._service.cancel([stream])
            with contextlib.suppress(TimeoutError, StreamerError):
                async with asyncio.timeout(CANCEL_S):
                    await stream.wait()
            await self._service.recorded()
        return await self._whole(request, stream)

    async def delete(self, request: Request) -> ASGIApp:
        """DELETE /v1/responses/{id}: a live one is cancelled first."""
        stream = await self._find(request)
        self._service.engine.forget(stream.request_id)
        await self._service.recorded()
        return _json(encode(Deleted(stream.request_id)), stream)

    async def input_items(self, request: Request) -> ASGIApp:
        """GET /v1/responses/{id}/input_items: the conversation it answers, in pages."""
        stream = await self._find(request)
        items = [_item(i) for i in context_of(stream).items]
        return _json(encode(_page(items, request)), stream)

    async def resume_chat(self, request: Request) -> ASGIApp:
        """GET /v1/chat/completions/{id}?stream=true: the chunks after a number."""
        stream = await find_chat(self._service, request.path_params["id"], request.scope)
        if not _is_streamed(request):
            raise InvalidRequest(
                "chat completions are not stored; with stream=true this route resumes one",
                param="stream",
            )
        cursor = _cursor(request)
        after = [0] * stream.params.n
        if cursor is not None:
            after = [_number(part) for part in cursor.split(".")]
        if len(after) != stream.params.n:
            raise InvalidRequest(
                f"{len(after)} numbers were given for {stream.params.n} choices; with several the "
                f"number is like 3.5",
                param="starting_after",
            )
        answer = chat_answer(self._service, stream, after)
        stream.cursors_at(answer.cursors)  # raises for a number that was never sent
        self._service.metrics.resumed("finished" if stream.is_finished else "live")
        return EventStream(
            self._service,
            answer,
            [stream],
            after=answer.begins_at,
            is_split=cursor is None,
        )

    async def _whole(self, request: Request, stream: TokenStream) -> Response:
        events, size = self._events(stream), whole_entries(stream)
        body = await self._service.built(lambda: encode(events.response()), size, request.scope)
        return _json(body, stream)

    async def _find(self, request: Request) -> TokenStream:
        return await find(self._service, request.path_params["id"], request.scope)

    def _events(self, stream: TokenStream, after: int = -1) -> ResponseEvents:
        return response_events(stream, self._service.token_text, after=after)


# ---------------------------------------------------------------- queries


def _body(body: bytes, **headers: str) -> Response:
    headers["x-content-type-options"] = "nosniff"
    return Response(body, 200, headers, "application/json")


def _json(body: bytes, stream: TokenStream) -> Response:
    response = _body(body)
    response.raw_headers += id_headers(stream.request_id)
    return response


def _is_streamed(request: Request) -> bool:
    """`stream` of the query; always false for a HEAD."""
    given = request.query_params.get("stream", "false").lower()
    if given not in ("true", "1", "false", "0"):
        raise InvalidRequest(f"stream is true or false, got {given[:20]!r}", param="stream")
    return given in ("true", "1") and request.method != "HEAD"


def _cursor(request: Request) -> str | None:
    header = request.headers.get("last-event-id")
    return header or request.query_params.get("starting_after")


def _is_number(text: str) -> bool:
    """Whether `int` may convert it: Python refuses 5,000 digits, and is slow for fewer."""
    return text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS


def _number(text: str) -> int:
    if not _is_number(text):
        raise InvalidRequest(
            f"starting_after is the number of an event, got {text[:40]!r}", param="starting_after"
        )
    return int(text)


def _check_query(request: Request) -> None:
    """InvalidRequest that names the parameter, for known values that are not supported."""
    query = request.query_params
    if query.get("include_obfuscation", "false").lower() not in ("false", "0"):
        raise InvalidRequest(
            "include_obfuscation is not supported by this server",
            param="include_obfuscation",
            code="unsupported_parameter",
        )
    for name in ("include", "include[]"):
        for value in query.getlist(name):
            if value not in get_args(Includable):
                raise InvalidRequest(
                    f"include: {value[:80]!r}; accepted: {', '.join(get_args(Includable))}",
                    param="include",
                )


PageItem = InputItem | ReasoningItem | FunctionCall | CallOutput


def _item(item: TurnItem) -> PageItem:
    if item.role == "reasoning":
        return ReasoningItem(item.id, "completed", [ReasoningPart(item.text)])
    if item.role == "call":
        return FunctionCall(item.id, item.call_id, item.name, item.text, "completed")
    if item.role == "tool":
        return CallOutput(item.id, item.call_id, item.text)
    if item.role == "assistant":
        part = InputPart("output_text", item.text, [])
    else:
        part = InputPart("input_text", item.text)
    return InputItem(item.id, item.role, [part])


def _page(items: list[PageItem], request: Request) -> InputPage:
    """One page of a list, by the query's `order`, `after` and `limit`."""
    query = request.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order is asc or desc, got {order[:20]!r}", param="order")
    given = query.get("limit", str(DEFAULT_PAGE))
    limit = int(given) if _is_number(given) else 0
    if not 0 < limit <= MAX_PAGE:
        raise InvalidRequest(f"limit is from 1 to {MAX_PAGE}, got {given[:20]!r}", param="limit")
    if order == "desc":
        items = items[::-1]
    after = query.get("after")
    if after is not None:
        ids = [item.id for item in items]
        if after not in ids:
            raise NotFound(f"there is no item {after[:80]!r} here", param="after")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return InputPage(page, first, last, len(items) > len(page))
