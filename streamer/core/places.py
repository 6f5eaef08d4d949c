"""Places: where in the queue each request waits whose reader wants to know, told when it changes.

A walk over the queue, made when EngineCore's clock says so and somebody wants it, never otherwise.
Called by the scheduler alone; nothing here changes what it decides.
"""

from __future__ import annotations

from typing import Final

from streamer.core.plan import Notice, NoticeKind
from streamer.core.request import Status
from streamer.core.state import State

# A walk sorts the queue: 0.5 us a request (one EPYC core, 2026-11-21). A longer queue is not
# walked, and who is far behind in it hears of its place again when it comes nearer.
MAX_WALKED: Final = 4096
MAX_TOLD: Final = 512


def news_of_places(state: State) -> tuple[Notice, ...]:
    """A notice for each request whose place is another than its reader was told."""
    if state.counts[Status.WAITING] > MAX_WALKED:
        return ()
    news = []
    for place, request in enumerate(state.queue.in_order()[:MAX_TOLD]):
        if request.is_new and request.place not in (None, place):
            request.place = place
            news.append(Notice(request.request_id, NoticeKind.WAITING, position=place))
    return tuple(news)
