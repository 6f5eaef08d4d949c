"""Recent: the outputs of requests that ended, by owner, within a bound.

They are found by requests of the same owner alone, which is salt and tenant. Owned by the
speculator.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TypeAlias

from streamer.core.speculation.index import Text

Owner: TypeAlias = tuple[bytes, str]  # salt, tenant


class Recent:
    """Two generations of Texts: when the younger one has half the bound, the older one is dropped.

    generation  changes whenever `texts` of an owner may
    """

    def __init__(self, max_tokens: int) -> None:
        self.generation = 0
        self._half = max(1, max_tokens // 2)
        self._num_young = 0
        self._num_old = 0
        self._young: dict[Owner, Text] = {}
        self._old: dict[Owner, Text] = {}

    def __len__(self) -> int:
        """Tokens kept."""
        return self._num_young + self._num_old

    def add(self, owner: Owner, tokens: Seq[int], *, is_last: bool) -> None:
        """Keep a part of an output; the next call goes on with it unless this is its last."""
        if self._num_young + len(tokens) > self._half:
            self._old, self._num_old = self._young, self._num_young
            self._young, self._num_young = {}, 0
            self.generation += 1
        text = self._young.get(owner)
        if text is None:
            text = self._young[owner] = Text()
            self.generation += 1
        text.add(tokens)
        if is_last:
            text.end_document()
        self._num_young += len(tokens)

    def texts(self, owner: Owner) -> tuple[Text, ...]:
        """What is kept of an owner, the younger first."""
        found = (self._young.get(owner), self._old.get(owner))
        return tuple(text for text in found if text is not None)
