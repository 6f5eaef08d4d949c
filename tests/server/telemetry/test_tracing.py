"""Traces: a span a request with the conventions' names, in the caller's trace; nothing unasked."""

from __future__ import annotations

import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest

from streamer.config import Config
from streamer.errors import ConfigError
from streamer.server import lifecycle
from streamer.server.telemetry.tracing import OpenTelemetry, make_tracer
from tests.server.responses.test_socket import FINAL, dial, send, until
from tests.server.support.counting import CHAT, sse
from tests.server.support.running import BUNDLED

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize("settings", [{}, BUNDLED], ids=["fake", "bundled"])
def test_spans_of_every_transport(
    server_with: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    monkeypatch.setattr(lifecycle, "make_tracer", lambda _: OpenTelemetry(exporter))
    server = server_with(**settings)
    url = server.url + "/v1/chat/completions"
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
    body = {**CHAT, "max_tokens": 5, "ignore_eos": True, "temperature": 0.5, "seed": 7}
    answer = httpx.post(url, json=body, headers=headers).json()
    with dial(server) as socket:
        send(socket, "response.create", input="count to 3")
        until(socket, *FINAL)
    with httpx.stream("POST", url, json={**CHAT, "ignore_eos": True, "stream": True}) as response:
        next(sse(response))
    server.wait_idle()
    server.stop()  # closing sends what is left
    chat, response, left = exporter.get_finished_spans()
    assert chat.context.trace_id == int(TRACE, 16)
    assert chat.parent is not None
    assert chat.parent.span_id == int(SPAN, 16)
    assert response.parent is left.parent is None
    found = dict(chat.attributes or {})
    assert chat.name == "chat " + answer["model"]
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.response.id"] == answer["id"]
    assert found["gen_ai.request.temperature"] == 0.5
    assert found["gen_ai.request.seed"] == 7
    assert found["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == 5
    assert found["gen_ai.response.finish_reasons"] == ("length",)
    assert "error.type" not in found
    assert chat.start_time is not None
    assert chat.end_time is not None
    (first,) = chat.events
    assert chat.start_time <= first.timestamp <= chat.end_time
    assert (response.attributes or {})["streamer.transport"] == "websocket"
    assert (left.attributes or {})["error.type"] == "left"
    assert "please" not in str([span.to_json() for span in (chat, response, left)])


class Collector(BaseHTTPRequestHandler):
    """Takes what an OTLP exporter posts."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.seen.append((self.path, body))  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def test_an_endpoint_gets_them_over_http(server_with: Any) -> None:
    pytest.importorskip("opentelemetry.sdk")
    collector: Any = HTTPServer(("127.0.0.1", 0), Collector)
    collector.seen = []
    thread = threading.Thread(target=collector.serve_forever)
    thread.start()
    try:
        server = server_with(otlp_endpoint=f"http://127.0.0.1:{collector.server_port}")
        body = {**CHAT, "max_tokens": 2}
        answer = httpx.post(server.url + "/v1/chat/completions", json=body).json()
        server.stop()
    finally:
        collector.shutdown()
        thread.join()
        collector.server_close()
    ((path, sent),) = collector.seen
    assert path == "/v1/traces"
    assert answer["id"].encode() in sent


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "file:///etc/passwd", ""])
def test_an_endpoint_that_is_no_address_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="otlp_endpoint: expected an address") as caught:
        make_tracer(endpoint)
    assert caught.value.param == "otlp_endpoint"


def test_without_opentelemetry_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match="pip install opentelemetry-sdk opentelemetry-exporter"):
        make_tracer("http://127.0.0.1:4318")


def test_nothing_is_imported_where_no_endpoint_is_named() -> None:
    assert make_tracer(Config().otlp_endpoint) is None
    script = (
        "import sys, streamer.server.lifecycle; "
        "sys.exit(any(m.startswith('opentelemetry') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
