"""TokenStream: the append-only log of one request's output, with a cursor for each reader.

Owns tokens, text and news of one request, its readers, and what follows from them: pause when they
lag, cancel when the last has left. Lives on the loop; the engine appends, transports and programs
read. It decides nothing about the tokens themselves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Protocol

from streamer.core.plan import Finish, Notice, NoticeKind, TokenLogprob
from streamer.core.sampling import SamplingParams
from streamer.engine.log import ChoiceLog, Delta
from streamer.engine.stats import Timing
from streamer.errors import InvalidRequest, StreamerError
from streamer.tokenizer_text import TextStream

__all__ = ["Control", "Delta", "Reader", "Timing", "TokenStream"]

PROMPT_TOKEN_BYTES = 36  # an int and its place in a tuple


class Control(Protocol):
    """What a stream may ask of its engine."""

    def cancel(self, request_id: str) -> None: ...
    def hold(self, request_id: str, is_held: bool) -> None: ...


class Reader:
    """One reader: what it has been given, and what waits for it; made by `attach`."""

    __slots__ = ("acknowledged", "cursors", "finished", "notices", "number", "on_news", "taken")

    def __init__(self, number: int, cursors: list[int], on_news: Callable[[], None]) -> None:
        self.number = number
        self.on_news = on_news
        self.cursors = cursors
        self.finished = [False] * len(cursors)
        self.notices: dict[NoticeKind, Notice] = {}
        self.taken = sum(cursors)
        self.acknowledged: int | None = None

    @property
    def position(self) -> int:
        """Output tokens it has consumed."""
        return self.taken if self.acknowledged is None else self.acknowledged


class TokenStream:
    """The output of one request, to be read by anybody, any number of times, from anywhere.

    seed           the one used, drawn or given; params has it too, and the clamped max_tokens
    created        unix seconds
    cached_tokens  prompt tokens whose KV was already there, shared_tokens those taken from the
                   request named in share_with; known once it runs
    finishes       a Finish for each choice that has ended
    error          what ended the stream without finishes: the engine's death
    is_paused      the scheduler was asked to pause it
    observers      called when it starts, gets its first token, and ends; must not raise
    """

    def __init__(
        self,
        *,
        request_id: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        token_bytes: Sequence[bytes],
        special: Mapping[int, bytes],
        control: Control,
        detach_s: float | None,
        window: int,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.created = time.time()
        self.cached_tokens = 0
        self.shared_tokens = 0
        self.finishes: list[Finish | None] = [None] * params.n
        self.error: StreamerError | None = None
        self.is_paused = False
        self.observers: list[Callable[[TokenStream], None]] = []
        stop = tuple(s.encode() for s in params.stop)
        shown = {} if params.skip_special_tokens else special
        self._choices = [
            ChoiceLog(TextStream(token_bytes, stop, shown), params.logprobs is not None)
            for _ in range(params.n)
        ]
        self._num_open = params.n
        self._head = 0  # output tokens of all choices
        self._control = control
        self._detach_s = detach_s
        self._window = window
        self._readers: list[Reader] = []
        self._num_readers = 0  # ever
        self._departure: asyncio.TimerHandle | None = None
        self._notice: Notice | None = None
        self._is_held = False  # by the caller of AsyncEngine.pause
        self._is_behind = False  # its readers lag
        self._calm_until = 0  # up to this head no reader that is here now can lag too far
        self._submitted = time.perf_counter()
        self._started: float | None = None
        self._first: float | None = None
        self._last: float | None = None
        self._ended: float | None = None

    # ------------------------------------------------------------ what it is

    @property
    def seed(self) -> int:
        """The 64-bit key of its noise."""
        return self.params.seed or 0

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far, of all choices."""
        return self._head

    @property
    def num_bytes(self) -> int:
        """About what it occupies, for retention."""
        prompt = PROMPT_TOKEN_BYTES * len(self.prompt)
        return sum(c.num_bytes for c in self._choices) + prompt + 2048

    @property
    def num_readers(self) -> int:
        """Readers attached now."""
        return len(self._readers)

    @property
    def is_started(self) -> bool:
        """Whether it has ever run."""
        return self._started is not None

    @property
    def is_scheduled(self) -> bool:
        """Whether it has run and is not paused: it has slots, or waits to have them back."""
        is_paused = self._notice is not None and self._notice.kind is NoticeKind.PAUSED
        return self.is_started and not is_paused

    @property
    def is_finished(self) -> bool:
        """Whether nothing will be added."""
        return not self._num_open or self.error is not None

    @property
    def timing(self) -> Timing:
        """Its times so far."""
        begin, first, last = self._submitted, self._first, self._last
        started, ended = self._started, self._ended
        per_token_s = None
        if first is not None and last is not None and self._head > 1:
            per_token_s = (last - first) / (self._head - 1)
        return Timing(
            queue_s=None if started is None else started - begin,
            prefill_s=None if first is None or started is None else first - started,
            first_token_s=None if first is None else first - begin,
            per_token_s=per_token_s,
            total_s=None if ended is None else ended - begin,
        )

    def text(self, choice: int = 0) -> str:
        """The text of a choice so far."""
        return self._choices[choice].text_from(0)

    def token_ids(self, choice: int = 0) -> tuple[int, ...]:
        """The output tokens of a choice so far."""
        return tuple(self._choices[choice].tokens)

    def logprobs(self, choice: int = 0) -> tuple[TokenLogprob, ...] | None:
        """One a token of a choice so far; None where they were not asked for."""
        return self._choices[choice].logprobs_from(0)

    # ------------------------------------------------------------ reading

    async def read(
        self, after: int | Sequence[int] = 0, *, reader: int | None = None
    ) -> AsyncGenerator[list[Delta | Notice], None]:
        """Everything beyond the cursor, then what comes, one list a wake-up; ends with the stream.

        after   output tokens already seen: one number for every choice, or one a choice
        reader  a number from `new_reader`, for one that will acknowledge

        A list holds notices first, then at most one Delta a choice: what piled up is merged. To be
        closed (contextlib.aclosing): closing detaches this reader, and so does cancelling its task.
        Raises InvalidRequest for a wrong cursor and EngineDead after what came before the death.
        """
        news = asyncio.Event()
        me = self.attach(after, news.set, reader)
        try:
            while True:
                news.clear()
                items = self.take(me)
                if items:
                    yield items
                    self.took(me)
                elif self.is_finished:
                    break
                else:
                    await news.wait()
        finally:
            self.detach(me)
        self.require_no_error()

    async def wait(self) -> None:
        """Until it is finished, as a reader that takes everything; raises what ended it."""
        heads = [len(c.tokens) for c in self._choices]
        async with aclosing(self.read(heads)) as batches:
            async for _ in batches:
                pass

    def new_reader(self) -> int:
        """A number under which a reader can acknowledge."""
        self._num_readers += 1
        return self._num_readers

    def acknowledge(self, reader: int, n: int) -> None:
        """This reader has consumed `n` output tokens in all; repeats and old news are harmless."""
        for each in self._readers:
            if each.number == reader:
                each.acknowledged = max(each.acknowledged or 0, min(n, self._head))
        self._follow_lag()

    def lag(self) -> int:
        """Output tokens that the furthest reader has not consumed; 0 when there is none."""
        if not self._readers:
            return 0
        return self._head - max(r.position for r in self._readers)

    def require_no_error(self) -> None:
        """Raise what ended it without finishes."""
        if self.error is not None:
            raise type(self.error)(self.error.message, code=self.error.code) from self.error

    # ------------------------------------------------------------ reading without waiting

    def attach(
        self, after: int | Sequence[int], on_news: Callable[[], None], number: int | None = None
    ) -> Reader:
        """A new reader, for `take`; to be given to `detach`. Cursor and number as in `read`.

        on_news  called within the loop turn of every step that brought something, and at the end;
                 it must neither raise nor detach: the engine calls it
        """
        n = self.params.n
        cursors = [after] * n if isinstance(after, int) else list(after)
        if len(cursors) != n or any(c < 0 for c in cursors):
            raise InvalidRequest(
                f"a cursor of {n} numbers from 0 on is wanted, got {after}", param="starting_after"
            )
        reader = Reader(self.new_reader() if number is None else number, cursors, on_news)
        if self._notice is not None and not self.is_finished:
            reader.notices[self._notice.kind] = self._notice
        if self._departure is not None:
            self._departure.cancel()
            self._departure = None
        self._readers.append(reader)
        self._calm_until = 0
        return reader

    def take(self, reader: Reader) -> list[Delta | Notice]:
        """What is beyond the reader's cursors; moves them."""
        items: list[Delta | Notice] = []
        if reader.notices:
            items.extend(reader.notices.values())
            reader.notices.clear()
        for choice, log in enumerate(self._choices):
            start, end = reader.cursors[choice], len(log.tokens)
            finish = self.finishes[choice]
            is_news = finish is not None and not reader.finished[choice]
            if start < end or is_news:
                items.append(log.delta(choice, min(start, end), finish))
                reader.cursors[choice] = max(start, end)
                reader.finished[choice] = finish is not None
        return items

    def took(self, reader: Reader) -> None:
        """The reader has consumed what it was given."""
        reader.taken = sum(reader.cursors)
        if self._is_behind:
            self._follow_lag()

    def detach(self, reader: Reader) -> None:
        """The reader reads no more: the last one's going may cancel the request."""
        self._readers.remove(reader)
        if self.is_finished:
            return
        if not self._readers and self._detach_s is not None:
            if self._detach_s <= 0:
                self._control.cancel(self.request_id)
                return
            loop = asyncio.get_running_loop()
            self._departure = loop.call_later(self._detach_s, self._control.cancel, self.request_id)
        self._follow_lag()

    # ------------------------------------------------------------ flow control

    def hold(self, is_held: bool) -> None:
        """Pause it for its caller, whatever its readers do, or stop doing so."""
        self._is_held = is_held
        self._settle()

    def _follow_lag(self) -> None:
        """Pause above the window, resume at half of it; without readers it is not paused."""
        if not self._window:
            return
        lag = self.lag()
        self._calm_until = self._head - lag + self._window
        if lag > self._window:
            self._is_behind = True
        elif lag <= self._window // 2:
            self._is_behind = False
        self._settle()

    def _settle(self) -> None:
        should_pause = self._is_held or self._is_behind
        if should_pause != self.is_paused and not self.is_finished:
            self.is_paused = should_pause
            self._control.hold(self.request_id, should_pause)

    # ------------------------------------------------------------ appending, by Registry alone,
    # which then calls `wake`: a step that brings several tokens wakes its readers once.

    def push(
        self, choice: int, token: int, logprob: TokenLogprob | None, finish: Finish | None
    ) -> None:
        """One more token of a choice, and its end if that is the last one."""
        self._last = time.perf_counter()
        self._head += 1
        self._choices[choice].push(token, logprob, finish)
        if self._first is None:
            self._first = self._last
            self._tell_observers()
        if finish is not None:
            self._close(finish)

    def end(self, finish: Finish) -> None:
        """The end of a choice that got no token in this step."""
        if self.finishes[finish.choice] is None:
            self._choices[finish.choice].end(finish)
            self._close(finish)

    def notify(self, notice: Notice) -> None:
        """What happens while nothing streams."""
        if notice.kind is NoticeKind.RUNNING and self._started is None:
            self._started = time.perf_counter()
            self.cached_tokens = notice.cached_tokens
            self.shared_tokens = notice.shared_tokens
            self._tell_observers()
        self._notice = notice
        for reader in self._readers:
            reader.notices.pop(notice.kind, None)  # the newest of a kind, in order of arrival
            reader.notices[notice.kind] = notice

    def fail(self, error: StreamerError) -> None:
        """End it without finishes, and wake its readers."""
        if not self.is_finished:
            self.error = error
            self._over()
            self.wake()

    def _close(self, finish: Finish) -> None:
        self.finishes[finish.choice] = finish
        self._num_open -= 1
        if not self._num_open:
            self._over()

    def _over(self) -> None:
        self._ended = time.perf_counter()
        self._tell_observers()
        if self._departure is not None:
            self._departure.cancel()
            self._departure = None

    def _tell_observers(self) -> None:
        for observer in self.observers:
            observer(self)

    def wake(self) -> None:
        """Tell the readers that there is something; those who take it at once have no lag."""
        for reader in self._readers:
            reader.on_news()
        if self._window and self._head > self._calm_until:
            self._follow_lag()
