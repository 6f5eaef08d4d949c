"""The native backend: ops.CpuBackend on the team of threads that runs the C files beside this.

Functions issue one op each (see program.py). Other modules do not rely on the layouts of its packed
weights and of its pool.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from streamer.kernels import reference
from streamer.kernels.batch import AttentionBatch, Forward, Limits
from streamer.kernels.cpu import MAX_HEAD, MAX_SHARE
from streamer.kernels.cpu.linear import embedding as embedding
from streamer.kernels.cpu.linear import pack_weight as pack_weight
from streamer.kernels.cpu.memory import in_huge_pages
from streamer.kernels.cpu.program import Again, Call, Count, Kind, Program, issue, new_rows, team
from streamer.kernels.draws import Draws

MAX_DRAW = 500_000  # vocabulary for which draw.c has scratch memory
TILE_QUERIES = 64  # as in attention.c
CODES = {torch.int8: 1, torch.float8_e4m3fn: 2}  # flags of a quantized pool's dtype, as in codes.c
TABLES, TABLE_STRIDE = 7, 5  # indices among attention.c's pointers and its integers

Ints = NDArray[np.int64]

rope_tables = reference.rope_tables
set_threads, stop = team.set_threads, team.stop

_best = Again()


def new_pool(
    num_blocks: int,
    layers: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """See Backend.new_pool; ValueError for heads beyond the C files' limits."""
    if head_dim > MAX_HEAD:
        raise ValueError(
            f"head_dim {head_dim} exceeds {MAX_HEAD}; STREAMER_KERNELS=torch has no such limit"
        )
    shape = (num_blocks, layers, block_size, kv_heads, head_dim)
    return in_huge_pages(reference.new_pool(*shape, dtype, device))


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """See Backend.rms_norm."""
    bound = x if rows is None else rows
    out = new_rows(bound, x.shape[1], dtype=x.dtype)
    sizes = (x.shape[1], x.stride(0))
    issue(Call(Kind.NORM, bound, x.dtype, (x, weight, out, rows), sizes, (eps,)))
    return out


def rope_and_store(
    qkv: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    pool_layer: torch.Tensor,
    batch: AttentionBatch,
    *,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """See Backend.rope_and_store."""
    kv_heads, _, dim = pool_layer.shape[2:]
    block = batch.block_size
    heads = qkv.shape[1] // dim - 2 * kv_heads
    q = new_rows(qkv, heads, dim, dtype=qkv.dtype)
    q_norm, k_norm = norms or (None, None)
    issue(
        Call(
            Kind.ROPE,
            qkv,
            qkv.dtype,
            (qkv, q_norm, k_norm, *tables, positions, batch.slots, pool_layer, q),
            (heads, kv_heads, dim, tables[0].shape[1], block, pool_layer.stride(0), qkv.stride(0)),
            (eps,),
            CODES.get(pool_layer.dtype, 0),
        )
    )
    return q


def store_kv(
    k: torch.Tensor, v: torch.Tensor, pool_layer: torch.Tensor, batch: AttentionBatch
) -> None:
    """See Backend.store_kv."""
    kv_heads, _, dim = pool_layer.shape[2:]
    strides = (k.stride(0), k.stride(1), v.stride(0), v.stride(1))
    issue(
        Call(
            Kind.STORE,
            k,
            k.dtype,
            (k, v, batch.slots, pool_layer),
            (kv_heads, dim, batch.block_size, pool_layer.stride(0), *strides),
            flags=CODES.get(pool_layer.dtype, 0),
        )
    )


class Rows:
    """A batch as attention.c reads it, all int64.

    starts [R + 1], contexts [R], tables [R, W] and tiles [n, 2]: (row, first query token of it)
    """

    __slots__ = ("contexts", "per_tile", "starts", "tables", "tiles")

    def __init__(self, starts: torch.Tensor, contexts: torch.Tensor, tables: torch.Tensor) -> None:
        self.starts = starts
        self.contexts = contexts
        self.tables = tables
        self.tiles = torch.empty(0)
        self.per_tile = 0

    @classmethod
    def of(cls, batch: AttentionBatch, per_tile: int) -> Rows:
        """Rows of this batch, made by the first layer of a step and used by all."""
        rows: Rows | None = batch.derived.get("rows")
        if rows is None:
            starts, contexts = map(torch.from_numpy, (batch.query_starts, batch.context_lens))
            rows = batch.derived["rows"] = cls(starts, contexts, batch.block_tables)
        if rows.per_tile == 0:
            rows.per_tile = per_tile
        if not len(rows.tiles):
            rows.tiles = torch.from_numpy(tiles_of(batch.query_lens, per_tile))
        return rows


def tiles_of(query_lens: Ints, per_tile: int) -> Ints:
    """[tiles, 2]: every row's queries, `per_tile` at a time."""
    counts = -(-query_lens // per_tile)
    rows = np.repeat(np.arange(len(query_lens)), counts)
    first = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack((rows, first * per_tile), 1)


def queries_per_tile(heads: int, kv_heads: int) -> int:
    """Query tokens of a tile: with all query heads of a KV head, TILE_QUERIES rows or one token."""
    return max(1, TILE_QUERIES // (heads // kv_heads))


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
    heads, (kv_heads, _, dim) = q.shape[1], pool_layer.shape[2:]
    if heads // kv_heads > MAX_SHARE:
        raise ValueError(
            f"{heads} query heads share {kv_heads} KV heads, at most {MAX_SHARE} may share one; "
            "STREAMER_KERNELS=torch has no such limit"
        )
    if q.stride(1) != dim or q.stride(2) != 1:
        q = q.contiguous()
    rows = Rows.of(batch, queries_per_tile(heads, kv_heads))
    out = new_rows(q, heads, dim, dtype=q.dtype)
    sinks = None if sinks is None else sinks.float().contiguous()
    window = sliding_window or 0
    issue(
        Call(
            Kind.ATTENTION,
            rows.tiles,
            q.dtype,
            (q, pool_layer, out, sinks, rows.tiles, rows.starts, rows.contexts, rows.tables),
            (
                heads,
                kv_heads,
                dim,
                batch.block_size,
                pool_layer.stride(0),
                rows.tables.stride(0),
                q.stride(0),
                window,
            ),
            (scale, softcap or 0.0),
            CODES.get(pool_layer.dtype, 0),
        )
    )
    return out


def best(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See Backend.best."""
    if not _best.is_of(x):
        values, ids = torch.empty(x.shape[0]), torch.empty(x.shape[0], dtype=torch.int64)
        call = Call(Kind.BEST, x, x.dtype, (x, values, ids), (x.shape[1], x.stride(0)))
        _best.keep(x, call, (values, ids))
    _best.run()
    values, ids = _best.results
    return values, ids


def top(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See CpuBackend.top."""
    shape = (x.shape[0], min(count, x.shape[1]))
    values, ids = torch.empty(shape), torch.empty(shape, dtype=torch.int64)
    if values.numel():
        issue(Call(Kind.TOP, x, x.dtype, (x, values, ids), (x.shape[1], x.stride(0), shape[1])))
    return values, ids


def ban(
    x: torch.Tensor, rows: torch.Tensor, words: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See CpuBackend.ban."""
    values, ids = torch.empty(len(rows)), torch.empty(len(rows), dtype=torch.int64)
    sizes = (x.shape[1], x.stride(0), words.shape[1])
    issue(Call(Kind.BAN, rows, x.dtype, (x, rows, words, values, ids), sizes))
    return values, ids


def draw(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """See CpuBackend.draw."""
    if logits.shape[1] > MAX_DRAW:
        return reference.draw(logits, draws)
    ids = torch.empty(len(draws.rows), dtype=torch.int64)
    pointers = (logits, draws.rows, draws.top_k, draws.settings, draws.origin, ids)
    sizes = (logits.shape[1], logits.stride(0))
    issue(Call(Kind.DRAW, draws.rows, logits.dtype, pointers, sizes))
    return ids


def copy_blocks(pool: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """See Backend.copy_blocks."""
    _copy(pool, pool, torch.stack((src, dst), 1))


def swap_blocks(
    src_pool: torch.Tensor, dst_pool: torch.Tensor, pairs: list[tuple[int, int]]
) -> None:
    """See Backend.swap_blocks."""
    if pairs:
        _copy(src_pool, dst_pool, torch.tensor(pairs))


def _copy(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    num_bytes = source.stride(0) * source.element_size()
    issue(Call(Kind.COPY, pairs, torch.float32, (source, target, pairs), (num_bytes,)))


def graph(forward: Forward, limits: Limits) -> Graph:
    """See Backend.graph."""
    return Graph(forward, limits)


class Graph:
    """A forward recorded on fixed inputs, which every step overwrites; block tables are read
    from the batch's own memory."""

    def __init__(self, forward: Forward, limits: Limits) -> None:
        self._forward = forward
        self._limits = limits
        max_tokens = limits.max_tokens
        tokens, positions, last, slots = torch.zeros(4, max_tokens, dtype=torch.int64)
        starts = torch.zeros(limits.max_rows + 1, dtype=torch.int64)
        contexts = torch.zeros(limits.max_rows, dtype=torch.int64)
        rows = Rows(starts, contexts, torch.zeros(1, 1, dtype=torch.int64))
        rows.tiles = torch.zeros(max_tokens, 2, dtype=torch.int64)
        batch = AttentionBatch.fixed(slots, limits.block_size, {"rows": rows})
        inputs = {
            Count.TOKENS: (tokens, positions, slots),
            Count.DRAWN: (last,),
            Count.TILES: (rows.tiles,),
        }
        self._program = Program.record(inputs, lambda: forward(tokens, positions, batch, last))
        self._per_tile = rows.per_tile
        self._tables = rows.tables
        ops = self._program.ops
        self._readers = np.flatnonzero(ops["kind"] == Kind.ATTENTION)
        # For a few numbers, a copy through numpy takes a fifth of torch's time.
        fixed = (tokens, positions, slots, last, starts, contexts, rows.tiles)
        self._fixed: list[Ints] = [tensor.numpy() for tensor in fixed]
        self._in_order = np.arange(max(max_tokens, limits.max_rows + 1))
        self._given = tokens, positions, slots  # of the latest step
        self._arrays = self._fixed[:3]
        self._num_steady = -1  # rows of the latest step, if each had one token and drew
        self._begun: tuple[AttentionBatch, int] | None = None  # with its longest context then
        self._one_tile_each = np.stack((self._in_order, np.zeros_like(self._in_order)), 1)

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        last: torch.Tensor | None,
    ) -> torch.Tensor:
        """See ops.Forward."""
        begun, self._begun = self._begun, None
        if begun is not None:
            count = batch.num_tokens
            if begun == (batch, batch.max_context) and last is None:
                out = self._program.join((count, count, count), self)
                if out is not None:
                    return out
            team.stop()  # before the inputs change
        if batch.num_tokens > self._limits.max_tokens or batch.num_rows > self._limits.max_rows:
            return self._forward(tokens, positions, batch, last)
        return self._program.run(self.fill(tokens, positions, batch, last))

    def begin(self, tokens: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch) -> bool:
        """See ops.Graph."""
        if not team.has_others:
            return False
        team.stop()
        self._program.begin(self.fill(tokens, positions, batch, None), self)
        self._begun = batch, batch.max_context
        return True

    def fill(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        last: torch.Tensor | None,
    ) -> tuple[int, int, int]:
        """Write a step within the limits into the inputs -> numbers of tokens, draws and tiles."""
        at_tokens, at_positions, at_slots, at_last, starts, contexts, at_tiles = self._fixed
        count, num_rows = batch.num_tokens, batch.num_rows
        given = self._given
        if tokens is not given[0] or positions is not given[1] or batch.slots is not given[2]:
            self._given = given = tokens, positions, batch.slots
            self._arrays = [tensor.numpy() for tensor in given]  # 10 us with cold caches
        at_tokens[:count], at_positions[:count], at_slots[:count] = self._arrays
        contexts[:num_rows] = batch.context_lens
        self._point_at(batch.block_tables)
        is_even = count == num_rows  # one token a row
        is_steady = is_even and last is None
        if is_steady and count == self._num_steady:
            return count, count, count  # the rest is as it was
        self._num_steady = count if is_steady else -1
        drawn = count if last is None else len(last)
        tiles = (
            self._one_tile_each[:count] if is_even else tiles_of(batch.query_lens, self._per_tile)
        )
        at_last[:drawn] = self._in_order[:drawn] if last is None else last.numpy()
        starts[: num_rows + 1] = batch.query_starts
        at_tiles[: len(tiles)] = tiles
        return count, drawn, len(tiles)

    def _point_at(self, tables: torch.Tensor) -> None:
        """Make the attention ops read these tables, which are kept alive until the next call."""
        before, self._tables = self._tables, tables
        if tables is before:
            return
        ops = self._program.ops
        if tables.data_ptr() != before.data_ptr():
            ops["p"][self._readers, TABLES] = tables.data_ptr()
        if tables.stride(0) != before.stride(0):
            ops["n"][self._readers, TABLE_STRIDE] = tables.stride(0)
