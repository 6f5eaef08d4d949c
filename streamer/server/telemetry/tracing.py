"""OpenTelemetry traces: one span a finished request, made when it ends, with its real times.

Optional: the packages of the extra [otel] are imported when an endpoint is named and not before.
Attributes follow the semantic conventions for generative AI; prompts and answers are not among
them. Spans leave in batches on a thread of the SDK's own. lifecycle.py makes and closes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from streamer.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from streamer.server.telemetry.records import Finished, Record, Tracer

TRACES_PATH: Final = "/v1/traces"
OPERATIONS: Final = {
    "chat": "chat",
    "completions": "text_completion",
    "responses": "chat",
    "messages": "chat",
    "ollama": "chat",
}
NANO: Final = 1_000_000_000
EXPORT_S: Final = 3.0  # with retries; how long the last batch may delay the exit


def make_tracer(endpoint: str | None) -> Tracer | None:
    """A tracer that sends to `endpoint` (the collector's address, or the whole URL); None: none.

    Raises ConfigError if the extra is not installed or the endpoint is no address.
    """
    if endpoint is None:
        return None
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.netloc:
        raise ConfigError(
            f"otlp_endpoint: expected an address such as http://127.0.0.1:4318, got {endpoint!r}",
            param="otlp_endpoint",
        )
    if url.path in ("", "/"):
        endpoint = endpoint.rstrip("/") + TRACES_PATH
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as e:
        raise ConfigError(
            "otlp_endpoint needs OpenTelemetry: pip install opentelemetry-sdk "
            f"opentelemetry-exporter-otlp-proto-http ({e})",
            param="otlp_endpoint",
        ) from e
    return OpenTelemetry(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_S))


class OpenTelemetry:
    """Spans to an exporter, by a provider of its own."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": "streamer"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("streamer")
        self._propagator = TraceContextTextMapPropagator()

    def finished(self, record: Record, line: Finished) -> None:
        """The span of a request that has just ended."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        carrier = {"traceparent": record.request.traceparent} if record.request.traceparent else {}
        operation = OPERATIONS[line.operation]
        began = int(record.began * NANO)
        span = self._tracer.start_span(
            f"{operation} {line.model}",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes=attributes(record, line, operation),
            start_time=began,
        )
        if line.first_token_s is not None:
            span.add_event("first_token", timestamp=began + int(line.first_token_s * NANO))
        if line.status >= 500:
            span.set_status(Status(StatusCode.ERROR, line.error))
        span.end(end_time=began + int(line.total_s * NANO))

    def close(self) -> None:
        """Send what is left; may wait for the network."""
        self._provider.shutdown()


def attributes(
    record: Record, line: Finished, operation: str
) -> dict[str, str | int | float | tuple[str, ...]]:
    """A request's attributes by the conventions' names; ours begin with `streamer.`."""
    params = record.streams[0].params
    found: dict[str, str | int | float | tuple[str, ...] | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "streamer",
        "gen_ai.request.model": line.model,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.seed": params.seed,
        "gen_ai.response.id": line.id,
        "gen_ai.response.model": line.model,
        "gen_ai.response.finish_reasons": (line.reason,),
        "gen_ai.response.time_to_first_chunk": line.first_token_s,
        "gen_ai.usage.input_tokens": line.prompt_tokens,
        "gen_ai.usage.output_tokens": line.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": line.cached_tokens,
        "error.type": line.reason if line.status >= 400 else None,
        "streamer.transport": line.transport,
        "streamer.queue_s": line.queue_s,
    }
    return {name: value for name, value in found.items() if value is not None}
