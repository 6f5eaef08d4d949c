"""The decoder's parts: where its weights come from, the rotary table, attention, feed-forward.

Each part is built from its tensors and called with packed tokens [T, ...]; no part knows a
checkpoint, a family or a Plan. Called by decoder.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, Protocol

import torch

from streamer.kernels import ops
from streamer.model.rope import RopeConfig, inverse_frequencies
from streamer.model.runner.device import CPU

Tables = tuple[torch.Tensor, torch.Tensor]  # cos and sin of Backend.rope_tables

ROPE_CHUNK = 4096  # positions in a new table, at most


class WeightSource(Protocol):
    """Where a decoder takes its tensors from, once each, in the dtype and on the device that it
    computes in."""

    dtype: torch.dtype
    device: torch.device

    def take(self, name: str) -> torch.Tensor:
        """A tensor that is dense whatever the checkpoint's format: a norm's, a bias."""
        ...

    def weight(self, module: str) -> ops.Weight:
        """The matrix [N, K] of a module such as model.layers.0.mlp.up_proj, or of an embedding."""
        ...

    def layer_done(self) -> None:
        """One more layer is built (for the progress bar)."""
        ...


@lru_cache
def has_bf16() -> bool:
    """Whether torch's operators compute in bfloat16 here rather than emulating it slowly. The
    native kernels do on every CPU: they widen it to float32, and read half the memory."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False


class RopeTable:
    """cos and sin by position, as Backend.rope_and_store reads them; grows on demand.

    length  positions in the table
    """

    def __init__(
        self,
        kernels: ops.Backend,
        rope: RopeConfig,
        dtype: torch.dtype,
        device: torch.device = CPU,
    ) -> None:
        self._kernels = kernels
        self._rope = rope
        self._dtype = dtype
        self._device = device
        self._tables = self._build(min(ROPE_CHUNK, rope.limit))

    def up_to(self, end: int) -> Tables:
        """Tables of at least the positions below `end`; tables returned before do not change."""
        if end > self.length:
            self._tables = self._build(max(end, 2 * self.length))
        return self._tables

    def _build(self, num_positions: int) -> Tables:
        self.length = num_positions
        positions = torch.arange(num_positions, dtype=torch.float32)
        angles = (positions[:, None] * inverse_frequencies(self._rope)).to(self._device)
        factor = self._rope.attention_factor
        if factor == 1.0:
            return self._kernels.rope_tables(angles, self._dtype)
        cos, sin = self._kernels.rope_tables(angles, torch.float32)
        return (cos * factor).to(self._dtype), (sin * factor).to(self._dtype)


class Step:
    """What every layer of one step shares: the batch, the tokens' positions and rotary tables."""

    __slots__ = ("batch", "positions", "tables")

    def __init__(self, batch: ops.AttentionBatch, positions: torch.Tensor, tables: Tables) -> None:
        self.batch = batch
        self.positions = positions
        self.tables = tables


class HeadNorms(NamedTuple):
    """Norms of every head's query and key, before rope; their weights [D]."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


class Attention:
    """Grouped-query attention over the block pool, with one merged q, k, v projection."""

    def __init__(
        self,
        kernels: ops.Backend,
        *,
        qkv: ops.Linear,
        out: ops.Linear,
        head_dim: int,
        window: int | None,
        norms: HeadNorms | None,
    ) -> None:
        self._kernels = kernels
        self._qkv = qkv
        self._out = out
        self._window = window
        self._norms = None if norms is None else (norms.query, norms.key)
        self._eps = 0.0 if norms is None else norms.eps
        self._scale = head_dim**-0.5

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, pool_layer: torch.Tensor, step: Step
    ) -> None:
        """Add the attention of x [T, H] to residual [T, H]; stores K and V before it reads."""
        q = self._kernels.rope_and_store(
            self._qkv(x),
            step.tables,
            step.positions,
            pool_layer,
            step.batch,
            norms=self._norms,
            eps=self._eps,
        )
        y = self._kernels.paged_attention(
            q, pool_layer, step.batch, self._scale, sliding_window=self._window
        )
        self._out(y.view(y.shape[0], -1), add_to=residual)


class FeedForward:
    """Gated feed-forward with one merged gate and up projection."""

    def __init__(self, *, gate_up: ops.Linear, down: ops.Linear) -> None:
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        """Add the feed-forward of x [T, H] to residual [T, H]."""
        self._down(self._gate_up(x), add_to=residual)
