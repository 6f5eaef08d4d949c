"""RecordedSteps: steps of up to fixed sizes, whose launches a GPU replays as one.

Owns the sizes' inputs and graphs. The layers of a step are one launch: of a decode, with its inputs
made from what the last step left on the device; of a step with chunks, with those that the host
sent. Another launch computes a decode's logits, draws and advances the rows. Logits and drawing run
op by op instead where chunks are in the step, since how many rows draw varies, and where a row has
a bias, a mask, penalties, a grammar or asks for log probabilities; and so does all of a step of a
size that is not recorded. Called by runner/cuda.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from streamer.kernels.ops import AttentionBatch
from streamer.model.runner.device import Device
from streamer.model.runner.inputs import Ints
from streamer.model.runner.interface import CausalModel, Recordable
from streamer.model.sampling.device import DeviceSampler, Draw

if TYPE_CHECKING:
    from streamer.kernels.gpu.decode_step import DecodeStep
    from streamer.kernels.gpu.fixed_step import FixedStep, RowState
    from streamer.kernels.gpu.mixed_step import MixedStep

ROWS = 8  # between two sizes of decodes, beyond the smallest
# Of steps with chunks, up to a GPU's default budget (core/sizes.py). By arithmetic an H100 reads
# the weights for as long as it multiplies them by 150 to 300 tokens: padding is free below that,
# and beyond it costs what it adds, a fifth at most, and beyond 1,024 tokens a ninth.
# Op by op a layer is eleven launches: 0.13 ms of Python for Triton's seven (one core of an EPYC Zen
# 4, Triton 3.6.0 and 3.9.0 without a driver, 2026-11-26), some 0.2 with the driver and cuBLAS. That
# is 5.6 ms a step of Qwen3-0.6B, which at half of 989 TFLOP/s computes 2,048 tokens in 3.6 (and
# 4,096 in 7.3, so that larger steps hide it). The 6.4 ms of an 8B model are hidden behind 58, but
# the event loop waits for the GIL meanwhile. The eight sizes beyond 1,024 take 0.2 GB more for 8B
# (states of 8 KiB a token of each size, activations of the largest) and about a second to record.
# By arithmetic. An H200 took 1.9 and 5.2 ms for 64 and 512 tokens of Qwen3-0.6B, op by op 14 each.
MIXED_SIZES = (
    *(32, 64, 96, 128),
    *(n << k for k in range(3) for n in (160, 192, 224, 256)),
    *range(1152, 2049, 128),
)


def decode_sizes(max_rows: int) -> list[int]:
    """Rows of the decodes to record: 1, 2, 4, then multiples of ROWS, up to max_rows itself."""
    return [*(n for n in (1, 2, 4, *range(ROWS, max_rows, ROWS)) if n < max_rows), max_rows]


def mixed_sizes(max_tokens: int) -> list[int]:
    """Tokens of the steps with chunks to record, of steps of up to max_tokens."""
    last = min(max_tokens, MIXED_SIZES[-1])
    return [*(n for n in MIXED_SIZES if n < last), last]


class RecordedLayers:
    """The layers of a step of one size, as one launch.

    Graphs share their memory: what a graph leaves is the next one's, unless it is held here.
    """

    __slots__ = ("_launch", "_model", "_pool", "_states", "_step")

    def __init__(
        self, device: Device, model: Recordable, pool: torch.Tensor, step: FixedStep
    ) -> None:
        self._model = model
        self._pool = pool
        self._step = step
        self._launch = device.record(self._run)

    def run(self) -> None:
        """Queue the launch, with the inputs that are there."""
        self._launch()

    def logits(self, count: int, last: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Of what the launch left of its first `count` tokens, op by op: see Recordable.logits."""
        return self._model.logits(self._states[:count], last)

    def _run(self) -> None:
        step = self._step
        step.prepare()
        self._states = self._model.states(step.tokens, step.positions, step.batch, self._pool)


class RecordedDecode:
    """A decode of one size, as two launches."""

    __slots__ = ("_draw", "_drawn", "_layers", "_sampler", "_step")

    def __init__(
        self, device: Device, model: Recordable, pool: torch.Tensor, step: DecodeStep,
        sampler: DeviceSampler,
    ) -> None:  # fmt: skip
        self._step = step
        self._sampler = sampler
        self._layers = RecordedLayers(device, model, pool, step)
        self._draw = device.record(self._draw_plain)

    def run_layers(self) -> None:
        """All but logits and drawing."""
        self._layers.run()

    def logits(self) -> torch.Tensor:
        """[size, V or more], op by op."""
        return self._layers.logits(len(self._step.tokens), None)[0]

    def draw(self) -> torch.Tensor:
        """[size] tokens, drawn from the logits as they are; the next launch overwrites them."""
        self._draw()
        return self._drawn

    def _draw_plain(self) -> None:
        # Only rows with filters pay for them, so one graph serves all.
        step = self._step
        self._drawn = self._sampler.draw_plain(self.logits(), step.chosen, step.drawn_at)
        step.commit(self._drawn)


class RecordedMixed:
    """The layers of a step with chunks, of one size."""

    __slots__ = ("_layers", "_step")

    def __init__(
        self, device: Device, model: Recordable, pool: torch.Tensor, step: MixedStep
    ) -> None:
        self._step = step
        self._layers = RecordedLayers(device, model, pool, step)

    def pack(self, tokens: Ints, positions: Ints, batch: AttentionBatch, owners: Ints) -> Ints:
        """A step's inputs in the form to be sent: see MixedStep.pack."""
        return self._step.pack(tokens, positions, batch, owners)

    def compute(
        self, sent: torch.Tensor, count: int, last: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and hidden states of the step of `count` tokens that was sent; `last` as in
        Recordable.logits."""
        self._step.sent.copy_(sent)
        self._layers.run()
        return self._layers.logits(count, last)


class RecordedSteps:
    """Decodes of up to as many rows as `state` has, and steps with chunks of up to max_tokens."""

    def __init__(
        self, state: RowState, sampler: DeviceSampler, model: CausalModel, pool: torch.Tensor,
        max_tokens: int,
    ) -> None:  # fmt: skip
        from streamer.kernels.gpu.decode_step import DecodeStep

        self._sampler = sampler
        self._model = model
        self._pool = pool
        self._state = state
        self._decode_sizes = decode_sizes(len(state.latest))
        self._mixed_sizes = mixed_sizes(max_tokens)
        self._steps = [DecodeStep(state, size) for size in self._decode_sizes]
        self._decodes: dict[int, RecordedDecode] = {}  # by the size's index
        self._mixed: dict[int, RecordedMixed] = {}

    @property
    def num_sizes(self) -> int:
        """Sizes that may be recorded."""
        return len(self._decode_sizes) + len(self._mixed_sizes)

    @property
    def num_recorded(self) -> int:
        """Sizes that were recorded; the others run op by op."""
        return len(self._decodes) + len(self._mixed)

    def warm(self) -> None:
        """Compile the kernels of a decode that is not recorded, by one of no rows."""
        step = self._steps[0]
        logits = self._forward(step)
        step.commit(self._sampler.draw_plain(logits, step.chosen, step.drawn_at))

    def record(
        self, device: Device, model: Recordable, budget_bytes: int, advance: Callable[[], None]
    ) -> None:
        """Record decodes, then steps with chunks, largest first, so that smaller ones fit into the
        memory of those before.

        Ends early when recording has taken budget_bytes. `advance` is called after each size. No
        row may be resident.
        """
        from streamer.kernels.gpu.mixed_step import MixedStep

        min_free_bytes = device.free_bytes() - budget_bytes
        given = device, model, self._pool
        for n in reversed(range(len(self._steps))):
            decode = RecordedDecode(*given, self._steps[n], self._sampler)
            if device.free_bytes() < min_free_bytes:
                return
            self._decodes[n] = decode
            advance()
        tile_tokens = _tile_tokens(model)
        for n in reversed(range(len(self._mixed_sizes))):
            step = MixedStep(self._state, self._mixed_sizes[n], tile_tokens)
            mixed = RecordedMixed(*given, step)
            if device.free_bytes() < min_free_bytes:
                return
            self._mixed[n] = mixed
            advance()

    def mixed(self, num_tokens: int) -> RecordedMixed | None:
        """The smallest recorded step that holds so many tokens with chunks among them, if any."""
        return self._mixed.get(bisect_left(self._mixed_sizes, num_tokens))

    def compute(self, count: int, draw: Draw) -> torch.Tensor | None:
        """Compute a decode of the first `count` of state.chosen: the logits [count, V or more], or
        None where a recorded launch computes them and draws at once."""
        n = bisect_left(self._decode_sizes, count)
        recorded = self._decodes.get(n)
        if recorded is None:
            return self._forward(self._steps[n])[:count]
        recorded.run_layers()
        return None if draw.is_plain and draw.logprobs is None else recorded.logits()[:count]

    def draw(self, count: int, draw: Draw, logits: torch.Tensor | None) -> torch.Tensor:
        """[count] tokens of the decode that was computed last, which gave these logits."""
        n = bisect_left(self._decode_sizes, count)
        if logits is None:
            return self._decodes[n].draw()[:count]
        step = self._steps[n]
        drawn = self._sampler.draw(draw, logits, step.chosen[:count], step.drawn_at[:count])
        step.commit(drawn)
        return drawn

    def _forward(self, step: DecodeStep) -> torch.Tensor:
        step.prepare()
        return self._model.forward(step.tokens, step.positions, step.batch, self._pool, None)


def recorded_bytes(
    device: Device, model: Recordable, state: RowState, pool: torch.Tensor, max_tokens: int
) -> int:
    """Memory of the graphs of RecordedSteps with such a state: what the largest of each kind takes
    while it runs, in which the smaller ones take place, and what all of them leave.

    The sum of both kinds, an upper bound: a graph takes what an earlier one let go only where its
    own tensors fit, and those of steps with chunks have other sizes than those of decodes.
    """
    from streamer.kernels.gpu.decode_step import DecodeStep
    from streamer.kernels.gpu.mixed_step import MixedStep

    decodes, mixed = decode_sizes(len(state.latest)), mixed_sizes(max_tokens)
    token_bytes = 0

    @torch.inference_mode()
    def decode() -> None:
        step = DecodeStep(state, decodes[-1])
        step.prepare()
        model.logits(model.states(step.tokens, step.positions, step.batch, pool), None)

    @torch.inference_mode()
    def chunks() -> None:
        nonlocal token_bytes
        step = MixedStep(state, mixed[-1], _tile_tokens(model))
        step.prepare()
        states = model.states(step.tokens, step.positions, step.batch, pool)
        token_bytes = states[0].nbytes

    peaks = device.peak_bytes(decode) + device.peak_bytes(chunks)
    return peaks + token_bytes * (sum(decodes) + sum(mixed))


def _tile_tokens(model: Recordable) -> tuple[int, int]:
    from streamer.kernels.gpu.attention.paged import tile_tokens

    return tile_tokens(model.num_heads, model.num_kv_heads, model.head_dim, model.dtype)
