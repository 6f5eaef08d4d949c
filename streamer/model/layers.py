"""The decoder's parts: packed linear layers, the rotary table, attention and feed-forward blocks.

Each part is built from its tensors and called with packed tokens [T, ...]; no part knows a
checkpoint, a family or a Plan. Called by decoder.py, Linear by fallback.py too.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F

from streamer.kernels import ops
from streamer.model.rope import RopeConfig, inverse_frequencies

ROPE_CHUNK = 4096  # positions by which the table grows at least


@lru_cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch and CPU multiply by packed weights, found out by doing it once."""
    if not torch._C._has_mkldnn:
        return False
    weight = torch.eye(16, dtype=dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        y = torch.ops.mkldnn._linear_pointwise(weight, packed, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return bool(torch.equal(y, weight))


@lru_cache
def has_bf16() -> bool:
    """Whether this CPU computes in bfloat16 rather than emulating it slowly."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False


_SINGLE_ROW_DIFFERS: dict[tuple[torch.Size, torch.dtype, int], bool] = {}  # what probes found


class Linear:
    """x [T, K] -> x @ weight.T + bias [T, N], with weights packed once (oneDNN) where possible.

    Packed weights read 1.5 (bf16) to 2.4 (fp32) times faster than F.linear at 1 to 32 rows (2 cores
    of an EPYC Zen 5, 2026-11-20), and a row's result does not depend on how many rows there are,
    with one exception: a single row of a long K takes another path. A probe finds that at packing,
    and such a layer computes two rows instead of one.
    """

    __slots__ = ("_bias", "_pads", "_weight", "is_packed")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.is_packed = weight.device.type == "cpu" and can_pack(weight.dtype)
        self._bias = bias
        self._pads = False
        if self.is_packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
            self._pads = self._single_row_differs(weight)
        else:
            self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] (T at least 1) -> [T, N]."""
        if not self.is_packed:
            return F.linear(x, self._weight, self._bias)
        if self._pads and x.shape[0] == 1:
            return self._multiply(x.expand(2, -1))[:1]
        return self._multiply(x)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return y

    def _single_row_differs(self, weight: torch.Tensor) -> bool:
        """Probe once for a shape: layers share theirs, and a large model has hundreds."""
        key = (weight.shape, weight.dtype, torch.get_num_threads())
        if key not in _SINGLE_ROW_DIFFERS:
            x = torch.linspace(-1.3, 1.7, 2 * weight.shape[1]).reshape(2, -1).to(weight.dtype)
            same = torch.equal(self._multiply(x[:1]), self._multiply(x)[:1])
            _SINGLE_ROW_DIFFERS[key] = not same
        return _SINGLE_ROW_DIFFERS[key]


class RopeTable:
    """cos and sin by position, in the layout of ops.rope; grows to the positions asked for."""

    def __init__(self, rope: RopeConfig, dtype: torch.dtype) -> None:
        self._rope = rope
        self._dtype = dtype
        self._cos, self._sin = self._build(min(ROPE_CHUNK, rope.limit))

    def rows(self, positions: torch.Tensor, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows for positions [T], all below `end` -> two of [T, dim]."""
        if end > self._cos.shape[0]:
            self._cos, self._sin = self._build(max(end, 2 * self._cos.shape[0]))
        return self._cos[positions], self._sin[positions]

    def _build(self, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(num_positions, dtype=torch.float32)
        angles = positions[:, None] * inverse_frequencies(self._rope)
        factor = self._rope.attention_factor
        if factor == 1.0:
            return ops.rope_tables(angles, self._dtype)
        cos, sin = ops.rope_tables(angles, torch.float32)
        return (cos * factor).to(self._dtype), (sin * factor).to(self._dtype)


class Step:
    """What every layer of one step shares: the batch and the tokens' rotary rows."""

    __slots__ = ("batch", "cos", "sin")

    def __init__(self, batch: ops.AttentionBatch, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self.batch = batch
        self.cos = cos
        self.sin = sin


class Attention:
    """Grouped-query attention over the block pool, with one merged q, k, v projection."""

    def __init__(
        self,
        *,
        qkv: Linear,
        out: Linear,
        heads: int,
        kv_heads: int,
        head_dim: int,
        window: int | None,
        eps: float,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
    ) -> None:
        self._qkv = qkv
        self._out = out
        self._heads, self._kv_heads, self._head_dim = heads, kv_heads, head_dim
        self._window = window
        self._eps = eps
        self._q_norm, self._k_norm = q_norm, k_norm
        self._scale = head_dim**-0.5

    def __call__(self, x: torch.Tensor, pool_layer: torch.Tensor, step: Step) -> torch.Tensor:
        """x [T, H] -> [T, H]; stores this step's K and V before any row reads."""
        heads, kv = self._heads, self._kv_heads
        qkv = self._qkv(x).view(x.shape[0], heads + 2 * kv, self._head_dim)
        if self._q_norm is not None and self._k_norm is not None:
            q = ops.rope(ops.rms_norm(qkv[:, :heads], self._q_norm, self._eps), step.cos, step.sin)
            k = qkv[:, heads : heads + kv]
            k = ops.rope(ops.rms_norm(k, self._k_norm, self._eps), step.cos, step.sin)
        else:
            qk = ops.rope(qkv[:, : heads + kv], step.cos, step.sin)
            q, k = qk[:, :heads], qk[:, heads:]
        ops.store_kv(k, qkv[:, heads + kv :], pool_layer, step.batch)
        y = ops.paged_attention(q, pool_layer, step.batch, self._scale, sliding_window=self._window)
        return self._out(y.view(x.shape[0], heads * self._head_dim))


class FeedForward:
    """Gated feed-forward with one merged gate and up projection."""

    def __init__(self, *, gate_up: Linear, down: Linear, activation: str) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] -> [T, H]."""
        gate_up = self._gate_up(x)
        if self._activation == "silu":
            return self._down(ops.silu_mul(gate_up))
        return self._down(ops.gelu_mul(gate_up, tanh=self._activation == "gelu_tanh"))
