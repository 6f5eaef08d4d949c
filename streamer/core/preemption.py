"""Who gives way when blocks run out, and how: pure choices over requests and Facts.

Order of victims (DESIGN section 5): paused readers, then the lowest priority, then the least
computed work lost, then the last to arrive. After MAX_PREEMPTIONS a running request is exempt while
another can run; those it met while paused are not counted. The last running request is never
chosen. Called by the scheduler alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from streamer.core.plan import Facts
from streamer.core.request import Request, Status

MAX_PREEMPTIONS = 2


def choose_victim(candidates: Iterable[Request]) -> Request | None:
    """The request to preempt among PAUSED and RUNNING ones, or None if nobody may be."""
    paused: list[Request] = []
    running: list[Request] = []
    for request in candidates:
        (paused if request.status is Status.PAUSED else running).append(request)
    if paused:
        return max(paused, key=lambda r: (r.is_held, *_rank(r)))
    if len(running) < 2:
        return None
    ordinary = [r for r in running if r.evictions < MAX_PREEMPTIONS]
    if ordinary:
        return max(ordinary, key=_rank)
    return max(running, key=lambda r: r.arrival)


def _rank(request: Request) -> tuple[int, int, int]:
    lost = sum(s.num_computed for s in request.sequences)
    return request.add.priority, -lost, request.arrival


def is_swap_cheaper(
    *, blocks_out: int, blocks_in: int, block_bytes: int, num_tokens: int, facts: Facts
) -> bool:
    """Compare seconds: copy out and back at the measured bandwidth, or compute again.

    num_tokens  tokens whose KV would be lost
    """
    moved = (blocks_out + blocks_in) * block_bytes
    swap_s = moved / facts.swap_bytes_per_s + 2 * facts.swap_fixed_s
    return swap_s < num_tokens * facts.prefill_s
