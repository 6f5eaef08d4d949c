"""Registry: every stream the engine knows, live ones and those kept for late readers.

Owns the two tables, the bounds on waiting requests, and the retention of finished streams; hands a
step's output to the streams it names. Called by AsyncEngine on the loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from streamer.core.plan import Finish, FinishReason, Notice, NoticeKind, StepOutput
from streamer.engine.load import Load
from streamer.engine.requests import QueueNeeds
from streamer.engine.stream import TokenStream
from streamer.errors import Overloaded, StreamerError

if TYPE_CHECKING:
    from streamer.engine.journal.writer import Journal

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0


class RetainedStream(NamedTuple):
    """One finished stream, and when it was kept."""

    since: float
    num_bytes: int
    tenant: str
    stream: TokenStream


class Retention:
    """Finished streams for late readers: `max_s` seconds, within `max_bytes`.

    Beyond `max_bytes` the tenant with the most bytes loses its oldest stream, so that no tenant
    pushes out the streams of others. `on_drop` is called for each that is not kept any more.
    """

    def __init__(self, max_s: float, max_bytes: int, on_drop: Callable[[str], None]) -> None:
        self._on_drop = on_drop
        self._max_s, self._max_bytes = max_s, max_bytes
        self._kept: OrderedDict[str, RetainedStream] = OrderedDict()
        self._by_tenant: dict[str, OrderedDict[str, None]] = {}
        self._bytes: Counter[str] = Counter()  # by tenant

    @property
    def num_bytes(self) -> int:
        """Of all kept streams."""
        return self._bytes.total()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, stream: TokenStream, tenant: str, now: float) -> None:
        kept = RetainedStream(now, stream.num_bytes, tenant, stream)
        self._kept[stream.request_id] = kept
        self._by_tenant.setdefault(tenant, OrderedDict())[stream.request_id] = None
        self._bytes[tenant] += kept.num_bytes

    def get(self, request_id: str) -> TokenStream | None:
        """A stream that is still kept."""
        kept = self._kept.get(request_id)
        return None if kept is None else kept.stream

    def drop(self, request_id: str) -> TokenStream | None:
        """Keep a stream no longer; returns it, if it was kept."""
        kept = self._kept.pop(request_id, None)
        if kept is None:
            return None
        names = self._by_tenant[kept.tenant]
        del names[request_id]
        self._bytes[kept.tenant] -= kept.num_bytes
        if not names:
            del self._by_tenant[kept.tenant], self._bytes[kept.tenant]
        self._on_drop(request_id)
        return kept.stream

    def expire(self, now: float) -> None:
        """Forget streams older than `max_s`, then those beyond `max_bytes`."""
        while self._kept:
            name, oldest = next(iter(self._kept.items()))
            if oldest.since > now - self._max_s:
                break
            self.drop(name)
        while self._kept and self.num_bytes > self._max_bytes:
            ((largest, _),) = self._bytes.most_common(1)
            self.drop(next(iter(self._by_tenant[largest])))


class Registry:
    """Streams by request id.

    num_ended  requests by the reason of their last finish
    journal    is given the ends of streams, and what is not kept
    """

    def __init__(self, retain_s: float, retain_bytes: int) -> None:
        self._live: dict[str, TokenStream] = {}
        # Of the latest step: the requests that its tokens are of, and their streams. A steady step
        # names the same tuple again.
        self._drawn: tuple[str, ...] = ()
        self._drawn_by: list[TokenStream | None] = []
        self._draw_once = False  # each of them one token
        # Ended here before the scheduler ended them: choices whose finishes are still to come.
        self._leaving: dict[str, int] = {}
        self._retained = Retention(retain_s, retain_bytes, self._dropped)
        self.journal: Journal | None = None
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._load = Load()
        self._num_returning = 0  # requests that gave their blocks up: they run before new ones
        self.num_submitted = 0
        self.num_ended: Counter[FinishReason] = Counter()

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        """Live requests that have never run."""
        return self._load.num_waiting

    @property
    def num_retained(self) -> int:
        """Finished streams still here."""
        self.expire()
        return len(self._retained)

    @property
    def retained_bytes(self) -> int:
        """About the bytes of memory of the retained streams."""
        return self._retained.num_bytes

    def live(self) -> list[TokenStream]:
        """Streams that have not ended."""
        return list(self._live.values())

    def get(self, request_id: str) -> TokenStream | None:
        """A stream, live or retained."""
        stream = self._live.get(request_id)
        if stream is None:
            self.expire()
            stream = self._retained.get(request_id)
        return stream

    def expire(self) -> None:
        """Retain no longer what is too old."""
        self._retained.expire(time.monotonic())

    def is_taken(self, request_id: str) -> bool:
        """Whether a request has this id, or finishes of one that had it are still to come."""
        return request_id in self._leaving or self.get(request_id) is not None

    def forget(self, request_id: str) -> None:
        """Retain this one no longer, or not at all if it is live; unknown ids are ignored."""
        stream = self._retained.drop(request_id)
        if stream is not None:
            stream.is_kept = False
        elif request_id in self._live:
            self._live[request_id].is_kept = False
            self._dropped(request_id)

    def require_room(self, needs: QueueNeeds, max_queue: int, max_num_seqs: int) -> None:
        """Raise Overloaded if a request can't wait: the queue is full, or the wait too long.

        At most `max_queue` choices wait, those for idle rows not counted. A tenant with a key has
        at most as many places as it leaves free, so that there is always room for another.
        """
        load, n = self._load, needs.n
        waiting, own = load.num_waiting_rows, load.waiting_rows(needs.tenant)
        idle = load.num_idle(needs.priority, max_num_seqs)
        now = time.perf_counter()
        free = max_queue + idle - waiting
        if n > free or (needs.tenant and own + n > free):
            used = f"{waiting} choices are waiting" if n > free else f"{own} choices of this key"
            ahead = load.rows_before(needs.priority, needs.tenant, n)
            raise _overloaded(
                f"{used} and {n} more requested; the limit is {max_queue}",
                ahead * load.mean_s(now) / max_num_seqs,
            )
        if needs.max_wait_s is None:
            return
        wait_s = load.wait_s(needs.priority, needs.tenant, n, idle, now)
        if wait_s > needs.max_wait_s:
            raise _overloaded(
                f"{waiting} choices are waiting: it would take about {wait_s:.1f} s to begin, and "
                f"the limit is {needs.max_wait_s:g} s",
                wait_s,
            )

    def add(self, stream: TokenStream, needs: QueueNeeds) -> int | None:
        """A new request; returns its position in the queue, as known here, if it asks for that."""
        queue_position = None
        if stream.is_started:
            stream.notify(Notice(stream.request_id, NoticeKind.PREEMPTED, how="recompute"))
        elif needs.sends_position:
            queue_position = self.num_waiting + self._num_returning
        if queue_position is not None:
            stream.notify(Notice(stream.request_id, NoticeKind.WAITING, position=queue_position))
        self._live[stream.request_id] = stream
        self.num_submitted += 1
        self._load.arrived(
            stream.request_id,
            priority=needs.priority,
            tenant=needs.tenant,
            n=needs.n,
        )
        self._is_idle.clear()
        return queue_position

    def hold(self, request_id: str, is_held: bool) -> None:
        """A stream was paused, or its pause has ended: others may have its rows in between."""
        stream = self._live.get(request_id)
        if stream is None:
            return
        if stream.is_started:
            self._load.moved(request_id, is_scheduled=not is_held, now=time.perf_counter())
        else:
            self._load.hold(request_id, is_held)

    async def wait_idle(self) -> None:
        """Wait until no request is live."""
        await self._is_idle.wait()

    def distribute(self, output: StepOutput) -> None:
        """Hand a step's notices, tokens and finishes to their streams, and wake their readers.

        A stream's readers are woken once, after its last token, while its memory is in the cache: a
        pass over all streams for their tokens and another to wake them read it twice.
        """
        live, now = self._live, time.perf_counter()
        self._num_returning = output.stats.preempted + output.stats.swapped
        touched: list[TokenStream] = []  # woken at the end
        for notice in output.notices:
            stream = live.get(notice.request_id)
            if stream is not None:
                stream.notify(notice)
                touched.append(stream)
                if stream.is_started:
                    self._load.moved(stream.request_id, is_scheduled=stream.is_scheduled, now=now)
        self._load.stepped(now)
        for request_id, found in output.prompt_logprobs.items():
            if (stream := live.get(request_id)) is not None:
                stream.prompt_logprobs += found
        finishes = {(f.request_id, f.choice): f for f in output.finishes}
        self._push(output, finishes, now)
        for (request_id, _), finish in finishes.items():
            stream = live.get(request_id)
            if stream is not None:
                stream.end(finish)
                touched.append(stream)
        for stream in touched:
            stream.wake()
        self._retire_ended(output.finishes)

    def end(self, finishes: Sequence[Finish]) -> None:
        """Hand over finishes that were held back from their steps' outputs."""
        for finish in finishes:
            if (stream := self._live.get(finish.request_id)) is not None:
                stream.end(finish)
                stream.wake()
        self._retire_ended(finishes)

    def _retire_ended(self, finishes: Sequence[Finish]) -> None:
        for finish in finishes:
            stream = self._live.get(finish.request_id)
            if stream is not None and stream.is_finished:
                self._retire(stream, finish.reason)
            elif stream is None and finish.request_id in self._leaving:
                self._leaving[finish.request_id] -= 1
                if not self._leaving[finish.request_id]:
                    del self._leaving[finish.request_id]

    def _push(
        self, output: StepOutput, finishes: dict[tuple[str, int], Finish], now: float
    ) -> None:
        """Hand each token to its stream, with the finish that comes with it, which is taken out of
        `finishes`."""
        ids, choices, logprobs = output.request_ids, output.choices, output.logprobs
        if ids is not self._drawn:
            self._drawn, self._drawn_by = ids, [self._live.get(each) for each in ids]
            self._draw_once = len(set(ids)) == len(ids)
        streams = self._drawn_by
        if self._draw_once and not logprobs:
            ending = {request_id for request_id, _ in finishes}
            for stream, choice, token in zip(streams, choices, output.tokens, strict=True):
                if stream is None:
                    continue
                if ending and stream.request_id in ending:
                    stream.push(
                        choice, token, None, finishes.pop((stream.request_id, choice), None)
                    )
                    stream.wake()
                else:
                    stream.draw(choice, token, now)
            return
        following = (*streams[1:], None) if streams else ()
        drawn = zip(streams, choices, output.tokens, following, strict=True)
        for i, (stream, choice, token, next_stream) in enumerate(drawn):
            if stream is None:
                continue
            finish = None
            if finishes and not (next_stream is stream and choices[i + 1] == choice):
                finish = finishes.pop((ids[i], choice), None)  # of the last token of a run
            stream.push(choice, token, logprobs.get(i) if logprobs else None, finish)
            if next_stream is not stream:
                stream.wake()

    def fail(self, stream: TokenStream, error: StreamerError, *, has_ended: bool = False) -> None:
        """End a live stream with an error, before the scheduler ends its request.

        has_ended  it has no request in a scheduler any more: no finishes are to come
        """
        if not has_ended:
            self._leaving[stream.request_id] = stream.finishes.count(None)
        stream.fail(error)
        self._retire(stream, FinishReason.FAILED)

    def left(self, request_id: str) -> None:
        """No finishes are to come of a request that ended here before."""
        self._leaving.pop(request_id, None)

    def fail_all(self, error: StreamerError) -> None:
        """End every live stream with an error."""
        for stream in self.live():
            self.fail(stream, error)

    def retain(self, stream: TokenStream, tenant: str, age_s: float = 0.0) -> None:
        """Keep a stream that finished `age_s` ago for late readers, within the bounds."""
        now = time.monotonic()
        self._retained.keep(stream, tenant, now - age_s)
        self._retained.expire(now)

    def _dropped(self, request_id: str) -> None:
        if self.journal is not None:
            self.journal.forget(request_id)

    def _retire(self, stream: TokenStream, reason: FinishReason) -> None:
        """Move a stream from live to retained, within the bounds."""
        del self._live[stream.request_id]
        self._drawn, self._drawn_by = (), []
        tenant = self._load.ended(stream.request_id, time.perf_counter())
        self.num_ended[reason] += 1
        if not self._live:
            self._is_idle.set()
        if self.journal is not None and stream.is_durable:
            self.journal.end(stream, is_kept=stream.is_kept and stream.is_stored)
        if stream.is_kept:
            self.retain(stream, tenant)


def _overloaded(message: str, wait_s: float) -> Overloaded:
    return Overloaded(message, retry_after_s=min(MAX_RETRY_S, max(MIN_RETRY_S, wait_s)))
