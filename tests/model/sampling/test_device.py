"""DeviceSampler against the CPU's Sampler, on the same logits, token for token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from streamer.core.plan import RowJoin
from streamer.core.sampling import SamplingParams
from streamer.kernels.ops import for_cpu
from streamer.model.sampling.device import DeviceSampler
from streamer.model.sampling.host import SampleOutput, Sampler
from streamer.model.sampling.runs import CUT, FAILED, Run
from tests.kernels.conftest import skip_without_interpreter
from tests.model.late_device import LateDevice
from tests.model.torch_ops import TorchOps

VOCAB = 40
ENDS = frozenset([3, 8])
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.1, seed=5, logprobs=3),
    SamplingParams(temperature=0.0, min_tokens=4, logit_bias={8: 50.0, 99: 1.0}),
    SamplingParams(temperature=0.7, seed=6, repetition_penalty=1.5, top_k=9, logprobs=0),
    SamplingParams(temperature=0.0, frequency_penalty=1.5, presence_penalty=0.5),
    SamplingParams(temperature=0.0, min_tokens=2, logprobs=1),
]


@pytest.fixture(autouse=True)
def _doors() -> Iterator[None]:
    skip_without_interpreter()
    with np.errstate(all="ignore"):
        yield


class Both:
    """The two samplers, with the same calls."""

    def __init__(self, max_rows: int) -> None:
        self.device = LateDevice(1)
        self.there = DeviceSampler(self.device, TorchOps(), VOCAB, max_rows)
        self.here = Sampler(for_cpu(), VOCAB, max_rows)

    def join(self, row: int, params: SamplingParams, tokens: tuple[int, ...], prompt: int) -> None:
        """Add the same sequence to both."""
        join = RowJoin(row, f"r{row}", 0, tokens, prompt, 0, (), params, ENDS)
        self.there.join(join)
        self.here.join(join)

    def leave(self, row: int) -> None:
        """Remove the row from both."""
        self.there.leave(row)
        self.here.leave(row)

    def sample(
        self, logits: torch.Tensor, rows: tuple[int, ...], at: list[int], runs: Sequence[Run] = ()
    ) -> tuple[SampleOutput, SampleOutput]:
        """(the device's, the CPU's)."""
        positions = np.array(at)
        draw = self.there.prepare(rows, positions, runs)
        slots, where = self.device.upload(np.array(rows)), self.device.upload(positions)
        results: list[torch.Tensor] = []

        def work() -> None:
            tokens = self.there.draw(draw, logits, slots, where)
            results.append(self.there.result(draw, logits, tokens).clone())

        self.device.main.run(work)
        expected = self.here.sample(logits.clone(), rows, at, runs)
        self.device.synchronize()
        return self.there.finish(draw, rows, results[0]), expected


def same(got: SampleOutput, expected: SampleOutput) -> None:
    """Tokens and failures to the bit, log probabilities to rounding."""
    assert got.tokens == expected.tokens
    assert got.logprobs.keys() == expected.logprobs.keys()
    for row, one in expected.logprobs.items():
        assert got.logprobs[row].token_id == one.token_id
        assert got.logprobs[row].logprob == pytest.approx(one.logprob, abs=1e-5)
        assert [t for t, _ in got.logprobs[row].top] == [t for t, _ in one.top]


@pytest.mark.parametrize("extra", [0, 5], ids=["exact", "padded"])
def test_rows_come_and_go(extra: int) -> None:
    """Eight steps in which tokens are counted, masks end, rows leave and others take their slots;
    the model's logits may be wider than the vocabulary."""
    both, rng = Both(8), torch.Generator().manual_seed(0)
    known = {row: 3 + row for row in range(6)}
    for row, params in enumerate(PARAMS):
        both.join(row, params, tuple(range(known[row])), 2)
    rows = tuple(range(6))
    for step in range(8):
        if step == 4:
            both.leave(3)
            both.leave(0)
            both.join(0, PARAMS[4], (1, 1, 2), 1)
            both.join(7, PARAMS[3], (4, 5, 6, 6), 2)
            known |= {0: 3, 7: 4}
            rows = (1, 2, 4, 5, 0, 7)
        logits = torch.randn(len(rows), VOCAB + extra, generator=rng) * 2
        same(*both.sample(logits, rows, [known[row] for row in rows]))
        for row in rows:
            known[row] += 1


@pytest.mark.parametrize(
    ("where", "value"),
    [((0, 5), torch.nan), ((2, 3), torch.nan), ((2, 8), torch.inf), ((4, 1), torch.inf)],
    ids=["greedy", "under the mask", "inf under the mask", "penalised"],
)
def test_rows_that_are_not_finite_fail_alone(where: Any, value: float) -> None:
    """Also where a mask would hide it; the other rows draw what they would draw without it."""
    both = Both(6)
    for row, params in enumerate(PARAMS):
        both.join(row, params, (1, 2, 3), 2)
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[where] = value
    got, expected = both.sample(logits, tuple(range(6)), [3] * 6)
    assert [row for row, token in enumerate(got.tokens) if token == FAILED] == [where[0]]
    same(got, expected)


def test_a_mask_that_leaves_nothing_fails_the_row() -> None:
    """The model allows only the end tokens, and min_tokens bans those."""
    both = Both(2)
    both.join(0, PARAMS[5], (1, 2), 2)
    both.join(1, PARAMS[0], (1, 2), 2)
    logits = torch.full((2, VOCAB), -torch.inf)
    logits[:, [3, 8]] = 1.0
    got, expected = both.sample(logits, (0, 1), [2, 2])
    assert [row for row, token in enumerate(got.tokens) if token == FAILED] == [0]
    same(got, expected)


def test_runs_are_drawn_and_counted_as_on_the_cpu() -> None:
    """Rows with and without penalties verify tokens of which some are wrong, beside rows that draw
    one; a row whose slot is taken over before its run is read leaves the new one's counts alone."""
    both, rng = Both(8), torch.Generator().manual_seed(2)
    chance = np.random.default_rng(0)
    known = {row: 3 + row for row in range(6)}
    for row, params in enumerate(PARAMS):
        both.join(row, params, tuple(range(known[row])), 2)
    num_accepted = num_cut = 0
    for _ in range(6):
        widths = [int(chance.integers(1, 5)) if row != 1 else 1 for row in known]
        rows = tuple(row for row, width in enumerate(widths) for _ in range(width))
        at = [known[row] + n for row, width in enumerate(widths) for n in range(width)]
        logits = torch.randn(len(rows), VOCAB, generator=rng)
        likely = chance.integers(0, VOCAB, len(rows))
        logits[range(len(rows)), likely] += 9.0
        firsts = np.cumsum(widths) - widths
        runs = [
            Run(int(first), tuple(likely[first : first + width - 1].tolist()))
            for first, width in zip(firsts, widths, strict=True)
            if width > 1
        ]
        got, expected = both.sample(logits, rows, at, runs)
        same(got, expected)
        for row, first in enumerate(firsts):
            kept = sum(token >= 0 for token in got.tokens[first : first + widths[row]])
            known[row] += kept
            num_accepted += kept - 1
        num_cut += got.tokens.count(CUT)
    assert num_accepted > 15
    assert num_cut > 5
    row, there = 4, both.there
    draw = there.prepare((row, row), np.array([60, 61]), [Run(0, (7,))])
    both.leave(row)
    both.join(row, PARAMS[4], (1, 2), 1)
    there.finish(draw, (row, row), torch.tensor([7, 8]))
    there.prepare((row,), np.array([3]))
    both.device.synchronize()
    assert there._counts._counts[row].gt(0).nonzero().flatten().tolist() == [2]


def test_counts_are_set_while_steps_are_queued() -> None:
    """Row slots are taken, taken again and counted in stream order, however late the stream is."""
    device = LateDevice(1)
    counts = DeviceSampler(device, TorchOps(), VOCAB, 16)._counts
    for row in range(5):
        counts.join(row, np.array([row, 30]), np.array([1, 2], np.float32))
    counts.join(1, np.array([7]), np.array([0], np.float32))
    rows = torch.tensor([0, 4, 1])
    device.main.run(partial(counts.add, rows, torch.tensor([30, 4, -1])))
    device.synchronize()
    seen = [{t: c for t, c in enumerate(row) if c >= 0} for row in counts._counts[rows].tolist()]
    assert seen == [{0: 1, 30: 3}, {4: 2, 30: 2}, {0: 1, 7: 0}]
