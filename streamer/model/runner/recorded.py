"""RecordedSteps: steps of up to fixed sizes, whose launches a GPU replays as one.

Owns the sizes' inputs and graphs. A decode is two launches: one makes the inputs from what the last
step left on the device and runs the layers; the other computes logits, draws and advances the rows.
Where a row has a bias, a mask, penalties, a grammar or asks for log probabilities, logits and
drawing run op by op instead, and so does a whole step of a size that is not recorded. Called by
runner/cuda.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from streamer.model.runner.device import Device
from streamer.model.runner.interface import CausalModel, Recordable
from streamer.model.sampling.device import DeviceSampler, Draw

if TYPE_CHECKING:
    from streamer.kernels.gpu.decode_step import DecodeStep, RowState

STEP = 8  # rows between two sizes of decodes, beyond the smallest


def decode_sizes(max_rows: int) -> list[int]:
    """Sizes to record: 1, 2, 4, then multiples of STEP, up to max_rows itself."""
    return [*(n for n in (1, 2, 4, *range(STEP, max_rows, STEP)) if n < max_rows), max_rows]


class RecordedDecode:
    """A recorded decode of one size.

    Graphs share their memory: what a graph leaves is the next one's unless it is held here.
    """

    __slots__ = ("_draw", "_drawn", "_layers", "_model", "_pool", "_sampler", "_states", "_step")

    def __init__(
        self, device: Device, model: Recordable, pool: torch.Tensor, step: DecodeStep,
        sampler: DeviceSampler,
    ) -> None:  # fmt: skip
        self._model = model
        self._pool = pool
        self._step = step
        self._sampler = sampler
        self._layers = device.record(self._run_layers)
        self._draw = device.record(self._draw_plain)

    def run_layers(self) -> None:
        """All but logits and drawing."""
        self._layers()

    def logits(self) -> torch.Tensor:
        """[size, V or more], op by op."""
        return self._model.logits(self._states, None)[0]

    def draw(self) -> torch.Tensor:
        """[size] tokens, drawn from the logits as they are; the next launch overwrites them."""
        self._draw()
        return self._drawn

    def _run_layers(self) -> None:
        step = self._step
        step.prepare()
        self._states = self._model.states(step.tokens, step.positions, step.batch, self._pool)

    def _draw_plain(self) -> None:
        # Only rows with filters pay for them, so one graph serves all.
        step = self._step
        self._drawn = self._sampler.draw_plain(self.logits(), step.chosen, step.drawn_at)
        step.commit(self._drawn)


class RecordedSteps:
    """Decodes of up to as many rows as `state` has."""

    def __init__(
        self, state: RowState, sampler: DeviceSampler, model: CausalModel, pool: torch.Tensor
    ) -> None:
        from streamer.kernels.gpu.decode_step import DecodeStep

        self._sampler = sampler
        self._model = model
        self._pool = pool
        self.sizes = decode_sizes(len(state.latest))
        self._steps = [DecodeStep(state, size) for size in self.sizes]
        self._recorded: dict[int, RecordedDecode] = {}  # by the size's index

    @property
    def num_recorded(self) -> int:
        """Sizes that were recorded; the others run op by op."""
        return len(self._recorded)

    def warm(self) -> None:
        """Compile the kernels of a decode that is not recorded, by one of no rows."""
        step = self._steps[0]
        logits = self._forward(step)
        step.commit(self._sampler.draw_plain(logits, step.chosen, step.drawn_at))

    def record(
        self, device: Device, model: Recordable, budget_bytes: int, advance: Callable[[], None]
    ) -> None:
        """Record the sizes, largest first, so that the smaller ones fit into its memory.

        Ends early when recording has taken budget_bytes. `advance` is called after each size. No
        row may be resident.
        """
        min_free_bytes = device.free_bytes() - budget_bytes
        for n in reversed(range(len(self.sizes))):
            recorded = RecordedDecode(device, model, self._pool, self._steps[n], self._sampler)
            if device.free_bytes() < min_free_bytes:
                return
            self._recorded[n] = recorded
            advance()

    def compute(self, count: int, draw: Draw) -> torch.Tensor | None:
        """Compute a decode of the first `count` of state.chosen: the logits [count, V or more], or
        None where a recorded launch computes them and draws at once."""
        n = bisect_left(self.sizes, count)
        recorded = self._recorded.get(n)
        if recorded is None:
            return self._forward(self._steps[n])[:count]
        recorded.run_layers()
        return None if draw.is_plain and draw.logprobs is None else recorded.logits()[:count]

    def draw(self, count: int, draw: Draw, logits: torch.Tensor | None) -> torch.Tensor:
        """[count] tokens of the decode that was computed last, which gave these logits."""
        n = bisect_left(self.sizes, count)
        if logits is None:
            return self._recorded[n].draw()[:count]
        step = self._steps[n]
        drawn = self._sampler.draw(draw, logits, step.chosen[:count], step.drawn_at[:count])
        step.commit(drawn)
        return drawn

    def _forward(self, step: DecodeStep) -> torch.Tensor:
        step.prepare()
        return self._model.forward(step.tokens, step.positions, step.batch, self._pool, None)
