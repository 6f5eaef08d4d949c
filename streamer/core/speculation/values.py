"""SpeculationSizes: which proposals are made, and their bounds; sizes.py makes it of a Config.

A frozen value alone.
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
