"""Stop strings, matched on bytes as tokens arrive.

Pure functions over the tokenizer's token-to-bytes table. Only sequences that have stop strings pay;
`apply` is the only caller.
"""

from __future__ import annotations

from collections.abc import Sequence


def find_stop(tail: bytes, piece: bytes, stops: Sequence[bytes]) -> tuple[int, int] | None:
    """(offset, index) of the earliest stop string that ends in `piece`, or None.

    tail   the output's last bytes before `piece`; longest stop string less one byte are enough
    offset counts from the start of `tail + piece`; of two that start together the first listed wins
    """
    text = tail + piece
    best: tuple[int, int] | None = None
    for index, stop in enumerate(stops):
        # A match that ended before `piece` would have ended the sequence then.
        offset = text.find(stop, max(0, len(tail) - len(stop) + 1))
        if offset >= 0 and (best is None or offset < best[0]):
            best = (offset, index)
    return best


def next_tail(tail: bytes, piece: bytes, stops: Sequence[bytes]) -> bytes:
    """What of `tail + piece` a later match may still begin in."""
    keep = max(len(stop) for stop in stops) - 1
    text = tail + piece
    return text[len(text) - keep :] if keep and len(text) > keep else text if keep else b""
