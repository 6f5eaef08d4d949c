"""The sampler: rows are independent, greedy is exact, masks hold, log probabilities are right."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from streamer.core.sampling import SamplingParams
from streamer.kernels import reference_sampling
from streamer.kernels.ops import for_cpu
from streamer.model.sampling.host import Sampler
from streamer.model.sampling.rows import History
from streamer.model.sampling.runs import CUT, FAILED, Run
from tests.kernels.sampling_oracle import edited, noise
from tests.model.sampling.joins import join

pytestmark = pytest.mark.usefixtures("backend")

VOCAB = 1001  # not a multiple of four

KINDS = [
    SamplingParams(temperature=0),
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.5, top_k=3),
    SamplingParams(seed=3, top_p=0.5),
    SamplingParams(seed=4, top_p=0.999, temperature=1.9),
    SamplingParams(seed=5, min_p=0.2),
    SamplingParams(seed=6, top_k=600, top_p=0.9),
    SamplingParams(seed=7, repetition_penalty=1.5, frequency_penalty=0.5),
    SamplingParams(temperature=0, presence_penalty=2.0),
    SamplingParams(seed=8, logit_bias={3: 50.0}),
    SamplingParams(temperature=0, logit_bias={3: 100.0}),
    SamplingParams(seed=9, logprobs=4),
    SamplingParams(seed=-10, top_k=1000, temperature=2.0),
    SamplingParams(seed=11, min_tokens=50),
    SamplingParams(temperature=0, min_tokens=50, logprobs=0),
    SamplingParams(seed=1),
]


@pytest.fixture(autouse=True)
def narrow_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at 64 and at 512 candidates first, although the vocabulary is small."""
    monkeypatch.setattr(reference_sampling, "WORTH", 1)


def logits_of(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return 2.0 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def sampler_of(kinds: list[SamplingParams], tokens: list[int] | None = None) -> Sampler:
    sampler = Sampler(for_cpu(), VOCAB, len(kinds))
    for row, params in enumerate(kinds):
        known = tokens if tokens is not None else [row, row + 1, row]
        join(sampler, row, params, known, 2, choice=row % 2, stop_ids=frozenset({row}))
    return sampler


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    rng = np.random.default_rng(0)
    together, alone = sampler_of(KINDS), sampler_of(KINDS)
    for step in range(6):
        logits = logits_of(len(KINDS), seed=step)
        order = rng.permutation(len(KINDS)).tolist()
        positions = [3 + step] * len(order)
        batch = together.sample(logits[order].clone(), order, positions).tokens
        single = [
            alone.sample(logits[row : row + 1].clone(), [row], [3 + step]).tokens[0]
            for row in order
        ]
        assert batch == single


def test_seed_position_and_choice_each_change_the_draw() -> None:
    logits = logits_of(1)

    def draws(seed: int, choice: int, start: int) -> list[int]:
        sampler = Sampler(for_cpu(), VOCAB, 1)
        join(sampler, 0, SamplingParams(seed=seed), [1], 1, choice)
        return [sampler.sample(logits.clone(), [0], [start + i]).tokens[0] for i in range(20)]

    base = draws(1, 0, 100)
    assert base == draws(1, 0, 100)
    assert base[1:] == draws(1, 0, 101)[:-1]
    assert base not in (draws(2, 0, 100), draws(1, 1, 100), draws(1 + (1 << 32), 0, 100))


@pytest.mark.parametrize("filters", [{}, {"top_k": VOCAB}], ids=["whole", "filtered"])
def test_noise_is_keyed_by_seed_position_choice_and_token(filters: dict[str, Any]) -> None:
    """Every draw, computed by hand: argmax of logits / temperature + noise(seed, position, ...)."""
    rows = [(1, 40, 0), (1, 0, 40), (1, 3, 2), (1, 2, 3), (-5, 7, 1), (9 + (5 << 40), 70_000, 13)]
    sampler = Sampler(for_cpu(), VOCAB, len(rows))
    for row, (seed, _, choice) in enumerate(rows):
        params = SamplingParams(seed=seed, temperature=1.5, **filters)
        join(sampler, row, params, [1], 1, choice)
    for step in range(4):
        logits = logits_of(len(rows), seed=step)
        got = sampler.sample(logits.clone(), range(len(rows)), [p + step for _, p, _ in rows])
        scaled = logits.numpy().astype(np.float64) / 1.5
        want = [
            int((scaled[row] + noise(seed, position + step, choice, VOCAB)).argmax())
            for row, (seed, position, choice) in enumerate(rows)
        ]
        assert got.tokens == want


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("bad", [0, 3, 7, 12])
def test_a_poisoned_row_fails_alone(poison: float, bad: int) -> None:
    logits = logits_of(len(KINDS))
    rows, positions = range(len(KINDS)), [3] * len(KINDS)
    clean = sampler_of(KINDS).sample(logits.clone(), rows, positions)
    poisoned = logits.clone()
    poisoned[bad, 17] = poison
    sampler = sampler_of(KINDS)
    output = sampler.sample(poisoned, rows, positions)
    assert output.tokens[bad] == FAILED
    assert bad not in output.logprobs
    assert [t for r, t in enumerate(output.tokens) if r != bad] == [
        t for r, t in enumerate(clean.tokens) if r != bad
    ]
    again = sampler.sample(logits.clone(), rows, positions)
    assert FAILED not in again.tokens


def test_nothing_finite_fails_and_a_ban_does_not() -> None:
    logits = logits_of(2)
    logits[0] = -torch.inf
    logits[1, 500:] = -torch.inf
    output = sampler_of(KINDS[:2]).sample(logits, [0, 1], [3, 3])
    assert output.tokens[0] == FAILED
    assert 0 <= output.tokens[1] < 500


def test_greedy_ties_take_the_lowest_id() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, [900, 40, 41]] = 7.0
    kinds = [SamplingParams(temperature=0), SamplingParams(temperature=0, logit_bias={1000: 1.0})]
    assert sampler_of(kinds).sample(logits, [0, 1], [3, 3]).tokens == [40, 40]


def test_min_tokens_masks_ends_until_so_many_are_out() -> None:
    for params in (
        SamplingParams(temperature=0, min_tokens=2),
        SamplingParams(seed=1, min_tokens=2),
        SamplingParams(seed=1, min_tokens=2, top_k=1),
    ):
        sampler = Sampler(for_cpu(), VOCAB, 1)
        ends = frozenset({9, VOCAB, -3, 10**9})
        join(sampler, 0, params, [5, 6, 7], 3, 0, stop_ids=ends)
        logits = torch.zeros(1, VOCAB)
        logits[0, 9] = 80.0
        drawn = [sampler.sample(logits.clone(), [0], [3 + i]).tokens[0] for i in range(4)]
        assert 9 not in drawn[:2]
        assert drawn[2:] == [9, 9]


@pytest.mark.parametrize("params", [{"temperature": 0}, {"seed": 1}, {"seed": 1, "top_k": 2}])
def test_a_row_whose_every_token_is_banned_fails_alone(params: dict[str, Any]) -> None:
    """min_tokens masks the only tokens the model allows: nothing is left to draw."""
    sampler = Sampler(for_cpu(), VOCAB, 2)
    join(sampler, 0, SamplingParams(min_tokens=2, **params), [5], 1, 0, stop_ids=frozenset({9}))
    join(sampler, 1, SamplingParams(**params), [5], 1, 0, stop_ids=frozenset())
    logits = torch.full((2, VOCAB), -torch.inf)
    logits[:, 9] = 1.0
    assert sampler.sample(logits, [0, 1], [1, 1]).tokens == [FAILED, 9]


def test_bias_beyond_the_vocabulary_touches_no_neighbour() -> None:
    kinds = [
        SamplingParams(temperature=0, logit_bias={VOCAB + 5: 100.0, -1: 100.0, 4: 1.0}),
        SamplingParams(temperature=0),
    ]
    logits = logits_of(2)
    expected = logits.clone()
    expected[0, 4] += 1.0
    tokens = sampler_of(kinds).sample(logits, [0, 1], [3, 3]).tokens
    assert tokens == expected.argmax(-1).tolist()


def test_padded_logits_are_never_drawn() -> None:
    logits = logits_of(len(KINDS), vocab=VOCAB + 23)
    logits[:, VOCAB:] = 99.0
    rows, positions = range(len(KINDS)), [3] * len(KINDS)
    output = sampler_of(KINDS).sample(logits.clone(), rows, positions)
    assert output.tokens == sampler_of(KINDS).sample(logits[:, :VOCAB], rows, positions).tokens


def test_penalties_follow_the_tokens_it_draws() -> None:
    params = SamplingParams(
        temperature=0, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2
    )
    prompt, output = [3, 4, 3], [8, 3]
    sampler = Sampler(for_cpu(), VOCAB, 1)
    join(sampler, 0, params, prompt + output, len(prompt), 0)
    logits = 0.5 * logits_of(1)
    for step in range(60):
        expected = edited(logits[0].numpy().astype(np.float64), params, prompt, output)
        token = sampler.sample(logits.clone(), [0], [5 + step]).tokens[0]
        assert token == int(expected.argmax())
        output.append(token)
    assert len(set(output)) > 10


def test_a_row_that_leaves_takes_its_history_along() -> None:
    params = SamplingParams(temperature=0, frequency_penalty=2.0)
    sampler = Sampler(for_cpu(), VOCAB, 1)
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 1.0
    join(sampler, 0, params, [1, 7], 1, 0)
    assert sampler.sample(logits.clone(), [0], [2]).tokens != [7]
    sampler.leave(0)
    with pytest.raises(ValueError, match=r"rows \[0\] did not join"):
        sampler.sample(logits.clone(), [0], [2])
    join(sampler, 0, params, [7, 1], 1, 0)
    assert sampler.sample(logits.clone(), [0], [2]).tokens == [7]


def test_history_grows_past_its_room() -> None:
    history = History([5, 5, 9], 1)
    for token in range(100):
        history.append(token % 40)
    counts = dict(zip(history.ids.tolist(), history.counts.tolist(), strict=True))
    assert counts == {t: 3.0 - (t >= 20) + (t in (5, 9)) for t in range(40)}


def test_history_after_tokens_is_what_appending_them_makes() -> None:
    history, grown = (History([5, 5, 9, 7], 1) for _ in range(2))
    more = [7, 3, 5, 3, 3, 12]
    for n, token in enumerate(more, 1):
        grown.append(token)
        ids, counts = history.after(more[:n])
        assert (ids.tolist(), counts.tolist()) == (grown.ids.tolist(), grown.counts.tolist())
    assert history.ids.tolist() == [5, 7, 9]


# Errors of what is proposed, by position: none, at once, in the middle, all but the last.
PROPOSED = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 0, 1, 0), (0, 1, 1, 1)]


@pytest.mark.parametrize("wrong", PROPOSED)
def test_runs_draw_what_single_draws_would(wrong: tuple[int, ...]) -> None:
    """Every kind of row verifies provisional tokens in one call, next to a row that does not, and
    goes on from there; tokens and log probabilities are those of draws one by one."""
    kinds = [
        *KINDS,
        SamplingParams(seed=20, repetition_penalty=1.4, presence_penalty=1.0, logprobs=2),
        SamplingParams(temperature=0, frequency_penalty=2.0, min_tokens=3, logit_bias={3: 2.0}),
    ]
    num_rows, steps = len(kinds), 5
    logits = [logits_of(num_rows, seed=step) for step in range(steps + 3)]
    for x in logits:
        x[:, :20] += 4.0  # a few tokens come again and again
    one, run = sampler_of(kinds), sampler_of(kinds)
    single = [
        one.sample(x.clone(), range(num_rows), [3 + n] * num_rows) for n, x in enumerate(logits)
    ]
    wide, rows, at, runs = [], [], [], []
    for row in range(num_rows):
        width = 1 if row == 4 else steps
        drawn = [single[n].tokens[row] for n in range(width - 1)]
        if width > 1:
            tokens = tuple((t + e) % VOCAB for t, e in zip(drawn, wrong, strict=True))
            runs.append(Run(len(rows), tokens))
        wide += [logits[n][row] for n in range(width)]
        rows += [row] * width
        at += range(3, 3 + width)
    got = run.sample(torch.stack(wide), rows, at, runs)
    kept = (*wrong, 1).index(1) + 1
    for row in range(num_rows):
        count, width = (1, 1) if row == 4 else (kept, steps)
        first = rows.index(row)
        tokens = [single[n].tokens[row] for n in range(count)] + [CUT] * (width - count)
        assert got.tokens[first : first + width] == tokens
        for n in range(width):
            expected = single[n].logprobs.get(row) if n < count else None
            assert got.logprobs.get(first + n) == expected
    for n in range(3):  # what was cut left nothing behind
        now = [1 if row == 4 else kept for row in range(num_rows)]
        x = torch.stack([logits[now[row] + n][row] for row in range(num_rows)])
        after = run.sample(x, range(num_rows), [3 + n + k for k in now])
        assert after.tokens == [single[now[row] + n].tokens[row] for row in range(num_rows)]


def test_a_run_that_reaches_logits_that_are_not_finite_fails_there() -> None:
    sampler = sampler_of(KINDS[:1])
    logits = logits_of(4)
    best = logits.argmax(-1).tolist()
    logits[2, 7] = torch.nan
    out = sampler.sample(logits.clone(), [0] * 4, [3, 4, 5, 6], [Run(0, (best[0], best[1], 5))])
    assert out.tokens == [best[0], best[1], FAILED, CUT]
    out = sampler.sample(logits, [0] * 4, [3, 4, 5, 6], [Run(0, (best[0], best[1] + 1, 5))])
    assert out.tokens == [best[0], best[1], CUT, CUT]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_of_the_raw_model(dtype: torch.dtype) -> None:
    kinds = [
        SamplingParams(temperature=0, logprobs=3, logit_bias={11: 100.0}),
        SamplingParams(temperature=0),
        SamplingParams(seed=2, temperature=0.3, logprobs=0, repetition_penalty=2.0),
        SamplingParams(seed=3, top_k=2, logprobs=20),
    ]
    logits = logits_of(4).to(dtype)
    logs = torch.log_softmax(logits.float(), -1)
    output = sampler_of(kinds).sample(logits.clone(), range(4), [3] * 4)
    assert sorted(output.logprobs) == [0, 2, 3]
    assert output.tokens[0] == 11
    for row, given in output.logprobs.items():
        assert given.token_id == output.tokens[row]
        assert given.logprob == pytest.approx(float(logs[row, given.token_id]), abs=1e-6)
        assert len(given.top) == kinds[row].logprobs
        best = logs[row].sort(descending=True, stable=True)
        assert [v for _, v in given.top] == pytest.approx(best.values[: len(given.top)].tolist())
        assert all(float(logs[row, t]) == pytest.approx(v, abs=1e-6) for t, v in given.top)


def test_equal_alternatives_are_in_order_of_their_ids() -> None:
    """Also where only some of them are asked for, and whatever the neighbours ask for."""
    logits = torch.zeros(1, VOCAB)
    logits[0, [900, 3, 40, 500, 77]] = 3.0
    logits[0, [901, 2]] = 4.0
    best = [2, 901, 3, 40, 77, 500, 900, 0, 1, 4, 5]
    for count in range(len(best) + 1):
        params = SamplingParams(temperature=0, logprobs=count)
        for others in ([], [SamplingParams(seed=1, logprobs=20)]):
            kinds = [params, *others]
            out = sampler_of(kinds).sample(logits.repeat(len(kinds), 1), range(len(kinds)), [3] * 2)
            assert [token for token, _ in out.logprobs[0].top] == best[:count]


def test_widths_do_not_change_the_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at 64 candidates first draws the same tokens as sorting all of them."""
    rows, positions = range(len(KINDS)), [3] * len(KINDS)
    for worth in (1, 4):
        for step in range(4):
            logits = logits_of(len(KINDS), seed=step)
            monkeypatch.setattr(reference_sampling, "WORTH", worth)
            narrow = sampler_of(KINDS).sample(logits.clone(), rows, positions).tokens
            monkeypatch.setattr(reference_sampling, "WORTH", VOCAB)
            assert sampler_of(KINDS).sample(logits.clone(), rows, positions).tokens == narrow


def test_filters_that_keep_all_draw_as_no_filter() -> None:
    """Pruned noise over everything equals noise over candidates: one seed, one token."""
    kinds = [SamplingParams(seed=3), SamplingParams(seed=3, top_k=VOCAB)]
    for step in range(30):
        logits = logits_of(1, seed=step).repeat(2, 1)
        sampler = Sampler(for_cpu(), VOCAB, 2)
        for row, params in enumerate(kinds):
            join(sampler, row, params, [1], 1, choice=0)
        first, second = sampler.sample(logits, [0, 1], [step, step]).tokens
        assert first == second


def test_ties_at_the_cut_stay() -> None:
    logits = torch.full((1, VOCAB), -5.0)
    logits[0, 100:300] = 2.0
    drawn = set()
    for params in (SamplingParams(seed=1, top_k=1), SamplingParams(seed=1, top_p=0.01)):
        sampler = Sampler(for_cpu(), VOCAB, 1)
        join(sampler, 0, params, [1], 1, 0)
        tokens = [sampler.sample(logits.clone(), [0], [p]).tokens[0] for p in range(100)]
        assert all(100 <= t < 300 for t in tokens)
        drawn.add(len(set(tokens)))
    assert min(drawn) > 50


def test_a_tiny_temperature_is_nearly_greedy() -> None:
    kinds = [SamplingParams(seed=1, temperature=1e-30), SamplingParams(seed=2, temperature=1e-6)]
    logits = logits_of(2)
    expected = logits.argmax(-1).tolist()
    assert sampler_of(kinds).sample(logits, [0, 1], [3, 3]).tokens == expected


def test_no_rows() -> None:
    output = Sampler(for_cpu(), VOCAB, 4).sample(torch.zeros(0, VOCAB), [], [])
    assert output.tokens == []
