"""Times one answer and reports it as Locust's own statistics: request types of these names.

    TTFT    request to first text
    ITL     between pieces of text, of whatever size
    TPOT    (E2E - TTFT) / (tokens - 1)
    E2E     request to end; its "content size" is in tokens
    CANCEL  cancel request to the terminal event
    RESUME  opening the new connection to its first event
    FORK    request to the first text after the kept part
    PAUSED  how long flow control paused an answer, by the events its slow reader got

Locust's "Aggregated" row mixes them and means nothing here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

TTFT, ITL, TPOT, E2E = "TTFT", "ITL", "TPOT", "E2E"
CANCEL, RESUME, FORK, PAUSED = "CANCEL", "RESUME", "FORK", "PAUSED"
ANSWER = (TTFT, ITL, TPOT, E2E)
STATISTICS = (*ANSWER, CANCEL, RESUME, FORK, PAUSED)


def bucket(ms: float) -> Any:
    """Round to two significant digits, also below 100 ms, where Locust has whole milliseconds."""
    if ms <= 0:
        return 0
    digits = 1 - math.floor(math.log10(ms))
    rounded = round(ms, digits)
    return int(rounded) if rounded >= 10 else rounded


class Meter:
    """One answer's times, from the moment this is made."""

    def __init__(self, fire: Callable[..., None], name: str) -> None:
        """fire: the `fire` of Locust's `request` event; name: of the statistics' rows."""
        self._fire, self._name = fire, name
        self._start = time.perf_counter()
        self._first_at = self._last_at = 0.0

    @property
    def age_s(self) -> float:
        """Seconds since this meter was made."""
        return time.perf_counter() - self._start

    def text(self, at: float | None = None) -> None:
        """Record a piece of text: TTFT for the first, ITL for later ones."""
        at = time.perf_counter() if at is None else at
        if self._first_at:
            self.report(ITL, at - self._last_at)
        else:
            self._first_at = at
            self.report(TTFT, at - self._start)
        self._last_at = at

    def end(self, num_tokens: int) -> None:
        """Record a complete and correct answer: TPOT and E2E."""
        whole_s = self.age_s
        if num_tokens > 1 and self._first_at:
            first_s = self._first_at - self._start
            self.report(TPOT, (whole_s - first_s) / (num_tokens - 1))
        self.report(E2E, whole_s, num_tokens)

    def fail(self, error: Exception) -> None:
        """Record a failure of E2E."""
        self.report(E2E, self.age_s, 0, error)

    def report(
        self, statistic: str, seconds: float, num_tokens: int = 0, error: Exception | None = None
    ) -> None:
        """Fire Locust's event for a statistic."""
        self._fire(
            request_type=statistic,
            name=self._name,
            response_time=seconds * 1e3,
            response_length=num_tokens,
            exception=error,
            context={},
        )
