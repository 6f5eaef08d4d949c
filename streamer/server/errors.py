"""Errors as the wire has them: OpenAI's object, Anthropic's or Ollama's, of any StreamerError.

Also the headers with an answer's id, which errors have as well. Values in, values or bytes out;
imports nothing of the server. Whatever answers uses it: bodies, handlers, the guard and the
connections themselves.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from streamer.errors import Overloaded, StreamerError

MAX_ECHO: Final = 200  # characters of what a client sent
MAX_MESSAGE: Final = 1000  # characters of a message

NO_THREADS: Final = "thread_unsupported_request"  # Anthropic's clients then send all messages
OVERLOADED: Final = 529  # Anthropic's status instead of 503, where waiting helps
_TYPES: Final = {  # Anthropic's, by status
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
# At the end of a path: a proxy may have put something before it.
_ANTHROPIC: Final = re.compile(r"/v1/messages(/count_tokens)?$")
_OLLAMA: Final = re.compile(r"/api/[a-z]+$")


class ApiError(msgspec.Struct, frozen=True):
    """An error: what is wrong, the field at fault and a code for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


def clip(text: str, limit: int = MAX_ECHO) -> str:
    """The text, cut to `limit` characters: an error repeats no long value whole."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def api_error(error: StreamerError) -> ApiError:
    """The wire's object for one of our exceptions."""
    param = None if error.param is None else clip(error.param)
    return ApiError(clip(error.message, MAX_MESSAGE), error.type, param, error.code)


def error_body(error: StreamerError) -> bytes:
    """`{"error": {...}}`."""
    return msgspec.json.encode({"error": api_error(error)})


# ---------------------------------------------------------------- Anthropic's and Ollama's forms


class ErrorDetails(msgspec.Struct, frozen=True):
    """A code for programs, and what the server can't do."""

    error_code: str
    unsupported: tuple[str, ...] = ()


class AnthropicError(msgspec.Struct, frozen=True):
    """What is wrong, in Anthropic's words.

    details  of errors that Anthropic's clients recover from
    """

    type: str
    message: str
    details: ErrorDetails | UnsetType = UNSET


class AnthropicErrorBody(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """An error of a route of Anthropic's; also an event of its streams."""

    error: AnthropicError


class OllamaErrorBody(msgspec.Struct, frozen=True):
    """An error of a route of Ollama's; also a line of its streams."""

    error: str


def said(error: StreamerError) -> str:
    """The message with the field at fault: these two forms have no place of its own for it."""
    message, param = error.message, error.param
    if param is not None and param not in message:
        message = f"{clip(param)}: {message}"
    return clip(message, MAX_MESSAGE)


def anthropic_error(error: StreamerError) -> tuple[int, bytes]:
    """Status and body of an error, as Anthropic has them."""
    status = OVERLOADED if isinstance(error, Overloaded) and error.status == 503 else error.status
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = ErrorDetails(NO_THREADS) if error.code == NO_THREADS else UNSET
    body = AnthropicErrorBody(AnthropicError(kind, said(error), details))
    return status, msgspec.json.encode(body)


def ollama_error(error: StreamerError) -> bytes:
    """`{"error": "..."}`."""
    return msgspec.json.encode(OllamaErrorBody(said(error)))


def error_answer(error: StreamerError, path: str) -> tuple[int, bytes]:
    """Status and body of an error, in the form of the route."""
    if _ANTHROPIC.search(path):
        return anthropic_error(error)
    if _OLLAMA.search(path):
        return error.status, ollama_error(error)
    return error.status, error_body(error)


def id_headers(request_id: str) -> tuple[tuple[bytes, bytes], ...]:
    """An answer's id in its head, as clients of OpenAI's API and of Anthropic's read it."""
    raw = request_id.encode()
    return (b"x-request-id", raw), (b"request-id", raw)
