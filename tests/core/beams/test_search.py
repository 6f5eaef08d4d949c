"""BeamSearch beside transformers' own: tokens, scores and number of steps, model by model.

The small loop here computes every hypothesis whole; the engine's rows and blocks have their own
tests.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from math import inf
from types import NoneType
from typing import Any, NamedTuple

import pytest
import torch
from transformers import StoppingCriteria

from streamer.core.beams.search import BeamSearch, Continuation, Ended, Scored, num_candidates
from streamer.core.plan import Candidates
from streamer.core.sampling import SamplingParams
from streamer.core.stopping.strings import Stop
from tests.checkpoints import make_checkpoint, reference_greedy, reference_model

PROMPT = [1, 17, 23, 4, 20]
PAD = 38
END_TOKENS = {"llama": (28, 9, 16), "gpt2": (26, 17, 4)}
SIZES: dict[str, Any] = {
    "llama": {"num_hidden_layers": 1, "hidden_size": 32},
    "gpt2": {"n_layer": 1, "n_embd": 32},
}
NO_END: frozenset[int] = frozenset()
TABLE = tuple(f"{'abcdefg'[t % 7]}{'xya'[t % 3]}"[: 1 + t % 2].encode() for t in range(40))
PENALTIES = (0.0, 0.6, 1.0, 2.0)
EARLY: tuple[Any, ...] = (True, False, "never")


@pytest.fixture(scope="module", params=END_TOKENS)
def model(request: Any, tmp_path_factory: Any) -> Iterator[Any]:
    """A tiny model, and `ends`: tokens that its beams come to."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a second one takes ten times as long here
    folder = make_checkpoint(
        tmp_path_factory.mktemp("beam"),
        request.param,
        3,
        vocab_size=40,
        **SIZES[request.param],
        tie_word_embeddings=False,
    )
    found = reference_model(folder)
    found.ends = END_TOKENS[request.param]
    yield found
    torch.set_num_threads(threads)


class Found(NamedTuple):
    """A search over the model.

    settled     tokens that were, before its end
    num_filled  places, over all steps, of hypotheses that only filled them
    """

    beams: BeamSearch
    settled: list[Scored]
    num_filled: int


@torch.inference_mode()
def search(model: Any, params: SamplingParams, stop_ids: frozenset[int]) -> Found:
    beams = BeamSearch(
        params, num_prompt=len(PROMPT), max_tokens=params.max_tokens or 0, stop_ids=stop_ids
    )
    wanted = num_candidates(params, len(stop_ids))
    known, settled, num_filled = [list(PROMPT)], list[Scored](), 0
    while True:
        logits = model(torch.tensor(known)).logits[:, -1].float()
        values, ids = torch.log_softmax(logits, -1).topk(min(wanted, logits.shape[-1]))
        candidates = list(map(Candidates, ids.tolist(), values.tolist()))
        going_on = beams.advance(known, candidates, TABLE)
        if beams.is_done:
            return Found(beams, settled, num_filled)
        num_filled += beams._logprobs.count(-inf)
        before = known
        known = [[*before[each.parent], each.token] for each in going_on]
        kept = sum(each.parent == place for place, each in enumerate(going_on))
        assert kept == len({each.parent for each in going_on})  # each parent's place is kept
        settled += beams.settle(known)
        assert beams.num_reported == len(settled)


def reference(model: Any, params: SamplingParams, stop_ids: frozenset[int]) -> Any:
    prompt = torch.tensor([PROMPT])
    return model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        num_beams=params.num_beams,
        num_return_sequences=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens or None,
        eos_token_id=sorted(stop_ids) or None,
        pad_token_id=PAD,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        stopping_criteria=[StopText(params.stop)] if params.stop else None,
    )


class StopText(StoppingCriteria):
    """Ends the rows whose output's text has one of the stop strings."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops = stops

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        texts = [text_of(row[len(PROMPT) :]) for row in input_ids.tolist()]
        return torch.tensor([any(stop in text for stop in self.stops) for text in texts])


def text_of(tokens: Iterable[int]) -> str:
    return b"".join(TABLE[token] for token in tokens).decode()


def compare(
    model: Any, params: SamplingParams, stop_ids: frozenset[int] = NO_END
) -> tuple[list[Ended], Found]:
    search_of = search(model, params, stop_ids)
    found = search_of.beams.ended[: params.n]
    settled = [token for token, _ in search_of.settled]
    expected = reference(model, params, stop_ids)
    rows = expected.sequences[:, len(PROMPT) :].tolist()
    assert len(found) == len(rows)
    for each, row, score in zip(found, rows, expected.sequences_scores.tolist(), strict=True):
        output = list(each.tokens)
        assert row[: len(output)] == output
        assert {*row[len(output) :]} <= {PAD, -1}  # -1 where there are no end tokens
        assert each.score == pytest.approx(score, abs=1e-5, rel=1e-5)
        assert settled == output[: len(settled)]
    return found, search_of


@pytest.mark.parametrize("width", [2, 4, 8])
def test_tokens_and_scores_are_those_of_transformers(model: Any, width: int) -> None:
    one, several = frozenset(model.ends[:1]), frozenset(model.ends)
    cases = [*itertools.product(PENALTIES, EARLY, [one])]
    cases += [(0.6, False, NO_END), (2.0, True, NO_END)]
    cases += [(1.0, early, several) for early in EARLY]
    ended = set()
    for penalty, early, stop_ids in cases:
        params = SamplingParams(
            use_beam_search=True,
            beam_width=width,
            n=1 + width // 2,
            length_penalty=penalty,
            early_stopping=early,
            max_tokens=10,
        )
        ended |= {each.stop for each in compare(model, params, stop_ids)[0]}
    assert {None, *one} <= ended


@pytest.mark.parametrize("width", [2, 4, 8])
def test_a_stop_string_ends_a_hypothesis_as_an_end_token_does(model: Any, width: int) -> None:
    """Over one token or several; where it ends most of the best ones, fewer go on for a while."""
    stops, num_filled = set(), 0
    for early, penalty in itertools.product(EARLY, (0.0, 1.0)):
        for stop in (("ba",), ("a",), ("cab", "d")):
            params = SamplingParams(
                use_beam_search=True,
                beam_width=width,
                n=2,
                length_penalty=penalty,
                early_stopping=early,
                max_tokens=10,
                stop=stop,
            )
            for stop_ids in (NO_END, frozenset(model.ends[:1])):
                found, whole = compare(model, params, stop_ids)
                num_filled += whole.num_filled
                for each in found:
                    if isinstance(each.stop, Stop):
                        text = text_of(each.tokens)
                        assert text[each.stop.text_bytes :].startswith(stop[each.stop.which])
                        assert not any(s in text_of(each.tokens[:-1]) for s in stop)
                    stops.add(type(each.stop))
    assert stops == {Stop, int, NoneType}
    assert num_filled > 0


def test_a_stop_string_before_min_tokens_ends_nothing(model: Any) -> None:
    params = SamplingParams(
        use_beam_search=True, beam_width=4, n=4, min_tokens=5, max_tokens=8, stop=("a",)
    )
    for each in search(model, params, NO_END).beams.ended:
        assert "a" not in text_of(each.tokens[4:-1])
        assert len(each.tokens) >= 5


@pytest.mark.parametrize("stop", [(), ("ba",)])
def test_log_probabilities_are_those_of_the_model(model: Any, stop: tuple[str, ...]) -> None:
    """Of each token of an answer, settled early or not, with the best beside it."""
    params = SamplingParams(
        use_beam_search=True, beam_width=3, n=2, logprobs=12, max_tokens=12, stop=stop
    )
    beams, settled, _ = search(model, params, NO_END)
    for ended in beams.ended[:2]:
        with torch.inference_mode():
            logits = model(torch.tensor([[*PROMPT, *ended.tokens]])).logits[0].float()
        values, ids = torch.log_softmax(logits[len(PROMPT) - 1 : -1], -1).topk(12)
        scored = ended.scored(0)
        assert scored[: len(settled)] == settled
        assert [token for token, _ in scored] == list(ended.tokens)
        logprobs = [found for _, found in scored if found is not None]
        assert sum(found.logprob for found in logprobs) == pytest.approx(ended.logprob, abs=1e-5)
        for found, token, i, v in zip(
            logprobs, ended.tokens, ids.tolist(), values.tolist(), strict=True
        ):
            assert found.token_id == token
            assert [each for each, _ in found.top] == i
            assert [each for _, each in found.top] == pytest.approx(v, abs=1e-5)
    assert settled or stop


def test_no_answer_ends_before_min_tokens(model: Any) -> None:
    shortest = []
    for minimum in (0, 5):
        params = SamplingParams(
            use_beam_search=True,
            beam_width=4,
            n=4,
            min_tokens=minimum,
            max_tokens=8,
            length_penalty=0.0,
            early_stopping=True,
        )
        found, _ = compare(model, params, frozenset(model.ends))
        shortest.append(min(len(each.tokens) for each in found))
    assert shortest[0] < 5 < shortest[1]


def test_a_width_of_one_takes_the_best_token(model: Any) -> None:
    params = SamplingParams(use_beam_search=True, max_tokens=8)
    beams, settled, _ = search(model, params, NO_END)
    assert list(beams.ended[0].tokens) == reference_greedy(model, PROMPT, 8)
    assert settled == beams.ended[0].scored(0)[:-1]  # one hypothesis is always settled


def test_a_vocabulary_smaller_than_the_width() -> None:
    params = SamplingParams(use_beam_search=True, beam_width=4, max_tokens=3)
    beams = BeamSearch(params, num_prompt=1, max_tokens=3, stop_ids=frozenset({1}))
    row = Candidates([0, 1], [-1.0, -1.5])
    assert beams.advance([[0]], [row]) == ((0, 0),)
    assert beams.advance([[0, 0]], [row]) == ((0, 0),)
    assert beams.advance([[0, 0, 0]], [row]) == ()
    assert [(e.tokens, e.logprob, e.stop) for e in beams.ended] == [
        ((0, 0, 0), -3.0, None),
        ((0, 0, 1), -3.5, 1),
        ((0, 1), -2.5, 1),
        ((1,), -1.5, 1),
    ]


def test_a_token_that_the_model_bans_goes_on_nowhere() -> None:
    """Where all others are banned the search ends, with fewer answers than its width."""
    params = SamplingParams(use_beam_search=True, beam_width=2, max_tokens=3)
    beams = BeamSearch(params, num_prompt=1, max_tokens=3, stop_ids=frozenset({1}))
    row = Candidates([5, 1, 6, 7], [-0.5, -1.0, -inf, -inf])
    assert beams.advance([[0]], [row]) == ((0, 5),)
    assert beams.settle([[0, 5]]) == []
    assert beams.advance([[0, 5]], [Candidates([1, 5, 6, 7], [0.0, -inf, -inf, -inf])]) == ()
    assert [e.tokens for e in beams.ended] == [(5, 1), (1,)]


def test_only_what_may_be_returned_holds_back_the_settled_prefix() -> None:
    """With n=1 that is the best that ended, beside those that run."""
    params = SamplingParams(use_beam_search=True, beam_width=2, length_penalty=0.0)
    beams = BeamSearch(params, num_prompt=1, max_tokens=9, stop_ids=frozenset({1}))
    assert beams.advance([[0]], [Candidates([5, 1], [-0.1, -5.0])]) == ((0, 5),)
    assert beams.settle([[0, 5]]) == []  # (1,) may be the answer
    assert beams.advance([[0, 5]], [Candidates([6, 1], [-0.1, -0.9])]) == ((0, 6),)
    assert beams.settle([[0, 5, 6]]) == [(5, None)]  # (5, 1) may be, (1,) no longer
    assert beams.num_reported == 1


def test_no_more_hypotheses_are_made_than_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 rows of 65 candidates each; making all took three quarters of a step's arithmetic."""
    made: list[Continuation] = []

    def make(parent: int, token: int) -> Continuation:
        made.append(Continuation(parent, token))
        return made[-1]

    monkeypatch.setattr("streamer.core.beams.search.Continuation", make)
    params = SamplingParams(use_beam_search=True, beam_width=64, max_tokens=3)
    beams = BeamSearch(params, num_prompt=1, max_tokens=3, stop_ids=NO_END)
    tokens = range(num_candidates(params, 0))
    row = Candidates(tokens, [-float(token) for token in tokens])
    assert len(beams.advance([[1]], [row])) == len(made) == 64
    assert len(beams.advance([[1, token] for token in range(64)], [row] * 64)) == 64
    assert len(made) == 128
