"""Items: the splits that a step's narrow tiles use, listed on the device for the attention kernel.

How a tile is split is tile.split_of's. Called by rows.py.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from streamer.kernels.gpu.attention.tile import split_of

MIN_SPLIT = 512  # keys below which a decode is not split; see docs/kernels.md
MAX_SPLITS = 16  # programs that may share a decode
BLOCK = 256  # tiles at once


@triton.jit(do_not_specialize=["count", "window"])
def _list_kernel(
    # pointers: starts, contexts and narrow tiles of Rows, items int32 [1 + count * MOST_SPLITS]
    starts_ptr,
    contexts_ptr,
    tiles_ptr,
    items_ptr,
    # sizes
    count,
    window,
    # meta
    QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """items = [how many, then tile * MOST_SPLITS + split for each split that a tile uses]."""
    done = tl.zeros((), tl.int32)
    for first in range(0, count, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        is_tile = tile < count
        # [BLOCK] each
        row = tl.load(tiles_ptr + tile * 4, mask=is_tile, other=0)
        start = tl.load(starts_ptr + row, mask=is_tile, other=0)
        queries = tl.load(starts_ptr + row + 1, mask=is_tile, other=0) - start
        context = tl.load(contexts_ptr + row, mask=is_tile, other=0)
        _, _, used = split_of(
            context, queries, 0, QUERIES, 0, window, BLOCK_KEYS, MIN_KEYS, MOST_SPLITS, HAS_WINDOW
        )
        used = tl.where(is_tile, used, 0)
        at = done + tl.cumsum(used, 0) - used
        for split in tl.static_range(MOST_SPLITS):
            tl.store(items_ptr + 1 + at + split, tile * MOST_SPLITS + split, mask=split < used)
        done += tl.sum(used, 0)
    tl.store(items_ptr, done)


def list_items(
    starts: torch.Tensor, contexts: torch.Tensor, tiles: torch.Tensor,
    queries: int, window: int, keys: int,
) -> torch.Tensor:  # fmt: skip
    """The items of narrow tiles of Rows.

    queries  tokens that fit a tile;  window  0: none;  keys  those that are read at once
    """
    count = tiles.shape[0]
    items = torch.empty(1 + count * MAX_SPLITS, dtype=torch.int32, device=tiles.device)
    _list_kernel[(1,)](
        starts_ptr=starts,
        contexts_ptr=contexts,
        tiles_ptr=tiles,
        items_ptr=items,
        count=count,
        window=window,
        QUERIES=queries,
        BLOCK_KEYS=keys,
        MIN_KEYS=MIN_SPLIT,
        MOST_SPLITS=MAX_SPLITS,
        HAS_WINDOW=window > 0,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return items
