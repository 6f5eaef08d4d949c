"""StuckWatch: ends a connection whose client reads nothing for too long.

An orderly close would wait behind the unread data; only aborting the transport frees the
connection. The protocol classes put the abort function into the scope; each streaming connection
owns one watch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Final

from starlette.types import Scope

ABORT: Final = "streamer.abort"  # in scope["extensions"]: drops the connection, buffers and all
# In scope["extensions"], once the protocol has answered by itself, for its body, a request that
# the application reads: the error of that answer.
REFUSAL: Final = "streamer.refusal"


def _nothing() -> None:
    pass


class StuckWatch:
    """While entered, aborts the connection when sends wait and none has ended for `limit_s`.

    on_stuck  called before the connection is aborted
    """

    def __init__(self, scope: Scope, limit_s: float, on_stuck: Callable[[], None]) -> None:
        self._abort: Callable[[], None] | None = scope.get("extensions", {}).get(ABORT)
        self._limit_s = limit_s
        self._on_stuck = on_stuck
        self._num_sending = 0
        self._since = 0.0  # when the first pending send began, or one ended
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> StuckWatch:
        self._look()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._on_stuck = _nothing  # else it and its owner would keep each other

    @property
    def is_sending(self) -> bool:
        """Whether a send that began has not ended."""
        return self._num_sending > 0

    def began(self) -> None:
        """A send begins."""
        if not self._num_sending:
            self._since = self._loop.time()
        self._num_sending += 1

    def ended(self) -> None:
        """A send has ended; others may still wait."""
        self._num_sending -= 1
        self._since = self._loop.time()

    def _look(self) -> None:
        now = self._loop.time()
        rest_s = self._since + self._limit_s - now if self._num_sending else self._limit_s
        if rest_s > 0:
            self._timer = self._loop.call_later(rest_s, self._look)
            return
        self._timer = None
        self._on_stuck()
        if self._abort is not None:
            self._abort()
