"""DecodeSteps: pure decodes at a ladder of sizes, each recorded as two launches.

Owns the sizes' inputs and graphs and the buffers that they share. One launch makes the inputs from
what the last step left on the device and computes logits; the other draws and advances the rows.
If a row has a bias, a mask, penalties or a grammar, drawing runs op by op instead. Called by
runner/cuda.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from streamer.model.runner.device import Device
from streamer.model.sampling.device import DeviceSampler, Draw

if TYPE_CHECKING:
    from streamer.kernels.gpu.decode_step import DecodeStep, RowState

Forward = Callable[["DecodeStep"], torch.Tensor]
Launch = Callable[[], None]
STEP = 8  # rows between two sizes, beyond the smallest


def ladder(max_rows: int) -> list[int]:
    """Sizes to record: 1, 2, 4, then multiples of STEP, up to max_rows itself."""
    return [*(n for n in (1, 2, 4, *range(STEP, max_rows, STEP)) if n < max_rows), max_rows]


class DecodeSteps:
    """Decodes of up to max_rows rows; `forward` gives a step's logits [size, V or more]."""

    def __init__(
        self, state: RowState, sampler: DeviceSampler, forward: Forward,
        vocab_size: int, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        from streamer.kernels.gpu.decode_step import DecodeStep

        max_rows, where = len(state.latest), state.flat.device
        self._sampler = sampler
        self._forward = forward
        self._state = state
        self.sizes = ladder(max_rows)
        self._steps = [DecodeStep(state, size) for size in self.sizes]
        # A graph's own outputs live in memory that the other graphs use too.
        self._logits = torch.zeros(max_rows, vocab_size, dtype=dtype, device=where)
        self._drawn = torch.zeros(max_rows, dtype=torch.int64, device=where)
        self._recorded: dict[int, tuple[Launch, Launch]] = {}  # size's index -> two launches

    @property
    def num_recorded(self) -> int:
        """Sizes that were recorded; the others run op by op."""
        return len(self._recorded)

    def warm(self) -> None:
        """Compile the kernels of a decode that is not recorded, by one of no rows."""
        for launch in self._launches(self._steps[0]):
            launch()

    def record(self, device: Device, budget_bytes: int, advance: Callable[[], None]) -> None:
        """Record the sizes, largest first, so that the smaller ones fit into its memory.

        Ends early when recording has taken budget_bytes. `advance` is called after each size. No
        row may be resident.
        """
        min_free_bytes = device.free_bytes() - budget_bytes
        for n in reversed(range(len(self.sizes))):
            compute, draw = map(device.record, self._launches(self._steps[n]))
            if device.free_bytes() < min_free_bytes:
                return
            self._recorded[n] = compute, draw
            advance()

    def compute(self, count: int) -> None:
        """The logits of one decode of the first `count` of state.chosen."""
        self._of(count)[1][0]()

    def draw(self, count: int, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw from the logits that were computed last: those [count, V] and the tokens.

        Both are overwritten by the next decode.
        """
        step, (_, draw_plain) = self._of(count)
        logits, tokens = self._logits[:count], self._drawn[:count]
        if draw.is_plain:
            draw_plain()
            return logits, tokens
        drawn = self._sampler.draw(draw, logits, step.chosen[:count], step.drawn_at[:count])
        tokens.copy_(drawn)
        step.commit(self._drawn[: len(step.tokens)])
        return logits, tokens

    def _of(self, count: int) -> tuple[DecodeStep, tuple[Launch, Launch]]:
        """The smallest size that holds `count` rows, and its launches."""
        n = bisect_left(self.sizes, count)
        step = self._steps[n]
        return step, self._recorded.get(n) or self._launches(step)

    def _launches(self, step: DecodeStep) -> tuple[Launch, Launch]:
        """What computes the step, and what draws; not stored, which would be a reference cycle."""
        return partial(self._compute_logits, step), partial(self._draw_plain, step)

    def _compute_logits(self, step: DecodeStep) -> None:
        step.prepare()
        logits = self._logits[: len(step.tokens)]
        logits.copy_(self._forward(step)[:, : logits.shape[1]])

    def _draw_plain(self, step: DecodeStep) -> None:
        size = len(step.tokens)
        logits, drawn = self._logits[:size], self._drawn[:size]
        # Only rows with filters pay for them, so one graph serves all.
        drawn.copy_(self._sampler.draw_plain(logits, step.chosen, step.drawn_at))
        step.commit(drawn)
