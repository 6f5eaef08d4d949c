"""Restoring: from what a journal has of a request to the request that goes on, or is kept.

AsyncEngine makes a Restoring when its model is loaded, before it takes requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from streamer.config import Config
from streamer.core.plan import Drawn, Finish, FinishReason, TokenLogprob
from streamer.engine.journal.records import Saved
from streamer.engine.requests import GenerateRequest, Progress, Timing
from streamer.engine.stream import Delta
from streamer.errors import StreamerError

if TYPE_CHECKING:
    from streamer.core.sampling import SamplingParams
    from streamer.engine.journal.writer import Contexts, Journal
    from streamer.engine.stream import TokenStream

# A request that ends its process may do so again: it is failed by name when it was restored so
# often without a token, and the process was killed each time. A beam search has none for long: at
# 5, one of 40 tokens was failed where a server was killed every second (2026-11-22).
MAX_TRIES: Final = 20
# From so many on it is suspected: suspects go on one after the other, each when the one before has
# its next token, or after SUSPECT_S. So a death counts against one of them, and the others against
# which the first deaths counted are cleared.
SUSPECT_TRIES: Final = 3
SUSPECT_S: Final = 10.0

log = logging.getLogger(__name__)


class Restoring:
    """The requests of a journal, on their way back into an engine.

    take  makes the stream of a request that has `progress`, and lets it go on where it has not
          ended
    """

    def __init__(
        self,
        journal: Journal,
        config: Config,
        contexts: Contexts | None,
        take: Callable[[GenerateRequest], TokenStream],
    ) -> None:
        self._journal = journal
        self._config = config
        self._contexts = contexts
        self._take = take
        self._waiting: list[tuple[Saved, GenerateRequest]] = []

    async def begin(self, compile: Callable[[SamplingParams, str], Awaitable[None]]) -> None:
        """Restore what has ended, and prepare the rest; the loop is free in between."""
        for saved in sorted(self._journal.saved, key=_when):
            try:
                request = self._request(saved)
                await compile(request.params, request.cache_salt)
            except Exception:
                log.exception("%s can't be restored, and is left out", saved.request_id)
                self._journal.forget(saved.request_id)
                continue
            if saved.is_finished:
                self._restore(saved, request)
            else:
                self._waiting.append((saved, request))
            await asyncio.sleep(0)
        self._journal.saved = []

    async def go_on(self) -> None:
        """Let the others go on, in the order in which they were accepted, but suspects first."""
        suspects = [each for each in self._waiting if num_tries(each[0]) > SUSPECT_TRIES]
        for saved, request in sorted(suspects, key=lambda each: num_tries(each[0])):
            stream = self._restore(saved, request)
            if stream is not None and not await _has_next(stream):
                return
        for saved, request in self._waiting:
            if num_tries(saved) <= SUSPECT_TRIES:
                self._restore(saved, request)

    def _request(self, saved: Saved) -> GenerateRequest:
        request, data = restored(saved, self._config, time.time()), saved.accepted.context
        if data is not None and self._contexts is not None:
            request = replace(request, context=self._contexts.decode(data))
        return request

    def _restore(self, saved: Saved, request: GenerateRequest) -> TokenStream | None:
        journal = self._journal
        if saved.tail.ended is None:
            starts = [len(tokens) for tokens in saved.tail.tokens]
            journal.restore(request.request_id, starts, num_tries(saved))
        try:
            stream = self._take(request)
        except StreamerError as e:  # of another model, say
            log.error("%s can't be restored, and is left out: %s", request.request_id, e.message)
            journal.forget(request.request_id)
            return None
        if self._contexts is not None and stream.context is not None:
            self._contexts.restored(stream)
        if not stream.is_finished:
            stream.miss()  # its readers may come back
        elif saved.tail.ended is None:
            journal.end(stream, is_kept=True)
        return stream


async def _has_next(stream: TokenStream) -> bool:
    """Wait for a stream's next token or end, SUSPECT_S at most; False: the engine has ended."""
    heads = [len(stream.token_ids(choice)) for choice in range(stream.params.n)]
    with contextlib.suppress(TimeoutError, StreamerError):
        async with asyncio.timeout(SUSPECT_S), aclosing(stream.read(heads)) as batches:
            async for items in batches:
                if any(isinstance(item, Delta) for item in items):
                    break
    return stream.error is None


def _when(saved: Saved) -> float:
    """For their order: when it ended or, where it goes on, when it was accepted."""
    ended = saved.tail.ended
    return saved.accepted.created if ended is None else ended.at


def restored(saved: Saved, config: Config, now: float) -> GenerateRequest:
    """The request as it goes on, without its context; `now` in unix seconds."""
    request, tail = saved.accepted.request, saved.tail
    error = _error(saved, now)
    outputs = tuple(
        Drawn(
            tuple(tokens),
            _logprobs(tokens, tail.logprobs[i]) if request.params.logprobs is not None else (),
            tail.finishes.get(i) or _failed(request.request_id, i, len(tokens), error),
        )
        for i, tokens in enumerate(tail.tokens)
    )
    began = tail.began
    progress = Progress(
        outputs=outputs,
        created=saved.accepted.created,
        prompt_logprobs=tuple(tail.prompt_logprobs),
        timing=Timing() if tail.ended is None else tail.ended.timing,
        cached_tokens=0 if began is None else began.cached_tokens,
        shared_tokens=0 if began is None else began.shared_tokens,
    )
    detach_s = request.detach_s
    if detach_s is not None:  # its reader was lost with the server: it may come back
        detach_s = max(detach_s, config.detach_timeout)
    return replace(request, progress=progress, detach_s=detach_s)


def num_tries(saved: Saved) -> int:
    """How often the request is restored with these tokens, this time included."""
    is_further = saved.tail.num_tokens > saved.tried_at
    return 1 if is_further else saved.tries + 1


def _error(saved: Saved, now: float) -> str | None:
    """Why a request does not go on; None: it does, or its choices have ended."""
    ended, deadline_s = saved.tail.ended, saved.accepted.request.deadline_s
    if ended is not None and ended.error is not None:
        return ended.error
    if deadline_s is not None and now - saved.accepted.created > deadline_s:
        return f"the answer was not complete within the request's deadline of {deadline_s:g} s"
    if num_tries(saved) > MAX_TRIES:
        return f"the server died {MAX_TRIES} times before the answer had its next token"
    return None


def _failed(request_id: str, choice: int, num_tokens: int, error: str | None) -> Finish | None:
    if error is None:
        return None
    return Finish(request_id, choice, FinishReason.FAILED, num_tokens, detail=error)


def _logprobs(tokens: list[int], found: dict[int, TokenLogprob]) -> tuple[TokenLogprob, ...]:
    nan = float("nan")
    return tuple(found.get(i) or TokenLogprob(token, nan) for i, token in enumerate(tokens))
