"""BeamSearch: the hypotheses of one request, which of them go on, and which have ended.

Pure arithmetic over candidates: holds no rows, blocks or running tokens, which are the caller's.
Tokens, scores and the moment of the end are those of transformers' `generate(num_beams=...)`.
Called by the scheduler's apply.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import islice
from math import inf
from operator import itemgetter
from typing import NamedTuple

from streamer.core.plan import Candidates, TokenLogprob
from streamer.core.sampling import SamplingParams
from streamer.core.stopping.strings import Stop, StopStrings

Scored = tuple[int, TokenLogprob | None]  # a token, and its log probability if requested


class Continuation(NamedTuple):
    """A hypothesis of the next step: the hypothesis it continues, and with which token."""

    parent: int
    token: int


class Chain(NamedTuple):
    """Log probabilities of a hypothesis' tokens, the last first; it has its parent's."""

    newest: TokenLogprob
    before: Chain | None


class Ended(NamedTuple):
    """A hypothesis that ended.

    tokens     its output, an end token or what a stop string is part of included
    logprob    of the whole output
    score      logprob / len(tokens) ** length_penalty
    stop       the token or the stop string that ended it; None: max_tokens did
    chain      of its tokens, if log probabilities were requested
    """

    tokens: tuple[int, ...]
    logprob: float
    score: float
    stop: int | Stop | None
    chain: Chain | None = None

    def scored(self, begin: int) -> list[Scored]:
        """Its tokens from `begin` on."""
        return _scored(self.tokens[begin:], self.chain)


def _scored(tokens: Seq[int], chain: Chain | None) -> list[Scored]:
    """The tokens, the last of which is the chain's newest."""
    found: list[Scored] = []
    for token in reversed(tokens):
        found.append((token, None if chain is None else chain.newest))
        chain = None if chain is None else chain.before
    return found[::-1]


def num_candidates(params: SamplingParams, num_stop_ids: int) -> int:
    """How many of a row's best tokens a search must see, to decide as with all of them."""
    width = params.num_beams
    most = _num_ranked(params, num_stop_ids)
    # Of a hypothesis' tokens `width` at most go on, and the end tokens among those before are
    # skipped for that.
    return max(width + num_stop_ids if most is None else most, params.logprobs or 0)


def _num_ranked(params: SamplingParams, num_stop_ids: int) -> int | None:
    """How many candidates of all hypotheses may go on; None: whichever do not end.

    Any token may complete a stop string: the bound is that of transformers.
    """
    return max(2, 1 + num_stop_ids) * params.num_beams if params.stop else None


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
        self._stop = tuple(stop.encode() for stop in params.stop)
        self._harmless: set[int] = set()  # tokens within which no stop string can end
        self._logprobs = [0.0]  # of the running hypotheses, by place; -inf: only fills the place
        self._chains: list[Chain | None] = [None]  # likewise
        self._num_output = 0  # tokens of each of them
        self._num_settled = 0
        self.num_reported = num_reported

    def advance(
        self, known: Seq[Seq[int]], candidates: Seq[Candidates], token_bytes: Seq[bytes] = ()
    ) -> tuple[Continuation, ...]:
        """The next step's hypotheses, by place; empty when the search is done.

        A hypothesis that goes on keeps its place where it can. They are never fewer than before.

        known        the running hypotheses' tokens, prompt included, by place
        candidates   for each the `num_candidates` best tokens with their log probabilities
        token_bytes  the bytes of each token, by id, in which stop strings are found
        """
        self._num_output += 1
        is_last = self._num_output >= self._max_tokens
        stops = StopStrings(self._stop, token_bytes)
        going_on: list[tuple[float, int, int]] = []
        most = _num_ranked(self._params, len(self._stop_ids))
        for rank, each in enumerate(islice(self._ranked(candidates), most)):
            if rank >= self.width and (is_last or len(going_on) == self.width):
                break  # of 4,160 candidates at a width of 64 the best 64 or a few more count
            _, parent, index = each
            stop = self._stop_in(known[parent], candidates[parent].tokens[index], stops)
            if stop is None and not is_last:
                going_on.append(each)
            elif rank < self.width:
                self._end(known[parent], each, candidates[parent], stop)
        self.is_done = not going_on or self._is_settled_by_scores(going_on[0][0])
        if self.is_done:
            return ()
        return self._place(going_on, candidates)

    def _ranked(self, candidates: Seq[Candidates]) -> Iterator[tuple[float, int, int]]:
        """(log probability of the whole, parent, index of the candidate) of each, best first."""
        may_stop = self._num_output > self._params.min_tokens
        rows = [
            self._continued(before, parent, row, may_stop=may_stop)
            for parent, (before, row) in enumerate(zip(self._logprobs, candidates, strict=True))
            if before > -inf
        ]
        return heapq.merge(*rows, key=itemgetter(0), reverse=True)

    def _continued(
        self, before: float, parent: int, row: Candidates, *, may_stop: bool
    ) -> Iterator[tuple[float, int, int]]:
        stop_ids = self._stop_ids
        for index, logprob in enumerate(row.logprobs):
            if logprob == -inf:
                return  # the model bans this token, and those after it
            if may_stop or row.tokens[index] not in stop_ids:
                yield before + logprob, parent, index

    def _stop_in(self, known: Seq[int], token: int, stops: StopStrings) -> int | Stop | None:
        """What ends a hypothesis with this token."""
        if token in self._stop_ids:
            return token
        if not self._stop or token in self._harmless:
            return None
        if not stops.may_end_in(token):
            self._harmless.add(token)
            return None
        if self._num_output < self._params.min_tokens:
            return None
        return stops.find(known, self._num_prompt, len(known), token)

    def _end(
        self,
        known: Seq[int],
        candidate: tuple[float, int, int],
        row: Candidates,
        stop: int | Stop | None,
    ) -> None:
        logprob, parent, index = candidate
        score = _score(logprob, self._num_output, self._params.length_penalty)
        if len(self.ended) == self.width and score <= self.ended[-1].score:
            return
        output = (*known[self._num_prompt :], row.tokens[index])
        chain = self._chained(parent, row, index)
        self.ended.append(Ended(output, logprob, score, stop, chain))
        self.ended.sort(key=lambda each: -each.score)
        del self.ended[self.width :]

    def _chained(self, parent: int, row: Candidates, index: int) -> Chain | None:
        """The chain of a hypothesis and its candidate, if log probabilities were requested."""
        num_top = self._params.logprobs
        if num_top is None:
            return None
        top = zip(row.tokens[:num_top], row.logprobs, strict=False)
        newest = TokenLogprob(row.tokens[index], row.logprobs[index], tuple(top))
        return Chain(newest, self._chains[parent])

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

    def _place(
        self, going_on: list[tuple[float, int, int]], candidates: Seq[Candidates]
    ) -> tuple[Continuation, ...]:
        placed: dict[int, tuple[float, int, int]] = {}
        others = []
        for each in going_on:
            if each[1] in placed:
                others.append(each)
            else:
                placed[each[1]] = each
        free = (place for place in range(self.width) if place not in placed)
        placed.update(zip(free, others, strict=False))
        # Where stop strings ended more of them than go on, rows are left without a hypothesis: they
        # follow one whose continuations never count, and are taken over in a later step.
        for place in range(len(candidates)):
            placed.setdefault(place, (-inf, place, 0))
        by_place = [placed[place] for place in range(len(placed))]
        self._logprobs = [logprob for logprob, _, _ in by_place]
        self._chains = [self._chained(parent, candidates[parent], i) for _, parent, i in by_place]
        return tuple(
            Continuation(parent, candidates[parent].tokens[index]) for _, parent, index in by_place
        )

    def settle(self, known: Seq[Seq[int]]) -> list[Scored]:
        """The output tokens, since the last call, in which all that may be returned agree.

        That are the running hypotheses (`known`, by place, with their new tokens) and the n best
        of those that ended.
        """
        ended = [each.tokens for each in self.ended[: self._params.n]]
        running = [place for place, logprob in enumerate(self._logprobs) if logprob > -inf]
        first, offset = known[running[0]], self._num_prompt
        while self._num_settled < self._num_output:
            at = self._num_settled
            token = first[offset + at]
            if any(known[place][offset + at] != token for place in running):
                break
            if any(len(each) <= at or each[at] != token for each in ended):
                break
            self._num_settled += 1
        begin, self.num_reported = self.num_reported, max(self.num_reported, self._num_settled)
        count = self.num_reported - begin
        if not count:
            return []
        output = first[offset + begin : offset + self._num_output]
        return _scored(output, self._chains[running[0]])[:count]
