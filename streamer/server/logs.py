"""The lines of the log: text for people, JSON for machines, the same facts in both.

`setup` is called once by the command line; everything else logs through the standard library.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Literal

import msgspec

_ENCODE = msgspec.json.Encoder(enc_hook=str).encode


class JsonFormatter(logging.Formatter):
    """One JSON object a line; a Struct given as the only argument adds its fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        body: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        args = record.args
        if isinstance(args, tuple) and len(args) == 1 and isinstance(args[0], msgspec.Struct):
            body["message"] = type(args[0]).__name__.lower()
            body |= msgspec.to_builtins(args[0])
        else:
            body["message"] = record.getMessage()
        if record.exc_info:
            body["exception"] = self.formatException(record.exc_info)
        return _ENCODE(body).decode()


def setup(level: str, form: Literal["text", "json"]) -> None:
    """Log to standard error; the server's own chatter from warnings on.

    uvicorn writes the heads of WebSocket handshakes at debug level, keys included: never shown.
    """
    handler = logging.StreamHandler()
    if form == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    # at info, its "started" and "finished" say what the command line says better
    quiet = logging.WARNING if level == "info" else logging.INFO
    logging.getLogger("uvicorn.error").setLevel(max(quiet, logging.getLogger().level))
