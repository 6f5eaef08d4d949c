"""paged_attention: prefill chunks and decodes of one step, a launch for each kind.

A program holds some query tokens of a row with all query heads of one KV head, so that each key is
read once for all of them and products fill their tiles (as in vLLM's and FlashInfer's GQA kernels),
and reads the row's keys through the block table with an online softmax. Called through backend.py.

Decodes with many keys are split among programs, and a second kernel merges the parts
(Flash-Decoding). How a row is split depends on its own keys alone, and products of decodes have
one tile shape in every launch: a decode's bits do not depend on what else is in the step. Which
splits there are is listed on the device, so that a recorded step, which must be launched for the
longest contexts, has no program for splits that its rows do not use: at 830 tokens those were three
in four. Keys before a sliding window are not read.

A quantized pool's codes are widened in registers to q's dtype, which holds them exactly, and
multiplied as such; the keys' scales multiply the scores, the values' scales the weights. So sums
over long contexts are as precise as without quantization: tile.py says how.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import driver

from streamer.kernels.batch import AttentionBatch
from streamer.kernels.gpu.attention import items
from streamer.kernels.gpu.attention.rows import Rows, num_splits
from streamer.kernels.gpu.attention.tile import attend, split_of
from streamer.kernels.gpu.common import IS_INTERPRETED, power_of_2
from streamer.kernels.quantized import LIMITS, scales_of

# Tried on an H200: docs/kernels.md.
NARROW = 16  # rows of a decode's tile: the minimum of tl.dot
WIDE = 128  # rows of a prefill's tile; half beyond 128 dimensions, a quarter beyond 256, in float32
# Of a prefill's tile of K, by bytes of an element: elements, keys at most.
KEY_ELEMENTS = {1: 16384, 2: 8192, 4: 2048}
MAX_KEYS = {1: 128, 2: 64, 4: 64}
STAGES = 3  # of loads; at two none goes on while a tile is multiplied
# A decode's tile is one warp's: it waits for no other, and many are resident, so that numbers of 16
# bits need no third stage. By bytes of an element: elements of its tile of K, stages.
NARROW_ELEMENTS = {1: 2048, 2: 4096, 4: 2048}
NARROW_STAGES = {1: 3, 2: 2, 4: 3}
WARP_SUMS = 2048  # of a decode's tile that one warp holds in registers; more are four warps'
PROGRAMS = 2112  # that share the items of narrow tiles: 16 for each multiprocessor of an H200


# Arguments that change from step to step must not cause another compilation.
@triton.jit(do_not_specialize=["window", "table_row"])
def _wide_kernel(
    # pointers: q [T, Hq, D], pool's layer [N, 2, Hk, B, D], out [T, Hq, D], sinks float32 [Hq],
    # starts, contexts, tiles and tables of Rows; scales float32 [N, 2, Hk, B] in the pool, or none
    q_ptr,
    pool_ptr,
    scales_ptr,
    out_ptr,
    sinks_ptr,
    starts_ptr,
    contexts_ptr,
    tiles_ptr,
    tables_ptr,
    # sizes
    window,
    scale,
    softcap,
    # strides
    q_token,
    q_head,
    q_dim,
    pool_block,
    pool_side,
    pool_head,
    pool_token,
    table_row,
    # meta
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Program (tile, KV head): a piece of a prefill chunk."""
    attend(
        q_ptr, pool_ptr, scales_ptr, out_ptr, sinks_ptr, starts_ptr, contexts_ptr,
        tiles_ptr + tl.program_id(0) * 4, tables_ptr, out_ptr, out_ptr, out_ptr,
        0, 1, window, scale, softcap,
        q_token, q_head, q_dim, pool_block, pool_side, pool_head, pool_token, table_row,
        HEADS, SHARE, D, D_PAD, BLOCK_SIZE, BLOCK_M, BLOCK_KEYS, BLOCK_KEYS, 1,
        HAS_WINDOW, HAS_SOFTCAP, HAS_SINKS, HAS_SCALES, UPCAST,
    )  # fmt: skip


@triton.jit(do_not_specialize=["splits", "window", "table_row"])
def _narrow_kernel(
    # pointers: as above, `tiles` are the narrow ones; items int32 of Rows.items, parts float32
    # [P, Hq, splits, D], their maxima and sums float32 [P, Hq, splits]
    q_ptr,
    pool_ptr,
    scales_ptr,
    out_ptr,
    sinks_ptr,
    starts_ptr,
    contexts_ptr,
    tiles_ptr,
    tables_ptr,
    items_ptr,
    parts_ptr,
    maxima_ptr,
    sums_ptr,
    # sizes
    splits,
    window,
    scale,
    softcap,
    # strides
    q_token,
    q_head,
    q_dim,
    pool_block,
    pool_side,
    pool_head,
    pool_token,
    table_row,
    # meta
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Program (any, KV head): its share of the items, each a split of a tile."""
    count = tl.load(items_ptr)
    for n in range(tl.program_id(0), count, tl.num_programs(0)):
        item = tl.load(items_ptr + 1 + n)
        attend(
            q_ptr, pool_ptr, scales_ptr, out_ptr, sinks_ptr, starts_ptr, contexts_ptr,
            tiles_ptr + item // MOST_SPLITS * 4, tables_ptr, parts_ptr, maxima_ptr, sums_ptr,
            item % MOST_SPLITS, splits, window, scale, softcap,
            q_token, q_head, q_dim, pool_block, pool_side, pool_head, pool_token, table_row,
            HEADS, SHARE, D, D_PAD, BLOCK_SIZE, BLOCK_M, BLOCK_KEYS, MIN_KEYS, MOST_SPLITS,
            HAS_WINDOW, HAS_SOFTCAP, HAS_SINKS, HAS_SCALES, UPCAST,
        )  # fmt: skip


@triton.jit(do_not_specialize=["splits", "window"])
def _merge_kernel(
    # pointers: as above; `tiles` are the narrow ones
    out_ptr,
    sinks_ptr,
    starts_ptr,
    contexts_ptr,
    tiles_ptr,
    parts_ptr,
    maxima_ptr,
    sums_ptr,
    # sizes
    splits,
    window,
    # meta
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Program (narrow tile, query head): merge the row's parts, weighted by their sums.

    A row that is not split is left as it is. MOST_SPLITS parts are added in one order in every
    launch: see the file's contract.
    """
    tile, head = tiles_ptr + tl.program_id(0) * 4, tl.program_id(1)
    row = tl.load(tile)
    start = tl.load(starts_ptr + row)
    queries = tl.load(starts_ptr + row + 1) - start
    context = tl.load(contexts_ptr + row)
    _, _, used = split_of(
        context, queries, 0, QUERIES, 0, window, BLOCK_KEYS, MIN_KEYS, MOST_SPLITS, HAS_WINDOW
    )
    if used > 1:
        first_part = tl.load(tile + 3)
        split, i = tl.arange(0, MOST_SPLITS), tl.arange(0, D_PAD)
        for token in range(queries):
            # int64: P * Hq * splits * D passes 2**31 at 32,768 decodes of 32 heads
            part = ((first_part + token).to(tl.int64) * HEADS + head) * splits + split
            # [MOST_SPLITS] each
            maxima = tl.load(maxima_ptr + part, mask=split < used, other=float("-inf"))
            sums = tl.load(sums_ptr + part, mask=split < used, other=0.0)
            # [MOST_SPLITS, D_PAD]
            is_inside = (split < used)[:, None] & (i < D)[None, :]
            values = tl.load(parts_ptr + part[:, None] * D + i[None, :], mask=is_inside, other=0.0)
            top = tl.max(maxima, 0)
            if HAS_SINKS:
                sink = tl.load(sinks_ptr + head) * 1.4426950408889634
                top = tl.maximum(top, sink)
            weights = tl.exp2(maxima - top)
            total = tl.sum(weights * sums, 0)
            if HAS_SINKS:
                total += tl.exp2(sink - top)
            y = tl.sum(weights[:, None] * values, 0) / total
            at = out_ptr + ((start + token).to(tl.int64) * HEADS + head) * D + i
            tl.store(at, y.to(out_ptr.dtype.element_ty), mask=i < D)


class _Shape:
    """Tile sizes of one head shape and dtype: the same in every launch."""

    __slots__ = (
        "dim_pad", "keys", "narrow", "narrow_stages", "narrow_warps", "share", "stages", "warps",
        "wide", "wide_keys",
    )  # fmt: skip

    def __init__(
        self, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, pool_dtype: torch.dtype,
        *, is_large: bool = True,
    ) -> None:  # fmt: skip
        item_bytes = dtype.itemsize
        self.share = heads // kv_heads
        self.dim_pad = max(16, power_of_2(dim))
        self.narrow = max(NARROW, power_of_2(self.share))
        parts = 4 if item_bytes == 4 or self.dim_pad > 256 else 2 if self.dim_pad > 128 else 1
        self.wide = max(WIDE // parts, self.narrow)
        # a quantized pool's in a model of float32 is as large as the model's own
        item = 4 if item_bytes == 4 else pool_dtype.itemsize
        elements = KEY_ELEMENTS[item if is_large else max(2, item)]
        self.stages = STAGES if is_large else 2
        self.wide_keys = min(MAX_KEYS[item], max(16, elements // self.dim_pad))
        is_single = item < 4 and self.narrow * self.dim_pad <= WARP_SUMS
        self.narrow_warps = 1 if is_single else 4
        self.narrow_stages = NARROW_STAGES[item] if is_single else self.stages
        fewest = 16 if is_single else 32
        self.keys = min(self.wide_keys, max(fewest, NARROW_ELEMENTS[item] // self.dim_pad))
        # Codes are widened in registers, which spill with 4 warps and more than 128 dimensions.
        self.warps = 8 if self.wide > 64 or pool_dtype in LIMITS else 4

    @property
    def tile_tokens(self) -> tuple[int, int]:
        """Query tokens of a narrow and of a wide tile."""
        return self.narrow // self.share, self.wide // self.share


@cache
def _is_large(device: torch.device) -> bool:
    """Whether a program may have Hopper's shared memory, 227 KB; an A100's have 163, others 99."""
    if device.type != "cuda":
        return True
    properties = driver.active.utils.get_device_properties(device.index)
    return bool(properties["max_shared_mem"] > 200 << 10)


def tile_tokens(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """How many query tokens of a row a narrow tile holds, and how many a wide one."""
    return _Shape(heads, kv_heads, dim, dtype, dtype).tile_tokens


def paged_attention(
    q: torch.Tensor,
    pool_layer: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See Backend.paged_attention. The output of a row without context is not written."""
    kv_heads = pool_layer.shape[2]
    if scale <= 0:
        raise ValueError(f"scale is {scale}, and has to be positive")
    shape = _Shape(
        q.shape[1], kv_heads, q.shape[2], q.dtype, pool_layer.dtype, is_large=_is_large(q.device)
    )
    rows = Rows.of(batch, *shape.tile_tokens)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    shared = _shared_arguments(out, rows, shape, sliding_window, sinks)
    has_scales = pool_layer.dtype in LIMITS
    both = {
        **shared,
        "q_ptr": q,
        "pool_ptr": pool_layer,
        "scales_ptr": scales_of(pool_layer, batch.block_size) if has_scales else None,
        "tables_ptr": rows.tables,
        "scale": scale,
        "softcap": softcap or 0.0,
        "q_token": q.stride(0),
        "q_head": q.stride(1),
        "q_dim": q.stride(2),
        "pool_block": pool_layer.stride(0),
        "pool_side": pool_layer.stride(1),
        "pool_head": pool_layer.stride(2),
        "pool_token": pool_layer.stride(3),
        "table_row": rows.tables.stride(0),
        "SHARE": shape.share,
        "BLOCK_SIZE": batch.block_size,
        "HAS_SOFTCAP": softcap is not None,
        "HAS_SCALES": has_scales,
        "UPCAST": IS_INTERPRETED and q.dtype is torch.bfloat16,
    }
    if rows.num_wide:
        _wide_kernel[(rows.num_wide, kv_heads)](
            tiles_ptr=rows.tiles,
            BLOCK_M=shape.wide,
            BLOCK_KEYS=shape.wide_keys,
            num_warps=shape.warps,
            num_stages=shape.stages,
            **both,
        )
    if rows.num_narrow:
        _launch_narrow(rows, shape, kv_heads, both, shared)
    return out


def _launch_narrow(
    rows: Rows, shape: _Shape, kv_heads: int, both: dict[str, Any], shared: dict[str, Any]
) -> None:
    """The narrow tiles: their items in as many programs as are needed, or as are enough."""
    heads, dim, window = shared["HEADS"], shared["D"], shared["window"]
    splits = num_splits(rows, window, shape.keys)
    stats = rows.num_parts * heads * splits if splits > 1 else 0
    stats = -(-stats // 4) * 4  # so that each part begins at a multiple of 16 bytes: see Rows
    room = torch.empty(stats * (dim + 2), dtype=torch.float32, device=rows.tiles.device)
    split = {
        "tiles_ptr": rows.tiles[rows.num_wide :],
        "parts_ptr": room,
        "maxima_ptr": room[stats * dim :],
        "sums_ptr": room[stats * (dim + 1) :],
        "splits": splits,
        "BLOCK_KEYS": shape.keys,
        "MIN_KEYS": items.MIN_SPLIT,
        "MOST_SPLITS": items.MAX_SPLITS,
    }
    queries = shape.narrow // shape.share
    programs = min(rows.num_narrow * splits, max(1, PROGRAMS // kv_heads))
    _narrow_kernel[(programs, kv_heads)](
        items_ptr=rows.items(queries, window, shape.keys),
        BLOCK_M=shape.narrow,
        num_warps=shape.narrow_warps,
        num_stages=shape.narrow_stages,
        **both,
        **split,
    )
    if splits > 1:
        _merge_kernel[(rows.num_narrow, heads)](QUERIES=queries, num_warps=1, **shared, **split)


def _shared_arguments(
    out: torch.Tensor,
    rows: Rows,
    shape: _Shape,
    window: int | None,
    sinks: torch.Tensor | None,
) -> dict[str, Any]:
    """The arguments that all kernels take."""
    return {
        "out_ptr": out,
        "sinks_ptr": None if sinks is None else sinks.float().contiguous(),
        "starts_ptr": rows.starts,
        "contexts_ptr": rows.contexts,
        "window": window or 0,
        "HEADS": out.shape[1],
        "D": out.shape[2],
        "D_PAD": shape.dim_pad,
        "HAS_WINDOW": window is not None,
        "HAS_SINKS": sinks is not None,
    }
