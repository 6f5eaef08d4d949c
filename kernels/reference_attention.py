"""Paged attention in plain torch: rows are sorted into groups, each gathered and multiplied whole.

A group is a few rows with the same number of query tokens, small enough that the K and V it gathers
stay in cache. Groups are planned once a step and used by every layer. Called through reference.py.
"""

# Measured on 2 shared cores of an EPYC Zen 5, torch 2.13, 2026-11-20: us a layer, single runs,
# so indications only. "small" has 4 query and 2 KV heads of 64 and 6 layers, "half" 16 and 8 of 128
# and 28.
# - Block-major pool (one block holds all layers) against a pool per layer, fp32. Small: decode of
#   32 rows at 200 tokens 649 / 637, prefill of 512 1543 / 1518, 256 tokens at 1024 2171 / 2277;
#   half: 5730 / 5613 (rows of 100 to 317 tokens), 21275 / 21689, 25806 / 31432. No difference
#   beyond noise, so block-major, where a swap or a copy is one piece.
# - Decode of 32 rows at 200 tokens, rows one by one against groups: fp32 2406 / 649 small, 4875 /
#   5233 half; bf16 5280 / 1041 and 15600 / 5900. Alone or grouped, a decode row in fp32 is bit-
#   equal (tested), so grouping costs no exactness.
# - Half's 32 rows in one gather instead of groups of 4 MB: 22400 (fresh pages every time).
# - Head-major blocks, gathered whole: a quarter off the gather, but then the unused tail of each
#   last block has to be cleared (25 us): not worth another layout.
# - torch's fused attention for decode takes 1.2 to 3 times as long as these two matmuls in
#   fp32, 3 to 20 times in bf16. For a prefill of 512, without the gather, on one core: fp32 3987
#   against 5116 small and 32294 against 39717 half; bf16 3574 against 1859 and 34736 against
#   15446. One path serves both.

from __future__ import annotations

import torch

from streamer.kernels.batch import AttentionBatch
from streamer.kernels.quantized import LIMITS, scales_of

# Bytes of K and V a group gathers: beyond the cache each new page costs more than the arithmetic.
GROUP_BYTES = 4 << 20
# Softmax adds in vectors of at most 16 lanes; keys are padded to a multiple of this.
LANES = 16
# Rows with more query tokens than this are alone in their group.
MAX_SHARED_QUERIES = 8
# Query tokens multiplied at once; bounds the scores to heads * QUERY_TILE * context.
QUERY_TILE = 256


class _Tile:
    """Query tokens [first, last) of a group's rows, over keys [key_first, key_last) of them.

    mask  [n, 1, 1, last - first, M] added to the scores' last M columns; None: no key is masked
    """

    __slots__ = ("first", "key_first", "key_last", "last", "mask")

    def __init__(
        self, first: int, last: int, key_first: int, key_last: int, mask: torch.Tensor | None
    ) -> None:
        self.first = first
        self.last = last
        self.key_first = key_first
        self.key_last = key_last
        self.mask = mask


class _Group:
    """Rows computed together: n rows of `queries` tokens, over `keys` gathered keys each.

    start  their first token in sorted order
    index  [2 * n * Hk * keys] rows of the pool layer seen as [.., D]: K of all, then V of all
    place  blocks and offsets [n, keys] of the keys
    """

    __slots__ = ("index", "keys", "n", "place", "queries", "start", "tiles")

    def __init__(
        self,
        start: int,
        n: int,
        queries: int,
        keys: int,
        index: torch.Tensor,
        place: tuple[torch.Tensor, torch.Tensor],
        tiles: list[_Tile],
    ) -> None:
        self.start = start
        self.n = n
        self.queries = queries
        self.keys = keys
        self.index = index
        self.place = place
        self.tiles = tiles

    def gather(
        self, flat: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """K and V [2, n, Hk, keys, D] in the dtype to compute in; codes times their scales."""
        dim = flat.shape[1]
        if scales is None:
            return flat.index_select(0, self.index).view(2, self.n, -1, self.keys, dim)
        codes = flat.view(torch.int8).index_select(0, self.index).view(flat.dtype)
        factors = scales[self.place[0], :, :, self.place[1]].permute(2, 0, 3, 1)
        wide = codes.view(2, self.n, -1, self.keys, dim).float()
        return wide.mul_(factors.unsqueeze(-1)).to(dtype)


class _Layout:
    """A step's groups; `order` sorts its tokens into theirs, `back` undoes it (None: in order)."""

    __slots__ = ("back", "groups", "order")

    def __init__(
        self, groups: list[_Group], order: torch.Tensor | None, back: torch.Tensor | None
    ) -> None:
        self.groups = groups
        self.order = order
        self.back = back


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
    """See Backend.paged_attention."""
    key = (sliding_window, pool_layer.stride(), pool_layer.dtype, q.dtype)
    layout: _Layout | None = batch.derived.get(key)
    if layout is None:
        layout = batch.derived[key] = _plan(batch, pool_layer, sliding_window, q.dtype)
    head_dim = q.shape[2]
    num_blocks, _, kv_heads, rows, _ = pool_layer.shape
    flat = pool_layer.as_strided(
        (
            (num_blocks - 1) * (pool_layer.stride(0) // head_dim) + 2 * rows * kv_heads,
            head_dim,
        ),
        (head_dim, 1),
    )
    scales = scales_of(pool_layer, batch.block_size) if pool_layer.dtype in LIMITS else None
    if layout.order is not None:
        q = q.index_select(0, layout.order)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for group in layout.groups:
        end = group.start + group.n * group.queries
        kv = group.gather(flat, scales, q.dtype)
        _attend(q[group.start : end], kv, group, scale, softcap, sinks, out)
    return out if layout.back is None else out.index_select(0, layout.back)


def _attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    group: _Group,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """One group over its gathered K and V: each tile's scores, softmax and values."""
    n, heads, dim = group.n, q.shape[1], q.shape[2]
    kv_heads = kv.shape[2]
    share = heads // kv_heads
    q = q.reshape(n, group.queries, kv_heads, share, dim).permute(0, 2, 3, 1, 4)
    o = out[group.start : group.start + n * group.queries]
    o = o.view(n, group.queries, kv_heads, share, dim).permute(0, 2, 3, 1, 4)
    for tile in group.tiles:
        queries, width = tile.last - tile.first, tile.key_last - tile.key_first
        part = q[:, :, :, tile.first : tile.last].reshape(n, kv_heads, share * queries, dim)
        k, v = kv[:, :, :, tile.key_first : tile.key_last]
        scores = torch.matmul(part * scale, k.transpose(-1, -2))
        scores = scores.view(n, kv_heads, share, queries, width)
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        if tile.mask is not None:
            scores[..., width - tile.mask.shape[-1] :].add_(tile.mask)
        weights = torch.softmax(scores, -1).view(n, kv_heads, share * queries, width)
        values = torch.matmul(weights, v).view(n, kv_heads, share, queries, dim)
        if sinks is not None:
            total = torch.logsumexp(scores.float(), -1, keepdim=True)
            sink = sinks.float().view(kv_heads, share, 1, 1)
            values.mul_(torch.sigmoid(total - sink))
        o[:, :, :, tile.first : tile.last] = values


def _plan(
    batch: AttentionBatch, pool_layer: torch.Tensor, window: int | None, dtype: torch.dtype
) -> _Layout:
    """Sort rows by query tokens and keys, cut them into groups, and list what each gathers."""
    query_lens: list[int] = batch.query_lens.tolist()
    contexts: list[int] = batch.context_lens.tolist()
    firsts = [
        0 if window is None else max(0, context - query - window + 1)
        for query, context in zip(query_lens, contexts, strict=True)
    ]
    sizes = [context - first for context, first in zip(contexts, firsts, strict=True)]
    rows = sorted(range(batch.num_rows), key=lambda r: (query_lens[r], sizes[r]))
    key_bytes = 2 * pool_layer.shape[2] * pool_layer.shape[4] * dtype.itemsize
    groups: list[_Group] = []
    start = 0
    for members in _cut(rows, query_lens, sizes, max(1, GROUP_BYTES // key_bytes)):
        groups.append(_make_group(batch, pool_layer, window, members, firsts, sizes, start, dtype))
        start += sum(query_lens[r] for r in members)
    starts: list[int] = batch.query_starts.tolist()
    tokens = [t for r in rows for t in range(starts[r], starts[r + 1])]
    if tokens == list(range(start)):
        return _Layout(groups, None, None)
    order = torch.tensor(tokens, device=pool_layer.device)
    return _Layout(groups, order, torch.argsort(order))


def _padded(size: int) -> int:
    """Keys a short row of `size` keys is padded to: four sizes an octave, all multiples of LANES.

    Depends on the row alone, and rows share a group only where it is equal: MKL sums in another
    order at other shapes (from 7 query heads a KV head on, 4% of the rows were off by 3e-7 in a
    group that padded them further than alone).
    """
    step = max(LANES, 1 << max(0, (size - 1).bit_length() - 3))
    return -(-size // step) * step


def _cut(
    rows: list[int], query_lens: list[int], sizes: list[int], max_keys: int
) -> list[list[int]]:
    """Runs of sorted rows of one shape that fit the cache together."""
    groups: list[list[int]] = []
    for r in rows:
        if groups:
            group = groups[-1]
            keys = _padded(sizes[r])
            if (
                query_lens[r] == query_lens[group[0]] <= MAX_SHARED_QUERIES
                and keys == _padded(sizes[group[0]])
                and (len(group) + 1) * keys <= max_keys
            ):
                group.append(r)
                continue
        groups.append([r])
    return groups


def _make_group(
    batch: AttentionBatch,
    pool_layer: torch.Tensor,
    window: int | None,
    members: list[int],
    firsts: list[int],
    sizes: list[int],
    start: int,
    dtype: torch.dtype,
) -> _Group:
    device, n = pool_layer.device, len(members)
    queries = int(batch.query_lens[members[0]])
    keys = max(sizes[r] for r in members)
    if queries <= MAX_SHARED_QUERIES:
        keys = _padded(keys)
    first = torch.tensor([[firsts[r]] for r in members], device=device)
    last = torch.from_numpy(batch.context_lens[members] - 1).to(device)[:, None]
    # Padding repeats the row's own last key, so that another sequence's values in the block, which
    # may be NaN, are never read (0 * NaN is NaN).
    positions = torch.minimum(first + torch.arange(keys, device=device), last)
    tables = batch.block_tables[torch.tensor(members, device=device)]
    block = tables.gather(1, positions // batch.block_size)
    dim, heads = pool_layer.shape[4], pool_layer.shape[2]
    offset = positions % batch.block_size
    at = block * (pool_layer.stride(0) // dim) + offset
    at = at[:, None, :] + torch.arange(heads, device=device)[:, None] * pool_layer.shape[3]
    index = torch.stack((at, at + pool_layer.stride(1) // dim)).view(-1)
    context = int(batch.context_lens[members[0]]) - firsts[members[0]]
    if queries > MAX_SHARED_QUERIES:
        tiles = _causal_tiles(queries, context, window, device, dtype)
    else:
        tiles = [_padded_tile(queries, keys, first, last, window, dtype)]
        if queries == 1 and all(sizes[r] == keys for r in members):
            tiles[0].mask = None
    return _Group(start, n, queries, keys, index, (block, offset), tiles)


def _padded_tile(
    queries: int,
    keys: int,
    first: torch.Tensor,
    last: torch.Tensor,
    window: int | None,
    dtype: torch.dtype,
) -> _Tile:
    """All of a group of short rows: first and last [n, 1] are their keys' positions."""
    device = first.device
    key = (first + torch.arange(keys, device=device))[:, None, :]
    query = (last - queries + 1 + torch.arange(queries, device=device))[:, :, None]
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return _Tile(0, queries, 0, keys, _additive(hidden, dtype)[:, None, None])


def _causal_tiles(
    queries: int, context: int, window: int | None, device: torch.device, dtype: torch.dtype
) -> list[_Tile]:
    """One long row, QUERY_TILE tokens at a time; `context` counts its gathered keys."""
    tiles = []
    for first in range(0, queries, QUERY_TILE):
        last = min(queries, first + QUERY_TILE)
        end = context - queries + last
        begin = 0 if window is None else max(0, end - (last - first) - window + 1)
        # Without a window all keys before the tile's own tokens are visible to all of them.
        masked = last - first if window is None else end - begin
        query = torch.arange(end - (last - first), end, device=device)[:, None]
        key = torch.arange(end - masked, end, device=device)
        hidden = key > query
        if window is not None:
            hidden |= key <= query - window
        tiles.append(_Tile(first, last, begin, end, _additive(hidden, dtype)))
    return tiles


def _additive(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
        hidden, -torch.inf
    )
