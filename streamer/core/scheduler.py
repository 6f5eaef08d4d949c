"""Scheduler: which sequences compute how many tokens in the next step, and which blocks move.

Owns every live request (in State). `command`, `schedule` and `apply` are called by EngineCore on
the GPU thread, never concurrently; plans are applied in order, and `schedule` may run with one plan
not yet applied. A log that starts with the config and the hasher's secret and goes on with every
command, facts and result replays to the same plans. There is no prefill and no decode phase: every
sequence catches up with its known tokens under one token budget.
"""

from __future__ import annotations

from streamer.core.admission import admit, blocks_needed, preempt_for_head
from streamer.core.blocks import BlockHasher
from streamer.core.plan import (
    Add,
    Cancel,
    Command,
    Facts,
    FinishReason,
    Notice,
    Pause,
    Plan,
    Resume,
    StepOutput,
    StepResult,
    StepStats,
)
from streamer.core.preemption import choose_victim, preempt, would_swap
from streamer.core.recovery.reset import cancelled, go_on, recover
from streamer.core.recovery.trials import Fault, Verdict
from streamer.core.request import Request, Sequence, Status
from streamer.core.results import apply_result, end_if_due
from streamer.core.sizes import SchedulerConfig, check_fits, check_outputs
from streamer.core.speculation.interface import Speculation
from streamer.core.speculation.speculator import Speculator
from streamer.core.state import Draft, State
from streamer.core.tokens import continue_running
from streamer.core.verification import plan_drafts, speculate
from streamer.core.view import Recorder, SchedulerView, ViewQuery, view_of
from streamer.errors import InvalidRequest, InvariantViolated

__all__ = ["Scheduler", "SchedulerConfig", "check_fits"]


class Scheduler:
    """The core's interface: takes commands, facts and results; returns plans and outputs."""

    def __init__(
        self, config: SchedulerConfig, hasher: BlockHasher, speculation: Speculation | None = None
    ) -> None:
        self.config = config
        if speculation is None and config.speculation is not None:
            speculation = Speculator(config.speculation)
        self.state = State(config, hasher, speculation)
        self._recorder: Recorder | None = None  # while a reader follows

    # ------------------------------------------------------------ commands

    def command(self, command: Command) -> None:
        """Take one command. Unknown ids are ignored: their request may just have ended."""
        if isinstance(command, Add):
            self._add(command)
            return
        request = self.state.requests.by_id.get(command.request_id)
        if request is None:
            return
        match command:
            case Cancel():
                cancelled(self.state, request)
                self.state.finish_all(request, FinishReason.CANCELLED)
            case Pause() if not request.is_held:
                self.state.hold(request)
            case Resume() if request.is_held:
                self.state.unhold(request)
            case _:
                pass

    def _add(self, add: Add) -> None:
        if add.request_id in self.state.requests.by_id:
            raise InvalidRequest(f"request {add.request_id} exists", param="request_id")
        n, name = add.params.num_sequences, add.params.is_wide_by
        if n > self.config.max_num_seqs:
            limit = self.config.max_num_seqs
            raise InvalidRequest(f"{name}={n} exceeds max_num_seqs={limit}", param=name)
        max_tokens = check_fits(len(add.prompt), n, add.params.max_tokens, self.config)
        if add.outputs:
            check_outputs(add.outputs, add.params.n, max_tokens)
            if all(drawn.finish is not None for drawn in add.outputs):
                raise InvalidRequest(f"request {add.request_id} has ended", param="outputs")
        request = self.state.open(add, max_tokens)
        if add.is_probe:
            self.state.trials.probe(request)
        for seq in request.live() if add.outputs else ():
            if seq.num_output:  # the engine before this one may have been lost before its end
                end_if_due(self.state, seq, seq.tokens[-1])

    def refuse(self, add: Add, error: Exception) -> None:
        """End a request that `command` could not take, as failed; raises `error` if it did."""
        if add.request_id in self.state.requests.by_id:
            raise error
        self.state.report.refused(add, f"{type(error).__name__}: {error}")

    # ------------------------------------------------------------ the step

    def schedule(self, facts: Facts) -> Plan | None:
        """The next plan; None when there is nothing to do, or not until the last one is applied.

        A plan in which no row computes reports finishes, or waits for copies or masks.
        """
        state = self.state
        if state.trials.members and state.launched > state.collected:
            return None  # a step that fails is to be that of its own requests
        draft = state.begin(facts)
        go_on(state)
        self._cover_running(draft)
        preempt_for_head(state, draft)
        continue_running(state, speculate(state, draft), draft)
        while draft.budget > 0 and (head := state.queue.head()) and admit(state, head, draft):
            pass
        return self._build(draft)

    def apply(self, plan: Plan, result: StepResult) -> StepOutput:
        """Apply a plan's result: the output for the loop."""
        state = self.state
        if not plan.number == result.number == state.collected + 1:
            raise InvariantViolated(
                f"plan {plan.number} with result {result.number} applied after {state.collected}"
            )
        state.collect(plan.number)
        state.trials.stepped()
        output = apply_result(state, plan, result)
        if self._recorder is not None:
            self._recorder.applied(output, state)
        return output

    def reset(self, fault: Fault) -> Verdict:
        """A step failed: forget all plans without a result; the runner is reset as well.

        Every request is computed again from its known tokens. The next plan's number goes on.
        """
        return recover(self.state, fault)

    @property
    def suspect_escaped(self) -> bool:
        """Whether one that may be at fault for the last failed step can't be tried for it."""
        return self.state.trials.has_escaped

    def snapshot(self, query: ViewQuery) -> SchedulerView:
        """The view for this query; steps are recorded from here on if it requests some."""
        recorder = self._recorder or Recorder()
        steps, owner_of = recorder.take(query.num_steps)
        self._recorder = recorder if query.num_steps else None
        return view_of(self.state, query, steps, owner_of)

    @property
    def notifies_positions(self) -> bool:
        """Whether a reader of a queued request receives its position in the queue."""
        return self.state.queue.num_notified > 0

    def changed_positions(self) -> tuple[Notice, ...]:
        """Places that differ from those last sent; O(waiting), so not in every step."""
        waiting = self.state.requests.counts[Status.WAITING]
        return self.state.queue.changed_positions(waiting)

    def stats(self) -> StepStats:
        """Counts now, for an engine that has not stepped yet."""
        return self.state.stats()

    def check(self) -> None:
        """Prove conservation of blocks, rows and requests, or raise InvariantViolated."""
        self.state.check()

    # ------------------------------------------------------------ blocks for those that run

    def _cover_running(self, draft: Draft) -> None:
        """A block for every token the running rows are about to write, preempting if need be."""
        state, size, kv = self.state, self.config.block_size, self.state.kv
        self._renew_steady()
        for seq in list(state.requests.lineup.others):
            request = seq.request
            if request.status is not Status.RUNNING or seq.provisional:
                continue
            known = seq.num_tokens
            has_room = len(seq.blocks) * size >= known and not seq.shares_tail
            if not (has_room or kv.allocate(seq, known) or self._make_room(seq, draft)):
                draft.stalled.add(seq)
            if len(seq.blocks) * size == known:
                draft.due += known + 1 < request.num_at_most
        draft.due += state.requests.lineup.num_full_next
        due = draft.due - kv.device.num_free
        if due > 0 and due > state.num_coming():
            self._swap_ahead(draft)

    def _renew_steady(self) -> None:
        """A block for each steady sequence whose last one is full, if there is room for all."""
        lineup, kv = self.state.requests.lineup, self.state.kv
        full = lineup.take_full()
        if kv.extend(full):
            for seq in full:
                kv.publish(seq)
            lineup.renew(full, self.config.block_size)
        else:
            for seq in full:
                lineup.disturb(seq)

    def _make_room(self, seq: Sequence, draft: Draft) -> bool:
        """Preempt until one running sequence has its blocks. False: it sits out, or was itself the
        victim."""
        kv, request = self.state.kv, seq.request
        while not kv.allocate(seq, seq.num_tokens):
            if self.state.num_coming():
                return False  # blocks are on their way
            victim = self._next_victim()
            if victim is None:
                return False
            preempt(self.state, victim, draft)
            if request.status is not Status.RUNNING:
                return False
        return True

    def _swap_ahead(self, draft: Draft) -> None:
        """The next step will lack blocks: start one swap now, so that it need not wait for one.

        Only a swap gains by that; blocks of a recomputed victim are free at once.
        """
        victim = self._next_victim()
        if victim is not None and would_swap(self.state, victim):
            preempt(self.state, victim, draft)

    def _next_victim(self) -> Request | None:
        requests = self.state.requests
        return choose_victim([*requests.running, *requests.paused])

    # ------------------------------------------------------------ the plan

    def _build(self, draft: Draft) -> Plan | None:
        state = self.state
        has_work = bool(draft.num_tokens or draft.has_swap or state.kv.copies)
        if not has_work and not state.report:
            if state.launched > state.collected:
                return None  # apply what is launched first
            if not (state.copy_plans or draft.waits):
                self._require_idle()
                return None
        state.launch(draft)
        copies = state.kv.take_copies()
        drafts: tuple[tuple[int, int], ...] = ()
        if state.speculation is not None and state.speculation.has_drafts:
            drafts = plan_drafts(state, state.speculation, draft)
        state.report.planned(draft.num_tokens, len(copies))
        if self._recorder is not None:
            self._recorder.planned(draft, state, len(copies))
        return Plan(
            number=draft.number,
            leaves=state.rows.take_leaves(),
            joins=tuple(draft.joins),
            tables=state.kv.take_updates(),
            chunks=tuple(draft.chunks),
            idle=tuple(draft.idle),
            drafts=drafts,
            copies=copies,
            swap_out=tuple(draft.swap_out),
            swap_in=tuple(draft.swap_in),
            num_rows=state.rows.num_joined,
            num_tokens=draft.num_tokens,
            num_samples=draft.num_samples,
        )

    def _require_idle(self) -> None:
        """Raise if a request waits although nothing can be planned and nothing is under way."""
        state = self.state
        for request in (*state.requests.running, *state.requests.swapping, *state.queue):
            raise InvariantViolated(
                f"stuck: request {request.request_id} is {request.status.value}, needs "
                f"{blocks_needed(state, request)} blocks, {state.kv.device.num_free} are free"
            )
