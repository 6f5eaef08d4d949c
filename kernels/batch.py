"""AttentionBatch: which rows of a step hold which tokens, and where their K and V live.

Made once a step by model/inputs.py, read by every layer of that step; a backend keeps what it
derives from it in `derived`, so that only the first layer pays. Holds no K or V itself.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Protocol

import torch


class AttentionBatch:
    """R rows with T packed query tokens in all; row r's are the last ones of its context.

    query_lens    R ints, each at least 1: tokens the row computes in this step
    context_lens  R ints: tokens the row attends to, those of this step included; query token i of
                  row r is at position context_lens[r] - query_lens[r] + i
    block_tables  [R, at least ceil(max(context_lens) / block_size)] int64: a row's blocks in
                  logical order; what lies beyond a row's context is never read, but is a valid id
    slots         [T] int64: block * block_size + offset where a token's K and V are stored
    block_size    tokens a block
    derived       a backend's own cache, keyed by what it likes
    query_starts  R + 1 ints: row r's packed tokens are [query_starts[r], query_starts[r + 1])
    """

    __slots__ = (
        "block_size",
        "block_tables",
        "context_lens",
        "derived",
        "query_lens",
        "query_starts",
        "slots",
    )

    def __init__(
        self,
        *,
        query_lens: list[int],
        context_lens: list[int],
        block_tables: torch.Tensor,
        slots: torch.Tensor,
        block_size: int,
    ) -> None:
        self.query_lens = query_lens
        self.context_lens = context_lens
        self.block_tables = block_tables
        self.slots = slots
        self.block_size = block_size
        self.query_starts = list(accumulate(query_lens, initial=0))
        self.derived: dict[Any, Any] = {}
        self._check()

    @classmethod
    def fixed(cls, slots: torch.Tensor, block_size: int, derived: dict[Any, Any]) -> AttentionBatch:
        """What a recorded graph sees: buffers that each step fills, and no rows of its own."""
        batch = cls.__new__(cls)
        batch.slots, batch.block_size, batch.derived = slots, block_size, derived
        return batch

    def _check(self) -> None:
        rows, tokens = len(self.query_lens), self.query_starts[-1]
        if len(self.context_lens) != rows or self.block_tables.shape[0] != rows:
            raise ValueError(
                f"{rows} query_lens, {len(self.context_lens)} context_lens and "
                f"{self.block_tables.shape[0]} block_tables must be as many"
            )
        if self.slots.shape[0] != tokens:
            raise ValueError(f"{self.slots.shape[0]} slots for {tokens} query tokens")
        width = self.block_tables.shape[1] * self.block_size if rows else 0
        for r, (query, context) in enumerate(zip(self.query_lens, self.context_lens, strict=True)):
            if not 1 <= query <= context <= width:
                raise ValueError(
                    f"row {r}: query_len {query} <= context_len {context} <= {width} "
                    "(block table) does not hold"
                )

    @property
    def num_rows(self) -> int:
        """Rows R."""
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        """Packed query tokens T."""
        return self.query_starts[-1]


class Limits:
    """The largest step that a recorded graph takes.

    max_tokens  packed query tokens T, and rows drawn from S
    max_rows    rows R
    width       blocks of a row's table
    """

    __slots__ = ("block_size", "max_rows", "max_tokens", "width")

    def __init__(self, *, max_tokens: int, max_rows: int, width: int, block_size: int) -> None:
        self.max_tokens = max_tokens
        self.max_rows = max_rows
        self.width = width
        self.block_size = block_size


class Forward(Protocol):
    """A model's forward: tokens and positions [T], `last` [S] (None: all T) -> logits [S, V]."""

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        last: torch.Tensor | None,
    ) -> torch.Tensor: ...
