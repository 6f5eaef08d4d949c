"""Scheduler: who computes how many tokens in the next step, and which blocks move.

Owns every live request (in State). `command`, `schedule` and `apply` are called by EngineCore on
the GPU thread, never concurrently; plans are applied in order, and `schedule` may run with one plan
not yet applied. A log that starts with the config and the hasher's secret and goes on with every
command, facts and result replays to the same plans. There is no prefill and no decode phase: every
sequence catches up with its known tokens under one token budget.
"""

from __future__ import annotations

from collections.abc import Iterable

from streamer.core.admission import admit, blocks_needed, make_way
from streamer.core.blocks import BlockHasher
from streamer.core.plan import (
    Add,
    Cancel,
    Command,
    Facts,
    Finish,
    FinishReason,
    Notice,
    Pause,
    Plan,
    Resume,
    StepOutput,
    StepResult,
    StepStats,
    TableUpdate,
)
from streamer.core.preemption import choose_victim
from streamer.core.request import MAY_BE_ADMITTED, Request, Sequence, Status
from streamer.core.results import apply_result
from streamer.core.sizes import SchedulerConfig, check_fits
from streamer.core.state import Draft, State
from streamer.core.tokens import continue_running
from streamer.core.view import Recorder, SchedulerView, Wanted, look
from streamer.errors import InvalidRequest, InvariantViolated

__all__ = ["Scheduler", "SchedulerConfig", "check_fits"]


class Scheduler:
    """The pure core's door: commands and facts in, plans out, results in, news out."""

    def __init__(self, config: SchedulerConfig, hasher: BlockHasher) -> None:
        self.config = config
        self.state = State(config, hasher)
        self._arrivals = 0
        self._recorder: Recorder | None = None  # while somebody follows

    # ------------------------------------------------------------ commands

    def command(self, command: Command) -> None:
        """Take one command. Unknown ids are ignored: their request may just have ended."""
        if isinstance(command, Add):
            self._add(command)
            return
        request = self.state.requests.get(command.request_id)
        if request is None:
            return
        match command:
            case Cancel():
                self.state.finish_all(request, FinishReason.CANCELLED)
            case Pause() if not request.is_held:
                self.state.queue.remove(request)
                request.is_held = True
                if request.status is Status.RUNNING:
                    self.state.pause(request)
            case Resume() if request.is_held:
                request.is_held = False
                if request.status in MAY_BE_ADMITTED:
                    self.state.enqueue(request)
            case _:
                pass

    def _add(self, add: Add) -> None:
        if add.request_id in self.state.requests:
            raise InvalidRequest(f"request {add.request_id} exists", param="request_id")
        n = add.params.n
        if n > self.config.max_num_seqs:
            limit = self.config.max_num_seqs
            raise InvalidRequest(f"n={n} exceeds max_num_seqs={limit}", param="n")
        max_tokens = check_fits(len(add.prompt), n, add.params.max_tokens, self.config)
        self._arrivals += 1
        request = Request(add, self._arrivals, max_tokens)
        self.state.requests[add.request_id] = request
        self.state.counts[Status.WAITING] += 1
        self.state.queue.open(request)
        self.state.enqueue(request)

    def refuse(self, add: Add, error: Exception) -> None:
        """End a request that `command` could not take, as failed; raises `error` if it did."""
        if add.request_id in self.state.requests:
            raise error
        detail = f"{type(error).__name__}: {error}"
        self.state.finishes += [
            Finish(add.request_id, choice, FinishReason.FAILED, num_tokens=0, detail=detail)
            for choice in range(add.params.n)
        ]

    # ------------------------------------------------------------ the step

    def schedule(self, facts: Facts) -> Plan | None:
        """The next plan; None when there is nothing to do, or nothing before the last is applied.

        A plan without rows reports finishes or waits for copies.
        """
        state = self.state
        state.facts = facts
        state.retire()
        draft = Draft(state.launched + 1, self.config)
        state.kv.plan = draft.number
        self._make_room(draft)
        make_way(state, draft)
        continue_running(state, draft)
        while draft.budget > 0 and (head := state.queue.head()) and admit(state, head, draft):
            pass
        return self._build(draft)

    def apply(self, plan: Plan, result: StepResult) -> StepOutput:
        """What the plan drew, as news for the loop."""
        state = self.state
        if not plan.number == result.number == state.collected + 1:
            raise InvariantViolated(
                f"plan {plan.number} with result {result.number} applied after {state.collected}"
            )
        state.collected = plan.number
        output = apply_result(state, result)
        if self._recorder is not None:
            self._recorder.applied(output, state)
        return output

    def snapshot(self, wanted: Wanted) -> SchedulerView:
        """What a look asks for; from here on steps are recorded if it wants steps, else not."""
        recorder = self._recorder or Recorder()
        steps, owner_of = recorder.take(wanted.num_steps)
        self._recorder = recorder if wanted.num_steps else None
        return look(self.state, wanted, steps, owner_of)

    @property
    def has_told(self) -> bool:
        """Whether anybody waits who is told of its place in the queue."""
        return self.state.queue.num_told > 0

    def news_of_places(self) -> tuple[Notice, ...]:
        """Who waits at another place than it was told; O(waiting), so not in every step."""
        waiting = self.state.counts[Status.WAITING]
        return self.state.queue.changed_places(waiting)

    def stats(self) -> StepStats:
        """Counts now, for an engine that has not stepped yet."""
        return self.state.stats()

    def check(self) -> None:
        """Prove conservation of blocks, rows and requests, or raise InvariantViolated."""
        self.state.check()

    # ------------------------------------------------------------ room for who runs

    def _make_room(self, draft: Draft) -> None:
        """A block for every token the running rows are about to write, preempting if need be."""
        state, size, kv = self.state, self.config.block_size, self.state.kv
        due = 0  # rows that will want a block in the step after this one
        for seq in [s for s in state.lined_up() if s.num_computed >= s.plain_until]:
            request = seq.request
            if request.status is not Status.RUNNING:
                continue
            known = len(seq.tokens) + seq.num_pending
            capacity = len(seq.blocks) * size
            if (seq.shares_tail or capacity < known) and not self._room_for(seq, draft):
                draft.sitting.add(seq)
            if len(seq.blocks) * size == known:
                due += known + 1 - len(request.add.prompt) < request.max_tokens
        if due > kv.device.num_free + kv.device.num_cooling:
            self._swap_ahead(draft)

    def _room_for(self, seq: Sequence, draft: Draft) -> bool:
        """Blocks for one running sequence. False: it sits out, or was itself the victim."""
        kv, request = self.state.kv, seq.request
        while not kv.allocate(seq, seq.num_tokens):
            if kv.device.num_cooling:
                return False  # blocks are on their way
            victim = choose_victim([*self.state.running, *self.state.paused])
            if victim is None:
                return False
            self.state.preempt(victim, draft)
            if request.status is not Status.RUNNING:
                return False
        return True

    def _swap_ahead(self, draft: Draft) -> None:
        """The next step will run dry: start one swap now, so that nobody waits for it then.

        Only a swap gains by that; blocks of a recomputed victim are free at once.
        """
        victim = choose_victim([*self.state.running, *self.state.paused])
        if victim is not None and self.state.would_swap(victim):
            self.state.preempt(victim, draft)

    # ------------------------------------------------------------ the plan

    def _build(self, draft: Draft) -> Plan | None:
        state = self.state
        has_work = bool(draft.num_tokens or draft.has_swap or state.kv.copies)
        if not has_work and not state.finishes and not state.notices:
            if state.launched > state.collected:
                return None  # apply what is launched first
            if not state.copy_plans:
                self._require_idle()
                return None
        if draft.swap_out or draft.swap_in:
            state.copy_plans.append(draft.number)
        state.launched = draft.number
        state.counters.computed_tokens += draft.num_tokens
        leaves, state.leaves = tuple(state.leaves), []
        copies, state.kv.copies = state.kv.copies, {}
        state.counters.copied_blocks += len(copies)
        for copy in copies.values():
            copy.request.copied_tokens += copy.num_tokens
        if self._recorder is not None:
            self._recorder.planned(draft, state, len(copies))
        return Plan(
            number=draft.number,
            leaves=leaves,
            joins=tuple(draft.joins),
            tables=self._table_updates(),
            chunks=tuple(draft.chunks),
            copies=tuple((copy.source, destination) for destination, copy in copies.items()),
            swap_out=tuple(draft.swap_out),
            swap_in=tuple(draft.swap_in),
            num_rows=state.num_joined,
            num_tokens=draft.num_tokens,
            num_samples=draft.num_samples,
        )

    def _table_updates(self) -> tuple[TableUpdate, ...]:
        touched, self.state.kv.touched = self.state.kv.touched, {}
        return tuple(
            TableUpdate(seq.row, start, tuple(seq.blocks[start:]))
            for seq, start in touched.items()
            if seq.joined
        )

    def _require_idle(self) -> None:
        """Nothing can be planned and nothing is under way: then nobody may be waiting."""
        state = self.state
        waiting: Iterable[Request] = (
            *state.running,
            *state.swapping,
            *state.queue,
        )
        for request in waiting:
            raise InvariantViolated(
                f"stuck: request {request.request_id} is {request.status.value}, needs "
                f"{blocks_needed(state, request)} blocks, {state.kv.device.num_free} are free"
            )
