"""LLM: the engine for programs without an event loop: prompts in, finished answers out.

Runs an AsyncEngine on a loop in a thread of its own, so that it works in notebooks too. Owns that
thread alone; everything else is AsyncEngine's.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from streamer.config import Config, settings
from streamer.core.plan import FinishReason, TokenLogprob
from streamer.core.sampling import SamplingParams
from streamer.errors import ConfigError, EngineDead, InvalidRequest, RequestFailed
from streamer.spelling import hint

if TYPE_CHECKING:
    from types import TracebackType

    from streamer.engine.engine import AsyncEngine, TokenStream

T = TypeVar("T")
Prompt = str | Sequence[int]
Params = SamplingParams | Sequence[SamplingParams] | None
Encode = Callable[[Any], Coroutine[Any, Any, tuple[str | None, tuple[int, ...]]]]
FEW = 4  # up to here prompts need no progress bar


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one request; the prompt counts once for its n choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Completion(msgspec.Struct, frozen=True):
    """One choice. `logprobs` has one entry a token where they were requested.

    cumulative_logprob, score  of a beam search: as in core.plan.Finish
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    cumulative_logprob: float | None = None
    score: float | None = None


class Output(msgspec.Struct, frozen=True):
    """The answer to one prompt; `text`, `token_ids`, `finish_reason` are the first choice's.

    prompt_logprobs  one a prompt token where they were requested; the first token's is None
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    choices: tuple[Completion, ...]
    usage: Usage
    seed: int
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason


class LLM:
    """A loaded model. To be closed, or used in `with`.

    model    a checkpoint folder or hub id; the bundled model if absent
    config   fields of Config by name

    Raises what loading raises: ConfigError and other StreamerErrors.
    """

    def __init__(self, model: str | None = None, **config: Any) -> None:
        known = [setting.name for setting in settings()]
        for name in config:
            if name not in known:
                raise ConfigError(f"{name} is not a setting{hint(name, known)}", param=name)
        self.config = Config(model=model, **config)
        if self.config.journal is not None:
            raise ConfigError(
                "journal: is for `streamer serve`; an LLM keeps none", param="journal"
            )
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()  # of _is_open: calls made before the close end with it
        self._is_open = True
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="streamer-llm", daemon=True
        )
        self._thread.start()
        self._engine: AsyncEngine | None = None
        # As many choices as can run, and some that wait: never more than the queue takes.
        waiting = min(self.config.max_num_seqs, self.config.max_queue)
        self._room = _Room(self.config.max_num_seqs + waiting)
        try:
            self._engine = self._run(self._open())
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        progress: bool = True,
    ) -> list[Output]:
        """Answers to all prompts, in their order, batched as the engine sees fit.

        A prompt is a text or token ids; `params` are for all or one a prompt, and without them the
        model's defaults hold. `progress` shows a bar, on a terminal or in a notebook, when there
        are more than a few. Raises the first request's error, if any.
        """
        return self._all(self._encode, _as_list(prompts), params, progress)

    def chat(
        self,
        conversations: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: Params = None,
        *,
        progress: bool = True,
    ) -> list[Output]:
        """Like generate, for conversations (or one: a list of messages)."""
        is_one = bool(conversations) and isinstance(conversations[0], Mapping)
        given = [conversations] if is_one else conversations
        for messages in given:
            _check_messages(messages)
        return self._all(self._encode_chat, given, params, progress)

    def close(self) -> None:
        """Free the model; what other threads wait for ends with EngineDead.

        A second call is harmless, and so is one in a forked child, which has no thread of it.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            is_first, self._is_open = self._is_open, False
        if not is_first:
            self._thread.join()
            return
        try:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        finally:  # on Ctrl-C too: a second close would wait for the thread
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------ on the loop's thread

    async def _open(self) -> AsyncEngine:
        from streamer.engine.engine import AsyncEngine

        return await AsyncEngine.from_config(self.config).__aenter__()

    async def _end(self) -> None:
        if self._engine is not None:
            await self._engine.aclose()
        # Without its loop a call would wait for ever: those under way end with the engine.
        if calls := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(calls)

    async def _encode(self, prompt: Prompt) -> tuple[str | None, tuple[int, ...]]:
        if isinstance(prompt, str):
            return prompt, tuple(await self._ready().encode(prompt))
        return None, tuple(prompt)

    async def _encode_chat(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[str | None, tuple[int, ...]]:
        return None, tuple(await self._ready().encode_chat(messages))

    async def _gather(
        self,
        encode: Encode,
        prompts: Sequence[Any],
        params: Params,
        done: Callable[[], None],
    ) -> list[Output]:
        from streamer.engine.engine import GenerateRequest

        engine = self._ready()
        default = engine.default_params() if params is None else params
        chosen = list(default) if isinstance(default, Sequence) else [default] * len(prompts)
        if len(chosen) != len(prompts):
            raise InvalidRequest(f"{len(chosen)} params for {len(prompts)} prompts", param="params")
        if not all(isinstance(one, SamplingParams) for one in chosen):
            raise InvalidRequest(
                "params must be a SamplingParams, or one for each prompt", param="params"
            )

        async def answer(prompt: Any, params: SamplingParams) -> Output:
            async with self._room.take(params.num_sequences):
                text, ids = await encode(prompt)
                await engine.compile(params)
                stream = engine.submit(GenerateRequest(prompt=ids, params=params))
                await stream.wait()  # leaving it, by an error elsewhere, cancels the request
            done()
            return _output(text, stream)

        try:
            async with asyncio.TaskGroup() as group:
                pairs = zip(prompts, chosen, strict=True)
                tasks = [group.create_task(answer(*pair)) for pair in pairs]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    # ------------------------------------------------------------ on the caller's thread

    def _all(
        self,
        encode: Encode,
        prompts: Sequence[Any],
        params: Params,
        progress: bool,
    ) -> list[Output]:
        if not progress or len(prompts) <= FEW:
            return self._run(self._gather(encode, prompts, params, lambda: None))
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

        columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
        console = Console()
        is_seen = console.is_terminal or console.is_jupyter
        with Progress(*columns, console=console, disable=not is_seen) as bar:
            task = bar.add_task("Prompts", total=len(prompts))
            return self._run(self._gather(encode, prompts, params, lambda: bar.advance(task)))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if os.getpid() != self._pid:
            from streamer.engine.refusals import forked

            work.close()
            raise forked(self._pid)
        with self._lock:
            if not self._is_open:
                work.close()
                raise EngineDead("the LLM is closed", code="engine_closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C too: its requests are cancelled and give their memory back
            future.cancel()
            raise

    def _ready(self) -> AsyncEngine:
        if self._engine is None:
            raise EngineDead("the LLM is closed", code="engine_closed")
        return self._engine


class _Room:
    """The choices that may be in the engine at once, of all calls together; first come, first in.

    num_free  if fewer than a request needs, it waits, and so do those behind it
    """

    def __init__(self, num_choices: int) -> None:
        self.num_choices = num_choices
        self.num_free = num_choices
        self._turn = asyncio.Lock()  # held by the request that is next
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def take(self, n: int) -> AsyncGenerator[None, None]:
        """Wait for room for n choices, and hold it until the context is left."""
        n = min(n, self.num_choices)  # more is the engine's to refuse
        async with self._turn:
            while self.num_free < n:
                self._freed.clear()
                await self._freed.wait()
            self.num_free -= n
        try:
            yield
        finally:
            self.num_free += n
            self._freed.set()


def _check_messages(messages: object) -> None:
    """InvalidRequest for what is no list of messages, each with a role, and a content or calls."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        like = '[{"role": "user", "content": "hi"}]'
        raise InvalidRequest(f"a conversation is a list such as {like}", param="messages")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"messages[{i}] must be an object", param=f"messages[{i}]")
        wanted = ["role"] if message.get("tool_calls") else ["role", "content"]
        if missing := next((name for name in wanted if message.get(name) is None), None):
            where = f"messages[{i}].{missing}"
            raise InvalidRequest(f"{where} is required", param=where, code="missing_field")


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or many: a list of numbers is one."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    if not all(isinstance(p, str | Sequence) for p in prompts):
        raise InvalidRequest("a prompt must be a text or a sequence of token ids", param="prompts")
    return list(prompts)  # type: ignore[arg-type]


def _output(text: str | None, stream: TokenStream) -> Output:
    choices = []
    for finish in stream.finishes:
        if finish is None or finish.reason is FinishReason.FAILED:
            detail = finish.detail if finish is not None else None
            raise RequestFailed(detail or "the request failed in a step")
        choice = finish.choice
        choices.append(
            Completion(
                stream.text(choice),
                stream.token_ids(choice),
                finish.reason.value,
                stream.logprobs(choice),
                finish.cumulative_logprob,
                finish.score,
            )
        )
    usage = Usage(stream.num_prompt_tokens, stream.num_output_tokens, stream.cached_tokens)
    scores = None if stream.params.prompt_logprobs is None else (None, *stream.prompt_logprobs)
    return Output(text, stream.prompt, tuple(choices), usage, stream.seed, scores)
