"""AsyncEngine: the loop's side of the engine, and the interface for servers and programs.

Owns the streams: submits, cancels, pauses, drains, distributes each step's output, and ends all
streams with an error when the engine dies. Lives on one event loop and reaches the GPU thread by
commands alone. Made by build.py, or by `AsyncEngine.from_config`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

from streamer.config import Config
from streamer.constraints.grammars import Grammars
from streamer.core.blocks import BlockHasher
from streamer.core.plan import Cancel, Command, FinishReason, Pause, Resume, StepOutput, StepStats
from streamer.core.sampling import SamplingParams, params_over
from streamer.core.scheduler import Scheduler
from streamer.core.sizes import ModelInfo, SchedulerConfig, sizes_of
from streamer.core.view import SchedulerView, ViewQuery
from streamer.engine.core import EngineCore, Inbox, Owner, Runner, Tokenizer
from streamer.engine.gpu_thread import GpuThread
from streamer.engine.journal.restoring import Restoring
from streamer.engine.journal.writer import Contexts, Journal
from streamer.engine.prompts import Prompts
from streamer.engine.refusals import (
    CLOSE_S,
    SHUTDOWN,
    cut_off,
    draining,
    ended_error,
    forked,
    fresh_copy,
    loading,
    restarting,
)
from streamer.engine.registry import Registry
from streamer.engine.requests import (
    GenerateRequest,
    QueueNeeds,
    accept,
    build_add,
    grammars_of,
    limits_of,
    with_end,
)
from streamer.engine.stats import LAG_WINDOW_S, PhaseTallies, RecentMax, Snapshot, take_snapshot
from streamer.engine.stream import Delta, Timing, TokenStream
from streamer.engine.view_feed import ViewFeed
from streamer.errors import (
    DeadlineExceeded,
    EngineDead,
    InvalidRequest,
    RequestFailed,
    StreamerError,
)
from streamer.tokenizer.chat import EarlierTurn

TOOL_SIZE = 512  # characters that a tool counts for, where long texts take turns

__all__ = ["AsyncEngine", "Delta", "GenerateRequest", "Timing", "TokenStream"]

CANCEL_S = 2.0  # a step under way ends in less, or hangs
PROMPT_PART = 4  # preparing a prompt may take this part of a step's time
# A seed travels through JSON, where integers beyond 2**53 lose digits.
SEED_BITS = 53

log = logging.getLogger(__name__)

State = Literal["new", "loading", "ready", "dead", "closed"]
T = TypeVar("T")


class AsyncEngine:
    """One model, many streams.

    load              makes the runner, on the GPU thread, where all torch work happens
    tokenizer_loader  makes the tokenizer, on the GPU thread too, before the model

    `async with engine:` starts and closes it. It belongs to the loop it was started on.
    """

    def __init__(
        self,
        load: Callable[[Owner], tuple[Runner, ModelInfo]],
        tokenizer_loader: Callable[[], Tokenizer],
        config: Config,
    ) -> None:
        self.config = config
        self.death: EngineDead | None = None
        self.is_draining = False
        self.stats = StepStats()
        self.phases = PhaseTallies()
        self._load = load
        self._load_tokenizer = tokenizer_loader
        self._state: State = "new"
        self._thread: GpuThread | None = None
        self._pid = os.getpid()  # of the process whose threads it has
        self._is_started = asyncio.Event()  # loading has ended, well or not
        self._is_ended = asyncio.Event()  # the thread has ended
        self._load_error: BaseException | None = None
        # filled on the GPU thread by _build, read on the loop after on_ready
        self._info: ModelInfo | None = None
        self._tokenizer: Tokenizer | None = None
        self._sizes: SchedulerConfig | None = None
        self._first_stats = StepStats()
        self._special: Mapping[int, bytes] = {}
        self._grammars: Grammars | None = None
        self._prompts = Prompts(config.watchdog_s / PROMPT_PART, self._die)
        self.view_feed = ViewFeed(self._command)
        self._streams = Registry(config.retain_s, config.retain_bytes)
        self.contexts: Contexts | None = None  # set before `start`, where requests have contexts
        self.journal: Journal | None = None
        self._restoring: asyncio.Task[None] | None = None
        self._random = random.SystemRandom() if config.seed is None else random.Random(config.seed)
        self._lag_s = RecentMax(LAG_WINDOW_S)

    @classmethod
    def from_config(cls, config: Config) -> AsyncEngine:
        """The engine of a Config, to be entered with `async with`."""
        from streamer.build import loaders

        return cls(*loaders(config), config)

    async def __aenter__(self) -> AsyncEngine:
        try:
            await self.start()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    # ------------------------------------------------------------ life

    @property
    def is_ready(self) -> bool:
        """Whether the model is loaded and requests are taken (unless draining)."""
        return self._state == "ready"

    @property
    def is_dead(self) -> bool:
        """Whether the engine stopped by an error, `death`. False after an orderly `aclose`."""
        return self.death is not None

    @property
    def is_hung(self) -> bool:
        """Whether any of its threads was given up: it can be left behind, but not ended."""
        return self._prompts.is_hung or (self._thread is not None and self._thread.is_hung)

    @property
    def info(self) -> ModelInfo:
        """The loaded model; Overloaded while it loads, EngineDead if that ended without one."""
        if self._info is None or self._state in ("new", "loading"):
            raise self._unavailable()
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises like `info`."""
        self._require_own_process()
        if self._tokenizer is None or self._state in ("new", "loading"):
            raise self._unavailable()
        return self._tokenizer

    async def start(self) -> None:
        """Load the model and return when requests are taken; a second call waits for the first.

        Raises what loading raised: any StreamerError as it is, others as EngineDead.
        """
        if self._state == "new":
            self._state = "loading"
            self._pid = os.getpid()
            await self._open_journal()
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
        try:
            self.journal = await Journal.open(Path(self.config.journal), self.contexts)
        except BaseException as e:
            self._load_error = e
            self._close(None)
            raise

    async def aclose(self, deadline_s: float = CLOSE_S) -> None:
        """End the engine, in any state: streams that are not finished end with EngineDead.

        Returns when the thread has ended. A step or a load that takes longer than `deadline_s` is
        left behind, as it can't be interrupted: if it ends after all, it frees what it holds.
        """
        if os.getpid() != self._pid:
            return  # a forked child: the engine's threads are in the parent
        if self._state == "new":
            self._close(None)
        elif not self._is_ended.is_set() and self._thread is not None:
            self.is_draining = True
            self._thread.stop()
            if not await _within(deadline_s, self._is_ended.wait()):
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
        if await _within(deadline_s, self._streams.wait_idle()):
            return
        self._put_off()
        for stream in self._streams.live():
            stream.cut_off_by = SHUTDOWN
            self.cancel(stream.request_id)
        if not await _within(CANCEL_S, self._streams.wait_idle()):
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

    def submit(self, request: GenerateRequest) -> TokenStream:
        """Queue a request; its stream exists before anything runs.

        Checks everything first: raises InvalidRequest and ContextLengthExceeded for what can't be
        served, Overloaded when it can't be now, EngineDead when it never will. A grammar that
        `compile` has not seen is compiled here, on the loop. One with `progress` goes on from
        there; if all its choices had ended, its stream is retained and nothing runs.
        """
        self._require_own_process()
        if self._state != "ready":
            raise self._unavailable()
        if self.is_draining:
            raise draining()
        return self._take(request)

    def _take(self, request: GenerateRequest) -> TokenStream:
        info, sizes, thread = self._info, self._sizes, self._thread
        if info is None or sizes is None or thread is None:
            raise self._unavailable()
        request = accept(request, info, sizes, self._random.getrandbits(SEED_BITS))
        if self._streams.is_taken(request.request_id):
            raise InvalidRequest(f"request {request.request_id} exists", param="request_id")
        if request.progress is None:
            self.require_room(request.queue_needs)
        grammar, grammars = request.params.structured_outputs, self._grammars
        compiled = grammars.compile(grammar) if grammar is not None and grammars else None
        hashes = self._prompts.hashes(request.prompt, request.cache_salt.encode())
        limits = limits_of(request, self.config)
        stream = TokenStream(request, limits, self, sizes.token_bytes, self._special)
        if stream.is_finished:
            age_s = time.time() - stream.created - (stream.timing.total_s or 0.0)
            self._streams.retain(stream, request.tenant, max(0.0, age_s))
            return stream
        if compiled is not None:
            stream.observers.append(compiled.held)
        queue_position = self._streams.add(stream, request.queue_needs)
        if self.journal is not None and request.is_durable and request.progress is None:
            self.journal.accept(request, stream.created)
        thread.command(build_add(request, info, hashes, queue_position))
        if request.deadline_s is not None:
            self._end_at(stream, request.deadline_s)
        return stream

    async def compile(self, params: SamplingParams, cache_salt: str = "") -> None:
        """Compile the grammar of these parameters in the prompt pool, as `submit` needs it.

        InvalidRequest names the part of it that can't be honoured.
        """
        grammar, grammars = params.structured_outputs, self._grammars
        if grammar is not None and grammars is not None and grammars.find(grammar) is None:
            name, size = f"structured_outputs.{grammar.kind}", len(grammar.text)
            await self.compiled(lambda each: each.compile(grammar), name, size, cache_salt)

    async def compiled(
        self, work: Callable[[Grammars], T], field: str, size: int, cache_salt: str = ""
    ) -> T:
        """What `work` makes of a field's grammar in the prompt pool; see Prompts.compiled."""
        self._require_own_process()
        if self._grammars is None:
            raise self._unavailable()
        salt = cache_salt.encode()
        return await self._prompts.compiled(partial(work, self._grammars), field, size, salt)

    def require_room(self, needs: QueueNeeds) -> None:
        """Raise Overloaded if a request could not be queued now, before its prompt is made."""
        if self._sizes is not None:
            self._streams.require_room(needs, self.config.max_queue, self._sizes.max_num_seqs)

    def _end_at(self, stream: TokenStream, deadline_s: float) -> None:
        """End the stream at its deadline, whatever its status is then."""

        def expire() -> None:
            self._command(Cancel(stream.request_id))
            what = "was not complete" if stream.is_started else "had not begun"
            message = f"the answer {what} within the request's deadline of {deadline_s:g} s"
            self._streams.fail(stream, DeadlineExceeded(message))

        timer = asyncio.get_running_loop().call_later(deadline_s, expire)
        stream.observers.append(lambda s: timer.cancel() if s.is_finished else None)

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
    ) -> AsyncGenerator[Delta, None]:
        """The answer to a text or token ids, as it comes; leaving the iterator cancels.

        Without `params`, the model's own defaults hold; the rest as in GenerateRequest: tenants
        share fairly, salts share no blocks. Raises RequestFailed if a step fails the request.
        """
        ids = await self.encode(prompt, True, cache_salt) if isinstance(prompt, str) else prompt
        params = self.default_params() if params is None else params
        await self.compile(params, cache_salt)
        stream = self.submit(
            GenerateRequest(
                prompt=tuple(ids),
                params=params,
                request_id=request_id or "",
                priority=priority,
                tenant=tenant,
                cache_salt=cache_salt,
            )
        )
        async with aclosing(stream.read()) as batches:  # its last reader leaving cancels it
            async for items in batches:
                for item in items:
                    if isinstance(item, Delta):
                        yield item
        for finish in stream.finishes:
            if finish is not None and finish.reason is FinishReason.FAILED:
                raise RequestFailed(finish.detail or "the request failed in a step")

    def default_params(self, **given: Any) -> SamplingParams:
        """SamplingParams that start from the model's generation_config.json."""
        return params_over(self.info.generation_defaults, given)

    def cancel(self, request_id: str) -> None:
        """End a request, whatever its status; unknown and finished ids are ignored."""
        stream = self._streams.get(request_id)
        if stream is not None and not stream.is_finished:
            self._command(Cancel(request_id))

    def pause(self, request_id: str) -> None:
        """Let a request give up its rows until `resume`; unknown and finished ids are ignored."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.hold(True)

    def resume(self, request_id: str) -> None:
        """Undo `pause`; a request whose reader lags stays paused for that."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.hold(False)

    def hold(self, request_id: str, is_held: bool) -> None:
        """Pause or resume a request, called by its stream for its caller and its readers."""
        self._streams.hold(request_id, is_held)
        self._command(Pause(request_id) if is_held else Resume(request_id))

    def _command(self, command: Command | ViewQuery) -> None:
        if self._thread is None:
            raise self._unavailable()
        self._thread.command(command)

    def get(self, request_id: str) -> TokenStream | None:
        """A live or recently finished request's stream."""
        return self._streams.get(request_id)

    def forget(self, request_id: str) -> None:
        """Keep nothing of a request: a live one is cancelled and not retained."""
        self.cancel(request_id)
        self._streams.forget(request_id)

    # ------------------------------------------------------------ prompts

    async def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        cache_salt: str = "",
        keep: int | None = None,
    ) -> list[int]:
        """Token ids of a text, in a thread pool; `cache_salt` as the request will have it.

        keep  the number of last ids to keep; the text may then be longer than the context
        """
        make = partial(self.tokenizer.encode, text, add_special_tokens)
        return await self._prompts.encode(make, len(text), cache_salt.encode(), keep)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        cache_salt: str = "",
        earlier_turn: EarlierTurn | None = None,
        variables: Mapping[str, Any] | None = None,
        keep: int | None = None,
    ) -> list[int]:
        """Like `encode`, for a conversation through the chat template, after `earlier_turn`.

        variables  further variables of the template; a list `tools` are the tools it presents
        """
        tokenizer = self.tokenizer
        given = dict(variables or {})
        tools = given.pop("tools") if isinstance(given.get("tools"), list) else None

        def make(max_tokens: int | None) -> list[int]:
            return tokenizer.encode_chat(
                messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                max_tokens=max_tokens,
                earlier_turn=earlier_turn,
                variables=given,
            )

        size = sum(len(m.get("content") or "") for m in messages) + TOOL_SIZE * len(tools or ())
        return await self._prompts.encode(make, size, cache_salt.encode(), keep)

    async def in_pool(self, work: Callable[[], T], size: int = 0, cache_salt: str = "") -> T:
        """Other work on texts, such as decoding a long one, in the same thread pool.

        size  its characters or tokens: long ones take turns by tenant, the prefix of their salt
        """
        self._require_own_process()
        return await self._prompts.run(work, size, cache_salt.encode())

    # ------------------------------------------------------------ seen from outside

    def snapshot(self) -> Snapshot:
        """The engine's state and counts now."""
        max_lag_s = self._lag_s.read(time.perf_counter())
        state = "draining" if self.is_draining and self._state == "ready" else self._state
        return take_snapshot(self._streams, state=state, step=self.stats, max_loop_lag_s=max_lag_s)

    # ------------------------------------------------------------ on the GPU thread

    def _build(self, inbox: Inbox) -> EngineCore:
        """Load everything; called once, by the thread."""
        tokenizer = self._load_tokenizer()
        runner, info = self._load(inbox)
        info = with_end(info, tokenizer.eos_token_id)
        sizes = sizes_of(self.config, info, tokenizer.token_bytes())
        hasher = BlockHasher(info.block_size, secrets.token_bytes(32))
        scheduler = Scheduler(sizes, hasher)
        self._grammars = grammars_of(tokenizer, info)
        runner.constrain(self._grammars)
        self._tokenizer, self._info, self._sizes = tokenizer, info, sizes
        self._prompts.hasher = hasher if self.config.enable_prefix_caching else None
        self._prompts.max_tokens = info.max_model_len - 1
        self._special = tokenizer.special_bytes
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
                self.journal.step(output)
            self._streams.distribute(output)
        except Exception as e:  # a bug of ours: no reader may wait for what it lost
            self._die(e)
        self._thread.permit()

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
        """End all streams and view queries with an error; log the first cause with its traceback.

        The error does not name the cause, since it may reach any client.
        """
        if cause is not None and self.death is None:
            self.death = EngineDead("the engine died of an internal error")
            self.death.__cause__ = cause
            if self._state != "loading" or not isinstance(cause, StreamerError):  # no refusal
                log.critical("the engine died", exc_info=cause)
        self._state = "closed" if self.death is None else "dead"
        self._put_off()
        self._streams.fail_all(ended_error(self.death))
        self.view_feed.close(ended_error(self.death))
        self._prompts.close(ended_error(self.death))
        self._is_started.set()

    def _require_own_process(self) -> None:
        """Raise EngineDead in a child of os.fork: the threads stayed in the parent."""
        if os.getpid() != self._pid and self._state != "new":
            raise forked(self._pid)

    def _unavailable(self) -> StreamerError:
        """The error of an engine that has ended, or is not loaded yet."""
        return ended_error(self.death) if self._state in ("dead", "closed") else loading()


async def _within(seconds: float, event: Awaitable[object]) -> bool:
    """Whether the event came within `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await event
    except TimeoutError:
        return False
    return True
