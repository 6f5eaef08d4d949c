"""Lanes: the responses of one socket: running on it, waiting on it, or resumed on it.

A lane is a task that runs its responses in order and sends their events itself, so a socket whose
client does not read holds up only its own lanes; their cursors then merge what they missed.
socket.py makes one Lanes a socket and passes it decoded events.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

import msgspec
from msgspec import UNSET
from starlette.types import Scope

from streamer.core.plan import Notice
from streamer.engine.log import Delta, deltas_of
from streamer.engine.refusals import RESTART, STEERED
from streamer.engine.stream import TokenStream
from streamer.errors import InvalidRequest, NotFound, RateLimited, StreamerError
from streamer.server.context import Context, context_of
from streamer.server.openai.common import new_id
from streamer.server.prepared import Prepared, Reading
from streamer.server.responses import steering
from streamer.server.responses.body import ResponseCreate
from streamer.server.responses.events import ResponseEvents, blank_response
from streamer.server.responses.parsed import response_events
from streamer.server.responses.respond import find, respond
from streamer.server.responses.socket_events import Resume, Resumed, Settings, error_event
from streamer.server.responses.steering import Steer, SteerEvent
from streamer.server.responses.types import Event, ResponseEvent, StateEvent
from streamer.server.transport.follow import Work, follow
from streamer.server.transport.frames import SPLIT, num_entries, portions

if TYPE_CHECKING:
    from streamer.server.service import Service
    from streamer.server.telemetry.metrics import Meter

log = logging.getLogger(__name__)

MAX_LANES: Final = 64
MAX_QUEUED: Final = 256  # creates waiting for their lane
MAX_RESPONSES: Final = 320  # not ended, with those whose reader here was dropped for its lag
MAX_QUEUED_BYTES: Final = 4 << 20  # of creates whose response has not begun

Write = Callable[[msgspec.Struct], Work | None]
Reply = Callable[[msgspec.Struct], None]


class PendingCreate(msgspec.Struct, frozen=True):
    """A checked response.create, waiting for its lane; `is_announced`: its client has its id."""

    response_id: str
    prepared: Prepared[ResponseCreate]
    settings: Settings
    steers: tuple[Steer, ...] = ()
    is_announced: bool = False

    @property
    def lane(self) -> str | None:
        return self.prepared.body.stream_id


class Resuming(msgspec.Struct, frozen=True):
    """A checked response.resume, for its lane."""

    event: Resume
    settings: Settings


class Attached(msgspec.Struct, eq=False):
    """A response whose events go out on this socket, and the number its reader has there.

    steers     input for the response that follows when this one has ended
    is_behind  the reader starts on tokens that were computed earlier
    num_made   output tokens whose events have been made
    number     the highest sequence number that the client acknowledged; -1: none
    """

    stream: TokenStream
    reader: int
    events: ResponseEvents
    lane: str | None
    settings: Settings
    steers: list[Steer] = []
    is_behind: bool = False
    num_made: int = 0
    number: int = -1

    def acknowledge(self, number: int) -> None:
        """Consumed up to this number; after the newest event, what had no event is consumed too."""
        self.number = max(self.number, number)
        num = self.events.tokens_at(number)
        if number >= self.events.number:
            num = max(num, self.num_made)
        self.stream.acknowledge(self.reader, num)

    def made(self, deltas: Sequence[Delta], events: Sequence[Event]) -> None:
        """These events were made of these tokens.

        Of special tokens, and of what a parser holds back, there are none, so that the client could
        never acknowledge them: a run of them beyond the window would pause the response for ever.
        """
        if deltas:
            self.num_made = deltas[-1].start + len(deltas[-1].token_ids)
        if not events and 0 <= self.events.number <= self.number:
            self.stream.acknowledge(self.reader, self.num_made)


def cancelled(pending: PendingCreate) -> ResponseEvent:
    """The terminal event of a response that never began."""
    prepared = pending.prepared
    context = Context(kind="response", tenant="", body=prepared.body, model=prepared.model)
    response = blank_response(
        context, pending.response_id, time.time(), prepared.params, "cancelled"
    )
    lane = UNSET if pending.lane is None else pending.lane
    return ResponseEvent("response.incomplete", 0, response, lane)


class Lanes:
    """The lanes of one socket.

    write  writes an event at once and returns None, or returns the coroutine that waits to
    reply  queues an event and returns at once
    """

    def __init__(
        self,
        service: Service,
        scope: Scope,
        session: str,
        *,
        write: Write,
        reply: Reply,
        is_extended: bool,
    ) -> None:
        self._service = service
        self._scope = scope
        self._session = session
        self._write = write
        self._reply = reply
        self._is_extended = is_extended
        self._lanes: dict[str | None, deque[PendingCreate | Resuming]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._attached: list[Attached] = []
        self._starting: dict[str, bool] = {}  # response id of a starting create -> is it cancelled?
        self._made: WeakSet[TokenStream] = WeakSet()  # on this socket; the engine keeps them
        self._queued_bytes = 0

    # ------------------------------------------------------------ what the client asks for

    def create(self, body: ResponseCreate, num_bytes: int, settings: Settings) -> None:
        """response.create: checked and given its id now, run when its lane is free."""
        service = self._service
        service.admit(self._scope)  # its lane may be busy
        for name, value in (("background", body.background), ("stream", body.stream is False)):
            if value:
                raise InvalidRequest(
                    f"{name} is for HTTP alone: a socket streams, and its responses outlive it",
                    param=name,
                    code="unsupported_parameter",
                )
        prepared = self._prepared(body, num_bytes, settings)
        body.items()
        self._require_room()
        if self._queued_bytes + num_bytes > MAX_QUEUED_BYTES:
            raise RateLimited(
                f"{self._queued_bytes} bytes of responses wait on this socket and this one has "
                f"{num_bytes}; the limit is {MAX_QUEUED_BYTES}"
            )
        pending = PendingCreate(new_id("resp_"), prepared, settings)
        if body.stream_id in self._lanes:
            self._wait_for_lane(msgspec.structs.replace(pending, is_announced=True))
        else:
            self._open_lane(body.stream_id, pending)
        self._queued_bytes += prepared.num_bytes

    def _prepared(
        self, body: ResponseCreate, num_bytes: int, settings: Settings
    ) -> Prepared[ResponseCreate]:
        reading = Reading(
            "websocket", settings.detach_s, settings.window, self._is_extended, self._session
        )
        return self._service.prepare(self._scope, "responses", body, num_bytes, reading)

    def resume(self, event: Resume, settings: Settings) -> None:
        """response.resume: on its lane if that is free (creates wait for it), else beside it."""
        event.check()
        pending = Resuming(event, settings)
        if event.stream_id not in self._lanes:
            self._open_lane(event.stream_id, pending)
        elif len(self._tasks) >= MAX_LANES:
            raise RateLimited(f"{MAX_LANES} lanes are running on this socket")
        else:
            self._spawn(self._run_beside(pending))

    async def cancel(self, response_id: str | None) -> None:
        """response.cancel: idempotent; a create waiting for its lane is removed from the queue."""
        if response_id is None:
            raise InvalidRequest(
                "response_id is required", param="response_id", code="missing_field"
            )
        if response_id in self._starting:
            self._starting[response_id] = True
            return
        for lane in self._lanes.values():
            for pending in lane:
                if isinstance(pending, PendingCreate) and pending.response_id == response_id:
                    lane.remove(pending)
                    self._queued_bytes -= pending.prepared.num_bytes
                    self._reply(cancelled(pending))
                    return
        stream = await find(self._service, response_id, self._scope, self._session, "response_id")
        self._service.cancel([stream])

    def acknowledge(self, response_id: str, number: int) -> None:
        """response.ack: consumed up to this number; ignored for a response not attached here."""
        for a in self._attached:
            if a.stream.request_id == response_id:
                a.acknowledge(number)

    def steer(self, event: SteerEvent, size: int, decode: steering.Decode) -> None:
        """response.steer: end the response at the next token, and continue with this input."""
        steering.check_encoding(event, decode)
        on_it = [a for a in self._attached if a.stream.request_id == event.previous_response_id]
        if not on_it:
            text = "this response does not stream on this socket"
            self._reply(steering.refused(event, "response_not_found", text))
            return
        a, code = on_it[0], ""
        if a.stream.is_finished:
            code, text = "response_already_completed", "this response has ended"
        elif context_of(a.stream).body.generate is False:
            code, text = "steering_not_supported", "this response says nothing"
        elif len(a.steers) >= steering.MAX_STEERS or self._queued_bytes + size > MAX_QUEUED_BYTES:
            code, text = "too_many_pending_steers", "too much input waits on this socket"
        else:
            try:
                steer = steering.read_steer(event, size, decode)
                self._service.admit(self._scope)
            except InvalidRequest as e:
                code, text = "invalid_input", e.message
            except StreamerError as e:
                code, text = e.code or e.type, e.message
        if code:
            self._reply(steering.refused(event, code, text, a.events.number))
            return
        a.steers.append(steer)
        self._queued_bytes += size
        self._reply(steering.accepted(steer, a.events.number, a.lane))
        a.stream.cut_off_by = STEERED
        self._service.cancel([a.stream])

    def drop(self) -> None:
        """Drop every reader of this socket: its responses wait for another reader."""
        for a in self._attached:
            a.stream.drop(a.reader)

    async def close(self) -> None:
        """Cancel every task; their readers detach."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------ lanes

    def _require_room(self) -> None:
        for stream in [s for s in self._made if s.is_finished]:
            self._made.discard(stream)
        waiting = len(self._starting) + sum(map(len, self._lanes.values()))
        if len(self._made) + waiting >= MAX_RESPONSES:
            raise RateLimited(
                f"{len(self._made) + waiting} responses of this socket have not ended; the limit "
                f"is {MAX_RESPONSES}"
            )

    def _open_lane(self, name: str | None, pending: PendingCreate | Resuming) -> None:
        if len(self._lanes) >= MAX_LANES:
            raise RateLimited(f"{MAX_LANES} lanes are running on this socket")
        self._lanes[name] = deque([pending])
        self._spawn(self._run_lane(name))

    def _wait_for_lane(self, pending: PendingCreate) -> None:
        if sum(map(len, self._lanes.values())) >= MAX_QUEUED:
            raise RateLimited(f"{MAX_QUEUED} responses wait for their lanes on this socket")
        lane = self._lanes[pending.lane]
        lane.append(pending)
        if self._is_extended:
            stream_id = UNSET if pending.lane is None else pending.lane
            waiting = StateEvent("response.waiting", pending.response_id, stream_id=stream_id)
            self._reply(msgspec.structs.replace(waiting, position=len(lane)))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, pending: PendingCreate | Resuming, lane: str | None) -> None:
        """Run one command: a bug ends one response, not those waiting behind it."""
        try:
            await (
                self._run(pending) if isinstance(pending, PendingCreate) else self._resume(pending)
            )
        except OSError:
            raise
        except Exception:
            log.exception("a response on a socket failed")
            await self._send(error_event(StreamerError("internal error", code="internal"), lane))

    async def _run_lane(self, name: str | None) -> None:
        lane = self._lanes[name]
        try:
            with contextlib.suppress(OSError):  # the client is gone: the read loop ends too
                while lane:
                    await self._guard(lane.popleft(), name)
        finally:
            del self._lanes[name]

    async def _run_beside(self, pending: Resuming) -> None:
        with contextlib.suppress(OSError):
            await self._guard(pending, pending.event.stream_id)

    async def _run(self, pending: PendingCreate) -> None:
        service = self._service
        with service.working():
            self._starting[pending.response_id] = False
            try:
                stream = await respond(
                    service,
                    pending.prepared,
                    pending.response_id,
                    is_announced=pending.is_announced,
                )
            except StreamerError as e:
                service.metrics.refused(e)
                for steer in pending.steers:
                    await self._send(steering.failed(steer, e.message, 0, pending.lane))
                if not pending.steers:
                    await self._send(error_event(e, pending.lane))
                return
            finally:
                self._queued_bytes -= pending.prepared.num_bytes
                is_cancelled = self._starting.pop(pending.response_id)
            self._made.add(stream)
            if is_cancelled:
                service.cancel([stream])
            await self._follow(stream, -1, pending.lane, pending.settings)

    async def _resume(self, pending: Resuming) -> None:
        event = pending.event
        after = -1 if event.starting_after is None else event.starting_after
        lane = UNSET if event.stream_id is None else event.stream_id
        try:
            stream = await find(self._service, event.response_id, self._scope, self._session)
        except NotFound:
            self._service.metrics.resumed("gone")
            await self._send(Resumed(event.response_id, after, "gone", lane))
            return
        status = "finished" if stream.is_finished else "live"
        self._service.metrics.resumed(status)
        await self._send(Resumed(event.response_id, after, status, lane))
        is_split = event.starting_after is None
        with self._service.working():
            await self._follow(stream, after, event.stream_id, pending.settings, is_split=is_split)

    async def _send(self, event: msgspec.Struct) -> None:
        work = self._write(event)
        if work is not None:
            await work

    # ------------------------------------------------------------ following

    async def _follow(
        self,
        stream: TokenStream,
        after: int,
        lane: str | None,
        settings: Settings,
        *,
        is_split: bool = False,
    ) -> None:
        """Send a response's events after the number `after`, up to the last."""
        service = self._service
        events = response_events(
            stream,
            service.token_text,
            after=after,
            lane=lane,
            is_extended=self._is_extended,
            include=settings.include,
        )
        is_behind = stream.num_output_tokens > 0
        attached = Attached(
            stream, stream.new_reader(), events, lane, settings, is_behind=is_behind
        )
        self._attached.append(attached)
        is_reading = False
        try:
            for event in events.opening():
                await self._send(event)
            is_reading = True
            write = partial(self._put_news, attached, service.metrics.meter(), is_split)
            cursor = events.tokens_at(after)
            await follow([stream], write, readers=[attached.reader], after=cursor)
        except StreamerError as e:
            if e.code == RESTART:
                return  # the socket is closed at once, and its client resumes on another
            if stream.error is None:
                await self._send(error_event(e, lane))
            for event in events.failed(e) if stream.error is not None else ():
                await self._send(event)
        finally:
            self._attached.remove(attached)
            if not is_reading:  # no reader attached, so no detaching would end it
                stream.miss()
        if attached.steers:
            await self._succeed(attached)

    async def _succeed(self, attached: Attached) -> None:
        """Start the successor of a steered response, before the creates waiting on its lane."""
        steers, stream, lane = tuple(attached.steers), attached.stream, attached.lane
        if not stream.is_finished:  # its reader was too slow; the successor's would be too
            self._queued_bytes -= sum(s.size for s in steers)
            for steer in steers:
                text = "this socket no longer follows the response"
                await self._send(steering.failed(steer, text, attached.events.number, lane))
            return
        context = context_of(stream)
        body = steering.successor(context.body, steers, lane)
        size, settings = sum(s.size for s in steers), attached.settings
        pending = PendingCreate(
            new_id("resp_"), self._prepared(body, size, settings), settings, steers
        )
        if lane in self._lanes:
            self._lanes[lane].appendleft(pending)
        else:
            self._open_lane(lane, pending)

    def _put_news(
        self,
        attached: Attached,
        meter: Meter,
        is_split: bool,
        source: int,
        items: list[Delta | Notice],
    ) -> Work | None:
        """Write at once, without a coroutine, while the socket accepts it."""
        deltas = deltas_of(items)
        meter.deltas(source, deltas)
        is_paced = attached.is_behind or num_entries(attached.stream, deltas) > SPLIT
        attached.is_behind = False
        if is_paced or is_split or deltas is not items:
            notices = [item for item in items if isinstance(item, Notice)]
            return self._send_news(attached, notices, deltas, is_split, is_paced)
        events = attached.events.deltas(deltas)
        attached.made(deltas, events)
        for i, event in enumerate(events):
            work = self._write(event)
            if work is not None:
                return self._send_rest(work, events[i + 1 :])
        return None

    async def _send_rest(self, work: Work, events: Sequence[Event]) -> None:
        await work
        for event in events:
            await self._send(event)

    async def _send_news(
        self,
        attached: Attached,
        notices: Sequence[Notice],
        deltas: Sequence[Delta],
        is_split: bool,
        is_paced: bool,
    ) -> None:
        events, stream = attached.events, attached.stream
        if self._is_extended:
            for notice in notices:
                await self._send(events.state(notice))
        for some in portions(stream, deltas, is_split):
            build, size = partial(events.deltas, some), num_entries(stream, some)
            built = await self._service.built(build, size, self._scope) if is_paced else build()
            attached.made(some, built)
            for event in built:
                await self._send(event)
