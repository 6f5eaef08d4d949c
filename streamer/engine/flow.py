"""Flow: when a request pauses for its readers, and when it ends because they are gone; Reader.

Owned by TokenStream, which reports readers and lag to it; it reaches the engine through Control.
Lives on the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec

from streamer.core.plan import Notice, NoticeKind


class Control(Protocol):
    """The engine's methods that a stream may call."""

    def cancel(self, request_id: str) -> None: ...
    def hold(self, request_id: str, is_held: bool) -> None: ...


class Limits(msgspec.Struct, frozen=True):
    """How far readers may lag and how long a request does without them.

    window     output tokens its furthest reader may lag before it is paused; 0: never paused
    detach_s   seconds it runs on after its last reader left; None: for ever
    pause_s    seconds it stays paused for lag before its readers are dropped
    linger_s   seconds it then stays paused, for a reader that comes back, before it is cancelled
    """

    window: int = 0
    detach_s: float | None = 0.0
    pause_s: float = 60.0
    linger_s: float = 30.0


class Reader:
    """One reader's cursors in a stream, and the notices it has not taken yet.

    Made by TokenStream.attach, which owns every field; the caller keeps it to take and detach.

    on_update     called when there is something to take, and when nothing more will come
    is_dropped  it was dropped for its lag, and is detached
    """

    __slots__ = (
        "acknowledged",
        "cursors",
        "finished",
        "given",
        "is_dropped",
        "notices",
        "number",
        "on_update",
        "taken",
    )

    def __init__(self, number: int, cursors: list[int], on_update: Callable[[], None]) -> None:
        self.number = number
        self.on_update = on_update
        self.cursors = cursors
        self.finished = [False] * len(cursors)
        self.notices: dict[NoticeKind, Notice] = {}
        self.given = self.taken = sum(cursors)
        self.acknowledged: int | None = None
        self.is_dropped = False

    @property
    def position(self) -> int:
        """Output tokens the reader has consumed."""
        return self.taken if self.acknowledged is None else self.acknowledged


class Flow:
    """Pause above the window, resume at half of it; without readers it is not paused.

    is_paused  the scheduler was asked to pause it
    is_behind  its readers lag, or were dropped for it
    drop       called when the readers have lagged for too long; it calls `last_reader_dropped`
    """

    def __init__(
        self, request_id: str, control: Control, limits: Limits, drop: Callable[[], None]
    ) -> None:
        self.limits = limits
        self.is_paused = False
        self._request_id = request_id
        self._control = control
        self._drop = drop
        self.is_behind = False
        self._is_held = False  # by the caller of AsyncEngine.pause
        self._is_ended = False
        self._cancel_timer: asyncio.TimerHandle | None = None
        self._lag_timer: asyncio.TimerHandle | None = None

    def hold(self, is_held: bool) -> None:
        """Pause the request for its caller, whatever its readers do, or end that pause."""
        self._is_held = is_held
        self._apply_pause()

    def update_lag(self, lag: int) -> None:
        """The furthest reader lags by `lag` output tokens."""
        if self._is_ended:
            return
        window = self.limits.window
        if window and lag > window:
            self.is_behind = True
        elif not window or lag <= window // 2:
            self.is_behind = False
        if not self.is_behind:
            self._stop_lag_timer()
        elif self._lag_timer is None:
            loop = asyncio.get_running_loop()
            self._lag_timer = loop.call_later(self.limits.pause_s, self._on_lag_timeout)
        self._apply_pause()

    def reader_attached(self, is_first: bool) -> None:
        """There is a new reader; `update_lag` comes next.

        is_first  no other reader is attached: a dropped one's pause ends
        """
        self._stop_cancel_timer()
        self._stop_lag_timer()
        if is_first:
            self.is_behind = False

    def last_reader_left(self) -> None:
        """The last reader has detached (it was not dropped)."""
        self._stop_lag_timer()
        detach_s = self.limits.detach_s
        if self._is_ended:
            return
        if detach_s is not None and detach_s <= 0:
            self._control.cancel(self._request_id)
            return
        self.is_behind = False
        self._apply_pause()
        if detach_s is not None:
            self._cancel_after(detach_s)

    def reader_missed(self) -> None:
        """An expected reader will not come; a wait that was begun for another one goes on."""
        if self._cancel_timer is None:
            self.last_reader_left()

    def last_reader_dropped(self) -> None:
        """The last reader was dropped for its lag: wait for another one, paused."""
        self._stop_lag_timer()
        if not self._is_ended:
            self.is_behind = True
            self._apply_pause()
            self._cancel_after(self.limits.linger_s)

    def end(self) -> None:
        """The request has ended."""
        self._is_ended = True
        self._stop_cancel_timer()
        self._stop_lag_timer()

    def _on_lag_timeout(self) -> None:
        self._lag_timer = None
        self._drop()

    def _cancel_after(self, seconds: float) -> None:
        self._stop_cancel_timer()
        loop = asyncio.get_running_loop()
        self._cancel_timer = loop.call_later(seconds, self._control.cancel, self._request_id)

    def _apply_pause(self) -> None:
        should_pause = self._is_held or self.is_behind
        if should_pause != self.is_paused and not self._is_ended:
            self.is_paused = should_pause
            self._control.hold(self._request_id, should_pause)

    def _stop_cancel_timer(self) -> None:
        if self._cancel_timer is not None:
            self._cancel_timer.cancel()
            self._cancel_timer = None

    def _stop_lag_timer(self) -> None:
        if self._lag_timer is not None:
            self._lag_timer.cancel()
            self._lag_timer = None
