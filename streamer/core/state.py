"""State: what the scheduler owns, by owner, and what changes several owners at once.

The owners are Requests (statuses), FairQueue (the order of admission and the tenants' accounts),
KVManager (blocks and tables), Rows (the runner's rows) and StepReport (counts and notices); each
changes through its own methods alone. A method here changes more than one of them together, so that
they stay consistent; preemption.py does the same for preemption.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from streamer.core.blocks import BlockHasher
from streamer.core.fairness import FairQueue
from streamer.core.kv import new_kv
from streamer.core.plan import (
    Add,
    Chunk,
    Facts,
    Finish,
    FinishReason,
    Notice,
    NoticeKind,
    RowJoin,
    StepStats,
)
from streamer.core.recovery.trials import Trials
from streamer.core.request import (
    MAY_BE_ADMITTED,
    Event,
    Request,
    Sequence,
    Status,
)
from streamer.core.running.requests import Requests
from streamer.core.running.rows import Rows
from streamer.core.sizes import SchedulerConfig
from streamer.core.speculation.interface import Speculation
from streamer.errors import InvariantViolated

WATERMARK = 0.01  # of the pool stays free when a request is admitted beside others


class Draft:
    """The plan being built.

    budget    tokens left in the step;  to_score: prompt tokens it may still score, or provisional
              ones it may verify
    stalled   running sequences that got no block in this plan
    begun     requests admitted without blocks in this plan
    starts    where each chunk of this plan began, to know what was computed before it
    last      the sequences that draw the last token they may
    has_swap  a swap begins, even if every block is there already
    due       blocks that the running rows will need in the step after this one
    waits     running sequences sit out until their masks are there
    """

    def __init__(self, number: int, config: SchedulerConfig, max_tokens: int) -> None:
        self.number = number
        self.budget = max_tokens
        self.to_score = config.max_scored_tokens
        self.joins: list[RowJoin] = []
        self.chunks: list[Chunk] = []
        self.idle: list[int] = []
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []
        self.stalled: set[Sequence] = set()
        self.begun: set[Request] = set()
        self.starts: dict[Sequence, int] = {}
        self.last: list[Sequence] = []
        self.num_tokens = 0
        self.num_samples = 0
        self.has_swap = False
        self.due = 0
        self.waits = False


class StepReport:
    """Running totals, and the finishes and notices of the next StepOutput."""

    def __init__(self) -> None:
        self.computed_tokens = 0
        self.generated_tokens = 0
        self.prefix_hit_tokens = 0
        self.preemptions_swap = 0
        self.preemptions_recompute = 0
        self.swapped_out_blocks = 0
        self.swapped_in_blocks = 0
        self.copied_blocks = 0
        self.verifications = 0
        self.rebuilds = 0  # after steps that failed
        self.proposed_tokens = 0
        self.accepted_tokens = 0
        self.proposed_at: tuple[int, ...] = ()
        self.accepted_at: tuple[int, ...] = ()
        self._finishes: list[Finish] = []
        self._notices: list[Notice] = []

    def __bool__(self) -> bool:
        return bool(self._finishes or self._notices)

    @property
    def num_notices(self) -> int:
        """Notices so far: the `at` by which `begun` puts its notice before later ones."""
        return len(self._notices)

    def take(self) -> tuple[tuple[Finish, ...], tuple[Notice, ...]]:
        """The finishes and notices since the last call."""
        finishes, notices = self._finishes, self._notices
        if finishes:
            self._finishes = []
        if notices:
            self._notices = []
        return tuple(finishes), tuple(notices)

    # ------------------------------------------------------------ requests

    def running(self, request: Request) -> None:
        """The request has rows and all its blocks again."""
        self._notices.append(Notice(request.request_id, NoticeKind.RUNNING))

    def begun(self, request: Request, cached: int, shared: int, at: int) -> None:
        """The request runs, these tokens found computed; its notice goes to index `at`."""
        self.prefix_hit_tokens += cached + shared
        notice = Notice(
            request.request_id, NoticeKind.RUNNING, cached_tokens=cached, shared_tokens=shared
        )
        self._notices.insert(at, notice)

    def prefilled(self, request: Request, done: int, total: int) -> None:
        """`done` of the request's `total` known tokens are computed."""
        self._notices.append(Notice(request.request_id, NoticeKind.PREFILL, done, total))

    def paused(self, request: Request) -> None:
        """The request gave up its rows."""
        self._notices.append(Notice(request.request_id, NoticeKind.PAUSED))

    def preempted(self, request: Request, num_swapped: int | None) -> None:
        """The request gave up its blocks, `num_swapped` of them copied out; None: recomputed."""
        if num_swapped is None:
            how = "recompute"
            self.preemptions_recompute += 1
        else:
            how = "swap"
            self.preemptions_swap += 1
            self.swapped_out_blocks += num_swapped
        self._notices.append(Notice(request.request_id, NoticeKind.PREEMPTED, how=how))

    def swapping_in(self, num_blocks: int) -> None:
        """`num_blocks` blocks are copied back."""
        self.swapped_in_blocks += num_blocks

    def finished(self, finish: Finish) -> None:
        self._finishes.append(finish)

    def refused(self, add: Add, detail: str) -> None:
        """All choices of a request that could not be taken end as FAILED."""
        self._finishes += [
            Finish(add.request_id, choice, FinishReason.FAILED, num_tokens=0, detail=detail)
            for choice in range(add.params.n)
        ]

    # ------------------------------------------------------------ steps

    def planned(self, num_tokens: int, num_copied: int) -> None:
        """Count a plan's tokens, and the blocks it copies before their first write."""
        self.computed_tokens += num_tokens
        self.copied_blocks += num_copied

    def verified(self, num_proposed: int, num_accepted: int) -> None:
        """Count a verification's provisional tokens, and those of them that were drawn."""
        self.verifications += 1
        self.proposed_tokens += num_proposed
        self.accepted_tokens += num_accepted
        self.proposed_at = _one_more(self.proposed_at, num_proposed)
        self.accepted_at = _one_more(self.accepted_at, num_accepted)

    def drawn(self, num_tokens: int) -> None:
        """Count the tokens that a result appended."""
        self.generated_tokens += num_tokens


def _one_more(counts: tuple[int, ...], upto: int) -> tuple[int, ...]:
    """The counts, of which the first `upto` are one higher."""
    more = tuple(count + 1 for count in counts[:upto])
    return more + (counts[upto:] or (1,) * (upto - len(counts)))


class State:
    """Everything the scheduler knows: the owners, and the time in plans.

    launched, collected   numbers of the last plan made and the last one applied
    last_tokens           plan not applied -> the sequences that draw in it the last token they may
    ended_until           the last plan that may draw for a choice that has ended
    copy_plans            plans whose swap copies are not done
    trials                what runs after a step failed
    beams_due             beam searches of which candidates came: hypotheses.py
    speculation           chooses provisional tokens; None: off
    unsettled             sequences that verify in a plan not applied
    forced                sequence -> number of its known tokens, and what must follow these
    late                  sequences that were to draw and did not, until they do: running/late.py
    """

    def __init__(
        self, config: SchedulerConfig, hasher: BlockHasher, speculation: Speculation | None = None
    ) -> None:
        self.config = config
        self.requests = Requests()
        self.trials = Trials(config.max_num_batched_tokens)
        self.queue = FairQueue(self.trials)
        self.kv = new_kv(config, hasher)
        self.rows = Rows(config.max_num_seqs)
        self.report = StepReport()
        self.watermark = max(1, int(config.num_blocks * WATERMARK))
        self.facts = Facts()
        self.launched = 0
        self.collected = 0
        self.last_tokens: dict[int, list[Sequence]] = {}
        self.ended_until = 0
        self.copy_plans: deque[int] = deque()
        self.beams_due: dict[Request, None] = {}
        self.speculation = speculation
        self.unsettled: dict[Sequence, None] = {}
        self.forced: dict[Sequence, tuple[int, tuple[int, ...]]] = {}
        self.late: dict[Sequence, None] = {}

    # ------------------------------------------------------------ time

    def begin(self, facts: Facts) -> Draft:
        """Start the next plan, with what the engine measured."""
        self.facts = facts
        self.retire()
        draft = Draft(self.launched + 1, self.config, self.trials.max_tokens)
        self.kv.begin(draft.number)
        return draft

    def retire(self) -> None:
        """Free what finished plans and copies held; move requests whose copies are done."""
        while self.copy_plans and self.copy_plans[0] <= self.facts.copies_done:
            self.copy_plans.popleft()
        upto = self.collected
        if self.copy_plans:
            upto = min(upto, self.copy_plans[0] - 1)
        self.kv.retire(upto)
        self.rows.retire(self.collected)
        for request in [r for r in self.requests.swapping if r.last_swap <= upto]:
            if request.status is Status.SWAPPING_OUT:
                self.requests.move(request, Event.SWAPPED_OUT)
                self.enqueue(request)
            else:
                self.requests.move(request, Event.SWAPPED_IN)
                self.report.running(request)
                if request.is_held:
                    self.pause(request)

    def launch(self, draft: Draft) -> None:
        """Record the plan as the last one launched."""
        if draft.swap_out or draft.swap_in:
            self.copy_plans.append(draft.number)
        if draft.last:
            self.last_tokens[draft.number] = draft.last
        self.launched = draft.number

    def collect(self, number: int) -> None:
        """Record the plan whose result is being applied."""
        self.collected = number

    def num_coming(self) -> int:
        """Device blocks that may be free when launched plans are over: those that cool, and those
        that unsettled sequences hold for provisional tokens alone."""
        coming = self.kv.device.num_cooling
        for seq in self.unsettled:
            if seq.request.status in (Status.RUNNING, Status.PAUSED):
                coming += self.kv.num_beyond(seq)
        return coming

    # ------------------------------------------------------------ a request's way

    def open(self, add: Add, max_tokens: int) -> Request:
        """Take a request into the queue: among those that return, if it has begun."""
        request = self.requests.add(add, max_tokens)
        self.queue.open(request)
        if request.has_begun:
            self.requests.move(request, Event.DROP)
        self.enqueue(request)
        return request

    def enqueue(self, request: Request) -> None:
        """Queue the request for admission, unless it is held."""
        if not request.is_held:
            self.queue.push(request)

    def hold(self, request: Request) -> None:
        """Pause a request whose reader is behind: neither running nor queued until `unhold`."""
        self.queue.remove(request)
        request.is_held = True
        if request.status is Status.RUNNING:
            self.pause(request)

    def unhold(self, request: Request) -> None:
        """Undo `hold`: the request's reader caught up."""
        request.is_held = False
        if request.status in MAY_BE_ADMITTED:
            self.enqueue(request)

    def join(self, seq: Sequence, draft: Draft, logits_of: int = -1) -> None:
        """Send the runner the sequence, as it is before this plan computes anything."""
        add = seq.request.add
        self.kv.forget_updates(seq)
        self.rows.join(seq)
        if self.speculation is not None and seq.request.beams is None:
            self.speculation.begin(seq)
        draft.joins.append(
            RowJoin(
                row=seq.row,
                request_id=add.request_id,
                choice=seq.choice,
                tokens=tuple(seq.tokens),
                num_prompt=len(add.prompt),
                num_computed=seq.num_computed,
                blocks=tuple(seq.blocks),
                params=add.params,
                stop_ids=add.stop_ids,
                logits_of=logits_of,
                reasoning=add.reasoning,
            )
        )

    def leave_all(self, request: Request) -> None:
        """Take the request out of all its rows."""
        for seq in request.sequences if self.late else ():
            self.late.pop(seq, None)
        for seq in request.sequences if self.speculation is not None else ():
            self.end_speculation(seq)
        self.rows.leave_all(request, self.launched, self.collected)

    def end_speculation(self, seq: Sequence) -> None:
        """The sequence leaves its row, if it has one."""
        if self.speculation is not None and seq.joined and seq.request.beams is None:
            self.speculation.end(seq)

    def pause(self, request: Request) -> None:
        """A running request gives up its rows and keeps its blocks."""
        self.leave_all(request)
        self.requests.move(request, Event.PAUSE)
        self.report.paused(request)

    def finish(
        self, seq: Sequence, reason: FinishReason, *, text_bytes: int | None = None,
        stop: str | int | None = None, detail: str | None = None,
    ) -> None:  # fmt: skip
        """End one choice; the request ends with its last one."""
        request = seq.request
        self.requests.close_choice(seq, reason)
        self.ended_until = self.launched
        if reason is not FinishReason.FAILED:
            self.kv.publish(seq)
        self.report.finished(
            Finish(
                request_id=request.request_id,
                choice=seq.choice,
                reason=reason,
                num_tokens=seq.num_output,
                text_bytes=text_bytes,
                stop=stop,
                detail=detail,
                copied_tokens=request.copied_tokens,
                proposed_tokens=seq.num_proposed,
                accepted_tokens=seq.num_kept_accepted,
            )
        )
        self._let_go(seq)
        if len(request.sequences) == request.add.params.n and not request.live():
            self._close(request)

    def finish_beams(self, request: Request, finishes: Iterable[Finish]) -> None:
        """End a beam search: its hypotheses, with these finishes of its choices."""
        for finish in finishes:
            self.report.finished(finish)
        for seq in request.live():
            self.requests.close_choice(seq, finish.reason)
            self._let_go(seq)
        self._close(request)

    def _let_go(self, seq: Sequence) -> None:
        self.late.pop(seq, None)
        self.end_speculation(seq)
        self.rows.leave(seq, self.launched, self.collected)
        self.kv.release(seq, self.launched)

    def _close(self, request: Request) -> None:
        self.queue.remove(request)
        self.leave_all(request)
        self.requests.move(request, Event.FINISH)
        self.queue.close(request)
        request.sequences = []  # each refers to its request: a cycle

    def finish_all(self, request: Request, reason: FinishReason, detail: str | None = None) -> None:
        """End every choice that is still open, forked or not."""
        if request.beams is not None:
            num_tokens, copied = request.beams.num_reported, request.copied_tokens
            self.finish_beams(
                request,
                [
                    Finish(
                        request_id=request.request_id,
                        choice=choice,
                        reason=reason,
                        num_tokens=num_tokens,
                        detail=detail,
                        copied_tokens=copied,
                    )
                    for choice in range(request.add.params.n)
                ],
            )
            return
        for choice in range(len(request.sequences), request.add.params.n):
            self.requests.open_choice(request, choice)
        for seq in request.live():
            self.finish(seq, reason, detail=detail)

    def num_bytes(self, tokens: Iterable[int]) -> int:
        """Bytes of these tokens' text; computed once, when a choice ends."""
        table = self.config.token_bytes
        known = len(table)
        return sum(len(table[t]) for t in tokens if t < known)

    # ------------------------------------------------------------ seen from outside

    def stats(self) -> StepStats:
        """Counts now; a block in no table counts as free, cooling ones included."""
        counts, report = self.requests.counts, self.report
        device, host = self.kv.device, self.kv.host
        return StepStats(
            waiting=counts[Status.WAITING],
            running=counts[Status.RUNNING] + counts[Status.SWAPPING_IN],
            paused=counts[Status.PAUSED],
            preempted=counts[Status.PREEMPTED],
            swapped=counts[Status.SWAPPED] + counts[Status.SWAPPING_OUT],
            blocks_total=device.num_blocks,
            blocks_free=device.num_free + device.num_cooling,
            blocks_cached=device.num_cached + device.num_cooling_cached,
            host_blocks_total=host.num_blocks,
            host_blocks_free=host.num_free + host.num_cooling,
            host_blocks_cached=host.num_cached + host.num_cooling_cached,
            steps=self.launched,
            computed_tokens=report.computed_tokens,
            generated_tokens=report.generated_tokens,
            prefix_hit_tokens=report.prefix_hit_tokens,
            preemptions_swap=report.preemptions_swap,
            preemptions_recompute=report.preemptions_recompute,
            swapped_out_blocks=report.swapped_out_blocks,
            swapped_in_blocks=report.swapped_in_blocks,
            copied_blocks=report.copied_blocks,
            proposed_tokens=report.proposed_tokens,
            accepted_tokens=report.accepted_tokens,
            proposed_at=report.proposed_at,
            accepted_at=report.accepted_at,
            verifications=report.verifications,
            rebuilds=report.rebuilds,
            swap_s=self.facts.swap_s,
        )

    def check(self) -> None:
        """Prove that the owners agree with each other, or raise InvariantViolated."""
        live = self.requests.by_id.values()
        self.kv.check(live)
        self.requests.check()
        self.rows.check(live)
        self.requests.lineup.check(self.requests.open_running(), self.config.block_size)
        expected = {r for r in live if r.status in MAY_BE_ADMITTED and not r.is_held}
        queued = list(self.queue)
        if len(set(queued)) != len(queued):
            raise InvariantViolated(
                f"{len(queued)} requests are queued, {len(set(queued))} of them different"
            )
        for request in expected ^ set(queued):
            raise InvariantViolated(
                f"request {request.request_id} is {request.status.value} and "
                f"{'not ' if request in expected else ''}in the queue"
            )
        self.queue.check(live)
