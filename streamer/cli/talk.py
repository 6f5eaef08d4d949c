"""The source of answers in a terminal: an engine in this process, or a server over its WebSocket.

Both yield the same pieces of text, so chat and generate treat them alike. Closing an answer's
iterator cancels the answer in either.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit, urlunsplit

import msgspec

from streamer.cli.arguments import (
    UsageError,
    add_config_flags,
    add_sampling_flags,
    config_flags_given,
    config_from,
    sampling_from,
)
from streamer.errors import InvalidRequest, StreamerError

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection
    from websockets.http11 import Response

    from streamer.config import Config
    from streamer.engine.engine import AsyncEngine

SUBPROTOCOL = "streamer.v1.json"
KEY_VARIABLE = "STREAMER_API_KEY"
MODEL_SECTIONS = ("model", "scheduling and memory")
Message = dict[str, Any]


class Piece(msgspec.Struct, frozen=True):
    """A piece of an answer. `num_tokens`: tokens so far, where known; `end`: on the last only."""

    text: str = ""
    num_tokens: int | None = None
    end: str | None = None


class AnswerSource(Protocol):
    """A source of answers to lists of messages."""

    name: str

    def answer(self, messages: list[Message]) -> AsyncIterator[Piece]: ...


def add_source_arguments(parser: argparse.ArgumentParser, *, model: bool) -> None:
    """Where answers come from: `--url` of a server, or a model with its settings."""
    parser.add_argument("--url", metavar="URL", help="a server's address, instead of a model")
    parser.add_argument("--key", metavar="KEY", help=f"its API key (or {KEY_VARIABLE})")
    add_sampling_flags(parser)
    add_config_flags(parser, sections=MODEL_SECTIONS, model=model, skip=("seed",))


def source_from(args: argparse.Namespace) -> AbstractAsyncContextManager[AnswerSource]:
    """The source for these flags, opened by `async with`; UsageError for flags that clash."""
    given = sampling_from(args)
    if args.url is None:
        return _in_process(config_from(args), given)
    if getattr(args, "model_argument", None) or args.config_model:
        raise UsageError("--url names a server, which has its own model: leave MODEL out")
    for flag in config_flags_given(args):
        raise UsageError(f"--url names a server, which has its own settings: leave {flag} out")
    if getattr(args, "raw", False):
        raise UsageError("--raw needs a model in this process: leave --url out")
    return _over_socket(args.url, args.key or os.environ.get(KEY_VARIABLE), given)


# ---------------------------------------------------------------- in this process


@asynccontextmanager
async def _in_process(config: Config, given: dict[str, Any]) -> AsyncIterator[AnswerSource]:
    from streamer.engine.engine import AsyncEngine

    async with AsyncEngine.from_config(config) as engine:
        yield InProcess(engine, given)


class InProcess:
    """Answers from an engine that this process owns."""

    def __init__(self, engine: AsyncEngine, given: dict[str, Any]) -> None:
        self.name = engine.info.name
        self._engine = engine
        self._params = engine.default_params(**given)

    async def answer(self, messages: list[Message]) -> AsyncIterator[Piece]:
        """Pieces of the assistant's next message."""
        try:
            prompt = await self._engine.encode_chat(messages)
        except InvalidRequest as error:
            if error.code != "no_chat_template":
                raise
            raise StreamerError(
                "this model has no chat template: --chat-template FILE gives it one, and "
                "`streamer generate --raw` continues plain text"
            ) from error
        async for piece in self._generate(prompt):
            yield piece

    async def complete(self, text: str) -> AsyncIterator[Piece]:
        """Pieces of plain text that follow `text`, without a chat template."""
        async for piece in self._generate(text):
            yield piece

    async def _generate(self, prompt: str | list[int]) -> AsyncIterator[Piece]:
        from contextlib import aclosing

        num_tokens = 0
        async with aclosing(self._engine.generate(prompt, self._params)) as deltas:
            async for delta in deltas:
                num_tokens += len(delta.token_ids)
                end = delta.finish.reason.value if delta.finish else None
                yield Piece(delta.text, num_tokens, end)


# ---------------------------------------------------------------- over a socket


@asynccontextmanager
async def _over_socket(
    url: str, key: str | None, given: dict[str, Any]
) -> AsyncIterator[AnswerSource]:
    source = OverSocket(socket_url(url), key, given)
    await source.check()
    yield source


def socket_url(url: str) -> str:
    """The WebSocket address of a server; `localhost:8000` is enough. UsageError for no address."""
    schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        is_address = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, an unpaired bracket
        is_address = False
    if not is_address or not url.isprintable() or " " in url:
        raise UsageError(
            f"--url: {url} is not the address of a server, such as http://127.0.0.1:8000"
        )
    path = parts.path.rstrip("/").removesuffix("/responses").removesuffix("/v1")
    return urlunsplit((schemes[parts.scheme], parts.netloc, path + "/v1/responses", "", ""))


class OverSocket:
    """Answers from a server, each over its own connection, so that none idles between answers."""

    def __init__(self, url: str, key: str | None, given: dict[str, Any]) -> None:
        self.name = url
        self._url = url
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._body = dict(given)
        if "max_tokens" in self._body:
            self._body["max_output_tokens"] = self._body.pop("max_tokens")

    async def check(self) -> None:
        """StreamerError if the server can't be reached or refuses, before the first question."""
        async with self._connected():
            pass

    async def answer(self, messages: list[Message]) -> AsyncIterator[Piece]:
        """Pieces of the assistant's next message."""
        async with self._connected() as socket:
            create = {"type": "response.create", "input": messages, **self._body}
            await socket.send(msgspec.json.encode(create).decode())
            response_id = None
            try:
                async for frame in socket:
                    event = msgspec.json.decode(frame)
                    response_id = _id_in(event) or response_id
                    piece = piece_of(event)
                    if piece is not None:
                        yield piece
                        if piece.end is not None:
                            response_id = None
                            return
            finally:
                if response_id is not None:
                    cancel = {"type": "response.cancel", "response_id": response_id}
                    await socket.send(msgspec.json.encode(cancel).decode())
        raise StreamerError(f"{self._url}: the connection ended before the answer did")

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[ClientConnection]:
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidStatus, WebSocketException
        from websockets.typing import Subprotocol

        try:
            async with connect(
                self._url,
                additional_headers=self._headers,
                subprotocols=[Subprotocol(SUBPROTOCOL)],
                max_size=None,
            ) as socket:
                yield socket
        except InvalidStatus as error:
            raise StreamerError(f"{self._url}: {refusal(error.response)}") from error
        except OSError as error:
            why = error.strerror or str(error)
            raise StreamerError(f"no server answers at {self._url}: {why}") from error
        except WebSocketException as error:
            raise StreamerError(f"{self._url}: {error}") from error


def refusal(response: Response) -> str:
    """Why a server did not open a socket: its error message, or else its HTTP status."""
    try:
        reason = msgspec.json.decode(response.body or b"")["error"]["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        reason = f"HTTP {response.status_code} {response.reason_phrase}"
    return f"{reason} (--key gives one)" if response.status_code == 401 else str(reason)


def _id_in(event: Any) -> str | None:
    response = event.get("response")
    return response.get("id") if isinstance(response, dict) else None


def piece_of(event: Any) -> Piece | None:
    """The piece that a server event adds, None for most. An error event raises StreamerError."""
    match event.get("type"):
        case "response.output_text.delta":
            return Piece(event["delta"])
        case "response.completed":
            return Piece(num_tokens=_output_tokens(event), end="stop")
        case "response.incomplete":
            details = event["response"].get("incomplete_details") or {}
            return Piece(num_tokens=_output_tokens(event), end=details.get("reason", "incomplete"))
        case "response.failed":
            error = event["response"].get("error") or {}
            raise StreamerError(error.get("message", "the answer failed"))
        case "error":
            raise StreamerError(event["error"]["message"])
        case _:
            return None


def _output_tokens(event: Any) -> int | None:
    usage = event["response"].get("usage") or {}
    return usage.get("output_tokens")
