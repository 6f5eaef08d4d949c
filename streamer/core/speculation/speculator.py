"""Speculator: what rows are likely to draw next, from texts seen before and the runner's draft.

Implements interface.Speculation. Owns the rows' indexes and the recent outputs of each owner; all
it answers follows from the calls it gets. A token it proposes is known only if the model draws it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as Seq
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Final

import msgspec

from streamer.core.plan import Facts
from streamer.core.speculation.index import ANCHOR, SEPARATOR, Text
from streamer.core.speculation.policy import (
    DELAY,
    SMALLEST,
    StepCosts,
    can_gain,
    draft_length,
    shares,
)
from streamer.core.speculation.recent import Owner, Recent
from streamer.core.speculation.row import SHARED_WEIGHT, Rates, RowMatch, Source
from streamer.core.speculation.values import SpeculationSizes

if TYPE_CHECKING:
    from streamer.core.request import Request, Sequence

# Tokens of prompts and finished outputs that are indexed in one step, about 0.7 ms.
INDEXED_A_STEP: Final = 2048
DRAFT_PRIOR: Final = 0.6  # acceptance of a draft model's token before one was seen
DRAFT_WEIGHT: Final = 1 / 16  # of a verified token in a row's running mean
WAITED: Final = 2.2  # tokens expected of a verification that a row waits a plan for
POOR_DRAFT: Final = 0.25  # acceptance below which a row's draft is only tried now and then
# After so many calls in a row that chose nothing, `may_gain` skips a step; after each further so
# many one more, up to MOST_RESTS: to look at 64 rows takes 0.1 ms, 5% of a tiny step.
VAIN, MOST_RESTS = 4, 3
LONG_MATCH: Final = 8  # a match from which a row needs no draft
# Known tokens until a row whose drafts do not pay has one token tried again, doubled each time;
# steps between two that try any, of one row in TRIED.
FIRST_TRIAL, LAST_TRIAL = 32, 1024
TRIED: Final = 16


class _Row:
    """One sequence that decodes.

    seen        known tokens that its match has followed
    generation  of the owner's recent outputs, as the match knows them
    drafted     the draft model's proposal, for when `drafted_at` tokens are known
    is_awaited  a plan under way drafts for it
    is_drafted  its last proposal was the draft model's
    trial_at    known tokens at which its draft is tried again; trial: tokens until the next
    is_trial    its proposal is verified whether or not that is expected to pay
    lost        plain steps by which verifications have delayed it
    """

    __slots__ = (
        "draft_rate",
        "drafted",
        "drafted_at",
        "generation",
        "is_awaited",
        "is_drafted",
        "is_trial",
        "lost",
        "match",
        "owner",
        "seen",
        "trial",
        "trial_at",
    )

    def __init__(self, match: RowMatch | None, owner: Owner, seen: int, draft_rate: float) -> None:
        self.match = match
        self.owner = owner
        self.seen = seen
        self.generation = -1
        self.draft_rate = draft_rate
        self.drafted: tuple[int, ...] = ()
        self.drafted_at = 0
        self.is_awaited = False
        self.is_drafted = False
        self.trial = FIRST_TRIAL
        self.trial_at = 0
        self.is_trial = False
        self.lost = 0.0

    def slack(self, seq: Sequence) -> float:
        """Plain steps that it may still lose to the verifications of other rows."""
        return DELAY * seq.num_output + seq.num_accepted - self.lost


class _Given:
    """A request's prompt and prediction as one Text, for all its rows."""

    __slots__ = ("num_rows", "text")

    def __init__(self) -> None:
        self.text = Text()
        self.num_rows = 0


class _Job(msgspec.Struct):
    """Tokens to be indexed, from `done` on: of a request's text, or of an owner's ended output."""

    tokens: Seq[int]
    owner: Owner
    done: int = 0

    @property
    def is_done(self) -> bool:
        return self.done >= len(self.tokens)

    def take(self, count: int) -> Seq[int]:
        """The next `count` tokens."""
        part = self.tokens[self.done : self.done + count]
        self.done += len(part)
        return part


class Speculator:
    """See interface.Speculation."""

    def __init__(self, sizes: SpeculationSizes) -> None:
        self.sizes = sizes
        self._rows: dict[Sequence, _Row] = {}
        self._given: dict[Request, _Given] = {}
        self._recent = Recent(sizes.max_indexed // 4)
        self._given_jobs: dict[Request, _Job] = {}
        self._ended_jobs: deque[_Job] = deque()
        self._num_live = 0  # tokens in the indexes of rows and requests
        self._num_waiting = 0  # tokens of ended outputs in their jobs
        self._shared = (Rates(), Rates(), Rates())  # of own output, of what is given, of recent
        self._draft_rate = DRAFT_PRIOR
        self._num_drafting = 0  # steps that asked for drafts
        self._trial_at = 0  # the step of these from which one may try
        self._facts = Facts()
        self._step_costs = StepCosts(self._facts)
        self._num_vain = 0  # calls of `choose` since one chose anything
        self._num_rests = 0  # steps until the next

    # ------------------------------------------------------------ rows

    def begin(self, seq: Sequence) -> None:
        """Take a sequence up, unless its request does without; one that comes back begins anew."""
        add = seq.request.add
        if not add.params.speculation:
            return
        owner = (add.salt, add.tenant)
        has_room = self._num_live + len(add.prompt) <= self.sizes.max_indexed
        match = self._match(seq, owner) if self.sizes.has_texts and has_room else None
        row = self._rows[seq] = _Row(match, owner, len(add.prompt), self._draft_rate)
        row.lost = row.slack(seq)  # what it gained in a row before is not spent again
        self._num_vain = self._num_rests = 0

    def _match(self, seq: Sequence, owner: Owner) -> RowMatch:
        request = seq.request
        own, given, _ = self._shared
        held = self._given.get(request)
        if held is None:
            held = self._given[request] = _Given()
            tokens, prediction = request.add.prompt, request.add.prediction
            self._num_live += len(tokens) + len(prediction)
            if prediction:
                tokens = (*tokens, SEPARATOR, *prediction)
            self._given_jobs[request] = _Job(tokens, owner)
        held.num_rows += 1
        return RowMatch(
            Source(Text(seq.tokens, len(request.add.prompt)), own),
            Source(held.text, given),
            self.sizes.max_match,
        )

    def end(self, seq: Sequence) -> None:
        """Forget a sequence that gave up its row, but for its output, if it has ended."""
        row = self._rows.pop(seq, None)
        if row is None or row.match is None:
            return
        request = seq.request
        held = self._given[request]
        held.num_rows -= 1
        self._num_live -= len(row.match.own.text)
        if not held.num_rows:
            del self._given[request]
            self._given_jobs.pop(request, None)
            self._num_live -= len(request.add.prompt) + len(request.add.prediction)
        if seq.num_output <= ANCHOR:
            return  # no match in it has a token after it
        is_kept = self.sizes.has_recent and seq.finish_reason is not None
        if is_kept and self._num_waiting < self.sizes.max_indexed // 4:
            self._num_waiting += seq.num_output
            self._ended_jobs.append(_Job(seq.tokens[len(request.add.prompt) :], row.owner))

    def _index(self) -> None:
        """Index up to INDEXED_A_STEP of the tokens that wait for it, in order of arrival: those of
        requests that run before ended outputs, which may have waited for long."""
        room = INDEXED_A_STEP
        given, ended = self._given_jobs, self._ended_jobs
        while given and room > 0:
            request, job = next(iter(given.items()))
            part = job.take(room)
            room -= len(part)
            self._given[request].text.add(part)
            if job.is_done:
                del given[request]
        while ended and room > 0:
            job = ended[0]
            part = job.take(room)
            room -= len(part)
            self._recent.add(job.owner, part, is_last=job.is_done)
            self._num_waiting -= len(part)
            if job.is_done:
                ended.popleft()

    def _catch_up(self, seq: Sequence, row: _Row, match: RowMatch, room: int) -> int:
        """Follow up to `room` of the tokens that became known since; how many.

        A row that comes back begins anew: 60,000 tokens of output would hold the step for 39 ms
        (EPYC Zen 5, Python 3.11, 2026-11-22).
        """
        seen = row.seen
        if row.generation != self._recent.generation:
            row.generation = self._recent.generation
            texts = self._recent.texts(row.owner)
            match.others[1:] = [Source(text, self._shared[2]) for text in texts]
        row.seen = min(len(seq.tokens), seen + room)
        match.follow(seen, row.seen)
        if match.grows:
            self._num_live += row.seen - seen
            match.grows = self._num_live < self.sizes.max_indexed
        return row.seen - seen

    @staticmethod
    def _may_propose(seq: Sequence, row: _Row, match: RowMatch, min_match: int) -> bool:
        """Whether the match is long enough, and of the newest tokens."""
        is_found = match.source is not None and match.length >= min_match
        return is_found and row.seen == len(seq.tokens)

    # ------------------------------------------------------------ proposals

    @property
    def has_drafts(self) -> bool:
        """Whether the runner has a draft model."""
        return self.sizes.has_draft

    def may_gain(self, num_rows: int, budget: int, facts: Facts) -> bool:
        """Whether tokens that are sure to be right would pay.

        A step whose cost leaves no gain, as with hundreds of rows, costs no work for any row: rows
        follow their tokens when there is one again. So do most steps where nothing is found.
        """
        if self._num_rests and not (self._given_jobs or self._ended_jobs):
            self._num_rests -= 1
            return False
        return can_gain(self._costs(facts), num_rows, budget)

    def _costs(self, facts: Facts) -> StepCosts:
        if facts is not self._facts:
            self._facts, self._step_costs = facts, StepCosts(facts)
        return self._step_costs

    def choose(
        self, rows: Seq[Sequence], budget: int, facts: Facts
    ) -> dict[Sequence, tuple[int, ...]]:
        """What to verify of each row, the rows' most probable tokens first."""
        if not can_gain(self._costs(facts), len(rows), budget):
            return {}
        self._index()
        chosen = self._chosen(rows, budget, self._costs(facts))
        self._num_vain = 0 if chosen else self._num_vain + 1
        self._num_rests = min(self._num_vain // VAIN, MOST_RESTS)
        return chosen

    def _chosen(
        self, rows: Seq[Sequence], budget: int, costs: StepCosts
    ) -> dict[Sequence, tuple[int, ...]]:
        candidates: list[tuple[Sequence, _Row, bool]] = []
        survivals: list[list[float]] = []
        others: list[float] = []
        room = INDEXED_A_STEP
        for seq in rows:
            row = self._rows.get(seq)
            if row is None:
                others.append(DELAY)
                continue
            row.is_awaited = False
            chances: list[float] = []
            match = row.match
            if match is not None:
                if row.seen < len(seq.tokens):
                    room -= self._catch_up(seq, row, match, room)
                if self._may_propose(seq, row, match, self.sizes.min_match):
                    chances = match.survivals(self.sizes.max_proposed, SMALLEST)
            is_drafted = False
            if row.drafted and row.drafted_at == len(seq.tokens):
                of_draft = list(accumulate([row.draft_rate] * len(row.drafted), mul))
                is_drafted = sum(of_draft) > sum(chances)
                chances = of_draft if is_drafted else chances
            if chances:
                candidates.append((seq, row, is_drafted))
                survivals.append(chances)
            else:
                others.append(row.slack(seq))
        if not candidates:
            return {}
        slacks = [row.slack(seq) for seq, row, _ in candidates] + others
        counts = shares(survivals, len(rows), budget, costs, slacks)
        for i, (_, row, is_drafted) in enumerate(candidates):
            counts[i] = max(counts[i], int(is_drafted and row.is_trial))
            row.is_trial = False
        if not any(counts):
            return {}
        growth = costs.growth(len(rows) + sum(counts), len(rows))
        for seq in rows:
            if seq in self._rows:
                self._rows[seq].lost += growth
        return {
            seq: proposal
            for (seq, row, is_drafted), count in zip(candidates, counts, strict=True)
            if count and (proposal := _proposal(row, count, is_drafted=is_drafted))
        }

    def wait(self, rows: Seq[Sequence], facts: Facts) -> Collection[Sequence]:
        """Rows whose next verification is worth a step without them, and those just drafted for."""
        costs = self._costs(facts)
        if not can_gain(costs, len(rows), len(rows) * self.sizes.max_proposed):
            return ()
        self._index()
        room, waiting = INDEXED_A_STEP, []
        for seq in rows:
            row = self._rows.get(seq)
            if row is None:
                continue
            match = row.match
            if match is not None and not row.is_awaited and row.seen < len(seq.tokens):
                room -= self._catch_up(seq, row, match, room)
            if self._waits(seq, row, costs):
                waiting.append(seq)
        if waiting:
            self._num_vain = self._num_rests = 0
        return waiting

    def _waits(self, seq: Sequence, row: _Row, costs: StepCosts) -> bool:
        """Whether a verification after the token that is being drawn brings more than two steps."""
        match = row.match
        if row.is_awaited or match is None:
            return row.is_awaited
        if not self._may_propose(seq, row, match, max(ANCHOR, self.sizes.min_match)):
            return False
        chances = match.survivals(self.sizes.max_proposed + 1, SMALLEST)
        more = costs.verifying_s(len(chances), 1) / costs.plain_s(1)
        return sum(chances) > WAITED * more

    # ------------------------------------------------------------ the draft model

    def drafts(self, rows: Seq[Sequence], facts: Facts) -> tuple[tuple[Sequence, int], ...]:
        """The rows for which a draft model's proposal is expected to pay, and its length.

        One whose drafts fail does without for a while, then has one more token tried.
        """
        costs = self._costs(facts)
        if not can_gain(costs, len(rows), len(rows) * self.sizes.max_proposed):
            return ()
        good: list[tuple[Sequence, _Row]] = []
        poor: list[tuple[Sequence, _Row]] = []
        for seq in rows:
            row = self._rows.get(seq)
            if row is None or (row.match is not None and row.match.length >= LONG_MATCH):
                continue
            (good if row.draft_rate >= POOR_DRAFT else poor).append((seq, row))
        rates = [row.draft_rate for _, row in good]
        length = draft_length(rates, self.sizes.max_proposed, facts.draft_s, costs)
        if not length:
            good, poor = [], good + poor
        found = [(seq, length) for seq, _ in good] + [(seq, 1) for seq in self._trials(poor)]
        for seq, _ in found:
            self._rows[seq].is_awaited = True
        if found:
            self._num_vain = self._num_rests = 0
        return tuple(found)

    def _trials(self, rows: Seq[tuple[Sequence, _Row]]) -> list[Sequence]:
        """Those of rows whose drafts do not pay that try one again: else they never would pay."""
        self._num_drafting += 1
        if self._num_drafting < self._trial_at:
            return []
        due = [(seq, row) for seq, row in rows if len(seq.tokens) >= row.trial_at]
        tried = due[: max(1, len(rows) // TRIED)]
        for seq, row in tried:
            row.is_trial, row.trial_at = True, len(seq.tokens) + row.trial
            row.trial = min(2 * row.trial, LAST_TRIAL)
        if tried:
            self._trial_at = self._num_drafting + FIRST_TRIAL
        return [seq for seq, _ in tried]

    def proposed(self, seq: Sequence, tokens: tuple[int, ...]) -> None:
        """Keep the draft model's proposal, for when the row may be verified."""
        row = self._rows.get(seq)
        if row is not None:
            row.drafted, row.drafted_at, row.is_awaited = tokens, len(seq.tokens), False

    # ------------------------------------------------------------ what became of them

    def observe(self, seq: Sequence, num_proposed: int, num_accepted: int) -> None:
        """A verification's outcome: of a text's tokens `follow` measures it, of a draft's this."""
        row = self._rows.get(seq)
        if row is None or not row.is_drafted:
            return
        for at in range(min(num_proposed, num_accepted + 1)):
            is_right = at < num_accepted
            row.draft_rate += DRAFT_WEIGHT * (is_right - row.draft_rate)
            self._draft_rate += SHARED_WEIGHT * (is_right - self._draft_rate)
        if num_accepted == num_proposed:  # the next trial follows at once
            row.trial, row.trial_at, self._trial_at = FIRST_TRIAL, 0, 0


def _proposal(row: _Row, count: int, *, is_drafted: bool) -> tuple[int, ...]:
    row.is_drafted = is_drafted
    if is_drafted:
        return row.drafted[:count]
    return tuple(row.match.proposal(count)) if row.match is not None else ()
