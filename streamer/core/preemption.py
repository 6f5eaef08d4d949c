"""Preemption: which requests give way when blocks or rows run out, and how they do.

Every rule of victims is here. They go in this order: readers that are paused, then the lowest
priority, then the least computed work lost, then the last to arrive. After MAX_PREEMPTIONS a
running request is exempt while another can run; those it met while paused are not counted. The last
running request gives way to a request of better priority alone. Called by scheduler.py, for blocks
of those that run, and by admission.py, for the head of the queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from streamer.core.plan import Facts
from streamer.core.request import Event, Request, Status
from streamer.core.state import Draft, State

MAX_PREEMPTIONS = 2


# ---------------------------------------------------------------- which


def choose_victim(candidates: Iterable[Request], *, may_be_last: bool = False) -> Request | None:
    """The request to preempt among PAUSED and RUNNING ones, or None if none may be.

    may_be_last  the last running one may be preempted too: another is admitted in its place
    """
    paused: list[Request] = []
    running: list[Request] = []
    for request in candidates:
        (paused if request.status is Status.PAUSED else running).append(request)
    if paused:
        return max(paused, key=lambda r: (r.is_held, *_rank(r)))
    if len(running) < (1 if may_be_last else 2):
        return None
    ordinary = [r for r in running if r.evictions < MAX_PREEMPTIONS]
    if ordinary:
        return max(ordinary, key=_rank)
    return max(running, key=lambda r: r.arrival)


def _rank(request: Request) -> tuple[int, int, int]:
    lost = sum(s.num_computed for s in request.sequences)
    return request.add.priority, -lost, request.arrival


def outranked_by(state: State, request: Request) -> list[Request]:
    """The running requests that give way to this one: of lower priority, and not exempt."""
    priority = request.add.priority
    return [
        r
        for r in state.requests.running
        if r.add.priority > priority and r.evictions < MAX_PREEMPTIONS
    ]


def paused_for(state: State, request: Request) -> list[Request]:
    """The paused requests that give way to this one.

    One that only waits for its rows keeps its blocks, unless its priority is lower or no request
    is progressing.
    """
    must = not state.requests.is_progressing
    priority = request.add.priority
    return [
        r
        for r in state.requests.paused
        if r is not request and (r.is_held or must or r.add.priority > priority)
    ]


def would_free(state: State, victims: list[Request], head: Request, num_blocks: int) -> bool:
    """Whether the head would find this many more blocks if all these gave way.

    A block is free when no table holds it. Blocks that the head would share are not counted: it
    takes them itself.
    """
    tables = [s.blocks for r in victims for s in r.sequences]
    if sum(map(len, tables)) < num_blocks:
        return False
    device, found = state.kv.device, {b for s in head.live() for b in s.found}
    holders = Counter(block for table in tables for block in table)
    freed = sum(1 for b, n in holders.items() if n == device.ref_count(b) and b not in found)
    return freed >= num_blocks


# ---------------------------------------------------------------- how


def preempt(state: State, request: Request, draft: Draft) -> None:
    """Take the request's blocks away: to the host, or to be computed again."""
    live = request.live()
    for seq in live:
        state.kv.publish(seq)
    moves = state.kv.swap_out(live) if would_swap(state, request) else None
    state.queue.remove(request)  # a paused one may be waiting for its rows
    request.preemptions += 1
    request.evictions += request.status is Status.RUNNING
    state.leave_all(request)
    if moves is not None:
        request.last_swap = draft.number
        draft.has_swap = True
        draft.swap_out += moves
        state.requests.move(request, Event.SWAP_OUT)
    else:
        for seq in live:
            state.kv.release(seq, state.launched)
            seq.candidates = None
        state.requests.move(request, Event.DROP)
        state.enqueue(request)
    state.report.preempted(request, None if moves is None else len(moves))


def would_swap(state: State, request: Request) -> bool:
    """Whether a preemption now would swap: there is host room, and it costs fewer seconds."""
    blocks_out, blocks_in, can_swap = state.kv.swap_cost(request.live())
    return can_swap and is_swap_cheaper(
        blocks_out=blocks_out,
        blocks_in=blocks_in,
        block_bytes=state.config.block_bytes,
        num_tokens=blocks_in * state.config.block_size,
        facts=state.facts,
    )


def is_swap_cheaper(
    *, blocks_out: int, blocks_in: int, block_bytes: int, num_tokens: int, facts: Facts
) -> bool:
    """Compare seconds: copy out and back at the measured bandwidth, or compute again.

    num_tokens  tokens whose KV would be lost
    """
    moved = (blocks_out + blocks_in) * block_bytes
    swap_s = moved / facts.swap_bytes_per_s + 2 * facts.swap_fixed_s
    return swap_s < num_tokens * facts.prefill_s
