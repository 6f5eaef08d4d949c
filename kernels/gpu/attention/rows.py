"""Rows: a batch as the attention kernel reads it, made once a step and used by every layer.

Cuts the rows' query tokens into tiles. Wide tiles are pieces of prefill chunks and read their keys
alone; narrow tiles are whole rows of few tokens (decodes), whose keys may be split among several
programs. Called by paged.py, and by decode_step.py and mixed_step.py, whose tensors stay.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from streamer.kernels.batch import AttentionBatch
from streamer.kernels.gpu.attention import items
from streamer.kernels.gpu.common import power_of_2, to_device

TILE_FIELDS = 4

Ints = NDArray[np.int64]


class Rows:
    """Tensors on the device, int32; tables of int64 are read as well.

    starts    [R + 1 or more] first packed token of each row, and the end
    contexts  [R] tokens a row attends to; 0: the row is padding, its output is never written
    tiles     [num_wide + num_narrow, 4]: row, first query token of it, row of `tables`, and for
              narrow tiles how many query tokens are in narrow tiles before it
    tables    [rows, W]
    num_parts query tokens in narrow tiles
    spans     contexts of the narrow rows on the host, queries their tokens; None: only the device
              knows the contexts, and spans holds the largest one possible
    """

    __slots__ = (
        "_items",
        "contexts",
        "num_narrow",
        "num_parts",
        "num_wide",
        "queries",
        "spans",
        "starts",
        "tables",
        "tiles",
    )

    def __init__(
        self,
        *,
        starts: torch.Tensor,
        contexts: torch.Tensor,
        tiles: torch.Tensor,
        tables: torch.Tensor,
        num_wide: int,
        num_parts: int,
        spans: Ints,
        queries: Ints | None = None,
    ) -> None:
        self.starts = starts
        self.contexts = contexts
        self.tiles = tiles
        self.tables = tables
        self.num_wide = num_wide
        self.num_narrow = tiles.shape[0] - num_wide
        self.num_parts = num_parts
        self.spans = spans
        self.queries = queries
        self._items: dict[tuple[int, int, int], torch.Tensor] = {}

    def items(self, queries: int, window: int, keys: int) -> torch.Tensor:
        """See items.list_items; listed once a step, by the first layer that needs them."""
        key = queries, window, keys
        if key not in self._items:
            narrow = self.tiles[self.num_wide :]
            self._items[key] = items.list_items(self.starts, self.contexts, narrow, *key)
        return self._items[key]

    def changed(self) -> None:
        """The tensors hold another step now."""
        self._items.clear()

    @classmethod
    def of(cls, batch: AttentionBatch, narrow: int, wide: int) -> "Rows":
        """Rows of at most `narrow` tokens in a tile each, longer ones in tiles of `wide` tokens."""
        key = ("rows", narrow, wide)
        rows: Rows | None = batch.derived.get(key) or batch.derived.get("rows")
        if rows is None:
            rows = batch.derived[key] = cls._make(batch, narrow, wide)
        return rows

    @classmethod
    def _make(cls, batch: AttentionBatch, narrow: int, wide: int) -> "Rows":
        lens, contexts = np.array(batch.query_lens), np.array(batch.context_lens)
        starts = np.array(batch.query_starts)
        large, small = cut(lens, contexts, narrow, wide)
        few = small[:, 0]
        tiles = np.concatenate([large, small])
        # One copy to the device. Each part begins at a multiple of 16 bytes: Triton specializes
        # kernels by that alignment, and would compile another one where it differs.
        room = -len(starts) % 4
        packed = np.concatenate([tiles.ravel(), starts, np.zeros(room, np.int64), contexts])
        on_device = to_device(packed.astype(np.int32), batch.slots.device)
        device_starts, device_contexts = on_device[tiles.size :], on_device[-len(contexts) :]
        return cls(
            starts=device_starts,
            contexts=device_contexts,
            tiles=on_device[: tiles.size].view(-1, TILE_FIELDS),
            tables=batch.block_tables,
            num_wide=len(large),
            num_parts=int(lens[few].sum()),
            spans=contexts[few],
            queries=lens[few],
        )


def cut(lens: Ints, contexts: Ints, narrow: int, wide: int) -> tuple[Ints, Ints]:
    """Wide tiles and narrow ones, [n, 4] each, of rows whose tables are in the rows' order."""
    small = np.flatnonzero(lens <= narrow)
    before = np.cumsum(lens[small]) - lens[small]
    large = wide_tiles(lens, contexts, lens > narrow, wide)
    return large, np.stack((small, 0 * small, small, before), 1)


def most_wide(max_rows: int, max_tokens: int, narrow: int, wide: int) -> int:
    """The most wide tiles that steps of so many rows and tokens are cut into: each row of them adds
    at most one to those that its tokens fill."""
    rows = min(max_rows, max_tokens // (narrow + 1))
    return (max_tokens - rows) // wide + rows


def wide_tiles(lens: Ints, contexts: Ints, is_wide: NDArray[np.bool_], wide: int) -> Ints:
    """[n, 4] tiles of the wide rows, those with most keys first: they take longest."""
    rows = np.flatnonzero(is_wide)
    counts = -(-lens[rows] // wide)
    owner = np.repeat(rows, counts)
    first = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * wide
    order = np.argsort(-(contexts[owner] - lens[owner] + first), kind="stable")
    return np.stack((owner, first, owner, 0 * first), 1)[order]


def num_splits(rows: Rows, window: int, keys: int) -> int:
    """Parts to keep room for of each narrow tile: the largest number a row uses, to a power of two.

    The kernels decide for each row (tile.split_of), and use no more than this. Where only the
    device knows the contexts, the number is that of the longest possible context without a window:
    no shorter one uses a greater power of two.
    """
    if not len(rows.spans):
        return 1
    begin: Ints = np.zeros_like(rows.spans)
    if window and rows.queries is not None:
        begin = np.maximum(0, rows.spans - rows.queries - window + 1) // keys * keys
    tiles = -(-(rows.spans - begin) // keys)
    per_split = np.maximum(items.MIN_SPLIT // keys, -(-tiles // items.MAX_SPLITS))
    return power_of_2(int((-(-tiles // per_split)).max()))
