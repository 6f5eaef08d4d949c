"""One way to send the three create bodies, over real sockets, and to see what became of them.

Chat and completions over HTTP, responses over their WebSocket. Requests that reach the engine are
kept, so that a test can show the effect of a field that the fake model ignores.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx
import pytest
from websockets.sync.client import connect

from streamer.engine.engine import GenerateRequest, TokenStream
from tests.server.support.counting import sse
from tests.server.support.running import Running

KINDS = ("chat", "completions", "responses")
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
}
LIMIT = {"chat": "max_tokens", "completions": "max_tokens", "responses": "max_output_tokens"}
FINAL = ("response.completed", "response.incomplete", "response.failed", "error")


class Answer(NamedTuple):
    """A whole answer. `request` and `stream` are the engine's; `events` those of a response."""

    body: dict[str, Any]
    request: GenerateRequest
    stream: TokenStream
    events: list[dict[str, Any]]

    @property
    def choices(self) -> list[dict[str, Any]]:
        choices: list[dict[str, Any]] = self.body["choices"]
        return choices

    @property
    def text(self) -> str:
        if "output" in self.body:
            return "".join(p["text"] for i in self.body["output"] for p in i["content"])
        choice = self.choices[0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        assert isinstance(text, str)
        return text

    @property
    def num_tokens(self) -> int:
        usage = self.body["usage"]
        return int(usage["output_tokens"] if "output" in self.body else usage["completion_tokens"])

    @property
    def num_cached(self) -> int:
        usage = self.body["usage"]
        key = "input_tokens_details" if "output" in self.body else "prompt_tokens_details"
        return int(usage[key]["cached_tokens"])


class Refused(Exception):
    """An error instead of an answer."""

    def __init__(self, status: int, error: dict[str, Any]) -> None:
        super().__init__(f"{status}: {error}")
        self.status = status
        self.param = error["param"]


class Asker:
    def __init__(self, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = server
        self.seen: list[tuple[GenerateRequest, TokenStream]] = []
        self.encoded: list[tuple[Any, ...]] = []  # the arguments of each text that was encoded
        engine = server.engine
        submit = engine.submit

        def recorded(request: GenerateRequest) -> TokenStream:
            stream = submit(request)
            self.seen.append((request, stream))
            return stream

        def kept(encode: Any) -> Any:
            def encode_as_called(*args: Any, **kwargs: Any) -> Any:
                self.encoded.append((*args, kwargs))
                return encode(*args, **kwargs)

            return encode_as_called

        monkeypatch.setattr(engine, "submit", recorded)
        monkeypatch.setattr(engine, "encode", kept(engine.encode))
        monkeypatch.setattr(engine, "encode_chat", kept(engine.encode_chat))

    @staticmethod
    def body(kind: str, text: str, limit: int | None) -> dict[str, Any]:
        """A body that asks for `text`, for at most `limit` tokens."""
        given: dict[str, Any] = {
            "chat": {"messages": [{"role": "user", "content": text}]},
            "completions": {"prompt": text},
            "responses": {"input": text},
        }[kind]
        return given if limit is None else {**given, LIMIT[kind]: limit}

    def ask(
        self, kind: str, text: str = "count, please", /, limit: int | None = 8, **fields: Any
    ) -> Answer:
        """The whole answer, or Refused."""
        body = {**self.body(kind, text, limit), **fields}
        before = len(self.seen)
        events: list[dict[str, Any]] = []
        if kind == "responses":
            with self.responding(body) as hearing:
                events = list(hearing)
            answer = events[-1]["response"]
        else:
            got = httpx.post(self.server.url + PATHS[kind], json=body, timeout=20)
            if got.status_code != 200:
                raise Refused(got.status_code, got.json()["error"])
            answer = got.json()
        return Answer(answer, *self.seen[before], events)

    @contextmanager
    def responding(self, body: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
        """The events of response.create up to the last; leaving closes the socket."""
        with connect(self.server.ws_url, max_size=None) as socket:
            socket.send(json.dumps({"type": "response.create", **body}))

            def receive() -> Iterator[dict[str, Any]]:
                while True:
                    event = json.loads(socket.recv(timeout=20))
                    if event["type"] == "error":
                        raise Refused(event["status"], event["error"])
                    yield event
                    if event["type"] in FINAL:
                        return

            yield receive()

    @contextmanager
    def begun(self, kind: str, **fields: Any) -> Iterator[TokenStream]:
        """The stream of an answer that has begun; leaving closes the connection."""
        body = {**self.body(kind, "count", None), "ignore_eos": True, **fields}
        if kind == "responses":
            with self.responding(body) as events:
                next(events)
                yield self.seen[-1][1]
            return
        url = self.server.url + PATHS[kind]
        with httpx.stream("POST", url, json={**body, "stream": True}, timeout=20) as response:
            events = sse(response)
            next(events)
            yield self.seen[-1][1]
