"""BeamSearch: the hypotheses of one request, which of them go on, and which have ended.

Pure arithmetic over candidates: holds no rows, blocks or running tokens, which are the caller's.
Tokens, scores and the moment of the end are those of transformers' `generate(num_beams=...)`.
Called by the scheduler's apply.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from operator import itemgetter
from typing import NamedTuple

from streamer.core.sampling import SamplingParams

Candidates = Seq[tuple[int, float]]


class Continuation(NamedTuple):
    """A hypothesis of the next step: the hypothesis it continues, and with which token."""

    parent: int
    token: int


class Ended(NamedTuple):
    """A hypothesis that ended.

    tokens     its output, an end token included
    logprob    of the whole output
    score      logprob / len(tokens) ** length_penalty
    stop_id    the token that ended it; None: max_tokens did
    """

    tokens: tuple[int, ...]
    logprob: float
    score: float
    stop_id: int | None


def num_candidates(width: int, num_stop_ids: int) -> int:
    """How many of a row's best tokens a search must see, to decide as with all of them.

    Of a hypothesis' tokens `width` at most go on, and the end tokens among those before are skipped
    for that.
    """
    return width + num_stop_ids


def _score(logprob: float, length: int, length_penalty: float) -> float:
    share: float = float(length) ** length_penalty  # of int and float it is Any
    return logprob / share


class BeamSearch:
    """One request's search.

    Hypotheses have places, 0 up to the width, one more token each every step.

    ended     the best hypotheses that have ended, as many as the width, best first
    is_done   nothing better can come, or nothing may go on: `ended` is the result
    num_reported  output tokens that `settle` has returned so far, those of a search in an engine
                  before this one included: it found the same
    """

    def __init__(
        self, params: SamplingParams, *, num_prompt: int, max_tokens: int,
        stop_ids: frozenset[int], num_reported: int = 0,
    ) -> None:  # fmt: skip
        self.width = params.num_beams
        self.ended: list[Ended] = []
        self.is_done = False
        self._params = params
        self._num_prompt = num_prompt
        self._max_tokens = max_tokens
        self._stop_ids = stop_ids
        self._logprobs = [0.0]  # of the running hypotheses, by place
        self._num_output = 0  # tokens of each of them
        self._num_settled = 0
        self.num_reported = num_reported

    def advance(
        self, known: Seq[Seq[int]], candidates: Seq[Candidates]
    ) -> tuple[Continuation, ...]:
        """The next step's hypotheses, by place; empty when the search is done.

        A hypothesis that goes on keeps its place where it can.

        known       the running hypotheses' tokens, prompt included, by place
        candidates  for each the `num_candidates` best tokens with their log probabilities
        """
        self._num_output += 1
        is_last = self._num_output >= self._max_tokens
        may_stop = self._num_output > self._params.min_tokens
        going_on: list[tuple[float, Continuation]] = []
        for rank, (logprob, parent, token) in enumerate(self._ranked(candidates, may_stop)):
            if rank >= self.width and (is_last or len(going_on) == self.width):
                break  # of 4,160 candidates at a width of 64 the best 64 or a few more count
            is_stop = token in self._stop_ids
            if not (is_stop or is_last):
                going_on.append((logprob, Continuation(parent, token)))
            elif rank < self.width:
                output = (*known[parent][self._num_prompt :], token)
                self._end(output, logprob, token if is_stop else None)
        self.is_done = not going_on or self._is_settled_by_scores(going_on[0][0])
        if self.is_done:
            return ()
        return self._place(going_on)

    def _ranked(self, candidates: Seq[Candidates], may_stop: bool) -> list[tuple[float, int, int]]:
        """(log probability of the whole, parent, token) of every candidate, best first."""
        stop_ids = self._stop_ids
        found = [
            (before + logprob, parent, token)
            for parent, (before, row) in enumerate(zip(self._logprobs, candidates, strict=True))
            for token, logprob in row
            if may_stop or token not in stop_ids
        ]
        found.sort(key=itemgetter(0), reverse=True)
        return found

    def _end(self, output: tuple[int, ...], logprob: float, stop_id: int | None) -> None:
        score = _score(logprob, len(output), self._params.length_penalty)
        self.ended.append(Ended(output, logprob, score, stop_id))
        self.ended.sort(key=lambda each: -each.score)
        del self.ended[self.width :]

    def _is_settled_by_scores(self, best_running: float) -> bool:
        """Whether no running hypothesis is expected to score above the worst that ended.

        With a length penalty a longer output may score higher, by how much is not known: it is
        taken at its present length, or ("never" stop early) at the greatest one.
        """
        if len(self.ended) < self.width:
            return False
        params = self._params
        if params.early_stopping is True:
            return True
        is_never = params.early_stopping == "never" and params.length_penalty > 0.0
        length = self._max_tokens if is_never else self._num_output
        return _score(best_running, length, params.length_penalty) <= self.ended[-1].score

    def _place(self, going_on: list[tuple[float, Continuation]]) -> tuple[Continuation, ...]:
        placed: dict[int, tuple[float, Continuation]] = {}
        others = []
        for each in going_on:
            parent = each[1].parent
            if parent in placed:
                others.append(each)
            else:
                placed[parent] = each
        free = (place for place in range(self.width) if place not in placed)
        placed.update(zip(free, others, strict=False))
        by_place = [placed[place] for place in range(len(placed))]
        self._logprobs = [logprob for logprob, _ in by_place]
        return tuple(continuation for _, continuation in by_place)

    def settle(self, known: Seq[Seq[int]]) -> tuple[int, ...]:
        """The output tokens, since the last call, in which all that may be returned agree.

        That are the running hypotheses (`known`, by place, with their new tokens) and the n best
        of those that ended.
        """
        ended = [each.tokens for each in self.ended[: self._params.n]]
        first, offset = known[0], self._num_prompt
        while self._num_settled < self._num_output:
            at = self._num_settled
            token = first[offset + at]
            if any(each[offset + at] != token for each in known):
                break
            if any(len(each) <= at or each[at] != token for each in ended):
                break
            self._num_settled += 1
        begin, self.num_reported = self.num_reported, max(self.num_reported, self._num_settled)
        return tuple(first[offset + begin : offset + self.num_reported])
