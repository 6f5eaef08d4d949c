"""Admission: which request enters the running set, and the blocks and rows it needs for that.

Functions over State and the plan being built, called by Scheduler.schedule. The queue is served
from its head, in the order of fairness.py: a head that does not fit yet is waited for, and requests
put before it are charged for that, so none starves. preemption.py chooses what gives way for it.
"""

from __future__ import annotations

from streamer.core.preemption import choose_victim, outranked_by, paused_for, preempt, would_free
from streamer.core.request import Event, Request, Sequence, Status
from streamer.core.state import Draft, State
from streamer.core.tokens import advance
from streamer.errors import InvariantViolated


def preempt_for_head(state: State, draft: Draft) -> None:
    """Preempt running requests of lower priority for the head of the queue, if that is enough.

    Readers that are paused give way before any that run.
    """
    head = state.queue.head()
    lowest = state.requests.lowest_running if head else None
    if head is None or lowest is None or lowest <= head.add.priority:
        return
    running, paused = outranked_by(state, head), paused_for(state, head)
    rows = sum(len(r.live()) + len(r.spare_rows) for r in running)
    blocks_short, rows_short = shortage(state, head)
    if rows_short > rows or not would_free(state, [*running, *paused], head, blocks_short):
        return
    while running and (blocks_short > 0 or rows_short > 0):
        candidates = paused if paused and blocks_short > 0 else running
        victim = choose_victim(candidates, may_be_last=True)
        if victim is None:
            return
        candidates.remove(victim)
        preempt(state, victim, draft)
        blocks_short, rows_short = shortage(state, head)


def shortage(state: State, request: Request) -> tuple[int, int]:
    """(blocks, rows) missing for admission, those on their way counted as there."""
    rows = state.rows
    blocks = blocks_needed(state, request) - state.kv.device.num_free - state.num_coming()
    return blocks, request.num_rows - rows.num_free - rows.num_cooling


def blocks_needed(state: State, request: Request) -> int:
    """Free blocks required for admission: its own, and those that must stay free beside them."""
    kv, live = state.kv, request.live()
    if request.status is Status.PAUSED:
        return 0
    if request.status is Status.SWAPPED:
        need = kv.swap_in_need(live)
    else:
        need = sum(kv.need(seq) for seq in live)
    if not state.requests.is_progressing:
        return need  # progress comes first
    headroom = 0 if request.status is Status.WAITING else len(live)
    return need + state.watermark + headroom


def admit(state: State, request: Request, draft: Draft) -> bool:
    """Admit the head of the queue; False when it has to wait."""
    if any(s.num_pending or s.is_unsettled for s in request.sequences):
        return False  # its last token is not known yet
    num_rows = request.num_rows
    taken = state.rows.num_reserved
    if num_rows > state.rows.num_free or (taken and taken + num_rows > state.trials.max_tokens):
        return False
    if not evict_paused_for(state, request, draft):
        return False
    if not state.rows.reserve(request, num_rows):
        raise InvariantViolated(f"{state.rows.num_free} rows free, but not {num_rows}")
    state.queue.remove(request)
    if request.status is Status.SWAPPED:
        swap_in(state, request, draft)
    elif request.status is Status.PAUSED:
        state.requests.move(request, Event.ADMIT)
        state.report.running(request)
        for seq in request.live():
            if state.kv.allocate(seq, seq.num_tokens):
                advance(state, seq, draft)
    else:
        begin(state, request, draft)
    return True


def evict_paused_for(state: State, request: Request, draft: Draft) -> bool:
    """Whether the request's blocks are free; preempts paused requests if that suffices."""
    device = state.kv.device
    while (need := blocks_needed(state, request)) > device.num_free:
        short = need - device.num_free - state.num_coming()
        paused = paused_for(state, request)
        if short <= 0 or not would_free(state, paused, request, short):
            return False
        victim = choose_victim(paused)
        if victim is None:
            return False
        preempt(state, victim, draft)
    return True


def swap_in(state: State, request: Request, draft: Draft) -> None:
    """Start the copies back; the request runs when they are done."""
    moves = state.kv.swap_in(request.live())
    if moves is None:
        raise InvariantViolated(f"request {request.request_id}: no room to swap in")
    draft.swap_in += moves
    request.last_swap = draft.number
    draft.has_swap = True
    state.requests.move(request, Event.SWAP_IN)
    state.report.swapping_in(len(moves))


def begin(state: State, request: Request, draft: Draft) -> None:
    """Give a request without blocks its tables, and tokens of this step at once.

    One sequence after the other: what the first publishes, its siblings match.
    """
    kv = state.kv
    cached = shared = 0
    before_prefill = state.report.num_notices
    state.requests.move(request, Event.ADMIT)
    draft.begun.add(request)
    for seq in request.live():
        cached_here, shared_here = inherit(state, seq, draft)
        cached, shared = cached + cached_here, shared + shared_here
        if not kv.allocate(seq, seq.num_tokens):
            raise InvariantViolated(
                f"request {request.request_id}: {seq.num_tokens} tokens don't fit "
                f"{kv.device.num_free} free blocks"
            )
        advance(state, seq, draft)
    state.report.begun(request, cached, shared, at=before_prefill)


def inherit(state: State, seq: Sequence, draft: Draft) -> tuple[int, int]:
    """Take what is computed already: (tokens from the cache, tokens shared by a fork)."""
    kv = state.kv
    parent = None if seq.request.is_scoring else parent_of(state, seq, draft)
    if parent is not None:
        at = common_tokens(parent, seq, draft)
        if at > kv.cached_tokens(seq) and kv.fork(parent, seq, at):
            state.requests.lineup.disturb(parent)  # it may write a block that both have now
            return 0, at
    return kv.match(seq), 0


def parent_of(state: State, seq: Sequence, draft: Draft) -> Sequence | None:
    """The sequence it was forked from, if that is its tenant's and still holds device blocks."""
    add = seq.request.add
    request = state.requests.by_id.get(add.share_with) if add.share_with is not None else None
    if request is None or request.status not in (Status.RUNNING, Status.PAUSED):
        return None
    if request.add.salt != add.salt:
        return None  # tenants share nothing, whatever a command says
    if request in draft.begun:
        return None  # a twin may compute what it matched in this very plan: match as well
    return request.sequences[0] if request.sequences[0].blocks else None


def common_tokens(parent: Sequence, child: Sequence, draft: Draft) -> int:
    """Tokens both begin with that the parent computed before this plan."""
    before = draft.starts.get(parent, parent.num_computed - 1)
    limit = min(before, len(parent.tokens), len(child.tokens) - 1)
    for i in range(limit):
        if parent.tokens[i] != child.tokens[i]:
            return i
    return max(limit, 0)
