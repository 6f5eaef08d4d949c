"""Ingress: what a replica knows of one ingress, and what it sends it of the streams it follows.

An ingress is a reader of each stream: what its socket does not take stays in the streams' logs,
which pause their requests as for any reader who lags. replica.py makes one a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict, deque
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from msgspec.structs import replace

from streamer.core.plan import Finish, Notice, StepOutput, TokenLogprob
from streamer.errors import StreamerError
from streamer.replicas import messages
from streamer.replicas.messages import Problem

if TYPE_CHECKING:
    from streamer.engine.engine import AsyncEngine
    from streamer.engine.flow import Reader
    from streamer.engine.stream import TokenStream
    from streamer.replicas.connection import Connection

MAX_TOKENS: Final = 1 << 14  # in one message, but for those of its last stream
RETURN_S: Final = 5.0  # in which an ingress comes back that has lost its connection alone

log = logging.getLogger(__name__)


class Host(Protocol):
    """The replica, as an ingress there knows it.

    followers  of each request
    """

    @property
    def engine(self) -> AsyncEngine: ...
    @property
    def followers(self) -> defaultdict[str, set[Ingress]]: ...
    def forget(self, request_id: str, *, asked_by: Ingress) -> None: ...
    def update_hold(self, request_id: str) -> None: ...


class Follow:
    """A stream that an ingress follows.

    num_scored  log probabilities of its prompt that the ingress has
    """

    __slots__ = ("is_due", "num_scored", "reader", "request_id", "stream")

    def __init__(self, stream: TokenStream, num_scored: int) -> None:
        self.request_id = stream.request_id
        self.stream = stream
        self.num_scored = num_scored
        self.is_due = False
        self.reader: Reader


class Batch:
    """What becomes the StepOutput of one message."""

    __slots__ = ("choices", "errors", "finishes", "ids", "logprobs", "notices", "scored", "tokens")

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.choices: list[int] = []
        self.tokens: list[int] = []
        self.logprobs: dict[int, TokenLogprob] = {}
        self.scored: dict[str, tuple[TokenLogprob, ...]] = {}
        self.finishes: list[Finish] = []
        self.notices: list[Notice] = []
        self.errors: dict[str, Problem] = {}

    def add(self, follow: Follow) -> None:
        """All that is new of a stream."""
        stream, request_id = follow.stream, follow.request_id
        for item in stream.take(follow.reader):
            if isinstance(item, Notice):
                self.notices.append(item)
                continue
            tokens, first = item.token_ids, len(self.tokens)
            if len(tokens) == 1:  # the usual case
                self.ids.append(request_id)
                self.choices.append(item.choice)
                self.tokens.append(tokens[0])
            else:
                self.ids += [request_id] * len(tokens)
                self.choices += [item.choice] * len(tokens)
                self.tokens += tokens
            if item.logprobs is not None:
                self.logprobs |= dict(enumerate(item.logprobs, first))
            if item.finish is not None:
                self.finishes.append(item.finish)
        if len(stream.prompt_logprobs) > follow.num_scored:
            self.scored[request_id] = tuple(stream.prompt_logprobs[follow.num_scored :])
            follow.num_scored = len(stream.prompt_logprobs)
        if stream.error is not None:
            self.errors[request_id] = Problem.of(stream.error)
        stream.took(follow.reader)


class Ingress:
    """One ingress. `held`: requests whose readers lag there."""

    def __init__(self, server: Host) -> None:
        self.connection: Connection
        self.held: set[str] = set()
        self._server = server
        self._engine = server.engine
        self._follows: dict[str, Follow] = {}
        self._due: deque[Follow] = deque()
        self._is_scheduled = False
        # submits that wait for a grammar, and what came for them meanwhile
        self._starting: dict[str, list[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    def send(self, message: Any) -> None:
        self.connection.send(message)

    def close(self) -> None:
        self.connection.close()

    def finish(self) -> None:
        """Send what is due, and close."""
        self.send_news()
        self.connection.finish()

    def lost(self) -> None:
        """The connection has ended; its streams have lost a reader if it does not come back."""
        for task in self._tasks:
            task.cancel()
        for request_id in list(self._follows):
            if (follow := self._let_go(request_id)) is not None:
                self._loop.call_later(RETURN_S, follow.stream.detach, follow.reader)

    # ------------------------------------------------------------ what it asks for

    def on_message(self, message: Any) -> None:
        if self.connection.is_closed:
            return
        waiting = self._starting.get(getattr(message, "request_id", ""))
        if waiting is not None:
            waiting.append(message)
            return
        match message:
            case messages.Submit():
                self._submit(message)
            case messages.Begin(taken) | messages.Taken(taken):
                self._give_up(taken)
            case messages.Attach(request_id):
                self._attach(request_id)
            case messages.Cancel(request_id, detail):
                stream = self._engine.get(request_id)
                if stream is not None:
                    stream.cut_off_by = detail
                    self._engine.cancel(request_id)
            case messages.Leave(request_id):
                self._leave(request_id)
            case messages.Hold(request_id, is_held):
                if request_id in self._follows:
                    (self.held.add if is_held else self.held.discard)(request_id)
                    self._server.update_hold(request_id)
            case messages.Forget(request_id):
                self._server.forget(request_id, asked_by=self)
            case messages.Settle(number):
                self._spawn(self._settle(number))
            case messages.View():
                self._spawn(self._view(message))

    def _submit(self, message: messages.Submit) -> None:
        request, stream = message.request, self._engine.get(message.request.request_id)
        needs_grammar = request.params.structured_outputs is not None
        if needs_grammar if stream is None else not stream.is_kept:
            self._starting[request.request_id] = []
            self._spawn(self._prepare(message, stream))
        else:
            self._begin(message)

    async def _prepare(self, message: messages.Submit, stream: TokenStream | None) -> None:
        request = message.request
        if stream is not None and not stream.is_finished:  # forgotten, and cancelled: its last step
            ended = asyncio.Event()
            stream.observers.append(lambda s: ended.set() if s.is_finished else None)
            await ended.wait()
        with contextlib.suppress(StreamerError):  # submit raises it again
            await self._engine.compile(request.params, request.cache_salt)
        waiting = self._starting.pop(request.request_id)
        self._begin(message)
        for each in waiting:
            self.on_message(each)

    def _begin(self, message: messages.Submit) -> None:
        request, progress = message.request, message.request.progress
        cursors: int | list[int] = 0
        num_scored = 0
        if progress is not None:
            cursors = [len(drawn.tokens) for drawn in progress.outputs]
            num_scored = len(progress.prompt_logprobs)
        try:
            stream = self._engine.get(request.request_id)
            if stream is None:
                stream = self._engine.submit(replace(request, context=message.context))
            self._follow(stream, cursors, num_scored)
        except StreamerError as error:
            self.send(messages.Answer(request.request_id, Problem.of(error)))
            return
        if self._engine.journal is None or not stream.is_durable:
            self.send(messages.Answer(request.request_id))
        else:
            self._spawn(self._record(stream))

    async def _record(self, stream: TokenStream) -> None:
        await self._engine.recorded(stream)
        self.send(messages.Answer(stream.request_id))

    def _attach(self, request_id: str) -> None:
        stream = self._engine.get(request_id)
        if stream is None or not stream.is_kept:
            self.send(messages.Found(request_id))
            return
        progress, context = stream.progress, stream.context
        self.send(
            messages.Found(
                request_id,
                replace(stream.request, context=None, progress=progress),
                context if isinstance(context, bytes) else None,
                None if stream.error is None else Problem.of(stream.error),
            )
        )
        if not stream.is_finished:
            cursors = [len(drawn.tokens) for drawn in progress.outputs]
            self._follow(stream, cursors, len(progress.prompt_logprobs))

    def _leave(self, request_id: str) -> None:
        if len(self._server.followers.get(request_id, ())) > 1:
            self._unfollow(request_id)
            self.send(messages.Left(request_id))
        else:
            self._engine.cancel(request_id)

    def _give_up(self, taken: Sequence[str]) -> None:
        for request_id in taken:
            self._unfollow(request_id)
            if not self._server.followers.get(request_id):
                self._engine.forget(request_id)

    async def _settle(self, number: int) -> None:
        await self._engine.recorded()
        self.send(messages.Settled(number))

    async def _view(self, message: messages.View) -> None:
        try:
            view = await self._engine.view_feed.send(message.query)
        except StreamerError:  # the engine has ended, and so will the connection
            return
        self.send(messages.Seen(view))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------ streams

    def _follow(self, stream: TokenStream, cursors: int | list[int], num_scored: int) -> None:
        request_id, follow = stream.request_id, Follow(stream, num_scored)
        follow.reader = stream.attach(cursors, partial(self._on_update, follow))
        self._unfollow(request_id)  # afterwards: the last reader that leaves may end it
        self._follows[request_id] = follow
        followers = self._server.followers[request_id]
        for each in followers:
            each.send(messages.Shared(request_id))
        followers.add(self)
        self._server.update_hold(request_id)
        self._on_update(follow)

    def _let_go(self, request_id: str) -> Follow | None:
        """Follow a stream no longer; its reader is still to be detached."""
        self.held.discard(request_id)
        follow = self._follows.pop(request_id, None)
        if follow is not None:
            followers = self._server.followers[request_id]
            followers.discard(self)
            if not followers:
                del self._server.followers[request_id]
            self._server.update_hold(request_id)
        return follow

    def _unfollow(self, request_id: str) -> None:
        if (follow := self._let_go(request_id)) is not None:
            follow.stream.detach(follow.reader)

    def _on_update(self, follow: Follow) -> None:
        """There is news of a stream: all of it is sent at the end of this turn of the loop."""
        if not follow.is_due:
            follow.is_due = True
            self._due.append(follow)
            if not self._is_scheduled and not self.connection.is_full:
                self._is_scheduled = True
                self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_scheduled = False
        if not self.connection.is_full:
            self.send_news()

    def drained(self) -> None:
        """The socket takes more again."""
        if self._due:
            self.send_news()

    def send_news(self) -> None:
        """Send what is due, or at least the counts."""
        connection, due, batch = self.connection, self._due, Batch()
        if connection.is_closed or self._engine.is_dead:
            connection.close()  # what a dead engine ended goes on elsewhere
            return
        while due and not connection.is_full and len(batch.tokens) < MAX_TOKENS:
            follow = due.popleft()
            follow.is_due = False
            if self._follows.get(follow.request_id) is not follow:
                continue
            if follow.reader.is_dropped:  # it was slow, but it is there
                self._reattach(follow)
            batch.add(follow)
            if follow.stream.is_finished:
                self._unfollow(follow.request_id)
        stats = self._engine.stats
        output = StepOutput(
            stats.steps,
            tuple(batch.ids),
            tuple(batch.choices),
            tuple(batch.tokens),
            batch.logprobs,
            batch.scored,
            tuple(batch.finishes),
            tuple(batch.notices),
            stats,
        )
        self.send(messages.News(output, batch.errors))
        if due and not connection.is_full and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._flush)

    def _reattach(self, follow: Follow) -> None:
        follow.reader = follow.stream.attach(
            follow.reader.cursors, partial(self._on_update, follow)
        )
