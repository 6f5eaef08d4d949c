"""The matrices of a model that ranks share: products summed or put together over all of them.

`Shared` is what decoder.py asks, which knows no ranks beside it: each part has the interface of
kernels.ops.Linear or Backend.embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from streamer.kernels import ops
from streamer.model.ranks.split import Part, PartSource, RowSource, split

if TYPE_CHECKING:
    from streamer.model.families import DecoderConfig
    from streamer.model.layers import WeightSource
    from streamer.model.ranks.group import Group

Embedding = Callable[[torch.Tensor], torch.Tensor]


class Shared:
    """A decoder of which this rank computes a part, and the group that computes the others."""

    def __init__(self, config: DecoderConfig, group: Group) -> None:
        self._parts = split(config, group.count)
        self.group = group
        self.part: Part = self._parts[group.index]

    def source(self, source: RowSource) -> WeightSource:
        """The tensors of this rank's part."""
        return PartSource(source, self._parts, self.group.index)

    def summed(self, part: ops.Linear, module: str) -> ops.Linear:
        """The matrix of which `part` has this rank's columns or, where those can't be divided, its
        rows; what comes in are this rank's columns."""
        if part.shape[0] == self.part.whole.hidden_size:
            return _Summed(part, self.group)
        columns = [found.size for each in self._parts if (found := each.columns(module))]
        return _Gathered(part, self.group, columns, [each.hidden.size for each in self._parts])

    def head(self, part: ops.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
        """Logits of the whole vocabulary, where `part` gives those of this rank's tokens."""
        sizes = [each.vocab.size for each in self._parts]
        return lambda x: self.group.concatenate(part(x), sizes)

    def embedding(self, part: Embedding) -> Embedding:
        """Embeddings of all tokens, where `part` has those of this rank's."""
        start, end = self.part.vocab

        def embed(tokens: torch.Tensor) -> torch.Tensor:
            is_other = (tokens < start) | (tokens >= end)
            found = part((tokens - start).clamp_(0, end - start - 1))
            return self.group.sum(found.masked_fill_(is_other.unsqueeze(1), 0))

        return embed


class _Summed:
    """See Shared.summed."""

    def __init__(self, part: ops.Linear, group: Group) -> None:
        self.shape = part.shape
        self._part = part
        self._group = group

    def __call__(self, x: torch.Tensor, *, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """See ops.Linear; what it is added to is the same on every rank, and is added once."""
        product = self._group.sum(self._part(x))
        return product if add_to is None else add_to.add_(product)

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """See ops.Linear."""
        raise NotImplementedError("no table is split by its columns")


class _Gathered:
    """See Shared.summed. Its numbers are those of one rank, to the last bit."""

    def __init__(
        self, part: ops.Linear, group: Group, columns: Sequence[int], rows: Sequence[int]
    ) -> None:
        self.shape = part.shape
        self._part = part
        self._group = group
        self._columns = columns
        self._rows = rows

    def __call__(self, x: torch.Tensor, *, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """See ops.Linear."""
        product = self._part(self._group.concatenate(x, self._columns))
        product = self._group.concatenate(product, self._rows)
        return product if add_to is None else add_to.add_(product)

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """See ops.Linear."""
        raise NotImplementedError("no table is split by its columns")
