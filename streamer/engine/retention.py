"""Retention: finished streams kept for late readers, by age and, where there is too much, by size.

What is too much is taken from the tenant that holds most, oldest first: what one makes does not
push out what others come back for. Owned by Registry, with a clock's seconds.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from streamer.engine.stream import TokenStream


class Kept(NamedTuple):
    """One finished stream, and since when."""

    since: float
    num_bytes: int
    tenant: str
    stream: TokenStream


class Retention:
    """Streams for `max_s` seconds within `max_bytes`; `num_bytes` in all."""

    def __init__(self, max_s: float, max_bytes: int) -> None:
        self._max_s, self._max_bytes = max_s, max_bytes
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._by_tenant: dict[str, OrderedDict[str, None]] = {}
        self._bytes: Counter[str] = Counter()  # by tenant

    @property
    def num_bytes(self) -> int:
        """Of all that are kept."""
        return self._bytes.total()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, stream: TokenStream, tenant: str, now: float) -> None:
        """One more."""
        kept = Kept(now, stream.num_bytes, tenant, stream)
        self._kept[stream.request_id] = kept
        self._by_tenant.setdefault(tenant, OrderedDict())[stream.request_id] = None
        self._bytes[tenant] += kept.num_bytes

    def get(self, request_id: str) -> TokenStream | None:
        """A stream that is still here."""
        kept = self._kept.get(request_id)
        return None if kept is None else kept.stream

    def drop(self, request_id: str) -> TokenStream | None:
        """Keep it no longer; the stream, if it was here."""
        kept = self._kept.pop(request_id, None)
        if kept is None:
            return None
        names = self._by_tenant[kept.tenant]
        del names[request_id]
        self._bytes[kept.tenant] -= kept.num_bytes
        if not names:
            del self._by_tenant[kept.tenant], self._bytes[kept.tenant]
        return kept.stream

    def expire(self, now: float) -> None:
        """Forget what is too old, and what is too much."""
        while self._kept:
            name, oldest = next(iter(self._kept.items()))
            if oldest.since > now - self._max_s:
                break
            self.drop(name)
        while self._kept and self.num_bytes > self._max_bytes:
            ((most, _),) = self._bytes.most_common(1)
            self.drop(next(iter(self._by_tenant[most])))
