"""AsyncEngine: the loop's side of the engine, and the interface for servers and programs.

Owns the streams: submits, cancels, pauses, drains, distributes each step's output, and ends all
streams with an error when the engine dies. Lives on one event loop and reaches the GPU thread by
commands alone. Made by build.py, or by `AsyncEngine.from_config`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from streamer.config import Config
from streamer.core.blocks import BlockHasher
from streamer.core.plan import (
    Add,
    Cancel,
    Command,
    Finish,
    FinishReason,
    Pause,
    Resume,
    StepOutput,
    StepStats,
)
from streamer.core.scheduler import Scheduler
from streamer.core.sizes import ModelInfo
from streamer.core.view import SchedulerView, ViewQuery
from streamer.engine.base import Engine, within
from streamer.engine.core import EngineCore, Inbox, Owner, Runner, Tokenizer
from streamer.engine.gpu_thread import GpuThread
from streamer.engine.journal.restoring import Restoring
from streamer.engine.journal.writer import NOT_DRAWN, Journal
from streamer.engine.refusals import (
    CLOSE_S,
    SHUTDOWN,
    cut_off,
    ended_error,
    fresh_copy,
    restarting,
)
from streamer.engine.requests import GenerateRequest, with_end
from streamer.engine.stats import PhaseTallies
from streamer.engine.stream import Delta, Timing, TokenStream
from streamer.errors import StreamerError

__all__ = ["AsyncEngine", "Delta", "GenerateRequest", "Timing", "TokenStream"]

CANCEL_S = 2.0  # a step under way ends in less, or hangs
EXPIRE_S = 10.0

log = logging.getLogger(__name__)


class AsyncEngine(Engine):
    """An engine whose model runs on a thread of this process.

    load              makes the runner, on the GPU thread, where all torch work happens
    tokenizer_loader  makes the tokenizer, on the GPU thread too, before the model
    """

    def __init__(
        self,
        load: Callable[[Owner], tuple[Runner, ModelInfo]],
        tokenizer_loader: Callable[[], Tokenizer],
        config: Config,
    ) -> None:
        super().__init__(config)
        self.stats = StepStats()
        self.phases: PhaseTallies = PhaseTallies()
        self._load = load
        self._load_tokenizer = tokenizer_loader
        self._thread: GpuThread | None = None
        self._is_started = asyncio.Event()  # loading has ended, well or not
        self._is_ended = asyncio.Event()  # the thread has ended
        self._load_error: BaseException | None = None
        self._first_stats = StepStats()  # filled on the GPU thread by _build, with what `_use` sets
        self._opening: asyncio.Task[None] | None = None  # the journal
        self._restoring: asyncio.Task[None] | None = None
        self._expiring: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()  # of ends that are not on disk yet

    @classmethod
    def from_config(cls, config: Config) -> AsyncEngine:
        """The engine of a Config, to be entered with `async with`."""
        from streamer.build import loaders

        return cls(*loaders(config), config)

    # ------------------------------------------------------------ life

    @property
    def is_hung(self) -> bool:
        """Whether any of its threads was given up: it can be left behind, but not ended."""
        return super().is_hung or (self._thread is not None and self._thread.is_hung)

    @property
    def counts(self) -> Mapping[str, StepStats]:
        """The scheduler's latest counts."""
        return {"": self.stats}

    @property
    def epoch(self) -> str | None:
        """The journal's name, from its first start on."""
        return None if self.journal is None else self.journal.epoch

    async def start(self) -> None:
        """Load the model and return when requests are taken; a second call waits for the first.

        Raises what loading raised: any StreamerError as it is, others as EngineDead.
        """
        if self._state == "new":
            self._state = "loading"
            self._pid = os.getpid()
            await self._open_journal()
            if self._state == "loading":  # else it was closed meanwhile
                self._thread = GpuThread(
                    self._build, self, asyncio.get_running_loop(), self.config.watchdog_s
                )
                self._thread.start()
        self._require_own_process()
        if self._state == "loading":
            await self._is_started.wait()
        if isinstance(self._load_error, StreamerError):
            raise fresh_copy(self._load_error) from self._load_error
        if self._state != "ready":
            raise ended_error(self.death)

    async def _open_journal(self) -> None:
        """Read the journal before the model is loaded: one that can't be used ends the start."""
        if self.config.journal is None:
            return
        self._opening = asyncio.create_task(self._opened(Path(self.config.journal)))
        # Read here too: after a cancelled start nothing else asks what came of it.
        self._opening.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            await asyncio.shield(self._opening)  # a thread reads it, which can't be interrupted
        except BaseException as e:
            self._load_error = e
            self._close(None)
            if self.journal is not None:  # it came with the cancellation
                await self.journal.close()
            raise

    async def _opened(self, folder: Path) -> None:
        """Open the journal; close it if the engine has ended meanwhile."""
        journal = await Journal.open(folder, self.contexts)
        if self._state == "loading":
            self.journal = journal
        else:
            await journal.close()

    async def aclose(self, deadline_s: float = CLOSE_S) -> None:
        """End the engine, in any state: streams that are not finished end with EngineDead.

        Returns when the thread has ended. A step or a load that takes longer than `deadline_s` is
        left behind, as it can't be interrupted: if it ends after all, it frees what it holds.
        """
        if os.getpid() != self._pid:
            return  # a forked child: the engine's threads are in the parent
        if self._thread is None:
            self._close(None)
            if self._opening is not None:
                await asyncio.wait([self._opening], timeout=deadline_s)
        elif not self._is_ended.is_set():
            self.is_draining = True
            self._thread.stop()
            if not await within(deadline_s, self._is_ended.wait()):
                self._thread.give_up(None)
        if self.journal is not None:
            await self.journal.close(is_orderly=self.death is None)

    async def drain(self, deadline_s: float) -> None:
        """Take no requests; let live ones finish for `deadline_s`, then cancel them and wait.

        A cancelled one has a finish with `detail` SHUTDOWN, or where a step hangs and no finish
        comes, it ends with that error. One in the journal ends with RESTART, and goes on at the
        next start. Takes at most CANCEL_S longer than `deadline_s`.
        """
        self.is_draining = True
        if await within(deadline_s, self._streams.wait_idle()):
            return
        self._put_off()
        for stream in self._streams.live():
            stream.cut_off_by = SHUTDOWN
            self.cancel(stream.request_id)
        if not await within(CANCEL_S, self._streams.wait_idle()):
            self._streams.fail_all(cut_off())

    def _put_off(self) -> None:
        """End the streams that the journal has: they go on at the next start."""
        journal = self.journal
        if journal is not None and journal.failure is None:
            journal.seal()
            for stream in [s for s in self._streams.live() if s.is_durable]:
                self._streams.fail(stream, restarting())
                self._command(Cancel(stream.request_id))

    async def _restore(self, journal: Journal) -> None:
        """Take up what the journal has; requests are taken when that is done."""
        self._streams.journal = journal
        restoring = Restoring(journal, self.config, self.contexts, self._take)
        try:
            await restoring.begin(self.compile)
            if self._state == "loading":
                await restoring.go_on()
            if self._state == "loading":
                self._open()
        except Exception as e:  # a bug of ours: the engine would load for ever
            self._die(e)

    # ------------------------------------------------------------ requests

    async def recorded(self, stream: TokenStream | None = None) -> None:
        """Wait until the journal has what was done, of `stream` or of all."""
        if self.journal is not None and (stream is None or stream.is_durable):
            await self.journal.recorded()

    def _begin(self, stream: TokenStream, request: GenerateRequest, add: Add) -> None:
        journal = self.journal
        if journal is not None and request.is_durable and not journal.has(request.request_id):
            journal.accept(request, stream.created)
        self._command(add)

    def cancel(self, request_id: str) -> None:
        """End a request, whatever its status; unknown and finished ids are ignored."""
        stream = self._streams.get(request_id)
        if stream is not None and not stream.is_finished:
            self._command(Cancel(request_id))

    def hold(self, request_id: str, is_held: bool) -> None:
        """Pause or resume a request, called by its stream for its caller and its readers."""
        self._streams.hold(request_id, is_held)
        self._command(Pause(request_id) if is_held else Resume(request_id))

    def _query(self, query: ViewQuery) -> None:
        self._command(query)

    def _command(self, command: Command | ViewQuery) -> None:
        if self._thread is None:
            raise self.unavailable()
        self._thread.command(command)

    def forget(self, request_id: str) -> None:
        """Keep nothing of a request: a live one is cancelled and not retained."""
        self.cancel(request_id)
        self._streams.forget(request_id)

    # ------------------------------------------------------------ on the GPU thread

    def _build(self, inbox: Inbox) -> EngineCore:
        """Load everything; called once, by the thread."""
        tokenizer = self._load_tokenizer()
        runner, info = self._load(inbox)
        info = with_end(info, tokenizer.eos_token_id)
        hasher = BlockHasher(info.block_size, secrets.token_bytes(32))
        scheduler = Scheduler(self._use(tokenizer, info, hasher), hasher)
        if self._grammars is not None:
            runner.constrain(self._grammars)
        self._first_stats = scheduler.stats()
        return EngineCore(runner, scheduler, inbox)

    # ------------------------------------------------------------ called for the GPU thread

    def on_ready(self) -> None:
        """Loading is done; ignored if it was given up before."""
        if self._state != "loading":
            return
        self.stats = self._first_stats
        if self.journal is None:
            self._open()
        else:
            self._restoring = asyncio.create_task(self._restore(self.journal))

    def _open(self) -> None:
        """Take requests from here on."""
        self._state = "ready"
        self._is_started.set()
        if self.journal is not None:
            self._expiring = asyncio.create_task(self._expire())

    async def _expire(self) -> None:
        """What is retained is on disk, too: it goes when it is too old, also if nothing comes."""
        while True:
            await asyncio.sleep(EXPIRE_S)
            self._streams.expire()

    def on_output(self, output: StepOutput, sent: float) -> None:
        """Distribute a step's output to the streams; then permit the step after next."""
        now = time.perf_counter()
        self._lag_s.observe(now - sent, now)
        self.stats = output.stats
        self.phases.observe(output.times)
        if self._thread is None or self._state not in ("loading", "ready"):
            return
        try:
            if self.journal is not None:
                output = self._record(self.journal, output)
            self._streams.distribute(output)
        except Exception as e:  # a bug of ours: no reader may wait for what it lost
            self._die(e)
        self._thread.permit()

    def _record(self, journal: Journal, output: StepOutput) -> StepOutput:
        """Hand a step to the journal; returns what streams may have before it is on disk.

        A token that a crash cuts off is drawn again, but a cancelled answer would go on: its end is
        held back until it is recorded.
        """
        late = [
            # as in the stream: one that FAILED keeps its own detail
            replace(finish, detail=stream.cut_off_by)
            if stream.cut_off_by is not None and finish.reason is FinishReason.CANCELLED
            else finish
            for finish in output.finishes
            if finish.reason in NOT_DRAWN
            and (stream := self._streams.get(finish.request_id)) is not None
            and stream.is_durable
        ]
        if not late or journal.failure is not None:
            journal.step(output)
            return output
        held = {(f.request_id, f.choice) for f in late}
        others = tuple(f for f in output.finishes if (f.request_id, f.choice) not in held)
        journal.step(replace(output, finishes=(*others, *late)))
        task = asyncio.create_task(self._end(journal, late))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return replace(output, finishes=others)

    async def _end(self, journal: Journal, finishes: Sequence[Finish]) -> None:
        await journal.recorded()
        try:
            self._streams.end(finishes)
        except Exception as e:
            self._die(e)

    def on_view(self, view: SchedulerView) -> None:
        self.view_feed.on_view(view)

    def on_end(self, cause: BaseException | None) -> None:
        """The thread has ended: no more steps."""
        if self._state == "loading":
            self._load_error = cause
        self._close(cause)
        self._is_ended.set()
        if self._thread is not None:
            self._thread.join()

    def _die(self, cause: Exception) -> None:
        """End the engine for a fault outside the GPU thread."""
        self._close(cause)
        if self._thread is not None:
            self._thread.stop()

    def _close(self, cause: BaseException | None) -> None:
        super()._close(cause)
        self._is_started.set()
        if self._expiring is not None:
            self._expiring.cancel()
