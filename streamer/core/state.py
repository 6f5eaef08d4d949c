"""State: what the scheduler owns, and the moves that schedule, command and apply share.

Requests by status, the queue, the rows and both pools change only through these methods, so that
the counts and the block tables can't drift apart. Called by scheduler.py and results.py alone.
"""

from __future__ import annotations

from collections import deque

from streamer.core.blocks import BlockHasher, BlockPool
from streamer.core.fairness import FairQueue
from streamer.core.kv import KVManager
from streamer.core.plan import (
    Chunk,
    Facts,
    Finish,
    FinishReason,
    Notice,
    NoticeKind,
    RowJoin,
    StepStats,
)
from streamer.core.preemption import is_swap_cheaper
from streamer.core.request import MAY_BE_ADMITTED, Event, Request, Sequence, Status
from streamer.core.rows import RowSlots
from streamer.core.sizes import SchedulerConfig
from streamer.errors import InvariantViolated

WATERMARK = 0.01  # of the pool stays free when a request is admitted beside others


class Draft:
    """The plan being built.

    budget   what is left of the step's tokens;  to_score: of those it scores
    sitting  running sequences that got no block in this plan
    begun    requests admitted without blocks in this plan
    starts   where each chunk of this plan began, to know what was computed before it
    """

    def __init__(self, number: int, config: SchedulerConfig) -> None:
        self.number = number
        self.budget = config.max_num_batched_tokens
        self.to_score = config.max_scored_tokens
        self.joins: list[RowJoin] = []
        self.chunks: list[Chunk] = []
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []
        self.sitting: set[Sequence] = set()
        self.begun: set[Request] = set()
        self.starts: dict[Sequence, int] = {}
        self.num_tokens = 0
        self.num_samples = 0
        self.has_swap = False  # somebody's swap begins, even if every block is there already


class Counters:
    """Running totals for StepStats."""

    computed_tokens = 0
    generated_tokens = 0
    prefix_hit_tokens = 0
    preemptions_swap = 0
    preemptions_recompute = 0
    swapped_out_blocks = 0
    swapped_in_blocks = 0
    copied_blocks = 0


class State:
    """Everything the scheduler knows.

    running, paused   requests with that status, in order of admission
    swapping          requests whose copies are not done
    queue             who may be admitted, in order
    launched, collected   numbers of the last plan made and the last one applied
    copy_plans        plans whose swap copies are not done
    """

    def __init__(self, config: SchedulerConfig, hasher: BlockHasher) -> None:
        self.config = config
        self.kv = KVManager(
            BlockPool(config.num_blocks, "device"),
            BlockPool(config.num_host_blocks, "host"),
            hasher,
            has_prefix_cache=config.enable_prefix_caching,
        )
        self.watermark = max(1, int(config.num_blocks * WATERMARK))
        self.rows = RowSlots(config.max_num_seqs)
        self.requests: dict[str, Request] = {}
        self.counts = dict.fromkeys(Status, 0)
        self.running: dict[Request, None] = {}
        self._lineup: list[Sequence] | None = None
        self.running_by_priority: dict[int, int] = {}
        self.paused: dict[Request, None] = {}
        self.swapping: list[Request] = []
        self.queue = FairQueue()
        self.facts = Facts()
        self.launched = 0
        self.collected = 0
        self.copy_plans: deque[int] = deque()
        self.num_joined = 0
        self.leaves: list[int] = []
        self.finishes: list[Finish] = []
        self.notices: list[Notice] = []
        self.counters = Counters()

    # ------------------------------------------------------------ status

    def move(self, request: Request, event: Event) -> None:
        """Move a request, keeping the sets by status."""
        before = request.status
        request.move(event)
        after = request.status
        self.counts[before] -= 1
        self.counts[after] += 1
        priority = request.add.priority
        if before is Status.RUNNING:
            self._lineup = None
            del self.running[request]
            self.running_by_priority[priority] -= 1
            if not self.running_by_priority[priority]:
                del self.running_by_priority[priority]
        elif before is Status.PAUSED:
            del self.paused[request]
        elif before in (Status.SWAPPING_OUT, Status.SWAPPING_IN):
            self.swapping.remove(request)
        if after is Status.RUNNING:
            self._lineup = None
            self.running[request] = None
            self.running_by_priority[priority] = self.running_by_priority.get(priority, 0) + 1
        elif after is Status.PAUSED:
            self.paused[request] = None
        elif after in (Status.SWAPPING_OUT, Status.SWAPPING_IN):
            self.swapping.append(request)

    def lined_up(self) -> list[Sequence]:
        """The open sequences of running requests, in order of admission; not to be changed."""
        if self._lineup is None:
            self._lineup = [s for r in self.running for s in r.sequences if s.finish_reason is None]
        return self._lineup

    def open_choice(self, request: Request, choice: int) -> Sequence:
        """One more sequence of a request, with its prompt."""
        seq = Sequence(request, choice, list(request.add.prompt))
        request.sequences.append(seq)
        self._lineup = None
        return seq

    def enqueue(self, request: Request) -> None:
        """Let it be admitted, unless its reader holds it."""
        if not request.is_held:
            self.queue.push(request)

    # ------------------------------------------------------------ time

    def retire(self) -> None:
        """Free what finished plans and copies held; move requests whose copies are done."""
        while self.copy_plans and self.copy_plans[0] <= self.facts.copies_done:
            self.copy_plans.popleft()
        upto = self.collected
        if self.copy_plans:
            upto = min(upto, self.copy_plans[0] - 1)
        self.kv.device.retire(upto)
        self.kv.host.retire(upto)
        self.rows.retire(self.collected)
        for request in [r for r in self.swapping if r.last_swap <= upto]:
            if request.status is Status.SWAPPING_OUT:
                self.move(request, Event.SWAPPED_OUT)
                self.enqueue(request)
            else:
                self.move(request, Event.SWAPPED_IN)
                self._tell(request, NoticeKind.RUNNING)
                if request.is_held:
                    self.pause(request)

    # ------------------------------------------------------------ rows

    def reserve_rows(self, request: Request, rows: list[int]) -> None:
        """Give each live sequence a row; the rest waits for choices that fork later."""
        for seq in request.live():
            seq.row = rows.pop(0)
        request.spare_rows = rows

    def join(self, seq: Sequence, draft: Draft, logits_of: int = -1) -> None:
        """Tell the runner about the sequence, as it is before this plan computes anything."""
        add = seq.request.add
        self.kv.touched.pop(seq, None)
        self.rows.owners[seq.row] = seq
        seq.joined = True
        self.num_joined += 1
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
            )
        )

    def leave(self, seq: Sequence) -> None:
        """Take the sequence out of its row."""
        if seq.row < 0:
            return
        if seq.joined:
            self.leaves.append(seq.row)
            self.num_joined -= 1
        self.rows.give_back(seq.row, self.launched if seq.joined else 0, self.collected)
        seq.row, seq.joined, seq.plain_until = -1, False, 0

    def leave_all(self, request: Request) -> None:
        """Take the request out of all its rows."""
        for seq in request.sequences:
            self.leave(seq)
        for row in request.spare_rows:
            self.rows.give_back(row, 0, self.collected)
        request.spare_rows = []

    # ------------------------------------------------------------ giving way

    def pause(self, request: Request) -> None:
        """A running request gives up its rows and keeps its blocks."""
        self.leave_all(request)
        self.move(request, Event.PAUSE)
        self._tell(request, NoticeKind.PAUSED)

    def would_swap(self, request: Request) -> bool:
        """Whether a preemption now would swap: there is host room, and it costs fewer seconds."""
        blocks_out, blocks_in, can_swap = self.kv.swap_cost(request.live())
        return can_swap and is_swap_cheaper(
            blocks_out=blocks_out,
            blocks_in=blocks_in,
            block_bytes=self.config.block_bytes,
            num_tokens=blocks_in * self.config.block_size,
            facts=self.facts,
        )

    def preempt(self, request: Request, draft: Draft) -> None:
        """Take the request's blocks away: to the host, or to be computed again."""
        live = request.live()
        moves = self.kv.swap_out(live) if self.would_swap(request) else None
        self.queue.remove(request)  # a paused one may be waiting for its rows
        request.preemptions += 1
        request.evictions += request.status is Status.RUNNING
        self.leave_all(request)
        if moves is not None:
            request.last_swap = draft.number
            draft.has_swap = True
            draft.swap_out += moves
            self.move(request, Event.SWAP_OUT)
            self.counters.preemptions_swap += 1
            self.counters.swapped_out_blocks += len(moves)
        else:
            for seq in live:
                self.kv.release(seq, self.launched)
            self.move(request, Event.DROP)
            self.enqueue(request)
            self.counters.preemptions_recompute += 1
        how = "recompute" if moves is None else "swap"
        self.notices.append(Notice(request.request_id, NoticeKind.PREEMPTED, how=how))

    def _tell(self, request: Request, kind: NoticeKind) -> None:
        self.notices.append(Notice(request.request_id, kind))

    # ------------------------------------------------------------ the end

    def finish(
        self, seq: Sequence, reason: FinishReason, *, text_bytes: int | None = None,
        stop: str | int | None = None, detail: str | None = None,
    ) -> None:  # fmt: skip
        """End one choice; the request ends with its last one."""
        request = seq.request
        seq.finish_reason = reason
        self._lineup = None
        self.finishes.append(
            Finish(
                request_id=request.request_id,
                choice=seq.choice,
                reason=reason,
                num_tokens=seq.num_output,
                text_bytes=text_bytes,
                stop=stop,
                detail=detail,
                copied_tokens=request.copied_tokens,
            )
        )
        self.leave(seq)
        self.kv.release(seq, self.launched)
        if len(request.sequences) == request.add.params.n and not request.live():
            self._end(request)

    def finish_all(self, request: Request, reason: FinishReason, detail: str | None = None) -> None:
        """End every choice that is still open, forked or not."""
        for choice in range(len(request.sequences), request.add.params.n):
            self.open_choice(request, choice)
        for seq in request.live():
            self.finish(seq, reason, detail=detail)

    def _end(self, request: Request) -> None:
        self.queue.remove(request)
        self.leave_all(request)
        self.move(request, Event.FINISH)
        self.queue.close(request)
        del self.requests[request.request_id]

    # ------------------------------------------------------------ seen from outside

    def stats(self) -> StepStats:
        """Counts now; a block that nobody holds is free, also while a launched plan ends."""
        counts, device, host, totals = self.counts, self.kv.device, self.kv.host, self.counters
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
            computed_tokens=totals.computed_tokens,
            generated_tokens=totals.generated_tokens,
            prefix_hit_tokens=totals.prefix_hit_tokens,
            preemptions_swap=totals.preemptions_swap,
            preemptions_recompute=totals.preemptions_recompute,
            swapped_out_blocks=totals.swapped_out_blocks,
            swapped_in_blocks=totals.swapped_in_blocks,
            copied_blocks=totals.copied_blocks,
            swap_s=self.facts.swap_s,
        )

    def check(self) -> None:
        """Prove that sets, counts, rows and pools agree, or raise InvariantViolated."""
        self.kv.check(self.requests.values())
        for status, members in ((Status.RUNNING, self.running), (Status.PAUSED, self.paused)):
            actual = [r for r in self.requests.values() if r.status is status]
            if set(actual) != set(members) or self.counts[status] != len(actual):
                raise InvariantViolated(
                    f"{len(actual)} requests are {status.value}, {len(members)} in its set, "
                    f"{self.counts[status]} counted"
                )
        joined = [s for r in self.requests.values() for s in r.sequences if s.joined]
        if len(joined) != self.num_joined or len({s.row for s in joined}) != len(joined):
            raise InvariantViolated(f"{len(joined)} rows joined, {self.num_joined} counted")
        if any(self.rows.owners[s.row] is not s for s in joined):
            raise InvariantViolated("a joined row's results would go to another sequence")
        self._check_plain()
        self.rows.check(
            row
            for r in self.requests.values()
            for row in (*(s.row for s in r.sequences if s.row >= 0), *r.spare_rows)
        )
        wanted = {
            r for r in self.requests.values() if r.status in MAY_BE_ADMITTED and not r.is_held
        }
        queued = list(self.queue)
        if len(set(queued)) != len(queued):
            raise InvariantViolated(
                f"{len(queued)} requests are queued, {len(set(queued))} of them different"
            )
        for request in wanted ^ set(queued):
            raise InvariantViolated(
                f"request {request.request_id} is {request.status.value} and "
                f"{'not ' if request in wanted else ''}in the queue"
            )
        self.queue.check(self.requests.values())

    def _check_plain(self) -> None:
        """Prove of the sequences that a step only counts on that it may."""
        lineup = [s for r in self.running for s in r.sequences if s.finish_reason is None]
        if self._lineup is not None and self._lineup != lineup:
            raise InvariantViolated(f"{len(lineup)} sequences run, {len(self._lineup)} lined up")
        for seq in (s for r in self.requests.values() for s in r.sequences):
            if seq.num_computed >= seq.plain_until:
                continue
            request, known = seq.request, seq.num_tokens
            is_ready = seq.joined and not seq.shares_tail and not request.spare_rows
            left = len(request.add.prompt) + request.max_tokens - known
            room = len(seq.blocks) * self.config.block_size - known
            if not is_ready or known - seq.num_computed != 1 or left < 1 or room < 1:
                raise InvariantViolated(
                    f"request {request.request_id} counts as plain up to {seq.plain_until} tokens: "
                    f"{seq.num_computed} of {known} computed, room for {room}, {left} to draw"
                )
