"""Views of the scheduler: pools, page tables, and the steps since the last view.

Frozen values, and pure functions over them: `seen_by` keeps what one key may see. `view_of` and the
Recorder read State, called by the scheduler alone, and change nothing it decides. Views are made on
the GPU thread, only when a reader asks (otherwise a step pays one test of an attribute), and
their size is bounded, whatever the pools' size.
"""

from __future__ import annotations

import struct
from collections import Counter, deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from functools import reduce
from operator import or_

import msgspec

from streamer.core.plan import NoticeKind, StepOutput, StepStats
from streamer.core.request import Request, Sequence
from streamer.core.state import Draft, State

MAX_CELLS = 1 << 16  # of a pool's grid
MAX_LISTED = 256  # requests of one owner with their page tables
MAX_TABLE_BLOCKS = 1 << 15  # of one owner's page tables, all together
MAX_STEPS = 256  # recorded between two views
MAX_ENTRIES = 1 << 13  # of those steps, all together


class ViewQuery(msgspec.Struct, frozen=True):
    """What a view contains.

    owners     prefixes of salts: requests with one of them are listed, the others counted
    num_steps  steps to record until the next view; 0: none
    """

    owners: tuple[bytes, ...] = ()
    num_steps: int = 0


class PoolView(msgspec.Struct, frozen=True):
    """A block pool as a grid.

    cells  a byte a cell (base64 in JSON): 0 free, 1 free with a prefix that can be matched, 2 free
           when launched plans and copies end, 4 held by one page table, 8 shared by several. Block
           b is in cell b // blocks_per_cell; a cell of several blocks has the bits of all
    """

    num_blocks: int
    blocks_per_cell: int
    cells: bytes


class SequenceView(msgspec.Struct, frozen=True):
    """One choice and its page table.

    tokens            known tokens
    computed          those of them whose KV is (or will be, by launched plans) there
    blocks            device block ids in order, 4 bytes each, little-endian (base64 in JSON); cut
                      off beyond what a view may carry: num_blocks counts all
    host_blocks       likewise while it is swapped out
    """

    choice: int
    tokens: int
    computed: int
    num_blocks: int
    blocks: bytes
    num_host_blocks: int
    host_blocks: bytes


class RequestView(msgspec.Struct, frozen=True):
    """A live request; steps refer to it by its `number`.

    preemptions     times it lost its blocks, running or paused
    queue_position  0: next to be admitted; None: not queued
    is_held         paused by its reader, wherever it is
    """

    number: int
    request_id: str
    status: str
    priority: int
    prompt_tokens: int
    max_tokens: int
    preemptions: int
    is_held: bool
    queue_position: int | None
    sequences: tuple[SequenceView, ...]


class StepView(msgspec.Struct, frozen=True):
    """One step: what it computed and moved, by the requests' numbers.

    prefilled    (request, tokens): several known tokens at once, recomputed ones too
    decoded      one token each; a request is there once a choice
    verified     (request, tokens): its newest token and the provisional ones after it
    admitted     took rows, new or again
    preempted    (request, "swap" or "recompute")
    finished     (request, reason), once a choice
    swapped_out, swapped_in, copied   blocks
    others       entries of the lists above that belong to other keys
    """

    number: int
    tokens: int
    prefilled: tuple[tuple[int, int], ...] = ()
    decoded: tuple[int, ...] = ()
    verified: tuple[tuple[int, int], ...] = ()
    admitted: tuple[int, ...] = ()
    paused: tuple[int, ...] = ()
    preempted: tuple[tuple[int, str], ...] = ()
    finished: tuple[tuple[int, str], ...] = ()
    swapped_out: int = 0
    swapped_in: int = 0
    copied: int = 0
    others: int = 0


class SchedulerView(msgspec.Struct, frozen=True):
    """The scheduler at one moment.

    requests   those of the caller's key, at most 256
    unlisted   every other live request, counted by status
    steps      recorded since the last view; a number that is missing was not recorded
    owner_of   number of each listed or recorded request -> its salt; not for the wire
    """

    step: int
    stats: StepStats
    block_size: int
    device: PoolView
    host: PoolView
    requests: tuple[RequestView, ...]
    unlisted: dict[str, int]
    steps: tuple[StepView, ...]
    owner_of: dict[int, bytes] | msgspec.UnsetType = msgspec.UNSET


def pack_table(blocks: Seq[int], room: int) -> bytes:
    """The first `room` block ids, 4 bytes each."""
    kept = blocks[:room]
    return struct.pack(f"<{len(kept)}I", *kept)


def pool_view(states: bytes, max_cells: int = MAX_CELLS) -> PoolView:
    """The grid of a pool whose block b has state `states[b]`."""
    each = max(1, -(-len(states) // max_cells))
    num_cells = -(-len(states) // each)
    # as whole numbers, whose "or" runs in C: 100,000 blocks would hold the GIL for 10 ms
    columns = (states[i::each].ljust(num_cells, b"\0") for i in range(each))
    joined = reduce(or_, (int.from_bytes(column, "little") for column in columns), 0)
    return PoolView(len(states), each, joined.to_bytes(num_cells, "little"))


def seen_by(view: SchedulerView, owner: bytes) -> SchedulerView:
    """The view without what belongs to others: their requests become counts."""
    owners = view.owner_of or {}
    mine = {number for number, salt in owners.items() if salt.startswith(owner)}
    unlisted = dict(view.unlisted)
    kept = []
    for request in view.requests:
        if request.number in mine:
            kept.append(request)
        else:
            unlisted[request.status] = unlisted.get(request.status, 0) + 1
    return msgspec.structs.replace(
        view,
        requests=tuple(kept),
        unlisted=unlisted,
        steps=tuple(_own_part(step, mine) for step in view.steps),
        owner_of=msgspec.UNSET,
    )


def _own_part(step: StepView, mine: set[int]) -> StepView:
    parts = {
        "prefilled": tuple(e for e in step.prefilled if e[0] in mine),
        "decoded": tuple(n for n in step.decoded if n in mine),
        "verified": tuple(e for e in step.verified if e[0] in mine),
        "admitted": tuple(n for n in step.admitted if n in mine),
        "paused": tuple(n for n in step.paused if n in mine),
        "preempted": tuple(e for e in step.preempted if e[0] in mine),
        "finished": tuple(e for e in step.finished if e[0] in mine),
    }
    others = sum(len(getattr(step, name)) - len(part) for name, part in parts.items())
    return msgspec.structs.replace(step, others=others, **parts)


# ---------------------------------------------------------------- made from State


class Recorder:
    """Records steps from their plan to their result, up to the number that `take` was given.

    owner_of  number of each request in the records -> its salt
    """

    def __init__(self) -> None:
        self.owner_of: dict[int, bytes] = {}
        self._room = 0  # steps that may still be recorded
        self._entries = 0
        self._numbers: dict[str, int] = {}
        self._planned: deque[StepView] = deque()
        self._applied: list[StepView] = []

    def planned(self, draft: Draft, state: State, num_copied: int) -> None:
        """Record a plan: how many tokens each request computes in it."""
        if not self._room or self._entries >= MAX_ENTRIES:
            return
        self._room -= 1
        # of rows that do not simply decode: the tokens they compute
        counts = dict.fromkeys(draft.idle, 0)
        counts |= {c.row: c.count for c in draft.chunks}
        counts |= {j.row: 0 for j in draft.joins if j.logits_of >= 0}
        prefilled: list[tuple[int, int]] = []
        decoded: list[int] = []
        verified: list[tuple[int, int]] = []
        for request in state.requests.running:
            for seq in request.sequences:
                if not seq.joined:
                    continue
                count = counts.get(seq.row)
                if count is None or (count == 1 and request.beams is not None):
                    decoded.append(request.arrival)
                elif count:
                    (verified if seq.provisional else prefilled).append((request.arrival, count))
                else:
                    continue
                self._name(request)
        self._entries += len(prefilled) + len(decoded) + len(verified)
        self._planned.append(
            StepView(
                number=draft.number,
                tokens=draft.num_tokens,
                prefilled=tuple(prefilled),
                decoded=tuple(decoded),
                verified=tuple(verified),
                swapped_out=len(draft.swap_out),
                swapped_in=len(draft.swap_in),
                copied=num_copied,
            )
        )

    def applied(self, output: StepOutput, state: State) -> None:
        """Complete a step's record by the notices and finishes of its output."""
        while self._planned and self._planned[0].number < output.number:
            self._planned.popleft()
        if not self._planned or self._planned[0].number != output.number:
            return
        by_kind: dict[NoticeKind, list[tuple[int, str]]] = {kind: [] for kind in NoticeKind}
        for notice in output.notices:
            number = self._number_of(notice.request_id, state)
            if number is not None:
                by_kind[notice.kind].append((number, notice.how))
        finished = [
            (number, f.reason.value)
            for f in output.finishes
            if (number := self._number_of(f.request_id, state)) is not None
        ]
        self._entries += len(output.notices) + len(finished)
        self._applied.append(
            msgspec.structs.replace(
                self._planned.popleft(),
                admitted=tuple(n for n, _ in by_kind[NoticeKind.RUNNING]),
                paused=tuple(n for n, _ in by_kind[NoticeKind.PAUSED]),
                preempted=tuple(by_kind[NoticeKind.PREEMPTED]),
                finished=tuple(finished),
            )
        )

    def take(self, num_steps: int) -> tuple[tuple[StepView, ...], dict[int, bytes]]:
        """The recorded steps and their requests' salts; up to `num_steps` more are recorded."""
        steps, owners = tuple(self._applied), self.owner_of
        pending = {n for s in self._planned for n in (*s.decoded, *(n for n, _ in s.prefilled))}
        self._applied = []
        self.owner_of = {n: salt for n, salt in owners.items() if n in pending}
        self._numbers = {i: n for i, n in self._numbers.items() if n in pending}
        self._room, self._entries = num_steps, 0
        return steps, owners

    def _name(self, request: Request) -> None:
        if request.arrival not in self.owner_of:
            self.owner_of[request.arrival] = request.add.salt
            self._numbers[request.request_id] = request.arrival

    def _number_of(self, request_id: str, state: State) -> int | None:
        """The request's number; None if it has ended and no record names it."""
        request = state.requests.by_id.get(request_id)
        if request is not None:
            self._name(request)
        return self._numbers.get(request_id)


def view_of(
    state: State, query: ViewQuery, steps: tuple[StepView, ...], owner_of: dict[int, bytes]
) -> SchedulerView:
    """The scheduler now, with the steps that were recorded and the owners of their requests."""
    positions = {request: i for i, request in enumerate(state.queue.in_order())}
    listed: list[RequestView] = []
    unlisted: Counter[str] = Counter()
    budgets = {owner: [MAX_LISTED, MAX_TABLE_BLOCKS] for owner in query.owners}
    for request in _in_order(state):
        owner = next((o for o in query.owners if request.add.salt.startswith(o)), None)
        budget = budgets[owner] if owner is not None else None
        if budget is None or not budget[0]:
            unlisted[request.status.value] += 1
            continue
        budget[0] -= 1
        owner_of[request.arrival] = request.add.salt
        listed.append(_request_view(request, positions.get(request), budget))
    return SchedulerView(
        step=state.launched,
        stats=state.stats(),
        block_size=state.config.block_size,
        device=pool_view(state.kv.device.states()),
        host=pool_view(state.kv.host.states()),
        requests=tuple(listed),
        unlisted=dict(unlisted),
        steps=steps,
        owner_of=owner_of,
    )


def _in_order(state: State) -> Iterator[Request]:
    """Every live request: those with blocks first, then the queue, then those held outside it."""
    live = state.requests
    first = [*live.running, *live.paused, *live.swapping, *state.queue.in_order()]
    yield from dict.fromkeys((*first, *live.by_id.values()))


def _request_view(request: Request, position: int | None, budget: list[int]) -> RequestView:
    return RequestView(
        number=request.arrival,
        request_id=request.request_id,
        status=request.status.value,
        priority=request.add.priority,
        prompt_tokens=len(request.add.prompt),
        max_tokens=request.max_tokens,
        preemptions=request.preemptions,
        is_held=request.is_held,
        queue_position=position,
        sequences=tuple(_sequence_view(seq, budget) for seq in request.live()),
    )


def _sequence_view(seq: Sequence, budget: list[int]) -> SequenceView:
    blocks, host_blocks = (pack_table(t, budget[1]) for t in (seq.blocks, seq.host_blocks))
    budget[1] -= min(budget[1], (len(blocks) + len(host_blocks)) // 4)
    return SequenceView(
        choice=seq.choice,
        tokens=len(seq.tokens),
        computed=seq.num_computed,
        num_blocks=len(seq.blocks),
        blocks=blocks,
        num_host_blocks=len(seq.host_blocks),
        host_blocks=host_blocks,
    )
