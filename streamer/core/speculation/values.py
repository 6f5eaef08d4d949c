"""SpeculationSizes and SpeculationCounts: the bounds of what is proposed, and what came of it.

Frozen values alone; sizes.py makes the one, StepStats carries the other.
"""

from __future__ import annotations

import msgspec


class SpeculationSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Which proposals are made, within which bounds.

    max_proposed      provisional tokens of a row and step
    has_texts         propose what followed the same tokens before, in the request itself
    has_recent        and in its owner's recent outputs
    has_draft         the runner has a draft model
    min_match         tokens that must be equal before a continuation is proposed
    max_match         tokens that are compared
    max_indexed       tokens in all indexes together, a quarter of them of recent outputs
    """

    max_proposed: int
    has_texts: bool = True
    has_recent: bool = True
    has_draft: bool = False
    min_match: int = 0
    max_match: int = 32
    max_indexed: int = 1 << 20


class SpeculationCounts(msgspec.Struct, frozen=True):
    """Running totals.

    verifications         runs that verified at least one token
    proposed, accepted    tokens
    proposed_at, accepted_at   the same by position in the run, the first one first
    """

    verifications: int = 0
    proposed: int = 0
    accepted: int = 0
    proposed_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
