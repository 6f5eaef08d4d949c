"""Journal: the loop's side of the journal, and the thread that writes it.

The loop hands over what happened, in order, and never waits: the thread writes everything that has
come in one transaction. Only `recorded` waits, for the disk. When the disk fails the journal says
so and takes no more, and the server goes on without it; it only tries to delete what must not come
back. Made and called by AsyncEngine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final, Protocol

from msgspec.structs import replace

from streamer.core.plan import Finish, FinishReason, NoticeKind, StepOutput
from streamer.engine.journal.folder import unusable
from streamer.engine.journal.records import Accepted, Ended, Saved, Step, Tail
from streamer.engine.journal.store import MOVED_BYTES, Store
from streamer.engine.requests import GenerateRequest
from streamer.engine.stream import TokenStream

# Records of steps that are kept as they came; then their tokens are moved to their requests. More
# makes the file larger, fewer write to each request more often.
MAX_STEPS: Final = 512
# What is drawn in so long goes in one commit, unless something waits for it, and is drawn again
# after a crash: a commit a step (0.3 ms) cost 4% of the tokens of 32 streams (42 M parameters, 2
# cores of an EPYC Zen 5, 2026-11-22).
GATHER_S: Final = 0.05
MAX_BATCH: Final = 1000  # of what happened, in one transaction
MAX_BEHIND: Final = 20_000  # what the disk has not taken yet: minutes of steps
WAIT_S: Final = 10.0  # for the disk, before a request is accepted without it
# What was deleted is erased from SQLite's log and from steps when nothing has come for so long, and
# while something does this often: it takes two flushes of the disk, for which a request may wait.
QUIET_S: Final = 1.0
ERASE_S: Final = 10.0
RETRY_S: Final = 10.0  # between attempts to delete, after the disk has failed
# Ends that a restart would not come to again.
NOT_DRAWN: Final = (FinishReason.CANCELLED, FinishReason.FAILED)

log = logging.getLogger(__name__)
# What to do, a step, an id to forget, a future to set when all before is on disk, None: close
_Item = Callable[[], None] | StepOutput | str | asyncio.Future[None] | None


class Contexts(Protocol):
    """What a server has beside its requests (GenerateRequest.context), as bytes and back.

    restored  called for each stream that came back, with its context in place
    """

    def encode(self, context: object) -> bytes: ...
    def decode(self, data: bytes) -> object: ...
    def restored(self, stream: TokenStream) -> None: ...


class Journal:
    """An open journal and its thread.

    saved    what it had when it was opened
    epoch    its name, from its first start on
    failure  why it stopped; None: it is written
    """

    def __init__(self, store: Store, saved: list[Saved], contexts: Contexts | None) -> None:
        self.saved = saved
        self.epoch = store.epoch
        self.failure: str | None = None
        self._store = store
        self._contexts = contexts
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[_Item] = SimpleQueue()
        self._waiting: set[asyncio.Future[None]] = set()
        self._next: asyncio.Future[None] | None = None  # will wait for what this turn hands over
        self._is_sealed = self._is_closed = False
        self._is_urgent = threading.Event()
        self._known = {each.request_id for each in saved}  # ids that the journal has
        # of the thread
        self._live: dict[str, Tail] = {}
        self._forgotten: set[str] = set()  # whose tokens are in steps, perhaps
        self._num_steps = 0
        self._erase_at = 0.0  # by the monotonic clock, the earliest
        self._touched: dict[str, Tail] = {}  # that have more than is in steps
        self._drawn = _nothing()
        # Of the latest steps, which named the same requests: these, and a row of tokens each.
        self._names: tuple[str, ...] = ()
        self._choices: tuple[int, ...] = ()
        self._tails: list[Tail | None] = []
        self._rows: list[tuple[int, ...]] = []
        self._thread = threading.Thread(target=self._run, name="streamer-journal", daemon=True)
        self._thread.start()

    @classmethod
    async def open(cls, folder: Path, contexts: Contexts | None) -> Journal:
        """The journal in this folder, which is made if it is not there; ConfigError if it can't."""

        def read() -> tuple[Store, list[Saved]]:
            store = Store(folder)
            try:
                return store, store.read()
            except (sqlite3.Error, OSError) as e:  # what was read can't be written back
                store.close()
                raise unusable(folder, e) from e
            except BaseException:
                store.close()
                raise

        store, saved = await asyncio.to_thread(read)
        return cls(store, saved, contexts)

    # ------------------------------------------------------------ on the loop

    def has(self, request_id: str) -> bool:
        """Whether it has this request, live or kept."""
        return request_id in self._known

    def accept(self, request: GenerateRequest, created: float) -> None:
        """A request was taken, perhaps with what it drew in another engine."""
        if self.failure is None:
            self._known.add(request.request_id)
            self._put(partial(self._accept, request, created))

    def restore(self, request_id: str, starts: list[int], tries: int) -> None:
        """A request goes on with token number `starts` of each choice."""
        self._known.add(request_id)
        self._put(partial(self._restore, request_id, starts, tries))

    def step(self, output: StepOutput) -> None:
        """A step's tokens and finishes."""
        if output.request_ids or output.finishes or output.notices or output.prompt_logprobs:
            self._put(output)

    def end(self, stream: TokenStream, *, is_kept: bool) -> None:
        """A stream has ended, and is kept or forgotten; once sealed, it goes on at the next start.

        After a failure its end can't be written: it is drawn again at the next start, or forgotten,
        where that would be another end.
        """
        if self._is_sealed:
            return
        if not is_kept:
            self.forget(stream.request_id)
            return
        if self.failure is not None:
            if any(f is None or f.reason in NOT_DRAWN for f in stream.finishes):
                self.forget(stream.request_id)
            return
        error = None if stream.error is None else stream.error.message
        ended = Ended(time.time(), stream.timing, error)
        finishes = {f.choice: f for f in stream.finishes if f is not None}
        self._put(partial(self._end, stream.request_id, ended, finishes))

    def forget(self, request_id: str) -> None:
        """A request is not kept any more, sealed or not; unknown ids are ignored."""
        if request_id in self._known and not self._is_closed:
            self._known.discard(request_id)
            self._queue.put(request_id)

    def seal(self) -> None:
        """Write nothing that happens from here on, but what is forgotten: what runs goes on at the
        next start."""
        self._is_sealed = True

    async def recorded(self) -> None:
        """Wait until the disk has all that was handed over, or the journal has failed."""
        if self.failure is not None or self._is_closed:
            return
        if self._next is None:  # all that ask in this turn of the loop wait together
            self._next = self._loop.create_future()
            self._loop.call_soon(self._hand_over, self._next)
        await asyncio.shield(self._next)

    def _hand_over(self, done: asyncio.Future[None]) -> None:
        """Have this future set when all that was handed over before is on disk."""
        self._next = None
        if self.failure is not None or self._is_closed:
            done.set_result(None)
            return
        late = f"the disk did not answer within {WAIT_S:g} s"
        timer = self._loop.call_later(WAIT_S, self._fail, late)
        done.add_done_callback(lambda _: timer.cancel())
        done.add_done_callback(self._waiting.discard)
        self._waiting.add(done)
        self._queue.put(done)
        self._is_urgent.set()

    async def close(self, *, is_orderly: bool = True) -> None:
        """Write what was handed over, and let go of the file; a disk that hangs is left behind.

        is_orderly  no request is to blame for the end: what runs has not been tried in vain
        """
        self._is_sealed = self._is_closed = True
        if is_orderly:
            self._queue.put(self._clear_tries)
        self._queue.put(None)
        self._is_urgent.set()
        deadline = self._loop.time() + WAIT_S
        while self._thread.is_alive() and self._loop.time() < deadline:
            await asyncio.to_thread(self._thread.join, 0.1)

    def _put(self, work: _Item) -> None:
        if self.failure is None and not self._is_sealed:
            self._queue.put(work)
            if self._queue.qsize() > MAX_BEHIND:
                self._fail(f"the disk is {MAX_BEHIND} writes behind")

    def _fail(self, why: str) -> None:
        """Stop, and release what waits: the server goes on without a journal."""
        if self.failure is None:
            self.failure = why
            log.error(
                "the journal in %s has failed (%s): responses do not outlive this process now",
                self._store.folder,
                why,
            )
        _set([*self._waiting])

    # ------------------------------------------------------------ on the thread

    def _run(self) -> None:
        items: list[_Item] = []
        try:
            while None not in items:
                items = self._gather()
                self._write(items)
                is_last = None in items
                if self._store.has_deleted and (is_last or time.monotonic() >= self._erase_at):
                    self._erase()
        except Exception as e:
            is_disk = isinstance(e, sqlite3.Error | OSError)
            if not is_disk:
                log.exception("the journal has a fault")
            self._tell(self._fail, str(e) if is_disk else repr(e))
            self._delete(items)
        self._store.close()

    def _delete(self, items: list[_Item]) -> None:
        """After a failure: delete what is forgotten, as soon as the disk takes it, until closed."""
        gone = {item for item in items if isinstance(item, str)}
        is_open, due = None not in items, 0.0
        while is_open:
            with contextlib.suppress(Empty):
                item = self._queue.get(timeout=max(0.0, due - time.monotonic()) if gone else None)
                is_open = item is not None
                if isinstance(item, str):
                    gone.add(item)
            if gone and (not is_open or time.monotonic() >= due):
                due = time.monotonic() + RETRY_S
                with contextlib.suppress(sqlite3.Error, OSError):
                    self._store.undo()
                    self._store.begin(is_durable=True)
                    for request_id in gone:
                        self._store.delete(request_id)
                    self._store.commit()
                    self._store.erase()
                    gone.clear()

    def _gather(self) -> list[_Item]:
        """What has come; sleeps until something has, and gives room back first if nothing runs."""
        if not self._live and self._queue.empty():
            self._store.shrink(MOVED_BYTES)
        items = [self._first()]
        self._is_urgent.wait(GATHER_S)
        self._is_urgent.clear()
        while len(items) < MAX_BATCH and not self._queue.empty():  # no other thread takes
            items.append(self._queue.get())
        return items

    def _first(self) -> _Item:
        """What comes next; what was deleted is erased while nothing does."""
        while self._store.has_deleted:
            with contextlib.suppress(Empty):
                return self._queue.get(timeout=QUIET_S)
            self._erase()
        return self._queue.get()

    def _erase(self) -> None:
        """Leave nothing of what was deleted in the files: its tokens in steps, and SQLite's log."""
        if self._forgotten and self._num_steps:
            self._store.begin(is_durable=False)
            self._move()
            self._store.commit()
        self._store.erase()
        self._erase_at = time.monotonic() + ERASE_S

    def _write(self, items: list[_Item]) -> None:
        """Write all of it in one transaction."""
        futures = [item for item in items if isinstance(item, asyncio.Future)]
        self._store.begin(is_durable=bool(futures))
        for item in items:
            if isinstance(item, StepOutput):
                self._step(item)
            elif isinstance(item, str):
                self._forget(item)
            elif callable(item):
                item()
        self._flush()
        self._store.commit()
        if futures:
            self._tell(_set, futures)

    def _accept(self, request: GenerateRequest, created: float) -> None:
        context = None
        if self._contexts is not None and request.context is not None:
            context = self._contexts.encode(request.context)
        if request.request_id in self._forgotten:  # an earlier one's tokens are not its own
            self._flush()
            self._move()
        bare = replace(request, context=None, progress=None)
        self._store.add_request(Accepted(bare, context, created))
        tail = self._live[request.request_id] = Tail(request.params.n)
        if request.progress is not None and request.progress.has_begun:
            tail.take(request.request_id, request.progress)
            self._store.add_part(request.request_id, tail.part())
            tail.go_on()

    def _restore(self, request_id: str, starts: list[int], tries: int) -> None:
        tail = self._live[request_id] = Tail(len(starts))
        tail.restart(starts)
        self._store.tried(request_id, tries, sum(starts))

    def _step(self, output: StepOutput) -> None:
        """Take what a step drew. A steady step names the same tuples as the one before, each choice
        once: its tokens wait for others, as pushing one by one took 1 us a token."""
        names, choices, logprobs = output.request_ids, output.choices, output.logprobs
        if names is not self._names or choices is not self._choices or logprobs:
            self._spread()
            self._names, self._choices = names, choices
            self._tails = [self._live.get(name) for name in names]
        if logprobs:
            for i, tail in enumerate(self._tails):
                if tail is not None:
                    tail.push(choices[i], output.tokens[i], logprobs.get(i))
                    self._touched[names[i]] = tail
        elif names:
            self._rows.append(output.tokens)
        if output.finishes or output.notices or output.prompt_logprobs:
            self._rest_of_step(output, self._drawn)

    def _spread(self) -> None:
        """Give the rows of tokens to their requests, and forget whose they were."""
        if self._rows:
            columns = zip(*self._rows, strict=True)
            drawn = zip(self._names, self._tails, self._choices, columns, strict=True)
            for name, tail, choice, tokens in drawn:
                if tail is not None:
                    tail.tokens[choice] += tokens
                    self._touched[name] = tail
            self._rows = []
        self._names = ()

    def _flush(self) -> None:
        """Write what was drawn in the steps of this transaction."""
        self._spread()
        for request_id, tail in self._touched.items():
            tail.add_to(self._drawn, request_id)
        self._touched = {}
        if self._drawn != _nothing():
            self._store.add_step(self._drawn)
            self._drawn = _nothing()
            self._num_steps += 1
            if self._num_steps >= MAX_STEPS:
                self._move()

    def _rest_of_step(self, output: StepOutput, step: Step) -> None:
        live = self._live
        for request_id, found in output.prompt_logprobs.items():
            if request_id in live:
                step.prompt_logprobs[request_id] = (
                    *step.prompt_logprobs.get(request_id, ()),
                    *found,
                )
                live[request_id].prompt_logprobs += found
        for finish in output.finishes:
            if (tail := live.get(finish.request_id)) is not None:
                step.finishes.append(finish)
                tail.finishes[finish.choice] = finish
        for notice in output.notices:
            tail = live.get(notice.request_id)
            if notice.kind is NoticeKind.RUNNING and tail is not None and tail.began is None:
                step.began.append(notice)
                tail.began = notice

    def _move(self) -> None:
        """Move the tokens of all steps to their requests."""
        for request_id, tail in self._live.items():
            if not tail.is_empty:
                self._store.add_part(request_id, tail.part())
                tail.go_on()
        self._store.drop_steps()
        self._num_steps = 0
        self._forgotten.clear()

    def _end(self, request_id: str, ended: Ended, finishes: dict[int, Finish]) -> None:
        self._flush()
        tail = self._live.pop(request_id, None)
        if tail is not None:
            tail.finishes = finishes  # with the details that the loop gave them
            self._store.add_part(request_id, tail.part(ended))
            if not self._live and self._num_steps:
                self._move()

    def _clear_tries(self) -> None:
        """The process ends in order, which counts against no request that runs."""
        for request_id, tail in self._live.items():
            self._store.tried(request_id, 0, tail.num_tokens)

    def _forget(self, request_id: str) -> None:
        self._flush()
        self._live.pop(request_id, None)
        self._store.delete(request_id)
        self._forgotten.add(request_id)
        if not self._live and self._num_steps:
            self._move()

    def _tell(self, method: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed
            self._loop.call_soon_threadsafe(method, *args)


def _nothing() -> Step:
    return Step([], [], [], [], {}, {}, [], [])


def _set(futures: Iterable[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
