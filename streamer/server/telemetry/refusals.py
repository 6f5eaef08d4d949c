"""Refusals: the log lines of requests that never ran (logger streamer.refused).

Their number a second is bounded; the next line counts those left out. Owned by Metrics, which
counts all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from streamer.server.telemetry.logs import Line

if TYPE_CHECKING:
    from streamer.errors import StreamerError

log = logging.getLogger("streamer.refused")

REFUSALS_A_SECOND: Final = 10
MAX_ERROR: Final = 500  # characters: some errors repeat what the client sent


class Refused(Line, frozen=True, kw_only=True, omit_defaults=True):
    """The line of a request that was answered with an error and never ran.

    id  drawn for the error: its answer has it, too
    unlogged  refusals before it without a line, beyond REFUSALS_A_SECOND
    """

    id: str
    status: int
    code: str
    error: str
    param: str | None = None
    unlogged: int | None = None


class Refusals:
    """Logs refusals, a bounded number a second: a client that retries all day fills no disk."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._second, self._num_lines, self._num_unlogged = -1, 0, 0

    def count(self, error: StreamerError, request_id: str) -> None:
        """Log a refusal, or count it for the next line."""
        second = int(self._clock())
        if second != self._second:
            self._second, self._num_lines = second, 0
        if self._num_lines == REFUSALS_A_SECOND:
            self._num_unlogged += 1
            return
        line = Refused(
            id=request_id,
            status=error.status,
            code=error.code or error.type,
            error=error.message[:MAX_ERROR],
            param=error.param,
            unlogged=self._num_unlogged or None,
        )
        self._num_lines, self._num_unlogged = self._num_lines + 1, 0
        log.info("%s", line)
