"""Engine: what a server or a program uses of an engine, wherever its model runs.

Owns the loop's side that every engine has: tokenizer and prompts, the checks of a request, the
streams and their table. AsyncEngine runs the model on a thread of this process; a Cluster's
replicas run it in others.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from streamer.config import Config
from streamer.constraints.grammars import Grammars
from streamer.core.blocks import BlockHasher
from streamer.core.plan import Add, FinishReason, StepStats
from streamer.core.sampling import SamplingParams, params_over
from streamer.core.sizes import ModelInfo, SchedulerConfig, sizes_of
from streamer.core.view import ViewQuery
from streamer.engine.core import Tokenizer
from streamer.engine.flow import Control
from streamer.engine.prompts import Prompts
from streamer.engine.refusals import CLOSE_S, draining, ended_error, forked, loading
from streamer.engine.registry import Registry
from streamer.engine.requests import (
    GenerateRequest,
    QueueNeeds,
    accept,
    build_add,
    grammars_of,
    limits_of,
)
from streamer.engine.stats import (
    LAG_WINDOW_S,
    PhaseTallies,
    RecentMax,
    Snapshot,
    take_snapshot,
    total,
)
from streamer.engine.stream import Delta, TokenStream
from streamer.engine.view_feed import ViewFeed
from streamer.errors import (
    DeadlineExceeded,
    EngineDead,
    InvalidRequest,
    RequestFailed,
    StreamerError,
)
from streamer.tokenizer.chat import EarlierTurn

if TYPE_CHECKING:
    from streamer.engine.journal.writer import Contexts, Journal

TOOL_SIZE = 512  # characters that a tool counts for, where long texts take turns
PROMPT_PART = 4  # preparing a prompt may take this part of a step's time
# A seed travels through JSON, where integers beyond 2**53 lose digits.
SEED_BITS = 53

log = logging.getLogger(__name__)

State = Literal["new", "loading", "ready", "dead", "closed"]
T = TypeVar("T")


class Engine(ABC):
    """One model, many streams.

    `async with engine:` starts and closes it. It belongs to the loop it was started on.

    contexts  what a server has beside its requests; set before `start`
    control   what a stream's readers call (engine/flow.py); None: the engine itself
    """

    def __init__(self, config: Config, control: Control | None = None) -> None:
        self.config = config
        self.death: EngineDead | None = None
        self.is_draining = False
        self.phases: PhaseTallies | None = None  # of steps that this process makes
        self.contexts: Contexts | None = None
        self.journal: Journal | None = None
        self._control = control or self
        self._state: State = "new"
        self._pid = os.getpid()  # of the process whose threads it has
        self._info: ModelInfo | None = None
        self._tokenizer: Tokenizer | None = None
        self._sizes: SchedulerConfig | None = None
        self._special: Mapping[int, bytes] = {}
        self._grammars: Grammars | None = None
        self._prompts = Prompts(config.watchdog_s / PROMPT_PART, self._die)
        self.view_feed = ViewFeed(self._query)
        self._streams = Registry(config.retain_s, config.retain_bytes)
        self._random = random.SystemRandom() if config.seed is None else random.Random(config.seed)
        self._lag_s = RecentMax(LAG_WINDOW_S)

    async def __aenter__(self) -> Self:
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

    # ------------------------------------------------------------ where the model runs

    @property
    @abstractmethod
    def counts(self) -> Mapping[str, StepStats]:
        """The latest counts of each scheduler, by the name of its replica; "": there is but one."""

    @abstractmethod
    async def start(self) -> None:
        """Return when requests are taken; raises what prevents that."""

    @abstractmethod
    async def aclose(self, deadline_s: float = CLOSE_S) -> None:
        """End the engine, in any state: streams that are not finished end with EngineDead."""

    @abstractmethod
    async def drain(self, deadline_s: float) -> None:
        """Take no requests; let live ones finish for `deadline_s`, then end them."""

    @abstractmethod
    def cancel(self, request_id: str) -> None:
        """End a request, whatever its status; unknown and finished ids are ignored."""

    @abstractmethod
    def hold(self, request_id: str, is_held: bool) -> None:
        """Pause or resume a request, called by its stream for its caller and its readers."""

    @abstractmethod
    def forget(self, request_id: str) -> None:
        """Keep nothing of a request: a live one is cancelled and not retained."""

    @abstractmethod
    async def recorded(self, stream: TokenStream | None = None) -> None:
        """Wait until what was done outlives this process, as far as anything here does.

        stream  was just submitted: StreamerError if it can't be run after all
        """

    @abstractmethod
    def _begin(self, stream: TokenStream, request: GenerateRequest, add: Add) -> None:
        """Let an accepted request run."""

    @abstractmethod
    def _query(self, query: ViewQuery) -> None:
        """Ask for a view; the answer comes to `view_feed`."""

    @abstractmethod
    def _die(self, cause: Exception) -> None:
        """End the engine for a fault of ours."""

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
    def epoch(self) -> str | None:
        """The name of what is remembered, where that outlives the process."""
        return None

    @property
    def is_hung(self) -> bool:
        """Whether any of its threads was given up: it can be left behind, but not ended."""
        return self._prompts.is_hung

    @property
    def info(self) -> ModelInfo:
        """The loaded model; Overloaded while it loads, EngineDead if that ended without one."""
        if self._info is None or self._state in ("new", "loading"):
            raise self.unavailable()
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises like `info`."""
        self._require_own_process()
        if self._tokenizer is None or self._state in ("new", "loading"):
            raise self.unavailable()
        return self._tokenizer

    # ------------------------------------------------------------ requests

    def submit(self, request: GenerateRequest) -> TokenStream:
        """Queue a request; its stream exists before anything runs.

        Checks everything first: raises InvalidRequest and ContextLengthExceeded for what can't be
        served, Overloaded when it can't be now, EngineDead when it never will. A grammar that
        `compile` has not seen is compiled here, on the loop. One with `progress` goes on from
        there; if all its choices had ended, its stream is retained and nothing runs.
        """
        self._require_own_process()
        if not self.is_ready:
            raise self.unavailable()
        if self.is_draining:
            raise draining()
        return self._take(request)

    def _take(self, request: GenerateRequest) -> TokenStream:
        info, sizes = self._info, self._sizes
        if info is None or sizes is None:
            raise self.unavailable()
        request = accept(request, info, sizes, self._random.getrandbits(SEED_BITS))
        if self._streams.is_taken(request.request_id):
            raise InvalidRequest(f"request {request.request_id} exists", param="request_id")
        if request.progress is None:
            self.require_room(request.queue_needs)
        grammar, grammars = request.params.structured_outputs, self._grammars
        compiled = grammars.compile(grammar) if grammar is not None and grammars else None
        hashes = self._prompts.hashes(request.prompt, request.cache_salt.encode())
        limits = limits_of(request, self.config)
        stream = TokenStream(request, limits, self._control, sizes.token_bytes, self._special)
        if stream.is_finished:
            age_s = time.time() - stream.created - (stream.timing.total_s or 0.0)
            self._streams.retain(stream, request.tenant, max(0.0, age_s))
            return stream
        if compiled is not None:
            stream.observers.append(compiled.held)
        queue_position = self._streams.add(stream, request.queue_needs)
        self._begin(stream, request, build_add(request, info, hashes, queue_position))
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
            raise self.unavailable()
        salt = cache_salt.encode()
        return await self._prompts.compiled(partial(work, self._grammars), field, size, salt)

    def require_room(self, needs: QueueNeeds) -> None:
        """Raise Overloaded if a request could not be queued now, before its prompt is made."""
        if self._sizes is not None:
            self._streams.require_room(needs, self.config.max_queue, self._sizes.max_num_seqs)

    def _end_at(self, stream: TokenStream, deadline_s: float) -> None:
        """End the stream at its deadline, whatever its status is then."""

        def expire() -> None:
            self.cancel(stream.request_id)
            what = "was not complete" if stream.is_started else "had not begun"
            message = f"the answer {what} within the request's deadline of {deadline_s:g} s"
            self._streams.fail(stream, DeadlineExceeded(message))

        left_s = time_left_s(deadline_s, stream.created, time.time())
        timer = asyncio.get_running_loop().call_later(left_s, expire)
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

    def named(self, request_id: str, prompt: Sequence[int], cache_salt: str) -> str:
        """The id for a request of this prompt, perhaps with where it will run."""
        return request_id

    def get(self, request_id: str) -> TokenStream | None:
        """A live or recently finished request's stream."""
        return self._streams.get(request_id)

    def live(self) -> list[TokenStream]:
        """The streams of requests that have not ended."""
        return self._streams.live()

    async def idle(self) -> None:
        """Wait until no request is live."""
        await self._streams.wait_idle()

    async def find(self, request_id: str) -> TokenStream | None:
        """The same, wherever it was submitted."""
        return self.get(request_id)

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
        return take_snapshot(
            self._streams, state=state, step=total(self.counts.values()), max_loop_lag_s=max_lag_s
        )

    # ------------------------------------------------------------ for those that extend it

    def _use(self, tokenizer: Tokenizer, info: ModelInfo, hasher: BlockHasher) -> SchedulerConfig:
        """The model to serve; returns its sizes."""
        sizes = sizes_of(self.config, info, tokenizer.token_bytes())
        self._grammars = grammars_of(tokenizer, info)
        self._tokenizer, self._info, self._sizes = tokenizer, info, sizes
        self._prompts.hasher = hasher if self.config.enable_prefix_caching else None
        self._prompts.max_tokens = info.max_model_len - 1
        self._special = tokenizer.special_bytes
        return sizes

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

    @abstractmethod
    def _put_off(self) -> None:
        """End the streams that go on elsewhere, or at the next start."""

    def _require_own_process(self) -> None:
        """Raise EngineDead in a child of os.fork: the threads stayed in the parent."""
        if os.getpid() != self._pid and self._state != "new":
            raise forked(self._pid)

    def unavailable(self) -> StreamerError:
        """The error of an engine that has ended, or is not loaded yet."""
        return ended_error(self.death) if self._state in ("dead", "closed") else loading()


async def within(seconds: float, event: Awaitable[object]) -> bool:
    """Whether the event came within `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await event
    except TimeoutError:
        return False
    return True


def time_left_s(deadline_s: float, created: float, now: float) -> float:
    """What is left of a deadline; a clock set back since `created` adds nothing to it."""
    return max(0.0, deadline_s - max(0.0, now - created))
