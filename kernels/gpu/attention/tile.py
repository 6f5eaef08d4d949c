"""One program of paged attention: one tile of queries over its share of the keys.

Inlined into paged.py's kernels, for tiles of prefill and of decode. Launches nothing.

How sums over many keys keep their precision, by the pool's dtype:
- float32: products and sums are float32 throughout ("ieee", no tensor core).
- bfloat16, float16: the tensor core multiplies exactly and adds in float32; its accumulator
  runs over all keys of a program, and _merge_kernel adds the parts of a split decode in float32.
- FP8, INT8: in two levels. Hopper's tensor core keeps only 14 bits of a sum of products of two e4m3
  operands; with those a needle test at 128k fell from 91% to 13% in vLLM, until each tile of keys
  had its own sum, added to a float32 sum (its blog, 2026-04-22). So no such product is made here:
  codes are widened to q's dtype, which holds either kind exactly, and the tensor core sums one
  tile of keys at a time in float32, from zero. The second level is a float32 sum outside the tensor
  core, once a tile, and _merge_kernel's. An FP8 product would save time in prefill alone, where
  arithmetic is the limit, and would round the weights to four bits.
tests/gpu/test_large.py holds 131,072 keys against float64.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from streamer.kernels.gpu.attention.widen import widened


@triton.jit
def split_of(
    context,
    queries,
    first,
    QUERIES: tl.constexpr,
    split,
    window,
    BLOCK_KEYS: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Keys [begin, end) of one split of a tile, and how many splits the tile has.

    The tile's query tokens are [first, first + QUERIES) of the row. Key tiles begin at multiples
    of BLOCK_KEYS in every wide tile, so a query of a chunk sums in one order wherever that was cut.
    """
    begin = context * 0
    if HAS_WINDOW:
        begin = tl.maximum(0, context - queries + first - window + 1) // BLOCK_KEYS * BLOCK_KEYS
    end = tl.minimum(context, context - queries + first + QUERIES)
    tiles = tl.cdiv(end - begin, BLOCK_KEYS)
    per_split = tiles
    if MOST_SPLITS > 1:
        per_split = tl.maximum(MIN_KEYS // BLOCK_KEYS, tl.cdiv(tiles, MOST_SPLITS))
    used = tl.cdiv(tiles, tl.maximum(1, per_split))
    per_split = tl.maximum(1, tl.cdiv(tiles, tl.maximum(1, used)))  # of nearly equal lengths
    used = tl.cdiv(tiles, per_split)
    begin += split * per_split * BLOCK_KEYS
    return begin, tl.minimum(end, begin + per_split * BLOCK_KEYS), used


@triton.jit
def loaded(scales_at, is_key):
    """Scales [BLOCK_KEYS], each loaded four times: fewer loads than threads Triton repeats for each
    layout in which they or their addresses are used, 16 loads a thread and their addresses."""
    at = scales_at[:, None] + tl.zeros((1, 4), tl.int32)
    return tl.max(tl.load(at, mask=is_key[:, None], other=0.0), 1)


@triton.jit
def capped(scores, scale, softcap):
    """softcap * tanh(scores * scale / softcap); tanh(x) is 1 - 2 / (exp(2 * x) + 1)."""
    return softcap * (1.0 - 2.0 / (tl.exp(scores * (2.0 * scale / softcap)) + 1.0))


@triton.jit
def attend(
    # pointers, as in paged.py; tile_ptr: this tile's four fields
    q_ptr,
    pool_ptr,
    scales_ptr,
    out_ptr,
    sinks_ptr,
    starts_ptr,
    contexts_ptr,
    tile_ptr,
    tables_ptr,
    parts_ptr,
    maxima_ptr,
    sums_ptr,
    # sizes
    split,
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
    """Row m of the tile is query token m // SHARE of it, query head m % SHARE of the KV head."""
    QUERIES: tl.constexpr = BLOCK_M // SHARE
    LOG2_E: tl.constexpr = 1.4426950408889634
    kv_head = tl.program_id(1)
    row, first = tl.load(tile_ptr), tl.load(tile_ptr + 1)
    start = tl.load(starts_ptr + row)
    queries = tl.load(starts_ptr + row + 1) - start
    context = tl.load(contexts_ptr + row)
    begin, end, used = split_of(
        context, queries, first, QUERIES, split, window,
        BLOCK_KEYS, MIN_KEYS, MOST_SPLITS, HAS_WINDOW,
    )  # fmt: skip
    m, i, n = tl.arange(0, BLOCK_M), tl.arange(0, D_PAD), tl.arange(0, BLOCK_KEYS)
    token, head = first + m // SHARE, kv_head * SHARE + m % SHARE
    position = context - queries + token
    is_query = (m < QUERIES * SHARE) & (token < queries)
    # int64: T * Hq * D passes 2**31 at 262,144 tokens of 8,192
    packed = (start + token).to(tl.int64)
    # [BLOCK_M, D_PAD]
    q_at = q_ptr + (packed * q_token + head * q_head)[:, None] + (i * q_dim)[None, :]
    q = tl.load(q_at, mask=is_query[:, None] & (i < D)[None, :], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    # int64: a table of 65,536 rows may have 2**31 entries
    table = tables_ptr + tl.load(tile_ptr + 2).to(tl.int64) * table_row
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D_PAD), tl.float32)
    to_log2 = LOG2_E if HAS_SOFTCAP else scale * LOG2_E  # of scores, for exp2; positive
    # Keys [whole_begin, whole_end) are seen by every query of the tile.
    whole_begin, whole_end = context, tl.minimum(end, context - queries + first + 1)
    if HAS_WINDOW:
        whole_begin = context - queries + first + QUERIES - window
    # The blocks of a tile are read one tile before its keys: loads whose addresses come from a
    # load of the same round are not started ahead (at two stages none were).
    block = tl.load(table + (begin + n) // BLOCK_SIZE, mask=begin + n < end, other=0)
    for first_key in range(begin, end, BLOCK_KEYS):
        key = first_key + n
        is_key = key < end
        ahead = key + BLOCK_KEYS
        next_block = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
        # int64: a pool of 100 GB has more than 2**31 elements
        head_at = block.to(tl.int64) * pool_block + kv_head * pool_head
        at = head_at + key % BLOCK_SIZE * pool_token
        kv_at = pool_ptr + at[:, None] + i[None, :]
        # Values beyond the context may be another sequence's NaN, and 0 * NaN is NaN.
        is_loaded = is_key[:, None] & (i < D)[None, :]
        # [BLOCK_KEYS, D_PAD] each
        k = tl.load(kv_at, mask=is_loaded, other=0.0)
        v = tl.load(kv_at + pool_side, mask=is_loaded, other=0.0)
        if HAS_SCALES:
            k, v = widened(k, q.dtype), widened(v, q.dtype)
        else:
            k, v = k.to(q.dtype), v.to(q.dtype)
        # [BLOCK_M, BLOCK_KEYS]; "ieee": float32 is multiplied as float32, not as TF32
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if HAS_SCALES:
            scales_at = scales_ptr + head_at // 4 + key % BLOCK_SIZE
            v_scale = loaded(scales_at + pool_side // 4, is_key)
            scores *= loaded(scales_at, is_key)[None, :]
        if HAS_SOFTCAP:
            scores = capped(scores, scale, softcap)
        # Most tiles are seen whole, by all queries.
        is_edge = first_key + BLOCK_KEYS > whole_end
        if HAS_WINDOW:
            is_edge = is_edge | (first_key < whole_begin)
        if is_edge:
            is_seen = is_key[None, :] & (key[None, :] <= position[:, None])
            if HAS_WINDOW:
                is_seen = is_seen & (key[None, :] > position[:, None] - window)
            scores = tl.where(is_seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * to_log2)
        # Until a row has seen a key its maximum is -inf, and -inf - -inf is NaN.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores * to_log2 - shift[:, None])
        keep = tl.exp2(top - shift)
        total = total * keep + tl.sum(weights, 1)
        if HAS_SCALES:  # fma: else Triton folds the addition into the dot's sum
            weights = (weights * v_scale[None, :]).to(v.dtype)
            part = tl.dot(weights, v, input_precision="ieee")
            acc = tl.fma(acc, tl.broadcast_to(keep[:, None], acc.shape), part)
        else:
            weights = weights.to(v.dtype)
            acc = tl.dot(weights, v, acc * keep[:, None], input_precision="ieee")
        top = new_top
        block = next_block
    is_out = is_query[:, None] & (i < D)[None, :]
    if used == 1:
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head, mask=is_query, other=0.0) * LOG2_E
            highest = tl.maximum(top, sink)
            keep = tl.exp2(top - highest)
            total = total * keep + tl.exp2(sink - highest)
            acc = acc * keep[:, None]
        y = acc / tl.where(is_query, total, 1.0)[:, None]
        out_at = out_ptr + ((packed * HEADS + head) * D)[:, None] + i[None, :]
        tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=is_out)
    else:
        # int64: P * Hq * splits * D passes 2**31 at 32,768 decodes of 32 heads
        part = ((tl.load(tile_ptr + 3) + token).to(tl.int64) * HEADS + head) * splits + split
        tl.store(maxima_ptr + part, top, mask=is_query)
        tl.store(sums_ptr + part, total, mask=is_query)
        tl.store(parts_ptr + (part * D)[:, None] + i[None, :], acc, mask=is_out)
