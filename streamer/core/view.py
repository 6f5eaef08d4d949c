"""What a look at the scheduler shows: pools, page tables, and the steps since the last look.

Frozen values, and pure functions over them: `seen_by` leaves what one key may see. Made on the GPU
thread while somebody looks, never otherwise, and bounded in every direction, whatever the pools'
size.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import reduce
from operator import or_

import msgspec

from streamer.core.plan import StepStats

MAX_CELLS = 1 << 16  # of a pool's grid
MAX_LISTED = 256  # requests of one owner with their page tables
MAX_TABLE_BLOCKS = 1 << 15  # of one owner's page tables, all together
MAX_STEPS = 256  # recorded between two looks
MAX_ENTRIES = 1 << 13  # and what they name, all together


class Wanted(msgspec.Struct, frozen=True):
    """What a look asks for.

    owners     salts begin with one of these: such requests are listed, the others counted
    num_steps  of steps to record until the next look; 0: none
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

    tokens, computed  known tokens, and those whose KV is (or will be, by launched plans) there
    blocks            device block ids in order, 4 bytes each, little-endian (base64 in JSON); cut
                      off beyond what a look may carry: num_blocks counts all
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
    """A live request. The steps call it by its `number`.

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
    """One step: who computed how much, and what else happened, by the requests' numbers.

    prefilled    (request, tokens): several known tokens at once, recomputed ones too
    decoded      one token each; a request is there once a choice
    admitted     took rows, new or again
    preempted    (request, "swap" or "recompute");  finished (request, reason), once a choice
    swapped_out, swapped_in, copied   blocks
    others       entries of the lists above that belong to other keys
    """

    number: int
    tokens: int
    prefilled: tuple[tuple[int, int], ...] = ()
    decoded: tuple[int, ...] = ()
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

    requests   those of the owners that were asked for, at most MAX_LISTED of each
    unlisted   every other live request, counted by status
    steps      recorded since the last look; a number that is missing was not recorded
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


def pack_table(blocks: Sequence[int], room: int) -> bytes:
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
        "admitted": tuple(n for n in step.admitted if n in mine),
        "paused": tuple(n for n in step.paused if n in mine),
        "preempted": tuple(e for e in step.preempted if e[0] in mine),
        "finished": tuple(e for e in step.finished if e[0] in mine),
    }
    others = sum(len(getattr(step, name)) - len(part) for name, part in parts.items())
    return msgspec.structs.replace(step, others=others, **parts)
