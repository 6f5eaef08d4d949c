"""Attention by the definition, in float64, query by query and head by head, and cases for it."""

from __future__ import annotations

import math

import torch

from streamer.kernels import ops
from streamer.kernels.ops import AttentionBatch


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def attention_oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [L, Hq, D] are the last of the k and v [S, Hk, D] of one contiguous sequence."""
    queries, heads, dim = q.shape
    context, kv_heads, _ = k.shape
    out = torch.zeros(queries, heads, dim, dtype=torch.float64)
    for i in range(queries):
        end = context - queries + i + 1
        seen = slice(0 if sliding_window is None else max(0, end - sliding_window), end)
        for h in range(heads):
            g = h // (heads // kv_heads)
            scores = k[seen, g].double() @ q[i, h].double() * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.exp()
            total = weights.sum()
            if sinks is not None:
                total += math.exp(float(sinks[h]))
            out[i, h] = weights / total @ v[seen, g].double()
    return out


class Case:
    """Random rows in a pool whose blocks are handed out in random order."""

    def __init__(
        self,
        rows: list[tuple[int, int]],
        *,
        heads: int,
        kv_heads: int,
        dim: int,
        block: int,
        dtype: torch.dtype = torch.float32,
        layers: int = 3,
        layer: int = 1,
        seed: int = 0,
    ) -> None:
        """rows are (query_len, context_len); K and V before a row's query are stored already."""
        rng = torch.Generator().manual_seed(seed)
        self.query_lens = [query for query, _ in rows]
        self.context_lens = [context for _, context in rows]
        widths = [-(-context // block) for context in self.context_lens]
        blocks = torch.randperm(sum(widths) + 3, generator=rng).tolist()
        self.pool = torch.full((len(blocks), layers, 2, kv_heads, block, dim), torch.nan)
        self.pool = self.pool.to(dtype)
        self.layer = layer
        self.tables = torch.full((len(rows), max(widths)), blocks.pop())
        self.k = [torch.randn(c, kv_heads, dim, generator=rng).to(dtype) for _, c in rows]
        self.v = [torch.randn(c, kv_heads, dim, generator=rng).to(dtype) for _, c in rows]
        self.q = [torch.randn(n, heads, dim, generator=rng).to(dtype) for n, _ in rows]
        slots: list[int] = []
        for r, (query, context) in enumerate(rows):
            table = [blocks.pop() for _ in range(widths[r])]
            self.tables[r, : len(table)] = torch.tensor(table)
            for p in range(context):
                if p >= context - query:
                    slots.append(table[p // block] * block + p % block)
                else:
                    self.pool[table[p // block], layer, 0, :, p % block] = self.k[r][p]
                    self.pool[table[p // block], layer, 1, :, p % block] = self.v[r][p]
        self.slots = torch.tensor(slots)
        self.block = block

    def batch(self) -> AttentionBatch:
        """A fresh batch, as one step would make it."""
        return AttentionBatch(
            query_lens=self.query_lens,
            context_lens=self.context_lens,
            block_tables=self.tables,
            slots=self.slots,
            block_size=self.block,
        )

    def new_k(self) -> torch.Tensor:
        """K of the step's packed tokens."""
        return torch.cat([k[-n:] for k, n in zip(self.k, self.query_lens, strict=True)])

    def new_v(self) -> torch.Tensor:
        """V of the step's packed tokens."""
        return torch.cat([v[-n:] for v, n in zip(self.v, self.query_lens, strict=True)])

    def run(self, kernels: ops.Backend, scale: float, **options: object) -> torch.Tensor:
        """The backend's output: the step's store, then its attention."""
        layer, batch = ops.layer_view(self.pool, self.layer), self.batch()
        kernels.store_kv(self.new_k(), self.new_v(), layer, batch)
        return kernels.paged_attention(torch.cat(self.q), layer, batch, scale, **options)  # type: ignore[arg-type]

    def expected(self, scale: float, **options: object) -> torch.Tensor:
        """The oracle's output."""
        return torch.cat(
            [
                attention_oracle(q, k, v, scale, **options)  # type: ignore[arg-type]
                for q, k, v in zip(self.q, self.k, self.v, strict=True)
            ]
        )
