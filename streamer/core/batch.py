"""Batch: what `apply` needs of rows that draw a token in one plan after the other.

Made and used by results.py; without it each row of each result would look its sequence up.
"""

from __future__ import annotations

from streamer.core.request import Sequence, Share


class Batch:
    """Rows that one plan after the other draws a token for: what `apply` needs of each.

    moves    Rows.num_moves when it was made; it holds until a row joins or leaves
    members  sequence, its known tokens, its stop ids; empty until the rows came a second time
    shares   the tenants' accounts, and how many of the members are each's
    """

    __slots__ = ("choices", "members", "moves", "request_ids", "rows", "shares")

    def __init__(self, rows: tuple[int, ...], moves: int) -> None:
        self.rows = rows
        self.moves = moves
        self.members: list[tuple[Sequence, list[int], frozenset[int]]] = []
        self.shares: list[tuple[Share, int]] = []
        self.request_ids: tuple[str, ...] = ()
        self.choices: tuple[int, ...] = ()

    def is_same(self, rows: tuple[int, ...], moves: int) -> bool:
        """Whether these are its rows, unmoved."""
        return moves == self.moves and (rows is self.rows or rows == self.rows)

    def is_of(self, rows: tuple[int, ...], moves: int) -> bool:
        """Whether its members are those of the rows that drew."""
        return bool(self.members) and self.is_same(rows, moves)
