"""GpuThread: the one worker thread, its tick permits, its death, and the watch over its steps.

Runs EngineCore: builds it (all torch work, loading included, happens on this thread), steps while
it holds a permit and has work, sleeps otherwise. Knows nothing of streams: it calls a Listener on
the loop, with exactly one wake-up a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Protocol

from streamer.core.plan import Command, StepOutput
from streamer.core.view import SchedulerView, ViewQuery
from streamer.engine.core import EngineCore, Inbox, Stopped
from streamer.errors import StepHung

FIRST_TIMES = 5  # factor on the first step's limit: it may compile its kernels
MAX_AHEAD = 2  # permits plus StepOutputs that the loop has not worked through
CHECKS = 4  # in the time that a step may take; a hung one is found a quarter late at worst
MIN_CHECK_S = 0.25


log = logging.getLogger(__name__)


class Listener(Protocol):
    """Receives the thread's events; every method is called on the loop."""

    def on_ready(self) -> None:
        """Loading is done."""
        ...

    def on_output(self, output: StepOutput, sent: float) -> None:
        """A step's output, sent at `sent` (time.perf_counter)."""
        ...

    def on_view(self, view: SchedulerView) -> None:
        """The answer to the oldest view query."""
        ...

    def on_end(self, cause: BaseException | None) -> None:
        """The thread ends; `cause` is what killed it, None if it was asked to."""
        ...


class _LoopClosed(Exception):
    """The loop was closed without closing the engine, or the thread was given up."""


class GpuThread:
    """A thread that runs what `build` returns, from `start` until `stop` or death.

    watchdog_s  a step that takes longer ends the engine; 0: it may take for ever
    is_hung     the thread was given up, by the watchdog or its owner, and is never joined
    """

    def __init__(
        self,
        build: Callable[[Inbox], EngineCore],
        listener: Listener,
        loop: asyncio.AbstractEventLoop,
        watchdog_s: float = 0.0,
    ) -> None:
        self._build = build
        self._listener = listener
        self._loop = loop
        self._watchdog_s = watchdog_s
        self._check: asyncio.TimerHandle | None = None
        self._num_begun = self._num_ended = 0  # steps; written by the thread alone
        self._is_warm = False  # the first plan was carried out; written by the thread too
        self._seen = (0, 0.0)  # the last step seen under way, and when that was first
        self.is_hung = False
        self._inbox = Inbox()
        # A daemon, so that a program that never closes its engine can still end.
        self._thread = threading.Thread(target=self._run, name="streamer-gpu", daemon=True)

    def start(self) -> None:
        """Start loading, with all permits given."""
        for _ in range(MAX_AHEAD):
            self._inbox.permit()
        self._thread.start()

    def command(self, command: Command | ViewQuery) -> None:
        """Send a command, which takes effect within one step, or a view query.

        Queries are answered between two steps, also when there is nothing to do.
        """
        self._inbox.put(command)
        self._watch()

    def permit(self) -> None:
        """The loop has worked through one StepOutput."""
        self._inbox.permit()
        self._watch()

    def stop(self) -> None:
        """Ask the thread to end after the current step or, while it loads, the current layer."""
        self._inbox.stop()

    def join(self) -> None:
        """Wait for the thread itself; only after on_end, when nothing is left to wait for."""
        if self._check is not None:
            self._check.cancel()  # the timer would keep the engine alive until it is due
            self._check = None
        if not self.is_hung:
            self._thread.join()

    # ------------------------------------------------------------ the watch, on the loop

    def _watch(self) -> None:
        if self._check is None and self._watchdog_s:
            self._check_later()

    def _check_later(self) -> None:
        wait_s = max(self._watchdog_s / CHECKS, MIN_CHECK_S)
        self._check = self._loop.call_later(wait_s, self._check_step)

    def _check_step(self) -> None:
        """Check whether the same step is still under way; without a step no timer runs."""
        self._check = None
        ended, begun = self._num_ended, self._num_begun  # in this order: a step may end meanwhile
        last, since = self._seen
        now = self._loop.time()
        if begun != last:
            self._seen = (begun, now)
        elif begun == ended or not self._thread.is_alive():
            return  # idle, or without a permit: the next command or permit watches again
        elif now - since >= (limit_s := self._watchdog_s * (1 if self._is_warm else FIRST_TIMES)):
            self.give_up(StepHung(f"a step took longer than {limit_s:g} s"))
            return
        self._check_later()

    def give_up(self, cause: StepHung | None) -> None:
        """Stop waiting for the thread; if a step hangs, log every thread's stack."""
        if self.is_hung:
            return
        if self._num_begun != self._num_ended:
            log.critical("a step hangs; every thread's stack:\n%s", _stacks())
        self.is_hung = True
        self._inbox.stop()
        self._listener.on_end(cause)

    # ------------------------------------------------------------ on the thread

    def _run(self) -> None:
        cause: BaseException | None = None
        core: EngineCore | None = None
        try:
            core = self._build(self._inbox)
            self._post(self._listener.on_ready)
            self._steps(core)
        except (_LoopClosed, Stopped):
            pass
        except BaseException as e:  # of any kind: all waiting callers must get it
            cause = e
        try:
            if core is not None:
                core.close()
        except BaseException as e:  # a device that failed may not be able to close either
            cause = cause or e
        del core
        with contextlib.suppress(_LoopClosed):
            self._post(self._listener.on_end, cause)

    def _steps(self, core: EngineCore) -> None:
        inbox = self._inbox
        while True:
            output = None
            if inbox.permits and not inbox.is_stopped:
                self._num_begun += 1
                output = core.step()
                self._num_ended += 1
            if inbox.is_stopped:
                return
            if output is not None:
                self._is_warm = True
                inbox.permits -= 1
                self._post(self._listener.on_output, output, time.perf_counter())
            while inbox.view_queries:  # after the output of the steps that they show
                self._post(self._listener.on_view, core.snapshot())
            if output is None:
                inbox.wait()

    def _post(self, listener: Callable[..., None], *args: object) -> None:
        if self.is_hung:  # it went on after all, but on_end was called already
            raise _LoopClosed
        try:
            self._loop.call_soon_threadsafe(listener, *args)
        except RuntimeError:
            raise _LoopClosed from None


def _stacks() -> str:
    """The stack of every thread, for the log, which blocks no thread if it is not read."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
