"""Scores: log probabilities of prompt tokens, out of the logits of the tokens before them.

Owns Scored: what a step scores, and the layout of the one tensor that the device returns. Logits
become fp32 a few rows at a time; only the requested numbers become Python's. Called by inputs.py
and both runners.
"""

from __future__ import annotations

from itertools import islice

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from streamer.core.plan import TokenLogprob
from streamer.model.sampling.host import top_logprobs

PIECE = 32  # rows of logits: 16 MiB in fp32 at a vocabulary of 128k


class Scored(msgspec.Struct, frozen=True):
    """What a step scores: P prompt tokens.

    rows     (row, number of its scored tokens), in the order of `targets`
    num_top  best alternatives that each of `rows` asks for
    targets  [P] int64: the tokens whose log probability is asked for
    """

    rows: tuple[tuple[int, int], ...]
    num_top: tuple[int, ...]
    targets: NDArray[np.int64]

    def split(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A step's logits [S + P, V] as those to draw from and those of the scored tokens."""
        num_drawing = len(logits) - len(self.targets)
        return logits[:num_drawing], logits[num_drawing:]

    def compute(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """[P, 1 + 2 k] fp64 (which holds every id and every fp32 exactly) on the logits' device:
        the targets' log probabilities, the k best ones, their ids.

        logits   [P, V]: of the tokens before the targets
        targets  [P], on the same device
        """
        max_top = max(self.num_top)
        parts = []
        for i in range(0, len(targets), PIECE):
            raw = logits[i : i + PIECE].float()
            own, values, ids = top_logprobs(raw, targets[i : i + PIECE], max_top)
            parts.append(torch.cat([own[:, None].double(), values.double(), ids.double()], 1))
        return torch.cat(parts)

    def by_row(self, result: torch.Tensor) -> dict[int, tuple[TokenLogprob, ...]]:
        """StepResult.prompt_logprobs, from a copy of compute's result on the host."""
        max_top = result.shape[1] // 2
        values: list[list[float]] = result[:, : max_top + 1].tolist()
        ids: list[list[int]] = result[:, max_top + 1 :].long().tolist()
        numbers = zip(self.targets.tolist(), values, ids, strict=True)
        out = {}
        for (row, count), num_top in zip(self.rows, self.num_top, strict=True):
            out[row] = tuple(
                TokenLogprob(token, own, tuple(zip(others[:num_top], best, strict=False)))
                for token, (own, *best), others in islice(numbers, count)
            )
        return out
