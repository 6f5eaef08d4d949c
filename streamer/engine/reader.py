"""Reader: one cursor into a token stream, and what waits to be taken there.

Made by TokenStream.attach, which owns every field; whoever attached keeps it to take and detach.
"""

from __future__ import annotations

from collections.abc import Callable

from streamer.core.plan import Notice, NoticeKind


class Reader:
    """One reader: what it has been given, and what waits for it.

    on_news     called when there is something to take, and when nothing more will come
    is_dropped  it was sent away for its lag, and is detached
    """

    __slots__ = (
        *("acknowledged", "cursors", "finished", "is_dropped", "notices", "number", "on_news"),
        "taken",
    )

    def __init__(self, number: int, cursors: list[int], on_news: Callable[[], None]) -> None:
        self.number = number
        self.on_news = on_news
        self.cursors = cursors
        self.finished = [False] * len(cursors)
        self.notices: dict[NoticeKind, Notice] = {}
        self.taken = sum(cursors)
        self.acknowledged: int | None = None
        self.is_dropped = False

    @property
    def position(self) -> int:
        """Output tokens it has consumed."""
        return self.taken if self.acknowledged is None else self.acknowledged
