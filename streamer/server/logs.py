"""The lines of the log: text for people, JSON for machines, the same facts in both.

`setup` is called once by the command line; everything else logs through the standard library. Who
logs never waits for who reads: a terminal stopped by Ctrl-S, or a full pipe, holds up no stream.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import threading
from collections import deque
from datetime import UTC, datetime
from typing import Final, Literal

import msgspec

MAX_WAITING_BYTES: Final = 1 << 20
LEAVE_S: Final = 1.0  # the process's end waits so long for a reader of the log

log = logging.getLogger(__name__)
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


class LineHandler(logging.Handler):
    """Writes each line to a file descriptor, here and now, unless that would have to wait.

    Then a thread writes it, and those after it, in order, and ends when it has caught up. Above
    `max_bytes` that wait, lines are lost, and the next line to be written says how many.

    num_waiting_bytes  those that the thread has not begun to write
    """

    def __init__(self, fd: int, max_bytes: int = MAX_WAITING_BYTES) -> None:
        super().__init__()
        self._fd = fd
        self._max_bytes = max_bytes
        # Of all below, the lock that `emit` is called with; nobody waits for the reader with it.
        self._state = threading.Condition(self.lock)
        self._waiting: deque[bytes] = deque()
        self.num_waiting_bytes = 0
        self._num_lost = 0
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write it, keep it, or count it as lost."""
        try:
            line = self.format(record).encode(errors="backslashreplace") + b"\n"
            if self._thread is not None:
                self._keep(line)
            elif len(line) <= select.PIPE_BUF and select.select([], [self._fd], [], 0)[1]:
                os.write(self._fd, line)
            else:
                self._keep(line)
                thread = threading.Thread(target=self._catch_up, daemon=True)
                thread.start()
                self._thread = thread
        except Exception:  # as every handler of the standard library
            self.handleError(record)

    def flush(self) -> None:
        """Wait until everything is written, but not for ever."""
        with self._state:
            self._state.wait_for(lambda: self._thread is None, LEAVE_S)

    def _keep(self, line: bytes) -> None:
        if self._num_lost or (
            self._waiting and self.num_waiting_bytes + len(line) > self._max_bytes
        ):
            self._num_lost += 1  # until the thread has caught up: the gap is one
            return
        self._waiting.append(line)
        self.num_waiting_bytes += len(line)

    def _catch_up(self) -> None:
        while line := self._next():
            rest = memoryview(line)
            with contextlib.suppress(OSError):  # nobody reads any more
                while rest:
                    select.select([], [self._fd], [])
                    rest = rest[os.write(self._fd, rest[: select.PIPE_BUF]) :]

    def _next(self) -> bytes:
        """The line to write; none, and the thread is no more, once it has caught up."""
        with self._state:
            if self._waiting:
                line = self._waiting.popleft()
                self.num_waiting_bytes -= len(line)
                return line
            if self._num_lost:
                text, args = "%d lines were lost: the log was not read", (self._num_lost,)
                self._num_lost = 0
                told = log.makeRecord(log.name, logging.WARNING, __file__, 0, text, args, None)
                return self.format(told).encode() + b"\n"
            self._thread = None
            self._state.notify_all()
            return b""


def setup(level: str, form: Literal["text", "json"]) -> None:
    """Log to standard error; the server's own chatter from warnings on.

    uvicorn writes the heads of WebSocket handshakes at debug level, keys included: never shown.
    """
    handler = LineHandler(sys.stderr.fileno())
    if form == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    # at info, its "started" and "finished" say what the command line says better
    quiet = logging.WARNING if level == "info" else logging.INFO
    logging.getLogger("uvicorn.error").setLevel(max(quiet, logging.getLogger().level))
