"""What sampling keeps of each resident row: parameters, bounded ids, token history.

Owns RowTable, RowState, Layout and History; holds no logits and draws nothing. Called by
sampling/host.py and sampling/device.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from streamer.constraints.filler import Wanted
from streamer.constraints.grammars import Grammars
from streamer.constraints.masks import Constraint
from streamer.core.beams.search import num_candidates
from streamer.core.plan import RowJoin
from streamer.errors import InvariantViolated
from streamer.kernels.philox import seed_key
from streamer.model.sampling.runs import CUT, Run

MAX_FORCED_S: Final = 1e-3  # of a step, to look for what must come


class History:
    """The distinct tokens of a row and how often each is output, growing token by token.

    Sparse, because a vocabulary-wide count per row would be 0.6 MB at 150,000 tokens and have to
    be read whole every step.
    """

    __slots__ = ("_counts", "_ids", "_size", "_slots")

    def __init__(self, tokens: Sequence[int], num_prompt: int) -> None:
        """`tokens` are the prompt's, then the output's; prompt tokens get a count of 0."""
        ids, inverse = np.unique(np.asarray(tokens, dtype=np.int64), return_inverse=True)
        self._size = ids.shape[0]
        room = max(16, 2 * self._size)
        self._ids = np.zeros(room, dtype=np.int64)
        self._counts = np.zeros(room, dtype=np.float32)
        self._ids[: self._size] = ids
        outputs = np.bincount(inverse[num_prompt:], minlength=self._size)
        self._counts[: self._size] = outputs[: self._size]
        self._slots = {int(token): slot for slot, token in enumerate(ids)}

    def append(self, token: int) -> None:
        slot = self._slots.get(token)
        if slot is None:
            if self._size == self._ids.shape[0]:
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            slot = self._slots[token] = self._size
            self._ids[slot] = token
            self._size += 1
        self._counts[slot] += 1

    def after(self, tokens: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """`ids` and `counts` as they were if these tokens had been appended."""
        if not tokens:
            return self.ids, self.counts
        new: dict[int, int] = {}
        slots = []
        for token in tokens:
            slot = self._slots.get(token)
            slots.append(new.setdefault(token, self._size + len(new)) if slot is None else slot)
        counts = np.concatenate((self.counts, np.zeros(len(new), np.float32)))
        np.add.at(counts, slots, 1)
        return np.concatenate((self.ids, np.array(list(new), np.int64))), counts

    @property
    def ids(self) -> NDArray[np.int64]:
        """Distinct tokens, in no order."""
        return self._ids[: self._size]

    @property
    def counts(self) -> NDArray[np.float32]:
        """Output occurrences of each of `ids`; 0 for a token of the prompt alone."""
        return self._counts[: self._size]


class RowState:
    """One resident sequence. Ids outside the vocabulary are dropped here: a row's bias can't change
    another row's logits."""

    __slots__ = (
        "bias_ids",
        "bias_values",
        "choice",
        "constraint",
        "history",
        "key",
        "min_position",
        "num_top",
        "params",
        "stop_ids",
    )

    def __init__(self, join: RowJoin, vocab_size: int, grammars: Grammars | None = None) -> None:
        params, tokens, num_prompt = join.params, join.tokens, join.num_prompt
        self.params = params
        self.choice = join.choice
        self.key = seed_key(params.seed or 0)
        bias = {t: b for t, b in params.logit_bias.items() if 0 <= t < vocab_size}
        self.bias_ids = np.fromiter(bias, dtype=np.int64, count=len(bias))
        self.bias_values = np.fromiter(bias.values(), dtype=np.float32, count=len(bias))
        ends = sorted(t for t in join.stop_ids if 0 <= t < vocab_size)
        self.stop_ids = np.array(ends, dtype=np.int64)
        self.min_position = num_prompt + params.min_tokens if ends and params.min_tokens else 0
        self.num_top = -1 if params.logprobs is None else params.logprobs
        if params.use_beam_search:  # which leaves out the ends that come too soon itself
            self.num_top, self.min_position = num_candidates(params, len(ends)), 0
        self.constraint: Constraint | None = None
        grammar, budget = params.structured_outputs, params.thinking_token_budget
        if grammar is not None or budget is not None:
            if grammars is None:
                raise InvariantViolated(f"{join.request_id} has a grammar, the runner has none")
            compiled = None if grammar is None else grammars.compile(grammar)
            self.constraint = Constraint(compiled, join, grammars.vocabulary, vocab_size)
            self.min_position = 0  # its mask sees to it
        self.history: History | None = None
        if params.has_penalties:
            # Only the repetition penalty looks at the prompt.
            skip = num_prompt if params.repetition_penalty == 1.0 else 0
            prompt = [t for t in tokens[skip:num_prompt] if 0 <= t < vocab_size]
            output = [t for t in tokens[num_prompt:] if 0 <= t < vocab_size]
            self.history = History(prompt + output, len(prompt))

    @property
    def penalties(self) -> tuple[float, float, float]:
        """Repetition, frequency and presence."""
        params = self.params
        return params.repetition_penalty, params.frequency_penalty, params.presence_penalty

    @property
    def is_edited(self) -> bool:
        """Whether anything but the temperature changes this row's logits (min_tokens apart)."""
        return bool(self.bias_ids.size) or self.history is not None


class RowTable:
    """The row slots: a state each, and what a Layout reads of all its rows, as arrays over the
    slots (25 us for 256 rows; one by one it took 250).

    top_k, settings, origin  as in ops.Draws, of rows that are not greedy
    floor                    first position without the min_tokens mask, 0: there is none
    num_top                  alternatives beside the drawn token's log probability, or -1: neither
    is_beam                  draws nothing: the alternatives are its candidates
    version                  changes whenever a row does
    """

    def __init__(self, max_rows: int, use: int) -> None:
        self.states: list[RowState | None] = [None] * max_rows
        self.version = 0
        self.is_greedy = np.zeros(max_rows, bool)
        self.is_edited = np.zeros(max_rows, bool)
        self.is_constrained = np.zeros(max_rows, bool)
        self.top_k = np.zeros(max_rows, np.int64)
        self.settings = np.zeros((max_rows, 3), np.float32)
        self.floor = np.zeros(max_rows, np.int64)
        self.num_top = np.zeros(max_rows, np.int64)
        self.is_beam = np.zeros(max_rows, bool)
        self.origin = np.zeros((max_rows, 5), np.uint32)
        self.origin[:, 4] = use

    def put(self, row: int, state: RowState) -> None:
        """The slot holds this row now."""
        params = state.params
        self.states[row] = state
        self.version += 1
        self.is_beam[row] = params.use_beam_search
        self.is_greedy[row] = params.is_greedy or params.use_beam_search
        self.is_edited[row] = state.is_edited
        self.is_constrained[row] = state.constraint is not None
        self.top_k[row] = max(0, params.top_k)
        log_min_p = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
        self.settings[row] = (params.temperature, params.top_p, log_min_p)
        self.floor[row] = state.min_position
        self.num_top[row] = state.num_top
        self.origin[row, :2] = state.key
        self.origin[row, 3] = state.choice

    def remove(self, row: int) -> None:
        """The slot is empty."""
        self.states[row] = None
        self.version += 1

    def states_of(self, rows: Sequence[int]) -> list[RowState]:
        """The states of rows that joined."""
        found = [self.states[row] for row in rows]
        if absent := [row for row, state in zip(rows, found, strict=True) if state is None]:
            raise ValueError(f"rows {absent} did not join")
        return found  # type: ignore[return-value]  # none is absent


class Layout:
    """What a fixed list of rows needs, computed when the list changes; indices are into the list,
    in which a row is named once for each token that it draws.

    slots        [rows] int64: the rows themselves
    edited       indices of rows with bias or history
    constrained  indices of rows with a grammar
    floors       (index, first position without the min_tokens mask)
    greedy       indices of rows that take the argmax;  drawn: of the others
    logprobs     indices of rows that asked;  num_top: their largest number of alternatives
    beams        those of them that draw nothing
    """

    def __init__(self, table: RowTable, rows: Sequence[int]) -> None:
        self.states = table.states_of(rows)
        at = self.slots = np.array(rows, np.int64)
        is_greedy, floor, num_top = table.is_greedy[at], table.floor[at], table.num_top[at]
        self.edited = _where(table.is_edited[at])
        self.floors = [(i, int(floor[i])) for i in _where(floor > 0)]
        self.logprobs = _where(num_top >= 0)
        self.num_top = max(0, int(num_top.max(initial=0)))
        self.beams = _where(table.is_beam[at])
        self.greedy = _where(is_greedy)
        self.drawn = _where(~is_greedy)
        self.constrained = _where(table.is_constrained[at])
        self.is_plain_greedy = not (self.drawn or self.edited or self.floors or self.constrained)

    def wanted(
        self, positions: Sequence[int] | NDArray[np.int64], runs: Sequence[Run]
    ) -> list[Wanted]:
        """The masks of `constrained`, in order, at these positions."""
        starts = {run.first: run.tokens for run in runs}
        found: list[Wanted] = []
        end = 0  # of the run that the index before is in
        for i in self.constrained:
            constraint = self.states[i].constraint
            if i >= end and constraint is not None:
                tokens = starts.get(i, ())
                end = i + 1 + len(tokens)
                found.append(Wanted(constraint, int(positions[i]), tokens))
        return found

    def wanted_after(
        self, positions: Sequence[int] | NDArray[np.int64], before: Sequence[Sequence[int]]
    ) -> list[Wanted]:
        """The masks of `constrained` at these positions, with those of the tokens before them."""
        return [
            Wanted(constraint, int(positions[i]) - len(before[i]), before[i])
            for i in self.constrained
            if (constraint := self.states[i].constraint) is not None
        ]

    def follow(self, tokens: Sequence[int]) -> None:
        """Constrained rows are where these tokens lead them; those of failed rows count nothing."""
        for i in self.constrained:
            constraint = self.states[i].constraint
            if constraint is not None and tokens[i] >= 0:
                constraint.drew(tokens[i])

    def forced(self, tokens: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Row -> the tokens that alone may come after these, for rows that may be ahead of them."""
        last = {int(self.slots[i]): i for i in self.constrained if tokens[i] != CUT}
        found: dict[int, tuple[int, ...]] = {}
        until = time.perf_counter() + MAX_FORCED_S
        for row, i in last.items():
            if time.perf_counter() > until:
                break
            state = self.states[i]
            if tokens[i] >= 0 and state.params.speculation and state.constraint is not None:
                found[row] = state.constraint.forced
        return {row: forced for row, forced in found.items() if forced}

    def late(self, late: Sequence[int], tokens: list[int]) -> dict[int, int]:
        """Row -> its last token, for those without the masks at these indices among `constrained`;
        what they drew is cut, in place."""
        newest: dict[int, int] = {}
        for n in late:
            i = self.constrained[n]
            constraint = self.states[i].constraint
            if constraint is not None:
                newest[int(self.slots[i])] = constraint.newest
            tokens[i] = CUT
        return newest

    def at_rows(self, errors: Mapping[int, str]) -> dict[int, str]:
        """Errors by index among `constrained`, by index among all rows instead."""
        return {self.constrained[n]: reason for n, reason in errors.items()}

    def below_floor(self, positions: Sequence[int] | NDArray[np.int64]) -> list[int]:
        """Indices of rows whose stop ids are masked at these positions."""
        return [i for i, floor in self.floors if positions[i] < floor]

    def biases(self, width: int) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
        """Bias of all rows: indices into their flattened logits [rows * width], and values."""
        biased = [i for i in self.edited if self.states[i].bias_ids.size]
        if not biased:
            return None
        ids = np.concatenate([self.states[i].bias_ids + i * width for i in biased])
        return ids, np.concatenate([self.states[i].bias_values for i in biased])

    def masked(self, below: Sequence[int], width: int) -> NDArray[np.int64]:
        """Indices of these rows' stop ids in the flattened logits; `below` is not empty."""
        return np.concatenate([self.states[i].stop_ids + i * width for i in below])


def _where(is_so: NDArray[np.bool_]) -> list[int]:
    return np.flatnonzero(is_so).tolist()
