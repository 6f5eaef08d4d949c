"""The sampler's draws against a float64 distribution, by chi-square, and a test of the test."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import chisquare

from streamer.core.sampling import SamplingParams
from streamer.kernels import reference_sampling
from streamer.kernels.ops import for_cpu
from streamer.model.sampling.host import Sampler
from streamer.model.sampling.runs import Run
from tests.kernels.sampling_oracle import distribution
from tests.model.sampling.joins import join

pytestmark = pytest.mark.usefixtures("backend")

VOCAB = 90
DRAWS = 6000
BATCH = 500
PROMPT = [1, 2, 3, 2, 50, 60]
OUTPUT = [3, 4, 4, 4, 70]

MIXES = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.7),
    SamplingParams(top_k=7),
    SamplingParams(top_k=64),
    SamplingParams(top_k=80, top_p=0.97),
    SamplingParams(top_p=0.8),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02),
    SamplingParams(repetition_penalty=1.8),
    SamplingParams(presence_penalty=1.5, frequency_penalty=0.7),
    SamplingParams(
        temperature=0.9, repetition_penalty=0.6, frequency_penalty=-0.5, top_k=30, top_p=0.95
    ),
    SamplingParams(logit_bias={5: 3.0, 6: -100.0, 89: 2.0}),
]


def the_logits() -> NDArray[np.float32]:
    """Likely tokens are those of the history, so that penalties show; 60 is below zero."""
    logits = np.random.default_rng(3).standard_normal(VOCAB) * 1.5
    logits[[1, 2, 3, 4, 50, 60, 70]] = [3.0, 2.5, 3.5, 3.2, 2.0, -0.5, 2.8]
    return logits.astype(np.float32)


def draw(params: SamplingParams, seed: int) -> NDArray[np.int64]:
    """How often each token was drawn in DRAWS draws; position and choice make them independent."""
    counts = np.zeros(VOCAB, dtype=np.int64)
    sampler = Sampler(for_cpu(), VOCAB, BATCH)
    for first in range(0, DRAWS, BATCH):
        for row in range(BATCH):
            one = msgspec.structs.replace(params, seed=seed + row)
            join(sampler, row, one, PROMPT + OUTPUT, len(PROMPT), choice=row % 3)
        logits = torch.from_numpy(np.tile(the_logits(), (BATCH, 1)))
        output = sampler.sample(logits, range(BATCH), [11 + first + row for row in range(BATCH)])
        assert min(output.tokens) >= 0
        counts += np.bincount(output.tokens, minlength=VOCAB)
    return counts


def p_value(counts: NDArray[np.int64], probs: NDArray[np.float64]) -> float:
    """The p-value of the counts under probs; 0 if a token of probability 0 was drawn."""
    if counts[probs == 0.0].any():
        return 0.0
    expected = probs * counts.sum()
    order = np.argsort(-expected)
    large = order[expected[order] >= 8.0]
    rest = order[(expected[order] < 8.0) & (expected[order] > 0.0)]
    seen, predicted = counts[large].tolist(), expected[large].tolist()
    if expected[rest].sum() >= 8.0:
        seen.append(int(counts[rest].sum()))
        predicted.append(float(expected[rest].sum()))
    elif rest.size:
        seen[-1] += int(counts[rest].sum())
        predicted[-1] += float(expected[rest].sum())
    return float(chisquare(seen, predicted).pvalue) if len(seen) > 1 else 1.0


def of(params: SamplingParams) -> NDArray[np.float64]:
    return distribution(the_logits().astype(np.float64), params, PROMPT, OUTPUT)


@pytest.mark.parametrize("worth", [1, 1000], ids=["candidates", "sorted"])
@pytest.mark.parametrize("params", MIXES, ids=range(len(MIXES)))
def test_draws_follow_the_distribution(
    monkeypatch: pytest.MonkeyPatch, params: SamplingParams, worth: int
) -> None:
    monkeypatch.setattr(reference_sampling, "WORTH", worth)
    assert p_value(draw(params, seed=1234), of(params)) > 1e-3


@pytest.mark.parametrize("params", MIXES[::4], ids=range(0, len(MIXES), 4))
def test_verified_draws_follow_the_distribution(params: SamplingParams) -> None:
    """Whatever is proposed: the first token always, the second where the first was confirmed."""
    first, second = np.zeros(VOCAB, np.int64), np.zeros(VOCAB, np.int64)
    sampler, rng = Sampler(for_cpu(), VOCAB, BATCH), np.random.default_rng(0)
    rows, runs = [row for row in range(BATCH) for _ in range(2)], []
    likely = np.flatnonzero(of(params) > 0.05)
    for start in range(0, DRAWS, BATCH):
        for row in range(BATCH):
            one = msgspec.structs.replace(params, seed=row)
            join(sampler, row, one, PROMPT + OUTPUT, len(PROMPT), choice=0)
        runs = [Run(2 * row, (int(token),)) for row, token in enumerate(rng.choice(likely, BATCH))]
        at = [11 + start + n for _ in range(BATCH) for n in range(2)]
        logits = torch.from_numpy(np.tile(the_logits(), (2 * BATCH, 1)))
        tokens = np.array(sampler.sample(logits, rows, at, runs).tokens).reshape(BATCH, 2)
        first += np.bincount(tokens[:, 0], minlength=VOCAB)
        if not params.has_penalties:  # the second one's distribution depends on the first
            second += np.bincount(tokens[tokens[:, 1] >= 0, 1], minlength=VOCAB)
    assert p_value(first, of(params)) > 1e-3
    assert params.has_penalties or second.sum() > DRAWS / 20
    assert p_value(second, of(params)) > 1e-3 or params.has_penalties


@pytest.mark.parametrize(
    ("drawn", "claimed"),
    [
        (SamplingParams(), SamplingParams(temperature=1.1)),
        (SamplingParams(), SamplingParams(temperature=0.9)),
        (SamplingParams(top_k=7), SamplingParams(top_k=6)),
        (SamplingParams(top_p=0.8), SamplingParams(top_p=0.75)),
        (SamplingParams(frequency_penalty=0.7), SamplingParams(presence_penalty=0.7)),
        (SamplingParams(repetition_penalty=1.3), SamplingParams(repetition_penalty=1.1)),
        (SamplingParams(logit_bias={5: 2.0}), SamplingParams()),
    ],
    ids=["hotter", "colder", "k", "p", "frequency", "repetition", "bias"],
)
def test_the_test_notices_another_distribution(
    drawn: SamplingParams, claimed: SamplingParams
) -> None:
    assert p_value(draw(drawn, seed=1234), of(claimed)) < 1e-6


@pytest.mark.parametrize(
    "params",
    [SamplingParams(seed=9), SamplingParams(seed=9, top_k=12, top_p=0.99)],
    ids=["whole", "filtered"],
)
def test_positions_alone_make_draws_independent(params: SamplingParams) -> None:
    """One row, one seed, many positions: the marginal fits, and so do pairs of neighbours."""
    sampler = Sampler(for_cpu(), VOCAB, 1)
    join(sampler, 0, params, PROMPT + OUTPUT, len(PROMPT), choice=0)
    tokens = [
        sampler.sample(torch.from_numpy(the_logits()[None].copy()), [0], [position]).tokens[0]
        for position in range(3000)
    ]
    assert p_value(np.bincount(tokens, minlength=VOCAB), of(params)) > 1e-3
    probs = of(params)
    best = int(probs.argmax())
    is_best = np.array(tokens) == best
    table = np.bincount(2 * is_best[:-1] + is_best[1:], minlength=4)
    p = probs[best]
    predicted = np.array([(1 - p) ** 2, (1 - p) * p, p * (1 - p), p * p])
    assert p_value(table, predicted) > 1e-3
