"""Admission: who enters the running set, and what must be moved or given up for it.

Functions over State and the plan being built, called by Scheduler.schedule. The queue is served
from its head, in the order of fairness.py: a head that does not fit yet is waited for, and whoever
is put before it is charged for that, so nobody starves.
"""

from __future__ import annotations

from collections import Counter

from streamer.core.plan import Notice, NoticeKind
from streamer.core.preemption import MAX_PREEMPTIONS, choose_victim
from streamer.core.request import Event, Request, Sequence, Status
from streamer.core.state import Draft, State
from streamer.core.tokens import advance
from streamer.errors import InvariantViolated


def make_way(state: State, draft: Draft) -> None:
    """Preempt running requests of lower priority for the head of the queue, if that is enough.

    Readers that are paused give way before anybody who runs.
    """
    head = state.queue.head()
    if head is None or not state.running_by_priority:
        return
    priority = head.add.priority
    if max(state.running_by_priority) <= priority:
        return
    victims = [
        r for r in state.running if r.add.priority > priority and r.evictions < MAX_PREEMPTIONS
    ]
    paused = paused_for(state, head)
    rows = sum(len(r.live()) + len(r.spare_rows) for r in victims)
    blocks_short, rows_short = shortage(state, head)
    if rows_short > rows or not would_free(state, [*victims, *paused], head, blocks_short):
        return
    while victims and (blocks_short > 0 or rows_short > 0):
        victim = choose_victim(paused) if blocks_short > 0 else None
        if victim is not None:
            paused.remove(victim)
        else:
            victim = max(victims, key=lambda r: (r.add.priority, r.arrival))
            victims.remove(victim)
        state.preempt(victim, draft)
        blocks_short, rows_short = shortage(state, head)


def would_free(state: State, victims: list[Request], head: Request, num_blocks: int) -> bool:
    """Whether the head would find so many more blocks if all these gave way.

    A block is free when all who share it are gone; what the head itself shares it then has to take.
    """
    tables = [s.blocks for r in victims for s in r.sequences]
    if sum(map(len, tables)) < num_blocks:
        return False
    device, found = state.kv.device, {b for s in head.live() for b in s.found}
    holders = Counter(block for table in tables for block in table)
    freed = sum(1 for b, n in holders.items() if n == device.ref_count(b) and b not in found)
    return freed >= num_blocks


def paused_for(state: State, request: Request) -> list[Request]:
    """The paused requests that give way to this one.

    Who only waits for its rows keeps its blocks, unless its priority is lower, or nobody else could
    ever go on.
    """
    must = not state.running and not is_anyone_returning(state)
    priority = request.add.priority
    return [
        r
        for r in state.paused
        if r is not request and (r.is_held or must or r.add.priority > priority)
    ]


def shortage(state: State, request: Request) -> tuple[int, int]:
    """(blocks, rows) missing for admission, those on their way counted as there."""
    device, rows = state.kv.device, state.rows
    blocks = blocks_needed(state, request) - device.num_free - device.num_cooling
    return blocks, rows_needed(request) - rows.num_free - rows.num_cooling


def rows_needed(request: Request) -> int:
    """Rows it takes: n from the start, also before its choices fork."""
    return request.add.params.n if len(request.sequences) == 1 else len(request.live())


def blocks_needed(state: State, request: Request) -> int:
    """Free blocks wanted before it enters: its own, and what must stay free beside them."""
    kv, live = state.kv, request.live()
    if request.status is Status.PAUSED:
        return 0
    if request.status is Status.SWAPPED:
        need = kv.swap_in_need(live)
    else:
        need = sum(kv.need(seq) for seq in live)
    if not state.running and not is_anyone_returning(state):
        return need  # progress comes first
    headroom = 0 if request.status is Status.WAITING else len(live)
    return need + state.watermark + headroom


def is_anyone_returning(state: State) -> bool:
    """Whether somebody's blocks are being copied back, who will run next."""
    return any(r.status is Status.SWAPPING_IN for r in state.swapping)


def admit(state: State, request: Request, draft: Draft) -> bool:
    """Let the head of the queue in; False when it has to wait."""
    if any(s.num_pending for s in request.sequences):
        return False  # its last token is not known yet
    num_rows = rows_needed(request)
    if num_rows > state.rows.num_free:
        return False
    if not evict_paused_for(state, request, draft):
        return False
    rows = state.rows.take(num_rows)
    if rows is None:
        raise InvariantViolated(f"{state.rows.num_free} rows free, but not {num_rows}")
    state.queue.remove(request)
    state.reserve_rows(request, rows)
    if request.status is Status.SWAPPED:
        swap_in(state, request, draft)
    elif request.status is Status.PAUSED:
        state.move(request, Event.ADMIT)
        state.notices.append(Notice(request.request_id, NoticeKind.RUNNING))
        for seq in request.live():
            if state.kv.allocate(seq, seq.num_tokens):
                advance(state, seq, draft)
    else:
        begin(state, request, draft)
    return True


def evict_paused_for(state: State, request: Request, draft: Draft) -> bool:
    """Whether its blocks are free now; takes those of paused readers if that helps."""
    device = state.kv.device
    while (need := blocks_needed(state, request)) > device.num_free:
        short = need - device.num_free - device.num_cooling
        paused = paused_for(state, request)
        if short <= 0 or not would_free(state, paused, request, short):
            return False
        victim = choose_victim(paused)
        if victim is None:
            return False
        state.preempt(victim, draft)
    return True


def swap_in(state: State, request: Request, draft: Draft) -> None:
    """Start the copies back; the request runs when they are done."""
    moves = state.kv.swap_in(request.live())
    if moves is None:
        raise InvariantViolated(f"request {request.request_id}: no room to swap in")
    draft.swap_in += moves
    request.last_swap = draft.number
    draft.has_swap = True
    state.counters.swapped_in_blocks += len(moves)
    state.move(request, Event.SWAP_IN)


def begin(state: State, request: Request, draft: Draft) -> None:
    """Give a request without blocks its tables, and tokens of this step at once.

    One sequence after the other: what the first publishes, its siblings match.
    """
    kv = state.kv
    cached = shared = 0
    place = len(state.notices)
    state.move(request, Event.ADMIT)
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
    state.counters.prefix_hit_tokens += cached + shared
    news = Notice(
        request.request_id, NoticeKind.RUNNING, cached_tokens=cached, shared_tokens=shared
    )
    state.notices.insert(place, news)  # before the prefill's


def inherit(state: State, seq: Sequence, draft: Draft) -> tuple[int, int]:
    """Take what is computed already: (tokens from the cache, tokens shared by a fork)."""
    kv = state.kv
    parent = None if seq.request.is_scoring else parent_of(state, seq, draft)
    if parent is not None:
        at = common_tokens(parent, seq, draft)
        if at > kv.cached_tokens(seq) and kv.fork(parent, seq, at):
            return 0, at
    return kv.match(seq), 0


def parent_of(state: State, seq: Sequence, draft: Draft) -> Sequence | None:
    """The sequence it was forked from, if that is its tenant's and still holds device blocks."""
    add = seq.request.add
    request = state.requests.get(add.share_with) if add.share_with is not None else None
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
