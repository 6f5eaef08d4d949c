"""Answers over HTTP: the response that follows token streams, the whole one, the watch for leavers.

EventStream is a plain ASGI callable: it sends everything new of each step as one body part, a
keep-alive while nothing comes, and stops as soon as the client is gone. app.py and the routes.py of
responses/, anthropic/ and ollama/ make one per streamed request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from streamer.engine.log import Delta, deltas_of
from streamer.engine.refusals import RESTART
from streamer.errors import StreamerError
from streamer.server.errors import id_headers
from streamer.server.transport.follow import Work, follow
from streamer.server.transport.frames import SPLIT, Framing, num_entries, portions
from streamer.server.transport.loop_turn import WRITE_PART
from streamer.server.transport.pace import LARGE
from streamer.server.transport.stuck import ABORT, StuckWatch

if TYPE_CHECKING:
    from streamer.core.plan import Notice
    from streamer.engine.stream import TokenStream
    from streamer.server.service import Service

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 15.0


class Answer(Protocol):
    """Builds the bytes of one answer for a transport."""

    @property
    def request_id(self) -> str: ...
    @property
    def framing(self) -> Framing: ...
    def opening(self) -> bytes: ...
    def deltas(self, source: int, deltas: Sequence[Delta]) -> bytes: ...
    def failure(self, deltas: Sequence[Delta]) -> StreamerError | None: ...
    def closing(self) -> bytes: ...
    def error(self, error: StreamerError) -> bytes: ...
    def whole(self, results: Sequence[Sequence[Delta]]) -> bytes: ...


class ClientWatch:
    """Cancels the body of its `async with` when the client is gone, and absorbs that cancel.

    `idle` is called after `idle_s` seconds and returns the seconds until its next call: the task
    that waits for the client to leave is also the timer of the keep-alive.
    """

    def __init__(
        self,
        receive: Receive,
        idle: Callable[[], Awaitable[float]] | None = None,
        idle_s: float | None = None,
    ) -> None:
        self._receive = receive
        self._idle = idle
        self._idle_s = idle_s
        self._is_over = False
        self.is_gone = False

    async def __aenter__(self) -> ClientWatch:
        owner = asyncio.current_task()
        if owner is None:
            raise RuntimeError("ClientWatch is for code that runs in a task")
        self._owner = owner
        self._cancels = owner.cancelling()
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> bool:
        self._is_over = True
        self._task.cancel()
        if not self.is_gone:
            return False
        is_ours_alone = self._owner.uncancel() <= self._cancels
        return is_ours_alone and kind is asyncio.CancelledError

    async def _watch(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._idle_s):
                    message = await self._receive()
            except TimeoutError:
                if self._idle is not None:
                    self._idle_s = await self._idle()
                continue
            except asyncio.CancelledError:
                # Kept by its task, it would keep this frame, which keeps the task: a cycle, in
                # every request, with all that the request holds.
                if self._is_over:
                    return
                raise
            if message["type"] == "http.disconnect":
                self.is_gone = True
                self._owner.cancel()
                return


HEADERS: Final = (
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)


class EventStream:
    """The ASGI response of one streamed request, submitted already or resumed.

    after     the cursor in each stream, the same that `answer` begins at
    is_split  deltas are not merged: one for each token

    Raises InvalidRequest for a cursor that a stream refuses, before anything is sent.
    """

    def __init__(
        self,
        service: Service,
        answer: Answer,
        streams: Sequence[TokenStream],
        keep_alive_s: float | None = None,
        *,
        after: int | Sequence[int] = 0,
        is_split: bool = False,
    ) -> None:
        self._service = service
        self._answer = answer
        self._streams = streams
        self._keep_alive_s = KEEP_ALIVE_S if keep_alive_s is None else keep_alive_s
        self._after = after
        for stream in streams:
            stream.cursors_at(after)
        self._is_split = is_split
        self._is_behind = any(s.num_output_tokens for s in streams)  # on earlier tokens
        self._meter = service.metrics.meter()
        self._readers = [s.new_reader() for s in streams]
        self._send: Send
        self._write_part: Callable[[bytes], bool]  # without waiting; False: use `send`
        self._scope: Scope = {}
        self._stuck: StuckWatch
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head and every event; return when all is sent or the client is gone."""
        self._send = send
        self._write_part = scope.get("extensions", {}).get(WRITE_PART, lambda _: False)
        self._scope = scope
        self._stuck = StuckWatch(scope, self._service.config.pause_timeout, self._drop)
        with self._service.working(), self._stuck:
            async with ClientWatch(receive, self._keep_alive, self._keep_alive_s):
                await self._write()

    async def _write(self) -> None:
        answer = self._answer
        media = (b"content-type", answer.framing.media)
        headers = [media, *HEADERS, *id_headers(answer.request_id)]
        is_reading = False
        try:
            self._stuck.began()
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            self._stuck.ended()
            await self._put(self._answer.opening())
            is_reading = True
            await self._put(await self._follow())
        finally:
            if not is_reading:  # no reader attached, so no detaching would end it
                for stream in self._streams:
                    stream.miss()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _follow(self) -> bytes:
        """Send the events as they come; the return value is the end of the body."""
        try:
            await follow(self._streams, self._put_news, readers=self._readers, after=self._after)
        except StreamerError as e:
            if e.code == RESTART:  # no end: the client is to come back
                self._scope.get("extensions", {}).get(ABORT, lambda: None)()
                return b""
            return self._answer.error(e)
        except Exception:
            log.exception("a stream failed")
            return self._answer.error(StreamerError("internal error", code="internal"))
        return self._answer.closing()

    def _put_news(self, source: int, items: list[Delta | Notice]) -> Work | None:
        """Write at once, without a coroutine, if the connection accepts it."""
        stream, deltas = self._streams[source], deltas_of(items)
        self._meter.deltas(source, deltas)
        is_merged = self._is_split and any(len(delta.token_ids) > 1 for delta in deltas)
        if self._is_behind or is_merged or num_entries(stream, deltas) > SPLIT:
            self._is_behind = False
            return self._put_paced(source, deltas)
        body = self._answer.deltas(source, deltas)
        if body and not self._put_now(body):
            return self._put_rest(deltas, body)
        if stream.is_finished or len(deltas) != 1:
            self._raise_failure(deltas)
        return None

    async def _put_paced(self, source: int, deltas: list[Delta]) -> None:
        stream, build = self._streams[source], self._answer.deltas
        for some in portions(stream, deltas, self._is_split):
            size = num_entries(stream, some)
            await self._put(
                await self._service.built(partial(build, source, some), size, self._scope)
            )
        self._raise_failure(deltas)

    async def _put_rest(self, deltas: list[Delta], body: bytes) -> None:
        await self._put(body)
        self._raise_failure(deltas)

    def _raise_failure(self, deltas: list[Delta]) -> None:
        failure = self._answer.failure(deltas)
        if failure is not None:
            self._service.cancel(self._streams)
            raise failure

    async def _put(self, body: bytes) -> None:
        if body and not self._put_now(body):
            self._stuck.began()
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
            self._stuck.ended()
            self._last_sent = time.monotonic()

    def _put_now(self, body: bytes) -> bool:
        if not self._write_part(body):
            return False
        self._last_sent = time.monotonic()  # not loop.time(): finding the loop is a system call
        return True

    async def _keep_alive(self) -> float:
        now = time.monotonic()
        rest_s = self._last_sent + self._keep_alive_s - now
        if rest_s > 0:
            return rest_s
        if not self._stuck.is_sending:  # else the client does not read what was sent before
            self._last_sent = now
            body = self._answer.framing.keep_alive
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
        return self._keep_alive_s

    def _drop(self) -> None:
        """The client reads nothing: drop its readers; the streams wait for others."""
        for stream, reader in zip(self._streams, self._readers, strict=True):
            stream.drop(reader)


async def read_whole(
    service: Service, answer: Answer, streams: Sequence[TokenStream], request: Request
) -> bytes | None:
    """Wait for all streams; returns the body of the answer, or None if the client left.

    Raises the error of the first stream that failed; the others end when their last reader leaves.
    """
    results: list[list[Delta]] = [[] for _ in streams]
    meter = service.metrics.meter()

    def keep(source: int, items: list[Delta | Notice]) -> None:
        deltas = deltas_of(items)
        meter.deltas(source, deltas)
        failure = answer.failure(deltas)
        if failure is not None:
            raise failure
        results[source].extend(deltas)

    async with ClientWatch(request.receive) as watch:
        await follow(streams, keep)
    if watch.is_gone:
        return None
    size = sum(map(num_entries, streams, results)) + sum(len(s.prompt_logprobs) for s in streams)
    whole = partial(answer.whole, results)
    return whole() if size <= LARGE else await service.built(whole, size, request.scope)


async def respond(
    service: Service,
    request: Request,
    answer: Answer,
    streams: Sequence[TokenStream],
    *,
    is_streamed: bool,
) -> ASGIApp:
    """The response of an answer that belongs to its connection: its events, or the whole."""
    await service.recorded(*streams)
    if is_streamed:
        return EventStream(service, answer, streams)
    with service.working():
        whole = await read_whole(service, answer, streams, request)
    if whole is None:
        return Response(status_code=499)
    response = Response(whole, 200, {"x-content-type-options": "nosniff"}, "application/json")
    response.raw_headers += id_headers(answer.request_id)
    return response
