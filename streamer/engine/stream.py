"""TokenStream: the append-only log of one request's output, with a cursor for each reader.

Owns tokens, text and notices of one request, its readers, and what follows from them: pause when
they lag, cancel when the last has left. Lives on the loop; the engine appends, transports and
programs read. It decides nothing about the tokens themselves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from streamer.constraints.reasoning import Place
from streamer.core.plan import Drawn, Finish, FinishReason, Notice, NoticeKind, TokenLogprob
from streamer.engine.flow import Control, Flow, Limits, Reader
from streamer.engine.log import (
    PROMPT_TOKEN_BYTES,
    WRITTEN,
    ChoiceLog,
    Delta,
    bytes_of,
    bytes_of_params,
)
from streamer.engine.refusals import fresh_copy
from streamer.engine.requests import GenerateRequest, Progress, Timing
from streamer.errors import InvalidRequest, ReaderTooSlow, StreamerError
from streamer.tokenizer.text import TextStream

__all__ = ["Delta", "Timing", "TokenStream"]

NEVER, BEHIND = 1 << 62, -1  # more tokens than a stream ever has, and fewer
STREAM_BYTES = 1300  # of a stream without its choices


class TokenStream:
    """The output of one request, for any number of readers, each from any token on.

    seed           the one used, drawn or given; params has it too, and the clamped max_tokens
    created        unix seconds
    cached_tokens  prompt tokens whose KV was already there, shared_tokens those taken from the
                   request named in share_with; known once it runs
    copied_tokens  those copied out of shared blocks before a write (see Finish); final at its end
    proposed_tokens, accepted_tokens  by speculation (see Finish); final at its end
    finishes       a Finish for each choice that has ended
    prompt_logprobs  one a prompt token but the first, if requested: complete before the first
                   output token
    error          what ended the stream without finishes: the engine's death
    context        GenerateRequest.context, unchanged
    request        as it was accepted, without its progress and prediction
    is_kept, is_restored  it is retained after its end; it had progress when it was submitted
    is_durable, is_stored  as in GenerateRequest
    cut_off_by     why it is cancelled, the `detail` of its finishes then: SHUTDOWN, STEERED
    observers      called when it starts, gets its first token, and ends; must not raise
    """

    # An instance with more than 30 attributes and no slots has a dict of its own: a step of 4,096
    # streams took 10 ms to distribute then, not 5 (EPYC Zen 5, Python 3.11, 2026-11-23).
    __slots__ = (
        "__weakref__",
        "_choices",
        "_context_bytes",
        "_ended",
        "_first",
        "_flow",
        "_head",
        "_last",
        "_no_lag_until",
        "_notice",
        "_num_open",
        "_num_readers",
        "_only",
        "_readers",
        "_reasoned",
        "_reasoning",
        "_started",
        "_submitted",
        "_token_texts",
        "accepted_tokens",
        "cached_tokens",
        "context",
        "copied_tokens",
        "created",
        "cut_off_by",
        "error",
        "finishes",
        "is_durable",
        "is_kept",
        "is_restored",
        "is_stored",
        "observers",
        "params",
        "prompt",
        "prompt_logprobs",
        "proposed_tokens",
        "request",
        "request_id",
        "shared_tokens",
    )

    def __init__(
        self,
        request: GenerateRequest,
        limits: Limits,
        control: Control,
        token_bytes: Sequence[bytes],
        special: Mapping[int, bytes],
    ) -> None:
        self.request_id = request.request_id
        self.prompt = request.prompt
        self.params = params = request.params
        self.created = time.time()
        self.cached_tokens = 0
        self.shared_tokens = 0
        self.copied_tokens = 0
        self.proposed_tokens = 0
        self.accepted_tokens = 0
        self.finishes: list[Finish | None] = [None] * params.n
        self.prompt_logprobs: list[TokenLogprob] = []
        self.error: StreamerError | None = None
        self.context = request.context
        self.request = request
        if request.progress is not None or request.prediction:
            self.request = replace(request, progress=None, prediction=())
        self.is_kept = True
        self.is_durable, self.is_stored = request.is_durable, request.is_stored
        self.cut_off_by: str | None = None
        self.observers: list[Callable[[TokenStream], None]] = []
        stop = tuple(s.encode() for s in params.stop)
        shown = special
        if params.skip_special_tokens:
            shown = {i: special[i] for i in request.shown if i in special}
        self._choices = [
            ChoiceLog(TextStream(token_bytes, stop, shown), params.logprobs is not None)
            for _ in range(params.n)
        ]
        # Its choice, while it is the only one and has not ended.
        self._only = self._choices[0] if params.n == 1 else None
        self._num_open = params.n
        self._head = 0  # output tokens of all choices
        self._context_bytes = request.context_bytes
        self._flow = Flow(self.request_id, control, limits, lambda: self._drop(self._readers[:]))
        self._readers: list[Reader] = []
        self._num_readers = 0  # ever
        self._notice: Notice | None = None
        self.is_restored = request.progress is not None
        # Up to this head no reader that is here now can lag too far; BEHIND: one does.
        self._no_lag_until = 0
        self._submitted = time.perf_counter()
        self._started: float | None = None
        self._first: float | None = None
        self._last: float | None = None
        self._ended: float | None = None
        self._reasoning = request.reasoning
        self._token_texts = token_bytes, special
        self._reasoned = 0, 0  # tokens of reasoning among the first output tokens, and these
        if request.progress is not None:
            self._restore(request.progress)

    def _restore(self, progress: Progress) -> None:
        """Become what the stream was in the engine before this one."""
        self.created = progress.created
        self.cached_tokens = progress.cached_tokens
        self.shared_tokens = progress.shared_tokens
        self.prompt_logprobs += progress.prompt_logprobs
        self._submitted -= max(0.0, time.time() - progress.created)
        if progress.has_begun:
            timing, now = progress.timing, time.perf_counter()
            self._started = now if timing.queue_s is None else self._submitted + timing.queue_s
            first_s = timing.first_token_s
            self._first = now if first_s is None else self._submitted + first_s
            self._head = sum(len(drawn.tokens) for drawn in progress.outputs)
            between_s = (timing.per_token_s or 0.0) * max(0, self._head - 1)
            self._last = self._first + between_s
        for choice, drawn in enumerate(progress.outputs):
            self._choices[choice].restore(drawn)
            if drawn.finish is not None:
                self._close(drawn.finish)
        if self.is_finished and progress.timing.total_s is not None:
            self._ended = self._submitted + progress.timing.total_s

    # ------------------------------------------------------------ what it is

    @property
    def seed(self) -> int:
        """The 64-bit key of the request's noise."""
        return self.params.seed or 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far, of all choices."""
        return self._head

    @property
    def reasoning_tokens(self) -> int:
        """Output tokens so far that are the model's reasoning, of all choices: a pass over all."""
        count, seen = self._reasoned
        if self._reasoning is not None and seen != self._head:
            places = self.places()
            for place, log, finish in zip(places, self._choices, self.finishes, strict=True):
                place.pass_over(log.tokens[: None if finish is None else finish.num_tokens])
            count = sum(place.num_tokens for place in places)
            self._reasoned = count, self._head
        return count

    def places(self) -> list[Place]:
        """The beginning of each choice, to be followed; empty where no reasoning is known."""
        if self._reasoning is None:
            return []
        token_bytes, special = self._token_texts

        def text_of(token: int) -> bytes:
            found = special.get(token)
            return token_bytes[token] if found is None else found

        return [Place(self._reasoning, text_of) for _ in self._choices]

    @property
    def num_bytes(self) -> int:
        """About the bytes of memory the stream occupies, for retention."""
        request_bytes = PROMPT_TOKEN_BYTES * len(self.prompt) + bytes_of_params(self.params)
        output_bytes = sum(c.num_bytes for c in self._choices) + bytes_of(self.prompt_logprobs)
        return request_bytes + output_bytes + self._context_bytes + STREAM_BYTES

    @property
    def is_paused(self) -> bool:
        """Whether the scheduler was asked to pause the request."""
        return self._flow.is_paused

    @property
    def num_readers(self) -> int:
        """Readers attached now."""
        return len(self._readers)

    @property
    def is_started(self) -> bool:
        """Whether the request has ever run."""
        return self._started is not None

    @property
    def is_scheduled(self) -> bool:
        """Whether the request ran and is not paused: it has rows, or waits to have them back."""
        return self.is_started and not self.is_paused

    @property
    def is_finished(self) -> bool:
        """Whether nothing will be added."""
        return not self._num_open or self.error is not None

    @property
    def timing(self) -> Timing:
        """The request's times so far."""
        marks = (self._submitted, self._started, self._first, self._last, self._ended)
        return Timing.of(*marks, num_tokens=self._head)

    @property
    def progress(self) -> Progress:
        """What another engine needs to go on from here: a pass over all tokens."""
        outputs = tuple(
            Drawn(tuple(log.tokens), log.logprobs_from(0) or (), finish)
            for log, finish in zip(self._choices, self.finishes, strict=True)
        )
        return Progress(
            outputs=outputs,
            created=self.created,
            prompt_logprobs=tuple(self.prompt_logprobs),
            timing=self.timing,
            cached_tokens=self.cached_tokens,
            shared_tokens=self.shared_tokens,
        )

    def text(self, choice: int = 0) -> str:
        """The text of a choice so far."""
        return self._choices[choice].text_from(0)

    def text_before(self, token: int, choice: int = 0) -> str:
        """The text that the first `token` output tokens had released."""
        whole = self.text(choice)
        return whole[: len(whole) - len(self._choices[choice].text_from(token))]

    def has_rest(self, choice: int = 0) -> bool:
        """Whether the choice's end released text that no token had."""
        return self._choices[choice].has_rest

    def num_shown(self, end: int, choice: int = 0) -> int:
        """Of the first `end` output tokens, those up to the last one that released text."""
        return self._choices[choice].num_shown(end)

    def token_ids(self, choice: int = 0, start: int = 0) -> tuple[int, ...]:
        """The output tokens of a choice so far, from this one on."""
        return tuple(self._choices[choice].tokens[start:])

    def logprobs(self, choice: int = 0) -> tuple[TokenLogprob, ...] | None:
        """One a token of a choice so far; None where they were not requested."""
        return self._choices[choice].logprobs_from(0)

    # ------------------------------------------------------------ reading

    async def read(
        self, after: int | Sequence[int] = 0, *, reader: int | None = None
    ) -> AsyncGenerator[list[Delta | Notice], None]:
        """All output beyond the cursor, then new output, a list per wake-up; ends with the stream.

        after   output tokens already seen: one number for every choice, or one a choice
        reader  a number from `new_reader`, for one that will acknowledge

        A list holds notices first, then at most one Delta a choice: what piled up is merged. To be
        closed (contextlib.aclosing): closing detaches this reader, and so does cancelling its task.
        Raises InvalidRequest for a wrong cursor, ReaderTooSlow after lagging for too long, and
        EngineDead after what came before the death.
        """
        updated = asyncio.Event()
        me = self.attach(after, updated.set, reader)
        try:
            while True:
                updated.clear()
                items = self.take(me)
                if items:
                    yield items
                    self.took(me)
                elif self.is_over(me):
                    break
                else:
                    await updated.wait()
        finally:
            self.detach(me)

    async def wait(self) -> None:
        """Wait for the end, as a reader that takes everything; raises the stream's error."""
        is_over = asyncio.Event()

        def pass_over() -> None:  # a token wakes no task, and its text is not made
            me.taken = me.given = self._head
            if self.is_finished or me.is_dropped:
                is_over.set()

        me = self.attach([len(c.tokens) for c in self._choices], pass_over)
        try:
            pass_over()
            await is_over.wait()
            self.is_over(me)
        finally:
            self.detach(me)

    def new_reader(self) -> int:
        """A number under which a reader can acknowledge."""
        self._num_readers += 1
        return self._num_readers

    def acknowledge(self, reader: int, n: int) -> None:
        """The reader has consumed `n` output tokens in all; repeated or lower `n` are harmless."""
        for each in self._readers:
            if each.number == reader:
                each.acknowledged = max(each.acknowledged or 0, min(n, self._head))
                self._update_lag()

    def lag(self) -> int:
        """Output tokens that the furthest reader has not consumed; 0 when there is none."""
        if not self._readers:
            return 0
        return self._head - max(r.position for r in self._readers)

    def split(self, delta: Delta) -> Iterator[Delta]:
        """A delta of this stream as one a token, for a reader that must not see them merged."""
        return self._choices[delta.choice].split(delta)

    # ------------------------------------------------------------ reading without waiting

    def attach(
        self, after: int | Sequence[int], on_update: Callable[[], None], number: int | None = None
    ) -> Reader:
        """A new reader, for `take`; to be given to `detach`. Cursor and number as in `read`.

        on_update  called within the loop turn of every step that brought something, and at the end;
                 it must neither raise nor detach: the engine calls it
        """
        cursors = self.cursors_at(after)
        reader = Reader(self.new_reader() if number is None else number, cursors, on_update)
        if self._notice is not None and not self.is_finished:
            reader.notices[self._notice.kind] = self._notice
        is_first = not self._readers
        self._readers.append(reader)
        if not self.is_finished:
            self._flow.reader_attached(is_first)
            self._update_lag()
        return reader

    def cursors_at(self, after: int | Sequence[int]) -> list[int]:
        """A cursor in each choice, none beyond what is there.

        Raises InvalidRequest for a cursor beyond the tokens of a choice that has not ended; in one
        that has ended (its end has a number too) it is cut to the last. A reader of a restored
        stream may have seen tokens that are still to be drawn again: those are left out for it.
        """
        n = self.params.n
        cursors = [after] * n if isinstance(after, int) else list(after)
        if len(cursors) != n or any(c < 0 for c in cursors):
            raise InvalidRequest(
                f"the cursor must be {n} numbers of 0 or more, got {after}", param="starting_after"
            )
        for choice, log in enumerate(self._choices):
            head, is_live = len(log.tokens), self.finishes[choice] is None and self.error is None
            if cursors[choice] > head and is_live and self.is_restored:
                cursors[choice] = min(cursors[choice], self.params.max_tokens or head)
                continue
            if cursors[choice] > head and is_live:
                raise InvalidRequest(
                    f"the cursor is {cursors[choice] - head} tokens beyond the {head} there are",
                    param="starting_after",
                )
            cursors[choice] = min(cursors[choice], head)
        return cursors

    def take(self, reader: Reader) -> list[Delta | Notice]:
        """The notices and tokens beyond the reader's cursors, which move to the end."""
        only = self._only
        if only is not None and not reader.notices:  # most often: it spares the loop
            start, end = reader.cursors[0], self._head
            reader.given = end
            if start >= end:
                return []
            reader.cursors[0] = end
            return [only.delta(0, start, None)]
        items: list[Delta | Notice] = []
        if reader.notices:
            items.extend(reader.notices.values())
            reader.notices.clear()
        cursors, finished = reader.cursors, reader.finished
        for choice, log in enumerate(self._choices):
            start, end = cursors[choice], len(log.tokens)
            finish = self.finishes[choice]
            if start < end:
                cursors[choice] = end
            elif finish is None or finished[choice]:
                continue
            else:
                start = end
            items.append(log.delta(choice, start, finish))
            if finish is not None:
                finished[choice] = True
        reader.given = self._head
        return items

    def took(self, reader: Reader) -> None:
        """The reader has consumed what `take` gave it."""
        reader.taken = reader.given
        if self._head > self._no_lag_until:
            self._update_lag()

    def is_over(self, reader: Reader) -> bool:
        """Whether nothing more comes to a reader that was given everything so far.

        Raises ReaderTooSlow if the reader was dropped, or the error that ended the stream.
        """
        if reader.is_dropped:
            raise ReaderTooSlow(
                f"this reader fell more than {self._flow.limits.window} tokens behind and "
                f"stayed there; resume the stream where it left off"
            )
        if self.error is not None:
            raise fresh_copy(self.error)
        return self.is_finished

    def detach(self, reader: Reader) -> None:
        """Remove a reader; removing the last one may cancel the request."""
        if reader.is_dropped:
            return
        self._readers.remove(reader)
        if not self._readers:
            self._flow.last_reader_left()
        self._update_lag()

    def miss(self) -> None:
        """The expected reader will not come: as if the last reader had left."""
        if not self._readers:
            self._flow.reader_missed()

    # ------------------------------------------------------------ flow control

    def hold(self, is_held: bool) -> None:
        """Pause the request for its caller, whatever its readers do, or end that pause."""
        self._flow.hold(is_held)

    def _update_lag(self) -> None:
        if self._readers:
            lag = self.lag()
            window = self._flow.limits.window
            self._no_lag_until = self._head - lag + window if window else NEVER
            self._flow.update_lag(lag)
            if self._flow.is_behind:
                self._no_lag_until = BEHIND

    def drop(self, reader: int) -> None:
        """Drop a reader whose transport takes nothing: its `read` raises ReaderTooSlow."""
        self._drop([r for r in self._readers if r.number == reader])

    def _drop(self, readers: Sequence[Reader]) -> None:
        for reader in readers:
            self._readers.remove(reader)
            reader.is_dropped = True
            reader.on_update()
        if readers and not self._readers:
            self._flow.last_reader_dropped()
        self._update_lag()

    # ------------------------------------------------------------ appending, by Registry alone,
    # which then calls `wake`: a step that brings several tokens wakes its readers once.

    def push(
        self, choice: int, token: int, logprob: TokenLogprob | None, finish: Finish | None
    ) -> None:
        """One more token of a choice, and its end if that is the last one."""
        self._last = now = time.perf_counter()
        self._head += 1
        self._choices[choice].push(token, logprob, finish)
        if self._first is None:
            self._first = now
            self._notify_observers()
        if finish is not None:
            self._close(finish)

    def draw(self, choice: int, token: int, now: float) -> None:
        """The only token that a step brings, without log probability or end: as `push` and `wake`,
        and faster where it is the only choice."""
        only = self._only
        if only is None or self._first is None or not only.is_simple:
            self.push(choice, token, None, None)
            self.wake()
            return
        self._last = now
        self._head = head = self._head + 1
        only.tokens.append(token)
        if not head % WRITTEN:
            only.write()
        for reader in self._readers:
            reader.on_update()
        if head > self._no_lag_until:
            self._update_lag()

    def end(self, finish: Finish) -> None:
        """The end of a choice that got no token in this step."""
        if self.finishes[finish.choice] is None:
            self._choices[finish.choice].end(finish)
            self._close(finish)

    def notify(self, notice: Notice) -> None:
        """Pass a notice to the readers; the first RUNNING starts the stream's times."""
        if notice == self._notice:  # a replica's, after its ingress's own
            return
        if notice.kind is NoticeKind.RUNNING and self._started is None:
            self._started = max(self._submitted, time.perf_counter() - notice.age_s)
            self.cached_tokens, self.shared_tokens = notice.cached_tokens, notice.shared_tokens
            self._notify_observers()
        self._notice = notice
        for reader in self._readers:
            reader.notices.pop(notice.kind, None)  # the newest of a kind, in order of arrival
            reader.notices[notice.kind] = notice

    def fail(self, error: StreamerError) -> None:
        """End the stream with an error, without finishes, unless it has ended; wake its readers."""
        if not self.is_finished:
            self.error = error
            self._set_ended()
        self.wake()  # where distributing its end has failed, no reader knows of it

    def _close(self, finish: Finish) -> None:
        if self.cut_off_by is not None and finish.reason is FinishReason.CANCELLED:
            finish = replace(finish, detail=self.cut_off_by)
        self.finishes[finish.choice] = finish
        self.copied_tokens = finish.copied_tokens  # it only grows, and finishes come in order
        self.proposed_tokens += finish.proposed_tokens
        self.accepted_tokens += finish.accepted_tokens
        self._num_open -= 1
        self._only = None
        if not self._num_open:
            self._set_ended()

    def _set_ended(self) -> None:
        self._ended = time.perf_counter()
        self._notify_observers()
        self.observers.clear()  # they hold other streams, which would be kept as long as this one
        self._flow.end()

    def _notify_observers(self) -> None:
        for observer in self.observers:
            observer(self)

    def wake(self) -> None:
        """Call the readers' `on_update`; a reader that takes it at once has no lag."""
        for reader in self._readers:
            reader.on_update()
        if self._head > self._no_lag_until:
            self._update_lag()
