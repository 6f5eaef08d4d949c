"""Sampler: logits and each row's parameters -> token ids, log probabilities, failed rows.

Owns the per-row state that sampling needs (parameters, token history for penalties); the runner
tells it who joins and leaves and calls `sample` once a step. Never sees a Plan, a block or a clock.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from streamer.core.plan import TokenLogprob
from streamer.core.sampling import SamplingParams


class SampleOutput(msgspec.Struct, frozen=True):
    """What one step drew.

    tokens    parallel to the rows asked for; -1 where the row failed
    logprobs  row -> TokenLogprob, for rows that asked and did not fail
    failed    row -> why: its logits were not finite
    """

    tokens: list[int]
    logprobs: dict[int, TokenLogprob]
    failed: dict[int, str]


class Sampler:
    """Samples for up to max_rows resident rows; one instance a runner, on its thread."""

    def __init__(self, vocab_size: int, max_rows: int) -> None:
        raise NotImplementedError

    def join(
        self,
        row: int,
        params: SamplingParams,
        tokens: Sequence[int],
        num_prompt: int,
        choice: int,
        stop_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Row slot `row` (0 to max_rows - 1) now holds this sequence; fields as in RowJoin."""
        raise NotImplementedError

    def leave(self, row: int) -> None:
        """Forget the row."""
        raise NotImplementedError

    def sample(
        self, logits: torch.Tensor, rows: Sequence[int], positions: Sequence[int]
    ) -> SampleOutput:
        """Draw one token for each of `rows` (distinct) and append it to the row's history.

        logits     [S, V] fp32 or bf16, one row of it for each of `rows`; may be overwritten
        positions  absolute position of the token to be drawn: how many tokens come before it
        """
        raise NotImplementedError
