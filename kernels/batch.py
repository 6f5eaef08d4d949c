"""AttentionBatch: which rows of a step hold which tokens, and where their K and V live.

Made once a step by model/runner, read by every layer of that step; a backend keeps what it derives
from the batch in `derived`, so that only the first layer computes it. Holds no K or V itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class AttentionBatch:
    """R rows with T packed query tokens in all; a row's are the last tokens of its context.

    query_lens    [R] int64, each at least 1: tokens the row computes in this step
    context_lens  [R] int64: tokens the row attends to, those of this step included; query token i
                  of row r is at position context_lens[r] - query_lens[r] + i
    max_context   the largest of context_lens, 0 without rows
    block_tables  [R, at least ceil(max(context_lens) / block_size)] int32 or int64: a row's blocks
                  in logical order, the last dimension dense; what lies beyond a row's context is
                  never read, but is a valid id. May be a view of memory that later steps change
    slots         [T] int64: block * block_size + offset where a token's K and V are stored
    block_size    tokens a block
    derived       a backend's own cache; the backend chooses the keys
    query_starts  [R + 1] int64: row r's packed tokens are [query_starts[r], query_starts[r + 1])
    num_rows, num_tokens  rows R, packed query tokens T
    """

    __slots__ = (
        "block_size",
        "block_tables",
        "context_lens",
        "derived",
        "max_context",
        "num_rows",
        "num_tokens",
        "query_lens",
        "query_starts",
        "slots",
    )

    def __init__(
        self,
        *,
        query_lens: Sequence[int] | Ints,
        context_lens: Sequence[int] | Ints,
        block_tables: torch.Tensor,
        slots: torch.Tensor,
        block_size: int,
    ) -> None:
        self.query_lens: Ints = np.asarray(query_lens, np.int64)
        self.context_lens: Ints = np.asarray(context_lens, np.int64)
        self.block_tables = block_tables
        self.slots = slots
        self.block_size = block_size
        self.derived: dict[Any, Any] = {}
        self.num_rows = len(self.query_lens)
        self.query_starts: Ints = np.zeros(self.num_rows + 1, np.int64)
        self.query_lens.cumsum(out=self.query_starts[1:])
        self.num_tokens = int(self.query_starts[-1])
        self._check()
        self.max_context = int(self.context_lens.max()) if self.num_rows else 0

    def advance(self) -> None:
        """Every row's context is a token longer, in the same arrays, which its table must cover;
        the caller's `slots` are the next ones."""
        self.context_lens += 1
        self.max_context += 1
        self.derived = {}

    @classmethod
    def of_row(cls, blocks: torch.Tensor, start: int, end: int, block_size: int) -> AttentionBatch:
        """The tokens at positions `start` to `end` of one row whose `blocks` [W] are given."""
        positions = torch.arange(start, end, device=blocks.device)
        return cls(
            query_lens=[end - start],
            context_lens=[end],
            block_tables=blocks[None],
            slots=blocks[positions // block_size] * block_size + positions % block_size,
            block_size=block_size,
        )

    @classmethod
    def fixed(
        cls,
        slots: torch.Tensor,
        block_size: int,
        derived: dict[Any, Any],
        max_context: int = 0,
    ) -> AttentionBatch:
        """The batch of a recorded graph: buffers that each step fills, and no rows of its own.

        max_context  the largest that any of its steps will have
        """
        batch = cls.__new__(cls)
        batch.slots, batch.block_size, batch.derived = slots, block_size, derived
        batch.max_context = max_context
        return batch

    def _check(self) -> None:
        rows, tokens, query, context = (
            self.num_rows,
            self.num_tokens,
            self.query_lens,
            self.context_lens,
        )
        if len(context) != rows or self.block_tables.shape[0] != rows:
            raise ValueError(
                f"{rows} query_lens, {len(context)} context_lens and "
                f"{self.block_tables.shape[0]} block_tables must be as many"
            )
        if self.slots.shape[0] != tokens:
            raise ValueError(f"{self.slots.shape[0]} slots for {tokens} query tokens")
        width = self.block_tables.shape[1] * self.block_size if rows else 0
        wrong = (query < 1) | (query > context) | (context > width)
        if wrong.any():
            r = int(wrong.argmax())
            raise ValueError(
                f"row {r}: query_len {query[r]} <= context_len {context[r]} <= {width} "
                "(block table) does not hold"
            )


class Limits:
    """The largest step that a recorded graph takes.

    max_tokens  packed query tokens T, and rows drawn from S
    max_rows    rows R
    block_size  tokens a block
    """

    __slots__ = ("block_size", "max_rows", "max_tokens")

    def __init__(self, *, max_tokens: int, max_rows: int, block_size: int) -> None:
        self.max_tokens = max_tokens
        self.max_rows = max_rows
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


class Graph(Forward, Protocol):
    """A forward that may begin before it is called."""

    def begin(self, tokens: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch) -> bool:
        """Compute on other threads what a call with this batch, one token a row, and no `last` will
        ask for; False: there are none that could. Any other op of the backend ends it, as does
        CpuBackend.stop."""
        ...


class Direct:
    """A forward as a Graph that begins nothing."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        last: torch.Tensor | None,
    ) -> torch.Tensor:
        return self._forward(tokens, positions, batch, last)

    def begin(self, tokens: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch) -> bool:
        """Nothing runs beside the caller."""
        return False
