"""The GPU's ops on CPU tensors, by plain torch: steps of the CUDA runner without the interpreter.

The rows of a batch for graphs, which are known on the device alone, are read from its tensors and
computed as reference.py computes any other. Sampling and the making of decode steps are not among
these ops: they stay Triton's.
"""

from __future__ import annotations

from typing import Any

import torch

from streamer.kernels import ops, reference
from streamer.kernels.batch import AttentionBatch


class TorchOps:
    """reference.py, also for batches of fixed_step.FixedStep."""

    def __getattr__(self, name: str) -> Any:
        return getattr(reference, name)

    def rope_and_store(
        self,
        qkv: torch.Tensor,
        tables: Any,
        positions: torch.Tensor,
        pool_layer: torch.Tensor,
        batch: AttentionBatch,
        **more: Any,
    ) -> torch.Tensor:
        """Padding stores nothing, and its q is NaN; q is computed for real rows alone."""
        kept, real = _real(batch)
        heads = qkv.shape[1] // pool_layer.shape[4] - 2 * pool_layer.shape[2]
        q = torch.full((len(qkv), heads, pool_layer.shape[4]), torch.nan, dtype=qkv.dtype)
        if len(kept):
            q[kept] = reference.rope_and_store(
                qkv[kept], tables, positions[kept], pool_layer, real, **more
            )
        return q

    def store_kv(
        self, k: torch.Tensor, v: torch.Tensor, pool_layer: torch.Tensor, batch: AttentionBatch
    ) -> None:
        kept, real = _real(batch)
        if len(kept):
            reference.store_kv(k[kept], v[kept], pool_layer, real)

    def paged_attention(
        self, q: torch.Tensor, pool_layer: torch.Tensor, batch: AttentionBatch, *a: Any, **b: Any
    ) -> torch.Tensor:
        """Outputs of padding are NaN."""
        kept, real = _real(batch)
        out = torch.full_like(q, torch.nan)
        if len(kept):
            out[kept] = reference.paged_attention(q[kept], pool_layer, real, *a, **b)
        return out


def _real(batch: AttentionBatch) -> tuple[torch.Tensor, ops.AttentionBatch]:
    """(indices of the tokens of real rows, their batch)."""
    rows = batch.derived.get("rows")
    if rows is None:
        return torch.arange(batch.num_tokens), batch
    contexts, starts = rows.contexts.tolist(), rows.starts.tolist()
    real = [row for row, context in enumerate(contexts) if context]
    table_of = {row: table for row, _, table, _ in rows.tiles.tolist()}
    kept = torch.tensor([n for r in real for n in range(starts[r], starts[r + 1])]).long()
    return kept, AttentionBatch(
        query_lens=[starts[r + 1] - starts[r] for r in real],
        context_lens=[contexts[r] for r in real],
        block_tables=rows.tables[[table_of[r] for r in real]],
        slots=batch.slots[kept],
        block_size=batch.block_size,
    )
