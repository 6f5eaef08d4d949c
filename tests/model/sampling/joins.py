"""Rows for tests that call a sampler without a runner.

`join` makes the RowJoin of a sequence that holds no blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from streamer.core.plan import RowJoin
from streamer.core.sampling import SamplingParams
from streamer.model.sampling.host import Sampler


def join(
    sampler: Sampler,
    row: int,
    params: SamplingParams,
    tokens: Sequence[int],
    num_prompt: int,
    choice: int,
    stop_ids: frozenset[int] = frozenset(),
) -> None:
    """Put a sequence of these tokens into the row."""
    known = tuple(tokens)
    sampler.join(RowJoin(row, f"r{row}", choice, known, num_prompt, 0, (), params, stop_ids))
