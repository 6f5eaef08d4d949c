"""The lines of the log: text for people, JSON for machines, the same facts in both.

`setup` is called once by the command line; everything else logs through the standard library, and
in JSON, prints and uncaught exceptions become lines too. Logging never waits for the log's
reader: a terminal stopped by Ctrl-S, or a full pipe, delays no stream.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import select
import sys
import threading
import warnings
from collections import deque
from datetime import UTC, datetime
from typing import Any, Final, Literal

import msgspec

MAX_WAITING_BYTES: Final = 1 << 20
LEAVE_S: Final = 1.0  # how long the process's end waits for the log's reader
MAX_PRINTED: Final = 64 << 10  # characters kept of a line that is printed in parts

log = logging.getLogger(__name__)
_ENCODE = msgspec.json.Encoder(enc_hook=str).encode


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Facts of one line: `name=value` pairs in text, fields in JSON; None is left out."""

    def __str__(self) -> str:
        pairs = ((f, getattr(self, f)) for f in self.__struct_fields__)
        shown = ((f, f"{v:.4f}" if isinstance(v, float) else v) for f, v in pairs if v is not None)
        return " ".join(f"{f}={v}" if _is_word(str(v)) else f"{f}={v!r}" for f, v in shown)


def _is_word(text: str) -> bool:
    return text.isprintable() and " " not in text


class JsonFormatter(logging.Formatter):
    """One JSON object a line; a Struct given as the only argument adds its fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its newline."""
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
        if record.stack_info:
            body["stack"] = self.formatStack(record.stack_info)
        try:
            return _ENCODE(body).decode()
        except UnicodeEncodeError:  # half a surrogate pair, which no JSON can hold
            clean = {k: v if v is None else _printable(str(v)) for k, v in body.items()}
            return _ENCODE(clean).decode()


def _printable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


class Printed(io.TextIOBase):
    """Replaces standard output or error: what is written there becomes lines of the log.

    A text that ends with a newline is one record, newlines inside it included. Of text that
    carriage returns overwrite, only the last part is kept.
    """

    def __init__(self, name: str, level: int, fd: int) -> None:
        self._log, self._level, self._fd = logging.getLogger(name), level, fd
        self._text = ""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        """Keep the text until its line ends, then log it."""
        with self._lock:
            whole = (self._text + text)[-MAX_PRINTED:]
            self._text = "" if whole.endswith("\n") else whole.rpartition("\r")[2]
            line = "" if self._text else whole.rstrip().rpartition("\r")[2]
        if line:
            self._log.log(self._level, "%s", line)
        return len(text)

    def fileno(self) -> int:
        """The descriptor beneath, for code that writes to it without Python."""
        return self._fd

    def writable(self) -> bool:
        return True


class LineHandler(logging.Handler):
    """Writes each line to a file descriptor at once, unless the write would block.

    Then a thread writes that line and those after it, in order, and ends when it has caught up.
    Above `max_bytes` waiting, lines are lost; a line after those that wait says how many.

    num_waiting_bytes  of the lines that the thread has not begun to write
    """

    def __init__(self, fd: int, max_bytes: int = MAX_WAITING_BYTES) -> None:
        super().__init__()
        self._fd = fd
        self._max_bytes = max_bytes
        # Guards all below: the lock that `emit` is called with; no blocking write is made under it.
        self._state = threading.Condition(self.lock)
        self._waiting: deque[bytes] = deque()
        self.num_waiting_bytes = 0
        self._num_lost = 0
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line, keep it for the thread, or count it as lost."""
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
        except OSError:
            pass  # the log has no reader any more
        except Exception:  # as every handler of the standard library
            self.handleError(record)

    def flush(self) -> None:
        """Wait until every line is written, for up to LEAVE_S."""
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
            with contextlib.suppress(OSError):  # the log has no reader any more
                while rest:
                    select.select([], [self._fd], [])
                    rest = rest[os.write(self._fd, rest[: select.PIPE_BUF]) :]

    def _next(self) -> bytes:
        """The next line to write; empty when none waits, and then the thread ends."""
        with self._state:
            if self._waiting:
                line = self._waiting.popleft()
                self.num_waiting_bytes -= len(line)
                return line
            if self._num_lost:
                text, args = "%d lines were lost: the log was not read", (self._num_lost,)
                self._num_lost = 0
                record = log.makeRecord(log.name, logging.WARNING, __file__, 0, text, args, None)
                return self.format(record).encode() + b"\n"
            self._thread = None
            self._state.notify_all()
            return b""


def setup(level: str, form: Literal["text", "json"]) -> None:
    """Log to standard error, Python's warnings too; never uvicorn's lines of debug level.

    At that level uvicorn writes the heads of WebSocket handshakes, keys included.
    """
    handler = LineHandler(sys.stderr.fileno())
    if form == "json":
        handler.setFormatter(JsonFormatter())
        _log_what_is_printed_or_raised()
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    warnings.formatwarning = _one_line
    logging.captureWarnings(True)
    # at info, uvicorn's "started" and "finished" repeat what the command line prints
    quiet = logging.WARNING if level == "info" else logging.INFO
    logging.getLogger("uvicorn.error").setLevel(max(quiet, logging.getLogger().level))


def _one_line(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    return f"{category.__name__}: {message} ({filename}:{lineno})"


def _log_what_is_printed_or_raised() -> None:
    """Log prints, lines of libraries with handlers of their own, and uncaught exceptions."""
    uncaught = logging.getLogger("uncaught")

    def report(args: Any) -> None:
        if args.exc_type is SystemExit:
            return  # a thread may end with it
        trace = args.exc_type, args.exc_value, args.exc_traceback
        uncaught.critical("%s", getattr(args, "err_msg", None) or "exception", exc_info=trace)

    sys.excepthook = lambda *trace: uncaught.critical("exception", exc_info=trace)
    threading.excepthook = sys.unraisablehook = report
    sys.stdout = Printed("stdout", logging.INFO, sys.stdout.fileno())
    sys.stderr = Printed("stderr", logging.WARNING, sys.stderr.fileno())
