"""Record: one request from its submission to its end, for any number of readers.

Observes its streams and reports to the metrics, the log (one line a finished request, logger
streamer.request) and, where traces are on, the tracer. Made by Service.record; never raises into
the engine. Requests that never ran are refusals.py's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal, Protocol

import msgspec

from streamer.core.plan import GAVE_UP, FinishReason
from streamer.engine.refusals import RESTART, SHUTDOWN
from streamer.errors import InvalidRequest
from streamer.server.telemetry.logs import Line

if TYPE_CHECKING:
    from streamer.engine.stream import TokenStream
    from streamer.server.telemetry.metrics import Metrics

log = logging.getLogger("streamer.request")

KEY_DIGITS: Final = 12  # of the key's digest: enough to tell keys apart
STATUS: Final = {"left": 499, "cancelled": 499, "failed": 500, SHUTDOWN: 503}
WORST_FIRST: Final = ("failed", SHUTDOWN, "cancelled", "left", "length", "stop")

Operation = Literal["chat", "completions", "embeddings", "responses", "messages", "ollama"]
Transport = Literal["http", "sse", "websocket"]


class Finished(Line, frozen=True, kw_only=True, omit_defaults=True):
    """The line of a finished request; None for a stage that it never reached.

    key     first digits of the key's digest, absent where no keys are required
    reason  of its worst choice: stop, length; left: its last reader had gone; cancelled;
            server_shutdown: cut off by it; failed
    status  the reason in HTTP (499: left or cancelled), also where a stream had begun with 200
    prompt  only with --log-prompts
    """

    id: str
    operation: Operation
    transport: Transport
    model: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    total_s: float
    reason: str
    status: int
    key: str | None = None
    queue_s: float | None = None
    first_token_s: float | None = None
    error: str | None = None
    prompt: tuple[str, ...] | None = None


class Prompts(Protocol):
    """Shows a prompt's token ids as text."""

    def __call__(self, ids: Sequence[int]) -> str: ...


class Tracer(Protocol):
    """Makes a span of every finished request: tracing.py's, where traces are on."""

    def finished(self, record: Record, line: Finished) -> None: ...
    def close(self) -> None: ...


class RequestInfo(msgspec.Struct, frozen=True):
    """What is reported of a request besides its streams.

    traceparent  the caller's trace, as it came
    """

    operation: Operation
    transport: Transport
    model: str
    tenant: str
    traceparent: str | None = None


class Record:
    """Observes the streams of one request: called when one starts, has a token, or ends.

    began  unix seconds
    """

    def __init__(
        self,
        streams: Sequence[TokenStream],
        request: RequestInfo,
        metrics: Metrics,
        *,
        tracer: Tracer | None = None,
        prompts: Prompts | None = None,
    ) -> None:
        self.streams = tuple(streams)
        self.began = time.time()
        self.request = request
        self._metrics = metrics
        self._tracer = tracer
        self._prompts = prompts
        self._queue_s: float | None = None
        self._first_token_s: float | None = None
        metrics.live.update(streams)
        for stream in streams:
            stream.observers.append(self)

    def __call__(self, stream: TokenStream) -> None:
        """Report what is new; the request is finished when its last stream is."""
        try:
            self._look(stream)
        except Exception:  # the engine goes on without this line
            log.exception("a request could not be reported")

    def _look(self, stream: TokenStream) -> None:
        timing = stream.timing
        # Of a stream that began in another process they would have the time without one.
        is_ours = not stream.is_restored
        if is_ours and self._queue_s is None and timing.queue_s is not None:
            self._queue_s = timing.queue_s
            self._metrics.queued(timing.queue_s)
        if is_ours and self._first_token_s is None and timing.first_token_s is not None:
            self._first_token_s = timing.first_token_s
            self._metrics.first_token(timing.first_token_s)
        if stream.is_finished:
            self._metrics.ended(stream)
            if all(s.is_finished for s in self.streams):
                self._finish()

    def _finish(self) -> None:
        line = self._line()
        self._metrics.finished(
            line.reason, line.transport, line.prompt_tokens, line.cached_tokens, line.total_s
        )
        log.info("%s", line)
        if self._tracer is not None:
            self._tracer.finished(self, line)

    def _line(self) -> Finished:
        streams = self.streams
        error = next((s.error for s in streams if s.error is not None), None)
        reason = min((_reason(s) for s in streams), key=WORST_FIRST.index)
        detail = next((f.detail for s in streams for f in s.finishes if f and f.detail), None)
        status = error.status if error is not None else STATUS.get(reason, 200)
        if reason == "failed" and detail is not None and detail.startswith(GAVE_UP):
            status = InvalidRequest.status
        show = self._prompts
        return Finished(
            id=streams[0].request_id,
            operation=self.request.operation,
            transport=self.request.transport,
            model=self.request.model,
            prompt_tokens=sum(s.num_prompt_tokens for s in streams),
            output_tokens=sum(s.num_output_tokens for s in streams),
            cached_tokens=sum(s.cached_tokens for s in streams),
            total_s=max(s.timing.total_s or 0.0 for s in streams),
            reason=reason,
            status=status,
            key=self.request.tenant[:KEY_DIGITS] or None,
            queue_s=self._queue_s,
            first_token_s=self._first_token_s,
            error=error.message if error is not None else detail,
            prompt=tuple(show(s.prompt) for s in streams) if show is not None else None,
        )


def _reason(stream: TokenStream) -> str:
    """Why the stream's worst choice ended."""
    if stream.error is not None:
        return SHUTDOWN if stream.error.code in (SHUTDOWN, RESTART) else "failed"
    if any(f.detail == SHUTDOWN for f in stream.finishes if f is not None):
        return SHUTDOWN
    reasons = {f.reason for f in stream.finishes if f is not None}
    if FinishReason.CANCELLED in reasons and not stream.num_readers:
        return "left"
    return min((r.value for r in reasons), key=WORST_FIRST.index)
