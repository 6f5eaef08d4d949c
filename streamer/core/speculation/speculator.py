"""Speculator: what rows are likely to draw next, from texts seen before and the runner's draft.

Implements interface.Speculation. Owns the rows' indexes and the recent outputs of each owner; all
it answers follows from the calls it gets. A token it proposes is known only if the model draws it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as Seq
from itertools import accumulate, islice
from math import inf
from operator import mul
from typing import TYPE_CHECKING, Final

import msgspec

from streamer.core.plan import Facts
from streamer.core.speculation.index import ANCHOR, SEPARATOR, Text
from streamer.core.speculation.policy import (
    DELAY,
    SHARE,
    SMALLEST,
    Account,
    StepCosts,
    draft_length,
    is_worth,
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
# What the account is charged for looking in a step, for each row that is looked at, for each token
# indexed, and for a row from its beginning to its end, in caches that the model has used since
# (EPYC Zen 5, Python 3.11, 2026-11-23): at 32 rows two thirds of the first two left a step of
# 2.0 ms 28 us longer, where a hundredth was granted, and the ends of rows took 5 more.
LOOKS_S: Final = 3e-5
LOOK_S: Final = 1.2e-5
INDEX_S: Final = 4e-7
ROW_S: Final = 2e-5
MOST_RESTS: Final = 64  # steps in a row that are not even counted while the account is empty
LONG_MATCH: Final = 8  # a match from which a row needs no draft
# Known tokens until a row whose drafts do not pay has one token tried again, doubled each time;
# steps between two that try any, of one row in TRIED.
FIRST_TRIAL, LAST_TRIAL = 32, 1024
TRIED: Final = 16


class _Row:
    """One sequence that decodes.

    match       None: it does without, or was not looked at yet (is_new)
    seen        known tokens that its match has followed
    generation  of the owner's recent outputs, as the match knows them
    drafted     the draft model's proposal, for when `drafted_at` tokens are known
    is_awaited  a plan under way drafts for it
    is_drafted  its last proposal was the draft model's
    trial_at    known tokens at which its draft is tried again; trial: tokens until the next
    is_trial    its proposal is verified whether or not that is expected to pay
    unlost      plain steps by which verifications had delayed all rows when its slack was none
    """

    __slots__ = (
        "draft_rate",
        "drafted",
        "drafted_at",
        "generation",
        "is_awaited",
        "is_drafted",
        "is_new",
        "is_trial",
        "match",
        "owner",
        "seen",
        "trial",
        "trial_at",
        "unlost",
    )

    def __init__(self, owner: Owner, draft_rate: float) -> None:
        self.match: RowMatch | None = None
        self.is_new = True
        self.owner = owner
        self.seen = 0
        self.generation = -1
        self.draft_rate = draft_rate
        self.drafted: tuple[int, ...] = ()
        self.drafted_at = 0
        self.is_awaited = False
        self.is_drafted = False
        self.trial = FIRST_TRIAL
        self.trial_at = 0
        self.is_trial = False
        self.unlost = 0.0

    def slack(self, seq: Sequence, lost: float) -> float:
        """Plain steps that it may still lose to the verifications of other rows, when all rows
        together have lost so many."""
        return DELAY * seq.num_output + seq.num_accepted - (lost - self.unlost)


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
        self._paid = 0.0, 0, 0.0  # of Facts: verified_s, num_verified, drafting_s
        self._verifying_s = 0.0  # what the newest verification was estimated to take, and paid
        self._trial_at = 0  # the step of these from which one may try
        self._facts = Facts()
        self._step_costs = StepCosts(self._facts)
        self._num_rests = 0  # steps until the account is looked at again
        self._rested = 0  # steps that it was not
        self._account = Account()
        self._num_rows = 0  # of the step being planned
        self._plain_s = 0.0  # what it takes without verifications
        self._lost = 0.0  # plain steps that verifications have taken, in all
        # Rows that may have a proposal, and the others, the next to be looked at first.
        self._hot: dict[Sequence, None] = {}
        self._cold: dict[Sequence, None] = {}

    # ------------------------------------------------------------ rows

    def begin(self, seq: Sequence) -> None:
        """Take a sequence up, unless its request does without; one that comes back begins anew."""
        add = seq.request.add
        if not add.params.speculation:
            return
        row = self._rows[seq] = _Row((add.salt, add.tenant), self._draft_rate)
        row.unlost = self._lost - row.slack(seq, 0.0)  # what it gained before is not spent again
        self._account.add(-ROW_S)
        self._cold[seq] = None

    def _open(self, seq: Sequence, row: _Row) -> None:
        """The first look at a row: begin to index its prompt, if there is room."""
        self._account.add(-LOOKS_S)
        row.is_new, row.seen = False, len(seq.request.add.prompt)
        if self.sizes.has_texts and self._num_live + row.seen <= self.sizes.max_indexed:
            row.match = self._match(seq, row.owner)

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
        self._hot.pop(seq, None)
        self._cold.pop(seq, None)
        if row is None:
            return
        if row.match is not None:
            self._close(seq.request, len(row.match.own.text))
        if seq.num_output <= ANCHOR:
            return  # no match in it has a token after it
        is_kept = self.sizes.has_recent and seq.finish_reason is not None
        if is_kept and self._num_waiting < self.sizes.max_indexed // 4:
            self._num_waiting += seq.num_output
            self._ended_jobs.append(_Job(seq.tokens[-seq.num_output :], row.owner))

    def _close(self, request: Request, num_own: int) -> None:
        """A row of the request is over, of which so many tokens were indexed."""
        held = self._given[request]
        held.num_rows -= 1
        self._num_live -= num_own
        if not held.num_rows:
            del self._given[request]
            self._given_jobs.pop(request, None)
            self._num_live -= len(request.add.prompt) + len(request.add.prediction)

    def _index(self, most: int) -> None:
        """Index up to `most` of the tokens that wait for it, in order of arrival: those of requests
        that run before ended outputs, which may have waited for long."""
        room = most
        given, ended = self._given_jobs, self._ended_jobs
        while given and room > 0:
            request, job = next(iter(given.items()))
            part = job.take(room)
            room -= len(part)
            self._given[request].text.add(part)
            if job.is_done:
                del given[request]
        while ended and room > 0 and self._account.is_rich:
            job = ended[0]
            part = job.take(room)
            room -= len(part)
            self._recent.add(job.owner, part, is_last=job.is_done)
            self._num_waiting -= len(part)
            if job.is_done:
                ended.popleft()
        self._account.add((room - most) * INDEX_S)

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
        self._account.add(-INDEX_S * (row.seen - seen))
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

    def looks(self, num_rows: int, budget: int, facts: Facts) -> Collection[Sequence]:
        """Rows that may have a proposal, and as many others in turn as the account allows.

        A step whose cost leaves no gain, as with hundreds of rows, costs no work for any row, nor
        does one while the account is empty: rows follow their tokens when there is one again.
        """
        if self._num_rests:
            self._num_rests -= 1
            return self._drafted()
        self._pay(facts)
        costs = self._costs(facts)
        if not num_rows or not costs.is_measured(num_rows):
            return ()
        self._num_rows, self._plain_s = num_rows, costs.plain_s(num_rows)
        if not costs.can_gain(num_rows, budget):
            return ()
        if not self._has_credit():
            return self._drafted()
        count = max(1, int(self._account.seconds / LOOK_S) - len(self._hot))
        others = list(islice(self._cold, count))
        for seq in others:  # to the end
            row = self._rows[seq]
            if row.is_new:
                self._open(seq, row)
            del self._cold[seq]
            self._cold[seq] = None
        looked = [*self._hot, *others]
        self._account.add(-LOOKS_S - LOOK_S * len(looked))
        if self._given_jobs or self._ended_jobs:
            self._index(min(INDEXED_A_STEP, 64 + int(self._account.seconds / INDEX_S)))
        return looked

    def _has_credit(self) -> bool:
        """Whether the account pays for looking in this step; if not, how many steps to rest."""
        account = self._account
        account.earn(self._plain_s, 1 + self._rested)
        steps = -account.seconds / (SHARE * self._plain_s)
        self._rested = self._num_rests = min(MOST_RESTS, max(0, int(steps)))
        return account.seconds > 0

    def _costs(self, facts: Facts) -> StepCosts:
        if facts.step_s is not self._facts.step_s or facts.verify_s is not self._facts.verify_s:
            self._facts, self._step_costs = facts, StepCosts(facts)
        return self._step_costs

    def _pay(self, facts: Facts) -> None:
        """Pay what verifications took beyond their estimates, and drafts.

        Where other processes have the cores now and then, the least of a few measured steps is less
        than most take: 64 chats had a third of their tokens proposed, and took a sixth more CPU.
        """
        verified_s, num_verified, drafting_s = self._paid
        count = facts.num_verified - num_verified
        if count > 0:
            self._account.add(count * self._verifying_s - (facts.verified_s - verified_s))
        self._account.add(min(0.0, drafting_s - facts.drafting_s))
        self._paid = facts.verified_s, facts.num_verified, facts.drafting_s

    def _sort(self, seq: Sequence, *, is_hot: bool) -> None:
        """Look at the sequence in the next step, or in its turn."""
        if is_hot:
            self._cold.pop(seq, None)
            self._hot[seq] = None
        elif seq in self._hot:
            del self._hot[seq]
            self._cold[seq] = None

    def choose(
        self, rows: Seq[Sequence], budget: int, facts: Facts
    ) -> dict[Sequence, tuple[int, ...]]:
        """What to verify of each row, the rows' most probable tokens first."""
        candidates: list[tuple[Sequence, _Row, bool]] = []
        survivals: list[list[float]] = []
        room = INDEXED_A_STEP
        for seq in rows:
            row = self._rows[seq]
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
            self._sort(seq, is_hot=bool(chances))
            if chances:
                candidates.append((seq, row, is_drafted))
                survivals.append(chances)
        if not candidates:
            return {}
        counts = self._counts(candidates, survivals, budget)
        return {
            seq: proposal
            for (seq, row, is_drafted), count in zip(candidates, counts, strict=True)
            if count and (proposal := _proposal(row, count, is_drafted=is_drafted))
        }

    def _counts(
        self,
        candidates: list[tuple[Sequence, _Row, bool]],
        survivals: list[list[float]],
        budget: int,
    ) -> list[int]:
        """How many tokens of each candidate to verify; the account pays for the wider step."""
        costs, num_rows = self._step_costs, self._num_rows
        counts, gain = shares(survivals, num_rows, budget, costs)
        growth = costs.growth(num_rows + sum(counts), num_rows) if any(counts) else 0.0
        verified = {seq for (seq, *_), n in zip(candidates, counts, strict=True) if n}
        if not is_worth(growth, gain, lambda: self._least_slack(verified)):
            counts = [0] * len(counts)
        for i, (_, row, is_drafted) in enumerate(candidates):
            counts[i] = max(counts[i], int(is_drafted and row.is_trial))
            row.is_trial = False
        if any(counts):
            growth = costs.growth(num_rows + sum(counts), num_rows)
            self._verifying_s = (1 + growth) * self._plain_s
            self._lost += growth
            self._account.add(-growth * self._plain_s)
        return counts

    def _least_slack(self, verified: Collection[Sequence]) -> float:
        """Plain steps that any row may lose of which nothing is verified."""
        slacks = [
            row.slack(seq, self._lost) for seq, row in self._rows.items() if seq not in verified
        ]
        if len(self._rows) < self._num_rows:
            slacks.append(DELAY)  # of requests that do without
        return min(slacks, default=inf)

    def wait(self, rows: Seq[Sequence], facts: Facts) -> Collection[Sequence]:
        """Rows whose next verification is worth a step without them, and those just drafted for."""
        costs, room, waiting = self._costs(facts), INDEXED_A_STEP, []
        for seq in rows:
            row = self._rows[seq]
            match = row.match
            if match is not None and not row.is_awaited and row.seen < len(seq.tokens):
                room -= self._catch_up(seq, row, match, room)
            if self._waits(seq, row, costs):
                waiting.append(seq)
            elif match is not None:
                self._sort(seq, is_hot=self._may_propose(seq, row, match, self.sizes.min_match))
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

    @property
    def has_drafts(self) -> bool:
        """See interface.Speculation: none are made while the account is empty."""
        return self.sizes.has_draft and self._account.seconds > 0

    def _drafted(self) -> list[Sequence]:
        """Rows with a draft that is paid for, and not verified."""
        if not self.sizes.has_draft:
            return []
        rows = self._rows
        return [s for s in self._hot if rows[s].is_awaited or rows[s].drafted_at == len(s.tokens)]

    def drafts(self, rows: Seq[Sequence], facts: Facts) -> tuple[tuple[Sequence, int], ...]:
        """The rows for which a draft model's proposal is expected to pay, and its length.

        One whose drafts fail does without for a while, then has one more token tried.
        """
        costs = self._costs(facts)
        self._pay(facts)
        most = len(rows) * self.sizes.max_proposed
        if not self.has_drafts or not costs.can_gain(len(rows), most):
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
            self._sort(seq, is_hot=True)
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
        self._account.add(num_accepted * self._plain_s / max(1, self._num_rows))
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
