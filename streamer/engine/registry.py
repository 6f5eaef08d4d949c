"""Registry: every stream the engine knows, live ones and those kept for late readers.

Owns the two tables, the bound on waiting requests, and the retention of finished streams; hands a
step's news to the streams it names. Called by AsyncEngine on the loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict

from streamer.core.plan import FinishReason, Notice, NoticeKind, StepOutput
from streamer.engine.stream import TokenStream
from streamer.errors import Overloaded, StreamerError

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
RECENT = 0.1  # weight of the newest request in the mean duration


class Registry:
    """Streams by request id.

    num_ended  requests by the reason of their last finish
    """

    def __init__(self, retain_s: float, retain_bytes: int) -> None:
        self._retain_s = retain_s
        self._retain_bytes = retain_bytes
        self._live: dict[str, TokenStream] = {}
        self._retained: OrderedDict[str, tuple[float, int, TokenStream]] = OrderedDict()
        self._is_quiet = asyncio.Event()
        self._is_quiet.set()
        self._mean_s = MIN_RETRY_S
        self._num_rows = 0  # sequences of live requests that have started and are not paused
        self._num_waiting_rows = 0  # and of those that have not
        self._num_returning = 0  # requests that gave their blocks up: they run before new ones
        self.num_waiting = 0
        self.num_submitted = 0
        self.retained_bytes = 0
        self.num_ended: Counter[FinishReason] = Counter()

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    @property
    def num_retained(self) -> int:
        """Finished streams still here."""
        self._expire()
        return len(self._retained)

    def live(self) -> list[TokenStream]:
        """Streams that have not ended."""
        return list(self._live.values())

    def get(self, request_id: str) -> TokenStream | None:
        """A stream, live or retained."""
        stream = self._live.get(request_id)
        if stream is None:
            self._expire()
            kept = self._retained.get(request_id)
            stream = kept[2] if kept is not None else None
        return stream

    def forget(self, request_id: str) -> None:
        """Retain this one no longer, or not at all if it is live; unknown ids are ignored."""
        kept = self._retained.pop(request_id, None)
        if kept is not None:
            self.retained_bytes -= kept[1]
            kept[2].is_kept = False
        elif request_id in self._live:
            self._live[request_id].is_kept = False

    def require_room(self, max_queue: int, max_num_seqs: int, n: int = 1) -> None:
        """Overloaded if more than `max_queue` choices would wait; idle rows are no queue.

        n  choices of the request that asks
        """
        idle_rows = max(0, max_num_seqs - self._num_rows)
        if self._num_waiting_rows + n <= max_queue + idle_rows:
            return
        turns = self._num_waiting_rows / max_num_seqs
        raise Overloaded(
            f"{self._num_waiting_rows} choices are waiting and {n} more asked for; the limit is "
            f"{max_queue}",
            retry_after_s=min(MAX_RETRY_S, max(MIN_RETRY_S, turns * self._mean_s)),
        )

    def add(self, stream: TokenStream, *, is_told: bool = False) -> int | None:
        """A new request; if it is told of it, its place in the queue as far as is known here."""
        place = self.num_waiting + self._num_returning if is_told else None
        if place is not None:
            stream.notify(Notice(stream.request_id, NoticeKind.WAITING, position=place))
        self._live[stream.request_id] = stream
        self.num_submitted += 1
        self.num_waiting += 1
        self._num_waiting_rows += stream.params.n
        self._is_quiet.clear()
        return place

    def hold(self, request_id: str, is_held: bool) -> None:
        """A stream has just been paused, or is no longer: its rows are others' meanwhile."""
        stream = self._live.get(request_id)
        if stream is not None and stream.is_started:
            self._num_rows += -stream.params.n if is_held else stream.params.n

    async def wait_quiet(self) -> None:
        """Until nothing is live."""
        await self._is_quiet.wait()

    def distribute(self, output: StepOutput) -> None:
        """Hand a step's notices, tokens and finishes to their streams, then wake their readers."""
        live = self._live
        self._num_returning = output.stats.preempted + output.stats.swapped
        touched: list[TokenStream] = []  # twice where a request's rows are not neighbours: harmless
        for notice in output.notices:
            stream = live.get(notice.request_id)
            if stream is not None:
                n, was_started = stream.params.n, stream.is_started
                stream.notify(notice)
                touched.append(stream)
                if stream.is_started and not was_started:
                    self.num_waiting -= 1
                    self._num_waiting_rows -= n
                    self._num_rows += n * stream.is_scheduled
        for request_id, found in output.prompt_logprobs.items():
            if (stream := live.get(request_id)) is not None:
                stream.prompt_logprobs += found
        finishes = {(f.request_id, f.choice): f for f in output.finishes}
        logprobs = output.logprobs
        triples = zip(output.request_ids, output.choices, output.tokens, strict=True)
        last = None
        for i, (request_id, choice, token) in enumerate(triples):
            stream = live.get(request_id)
            if stream is not None:
                if stream is not last:
                    touched.append(stream)
                    last = stream
                finish = finishes.pop((request_id, choice), None) if finishes else None
                stream.push(choice, token, logprobs.get(i) if logprobs else None, finish)
        for (request_id, _), finish in finishes.items():
            stream = live.get(request_id)
            if stream is not None:
                stream.end(finish)
                touched.append(stream)
        for stream in touched:
            stream.wake()
        for finish in output.finishes:
            stream = live.get(finish.request_id)
            if stream is not None and stream.is_finished:
                self._retire(stream, finish.reason)

    def fail_all(self, error: StreamerError) -> None:
        """End every live stream with an error."""
        for stream in self.live():
            stream.fail(error)
            self._retire(stream, FinishReason.FAILED)

    def _retire(self, stream: TokenStream, reason: FinishReason) -> None:
        """From live to retained, within the bounds."""
        del self._live[stream.request_id]
        if stream.is_scheduled:
            self._num_rows -= stream.params.n
        if not stream.is_started:
            self.num_waiting -= 1
            self._num_waiting_rows -= stream.params.n
        self.num_ended[reason] += 1
        total_s = stream.timing.total_s or 0.0
        self._mean_s += RECENT * (total_s - self._mean_s)
        if not self._live:
            self._is_quiet.set()
        if not stream.is_kept:
            return
        size = stream.num_bytes
        self._retained[stream.request_id] = (time.monotonic(), size, stream)
        self.retained_bytes += size
        self._expire()

    def _expire(self) -> None:
        """Forget what is too old or, oldest first, too much."""
        if not self._retained:
            return
        oldest_s = time.monotonic() - self._retain_s
        while self._retained:
            since, size, _ = next(iter(self._retained.values()))
            if since > oldest_s and self.retained_bytes <= self._retain_bytes:
                return
            self._retained.popitem(last=False)
            self.retained_bytes -= size
