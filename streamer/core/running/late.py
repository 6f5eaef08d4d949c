"""Late rows: those that were to draw, and whose masks were not there in time (StepResult.late).

Functions over State, called in schedule and apply. A late sequence counts its last token as not
computed again and sits out, so that its neighbours' steps do not wait, until its mask is there. It
then decodes: what it verified is verified no more, since a run's masks would be late again.
"""

from __future__ import annotations

from collections.abc import Iterable

from streamer.core.request import Sequence
from streamer.core.state import State
from streamer.errors import InvariantViolated


def waiting(state: State) -> list[Sequence]:
    """The late sequences that sit this plan out: their masks are not there, or plans launched
    before it was known that they are late are not applied."""
    rows = set(state.facts.late)
    return [seq for seq in state.late if seq.num_pending or seq.row in rows]


def step_back(state: State, rows: Iterable[int]) -> None:
    """Each of these rows did not draw what it was to draw.

    A plan launched meanwhile goes on from a token that does not exist: what it stores is beyond the
    known tokens, and it is late as well.
    """
    for row in rows:
        seq = state.rows.owners[row]
        if seq is None:
            raise InvariantViolated(f"row {row} is late, but no sequence has it")
        state.requests.lineup.disturb(seq)
        seq.num_tokens -= 1
        if seq.finish_reason is not None:
            continue
        seq.num_computed = min(seq.num_computed, seq.num_tokens - 1)
        state.kv.step_back(seq, state.launched)
        if seq.joined:
            state.late[seq] = None


def drew(state: State, rows: Iterable[int]) -> None:
    """These rows drew tokens: the late ones among them are late no more."""
    owners = state.rows.owners
    for seq in {owners[row] for row in rows}.intersection(state.late):
        if seq is not None:
            del state.late[seq]
