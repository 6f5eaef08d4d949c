"""Pool: a few threads for work on texts, which may hang: templates and tokenizers are not ours.

Owns the threads and what is under way in them. Work that takes too long is given up: its caller
gets an error, and its thread is interrupted, so that a template's endless loop ends. If all threads
hang nevertheless, `on_hung` is called. Made by Prompts, called on the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from streamer.engine.refusals import fresh_copy
from streamer.errors import EngineDead, PoolHung, RequestFailed

PROMPT_TIMEOUT = "prompt_timeout"
CHECKS = 4  # in the time that work may take
T = TypeVar("T")

log = logging.getLogger(__name__)


class _Interrupted(BaseException):
    """Raised in a thread whose work is given up; not to be caught by what it runs."""


class _Call:
    """One call: made and ended on the loop, run in a thread.

    began_s         when a thread took it (time.monotonic), None before
    num_interrupts  how often its thread was to be interrupted because it took too long
    on_free         called on the loop when no thread has it any more
    """

    __slots__ = ("began_s", "future", "num_interrupts", "on_free", "work")

    def __init__(
        self, work: Callable[[], Any], future: asyncio.Future[Any], on_free: Callable[[], None]
    ) -> None:
        self.work = work
        self.future = future
        self.on_free = on_free
        self.began_s: float | None = None
        self.num_interrupts = 0


class _Worker:
    """One thread and its current call. A daemon: what hangs must not keep a program from ending."""

    def __init__(self, calls: SimpleQueue[_Call | None], name: str) -> None:
        self.call: _Call | None = None
        self._calls = calls
        self._lock = threading.Lock()  # so that no other call than the given one is interrupted
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def interrupt(self, call: _Call) -> None:
        """Raise in the thread if it still runs this call; a call into native code ends first."""
        with self._lock:
            if self.call is call and self._thread.ident is not None:
                ident = ctypes.c_ulong(self._thread.ident)
                kind = ctypes.py_object(_Interrupted)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, kind)

    def _run(self) -> None:
        is_open = True
        while is_open:
            self.call = None
            with contextlib.suppress(_Interrupted):  # one may arrive after its call
                is_open = self._serve()

    def _serve(self) -> bool:
        """Run calls until the end marker; then False."""
        while (call := self._calls.get()) is not None:
            result, error = None, None
            try:
                result = self._work(call)
            except BaseException as e:  # of any kind: the call's caller waits
                error = e
            self._post_result(call, result, error)
            del call, result, error  # while it waits for the next one
        return False

    def _work(self, call: _Call) -> object:
        """The call's result; after it no interruption is sent, but one that was may still come."""
        try:
            with self._lock:
                call.began_s = time.monotonic()
                self.call = call
            if call.future.done():  # its caller is gone, or the pool is closed
                return None
            return call.work()
        finally:
            with self._lock:
                self.call = None

    def _post_result(self, call: _Call, result: object, error: BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits
            call.future.get_loop().call_soon_threadsafe(_settle, call, result, error)


def _settle(call: _Call, result: object, error: BaseException | None) -> None:
    """No thread has the call any more: set its result or error, if its caller still waits."""
    call.on_free()
    future = call.future
    if future.done():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        future.set_exception(error)
    else:  # a panic of the tokenizer, which no handler expects
        log.error("a text could not be prepared", exc_info=error)
        future.set_exception(RequestFailed("the text could not be prepared"))


class Pool:
    """Runs work in `num_threads` threads, which start with the first.

    limit_s  seconds that work may take once it has begun; 0: for ever
    on_hung  called once, when work that was given up still has every thread
    """

    def __init__(
        self, num_threads: int, limit_s: float, on_hung: Callable[[PoolHung], None]
    ) -> None:
        self._num_threads = num_threads
        self._limit_s = limit_s
        self._on_hung = on_hung
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._workers: list[_Worker] = []
        self._waiting: set[asyncio.Future[Any]] = set()
        self._check: asyncio.TimerHandle | None = None
        self._end: EngineDead | None = None
        self.is_hung = False

    async def run(self, work: Callable[[], T], on_free: Callable[[], None] = lambda: None) -> T:
        """Run `work` in a thread: its result or error.

        Raises RequestFailed if the work is given up, and after `close` the error given there.

        on_free  called when no thread has it any more: later than its caller gives it up, or it is
                 given up, where it is native code, which nothing interrupts
        """
        if self._end is not None:
            on_free()
            raise fresh_copy(self._end)
        if not self._workers:
            names = (f"streamer-encode_{i}" for i in range(self._num_threads))
            self._workers = [_Worker(self._calls, name) for name in names]
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        self._calls.put(_Call(work, future, on_free))
        if self._check is None and self._limit_s:
            self._check_later()
        return await future

    def close(self, error: EngineDead) -> None:
        """End the threads, but those that hang; waiting callers get the error."""
        if self._end is not None:
            return
        self._end = error
        if self._check is not None:
            self._check.cancel()
        for worker in self._workers:
            self._calls.put(None)
            if (call := worker.call) is not None:
                worker.interrupt(call)
        for future in list(self._waiting):
            if not future.done():
                future.set_exception(fresh_copy(error))

    def _check_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._check = loop.call_later(self._limit_s / CHECKS, self._check_calls)

    def _check_calls(self) -> None:
        """Give up calls that take too long; without calls no timer runs."""
        self._check = None
        now, num_hung = time.monotonic(), 0
        calls = [(worker, worker.call) for worker in self._workers]
        for worker, call in calls:
            if call is None or call.began_s is None or now - call.began_s < self._limit_s:
                continue
            num_hung += call.num_interrupts > 1  # one is lost if a finalizer happens to run
            self._give_up(call)
            worker.interrupt(call)
            call.num_interrupts += 1
        if num_hung == self._num_threads and not self.is_hung:
            self.is_hung = True
            self._on_hung(
                PoolHung(f"every thread that prepares prompts has hung for {self._limit_s:g} s")
            )
        elif self._waiting or any(call is not None for _, call in calls):
            self._check_later()  # a call just taken may show in its future alone

    def _give_up(self, call: _Call) -> None:
        if not call.future.done():
            text = f"preparing the text took longer than {self._limit_s:g} s"
            call.future.set_exception(RequestFailed(text, code=PROMPT_TIMEOUT))
