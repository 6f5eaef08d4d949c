"""Routing: which replica gets a request: the one with the longest prefix of it, unless it is busy.

Pure values: `Known` is what this ingress knows of a replica's prefix cache, `choose` decides.
Called by cluster.py for every request, and again when its replica is lost.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, Protocol, TypeVar

# A replica with a prefix may be busier than the least busy one by so much: half of its rows, or
# half of its blocks.
IMBALANCE: Final = 0.5


class Known:
    """Hashes of blocks that a replica has computed, as many as it can keep; the oldest go first,
    of a prompt its last ones.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def add(self, hashes: Sequence[bytes]) -> None:
        """The replica computes these blocks of a prompt, or uses them again."""
        known = self._hashes
        for each in reversed(hashes):
            known[each] = None
            known.move_to_end(each)
        while len(known) > self._max_blocks:
            known.popitem(last=False)

    def num_known(self, hashes: Sequence[bytes]) -> int:
        """How many of a prompt's blocks are known, from the first on: each hash covers those
        before it, so that one that is known stands for them."""
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in self._hashes:
                low = middle + 1
            else:
                high = middle
        return low

    def clear(self) -> None:
        """The replica has begun anew."""
        self._hashes.clear()


class Candidate(Protocol):
    """A replica that takes requests."""

    @property
    def known(self) -> Known: ...
    @property
    def busyness(self) -> float: ...


C = TypeVar("C", bound=Candidate)


class Named(Protocol):
    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=Named)


def choose_alike(candidates: Sequence[N], request_id: str) -> N | None:
    """The replica where a request goes on that several ingresses read: each takes the same."""

    def score(each: N) -> bytes:
        return blake2b(f"{each.name} {request_id}".encode(), digest_size=8).digest()

    return max(candidates, key=score, default=None)


def choose(candidates: Sequence[C], hashes: Sequence[bytes]) -> C | None:
    """The replica for a prompt with these block hashes; None if there is none at all."""
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    busy = {id(each): each.busyness for each in candidates}
    idlest = min(candidates, key=lambda each: busy[id(each)])
    if not hashes:
        return idlest
    known = {id(each): each.known.num_known(hashes) for each in candidates}
    best = max(candidates, key=lambda each: (known[id(each)], -busy[id(each)]))
    is_near = busy[id(best)] <= busy[id(idlest)] + IMBALANCE
    return best if known[id(best)] and is_near else idlest
