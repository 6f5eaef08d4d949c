"""Errors as the wire has them: OpenAI's error object, of any StreamerError.

Values in, values or bytes out; imports nothing of the server. Whatever answers uses it: bodies,
handlers, the guard and the connections themselves.
"""

from __future__ import annotations

from typing import Final

import msgspec

from streamer.errors import StreamerError

MAX_ECHO: Final = 200  # characters of what a client sent
MAX_MESSAGE: Final = 1000  # characters of a message


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
