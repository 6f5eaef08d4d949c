"""Reset: every request is computed again from its known tokens, on a runner that was reset too.

Functions over State, called by scheduler.py: after a step failed, and at the start of each plan
while requests are on trial for that.
"""

from __future__ import annotations

from typing import Final

from streamer.core.kv import new_kv
from streamer.core.plan import OUT_OF_MEMORY, STEP_FAILED, FinishReason
from streamer.core.recovery.trials import PROOF, Fault, Verdict
from streamer.core.request import Event, Request, Sequence, Status
from streamer.core.running.rows import Rows
from streamer.core.state import State

_WITHOUT_BLOCKS: Final = frozenset((Status.WAITING, Status.PREEMPTED))
_SWAPPED: Final = frozenset((Status.SWAPPED, Status.SWAPPING_OUT))  # their readers know


def recover(state: State, fault: Fault) -> Verdict:
    """Forget all plans without a result, and decide what runs next."""
    collected = state.collected
    suspects = [r for r in state.requests.by_id.values() if _may_be_at_fault(r)]
    marks = {s: s.num_computed + PROOF for r in suspects for s in r.live()}
    _reset(state)
    state.report.rebuilds += 1
    trials = state.trials
    if fault.is_memory and trials.shrink(fault.num_tokens):
        return Verdict.SHRUNK
    if not trials.members:
        trials.begin(suspects, marks, collected)
        return Verdict.RETRIED
    at_fault = trials.judge(suspects)
    if at_fault is None:
        return Verdict.HALVED
    reason = OUT_OF_MEMORY if fault.is_memory else STEP_FAILED
    state.finish_all(at_fault, FinishReason.FAILED, reason)
    return Verdict.BLAMED


def _may_be_at_fault(request: Request) -> bool:
    """Whether it may have been in a plan that has no result."""
    is_in = request.status in (Status.RUNNING, Status.SWAPPING_IN, Status.SWAPPING_OUT)
    return is_in or any(s.num_pending or s.is_unsettled for s in request.sequences)


def _reset(state: State) -> None:
    for request in list(state.requests.by_id.values()):
        for seq in request.sequences:
            state.end_speculation(seq)
            _lose(seq)
        request.spare_rows = []
        request.num_scored = request.num_reported
        before = request.status
        if before in _WITHOUT_BLOCKS:
            continue
        state.queue.remove(request)
        state.requests.move(request, Event.DROP)
        state.enqueue(request)
        if before not in _SWAPPED:
            state.report.preempted(request, None)
    state.kv = new_kv(state.config, state.kv.hasher)
    state.kv.retire(state.launched)
    state.rows = Rows(state.config.max_num_seqs)
    state.copy_plans.clear()
    state.collected = state.launched
    state.beams_due.clear()
    state.forced = {}
    state.unsettled = {}
    state.late = {}
    state.last_tokens = {}


def _lose(seq: Sequence) -> None:
    """All that was computed is lost, and what was drawn and not reported."""
    seq.num_tokens = len(seq.tokens)
    seq.num_computed = seq.num_published = 0
    seq.blocks, seq.host_blocks, seq.found = [], [], []
    seq.row, seq.joined, seq.shares_tail = -1, False, False
    seq.candidates, seq.is_unsettled = None, False
    seq.provisional, seq.is_forced = (), False


def cancelled(state: State, request: Request) -> None:
    """A request is about to be cancelled: a step that fails may be its fault, and will not be
    found to be."""
    state.trials.cancelled(request, state.launched if _may_be_at_fault(request) else 0)


def go_on(state: State) -> None:
    """Before a plan: end a trial that is passed, and let no request run that is not on trial.

    One that passed keeps its blocks until its turn comes again.
    """
    trials = state.trials
    while trials.members and trials.is_passed:
        trials.passed()
    if trials.members:
        for request in [r for r in state.requests.running if r not in trials.members]:
            state.pause(request)
            state.enqueue(request)
