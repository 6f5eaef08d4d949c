"""GpuThread: the one worker thread, its tick permits, and its death.

Runs EngineCore: builds it (all torch work, loading included, happens on this thread), steps while
it holds a permit and has work, sleeps otherwise. Knows nothing of streams: what happens is told to
a Listener on the loop, with exactly one wake-up a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Callable
from typing import Protocol

from streamer.core.plan import Command, StepOutput
from streamer.core.view import SchedulerView, Wanted
from streamer.engine.core import EngineCore, Inbox

MAX_AHEAD = 2  # permits plus StepOutputs that the loop has not worked through


class Listener(Protocol):
    """Hears of the thread; every method is called on the loop."""

    def on_ready(self) -> None:
        """Loading is done."""
        ...

    def on_output(self, output: StepOutput, sent: float) -> None:
        """A step's news, sent at `sent` (time.perf_counter)."""
        ...

    def on_view(self, view: SchedulerView) -> None:
        """The answer to the oldest look."""
        ...

    def on_end(self, cause: BaseException | None) -> None:
        """The thread ends; `cause` is what killed it, None if it was asked to."""
        ...


class _LoopGone(Exception):
    """Nobody listens any more: the loop was closed without closing the engine."""


class GpuThread:
    """A thread that runs what `build` returns, from `start` until `stop` or death."""

    def __init__(
        self,
        build: Callable[[Inbox], EngineCore],
        listener: Listener,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._build = build
        self._listener = listener
        self._loop = loop
        self._inbox = Inbox()
        # A daemon, so that a program that never closes its engine can still end.
        self._thread = threading.Thread(target=self._run, name="streamer-gpu", daemon=True)

    def start(self) -> None:
        """Start loading, with all permits given."""
        for _ in range(MAX_AHEAD):
            self._inbox.permit()
        self._thread.start()

    def command(self, command: Command | Wanted) -> None:
        """Send a command, which takes effect within one step, or ask for a look.

        Looks are answered between two steps, also when there is nothing to do.
        """
        self._inbox.put(command)

    def permit(self) -> None:
        """The loop has worked through one StepOutput."""
        self._inbox.permit()

    def stop(self) -> None:
        """Ask it to end after the current step (or after loading, which can't be interrupted)."""
        self._inbox.stop()

    def join(self) -> None:
        """Wait for the thread itself; only after on_end, when nothing is left to wait for."""
        self._thread.join()

    # ------------------------------------------------------------ on the thread

    def _run(self) -> None:
        cause: BaseException | None = None
        core: EngineCore | None = None
        try:
            core = self._build(self._inbox)
            # A collection over what loading left takes 116 ms for 1.2 M objects: never again.
            gc.collect()
            gc.freeze()
            self._tell(self._listener.on_ready)
            self._steps(core)
        except _LoopGone:
            pass
        except BaseException as e:  # whatever it was, everybody who waits must learn of it
            cause = e
        try:
            if core is not None:
                core.close()
        except BaseException as e:  # a device that failed may not be able to close either
            cause = cause or e
        del core
        with contextlib.suppress(_LoopGone):
            self._tell(self._listener.on_end, cause)

    def _steps(self, core: EngineCore) -> None:
        inbox = self._inbox
        while True:
            output = None
            if inbox.permits and not inbox.is_stopped:
                output = core.step()
            if inbox.is_stopped:
                return
            while inbox.looks:
                self._tell(self._listener.on_view, core.snapshot())
            if output is None:
                inbox.wait()
                continue
            inbox.permits -= 1
            self._tell(self._listener.on_output, output, time.perf_counter())

    def _tell(self, listener: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(listener, *args)
        except RuntimeError:
            raise _LoopGone from None
