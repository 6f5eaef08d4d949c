"""check_moves: the blocks that a plan copies, within their pools and out of each other's way.

Called by every runner before it copies anything; a scheduler's mistake ends the engine there,
sooner than one request reads another's KV.
"""

from __future__ import annotations

from streamer.core.plan import Plan
from streamer.errors import InvariantViolated


def check_moves(plan: Plan, num_blocks: int, num_host_blocks: int) -> None:
    """Raise InvariantViolated for a block beyond its pool, or one copied into beside another copy.

    A plan's copies run in any order and beside its swaps: none may write what another reads or
    writes.
    """
    for name, pairs, sources, destinations in (
        ("swap_out", plan.swap_out, num_blocks, num_host_blocks),
        ("copies", plan.copies, num_blocks, num_blocks),
        ("swap_in", plan.swap_in, num_host_blocks, num_blocks),
    ):
        for source, destination in pairs:
            if not (0 <= source < sources and 0 <= destination < destinations):
                raise InvariantViolated(
                    f"plan {plan.number}: {name} {source} to {destination} is beyond the pools "
                    f"of {sources} and {destinations} blocks"
                )
    for name, outgoing, incoming in (
        ("device", (*plan.copies, *plan.swap_out), (*plan.copies, *plan.swap_in)),
        ("host", plan.swap_in, plan.swap_out),
    ):
        read, written = {pair[0] for pair in outgoing}, {pair[1] for pair in incoming}
        if len(written) < len(incoming) or read & written:
            raise InvariantViolated(
                f"plan {plan.number} copies into a block of the {name} beside another copy of it: "
                f"copies {plan.copies}, swap_out {plan.swap_out}, swap_in {plan.swap_in}"
            )
