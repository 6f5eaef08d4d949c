"""The kernels' contract: what each op of a Backend takes and returns, and a device's backend.

Three modules are backends: cpu/native.py, compiled on first use; reference.py, plain torch, where
that can't be compiled; gpu/backend.py. model/runner/load.py chooses one and passes it to the model
and the runner. Ops do not check shapes, which are the caller's responsibility; AttentionBatch
checks its own when it is made.

Letters: T packed tokens, R rows, Hq query heads, Hk KV heads (Hq is a multiple of Hk), D head_dim,
B tokens a block, N blocks. Floats are fp32 or bf16, all of one call alike but for a quantized pool;
ids are int64.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Protocol

import torch

from streamer.kernels.batch import AttentionBatch as AttentionBatch
from streamer.kernels.batch import Direct as Direct
from streamer.kernels.batch import Forward as Forward
from streamer.kernels.batch import Graph as Graph
from streamer.kernels.batch import Limits as Limits
from streamer.kernels.draws import Draws as Draws
from streamer.kernels.quantized import scale_rows
from streamer.kernels.weights import QuantizedWeight as QuantizedWeight
from streamer.kernels.weights import Weight as Weight


class Linear(Protocol):
    """What pack_weight makes: a matrix [N, K] in the backend's own form, with its bias."""

    shape: tuple[int, int]

    def __call__(self, x: torch.Tensor, *, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, K] (rows of any stride) @ matrix.T + bias -> [T, N], [T, N / 2] of gates and ups.

        With add_to [T, N], which is not for gates, the product is added to it and it is returned.
        On a CPU a row's result does not depend on how many rows there are.
        """
        ...

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of the matrix for tokens [T] -> [T, K], as Backend.embedding; only of a weight that
        was packed with is_table."""
        ...


class Backend(Protocol):
    """The ops, for tensors of one device."""

    def set_threads(self, count: int) -> None:
        """Threads that the ops use from now on; to be called on the thread that calls them."""
        ...

    def new_pool(
        self,
        num_blocks: int,
        layers: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> torch.Tensor:
        """A block pool [N, layers, 2, Hk, B, D] (0: K, 1: V); one block is contiguous, all layers.

        dtype  that of the ops' floats, or int8 or float8_e4m3fn: heads then have B + scale_rows
               rows, see quantized.py, and what is stored is quantized

        Zeroed lazily where the system can: memory is touched on first use.
        """
        ...

    def graph(self, forward: Forward, limits: Limits) -> Graph:
        """`forward` as one launch, where the backend can record its ops.

        `forward` is run once, on buffers of the limits' size, and must call nothing but ops and
        views on tensors whose first dimension is T or S. Steps beyond the limits call `forward`
        directly.
        """
        ...

    def pack_weight(
        self,
        parts: Sequence[Weight],
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        *,
        dtype: torch.dtype | None = None,
        is_table: bool = False,
    ) -> Linear:
        """Weights [N_i, K], stacked to [N, K], in the backend's own form; they may be freed.
        NotFinite for what their codes hold.

        bias        [N]
        activation  silu, gelu or gelu_tanh: the first N / 2 outputs are gates, the others their
                    ups, and the result is act(gate) * up
        dtype       of x and of the result; None: that of the parts, if they are dense
        is_table    whether its rows are looked up, too (Linear.rows)
        """
        ...

    def embedding(self, tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Rows of table [V, H] for tokens [T] -> [T, H]."""
        ...

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x / sqrt(mean(x**2) + eps) * weight over the last dimension; statistics in fp32.

        x [T, H], weight [H] -> [T, H], or [S, H] of `rows` [S] alone. A family that scales by 1 + w
        adds the 1 when loading.
        """
        ...

    def rope_tables(
        self, angles: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Angles [P, rotary / 2] fp32 -> (cos, sin), each [P, rotary], for rope_and_store.

        The first half of sin is negated, so that layers need not. Scale factors (YaRN's attention
        factor) may be multiplied into both.
        """
        ...

    def rope_and_store(
        self,
        qkv: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        positions: torch.Tensor,
        pool_layer: torch.Tensor,
        batch: AttentionBatch,
        *,
        norms: tuple[torch.Tensor, torch.Tensor] | None = None,
        eps: float = 0.0,
    ) -> torch.Tensor:
        """Rotate q and k, write k and v into pool_layer at batch.slots -> q [T, Hq, D].

        qkv        [T, (Hq + 2 * Hk) * D], the three side by side
        tables     (cos, sin) of rope_tables; neox style: pairs (i, i + rotary / 2) of the first
                   `rotary` dimensions
        positions  [T]
        norms      ([D] of q, [D] of k): rms_norm of each head with `eps`, before the rotation
        """
        ...

    def store_kv(
        self, k: torch.Tensor, v: torch.Tensor, pool_layer: torch.Tensor, batch: AttentionBatch
    ) -> None:
        """Write k and v [T, Hk, D] (strides of whole D) into pool_layer at batch.slots."""
        ...

    def paged_attention(
        self,
        q: torch.Tensor,
        pool_layer: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        *,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of every row over its own context, read through its block table.

        q [T, Hq, D] (any strides) -> [T, Hq, D], contiguous. Query head h reads KV head
        h // (Hq / Hk). All rows' K and V of this step are in the pool already, so a row may read
        what another row stored in the same step.

        scale           multiplies q . k
        sliding_window  a token at position p sees positions p - sliding_window + 1 to p; None: all
        softcap         scores become softcap * tanh(score / softcap), before masking; None: off
        sinks           [Hq] a logit per head that enters the softmax's sum and adds no value
        """
        ...

    def best(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest value of each row of x [S, V] and its index -> [S] fp32, [S] ids.

        The first of equals; NaN (and any id) where the row has a NaN. On a CPU the next call for
        the same x may overwrite the result.
        """
        ...

    def copy_blocks(self, pool: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
        """pool[dst[i]] = pool[src[i]] for all i (copy-on-write); src and dst [C] share no block."""
        ...

    def swap_blocks(
        self, src_pool: torch.Tensor, dst_pool: torch.Tensor, pairs: list[tuple[int, int]]
    ) -> None:
        """dst_pool[d] = src_pool[s] for all (s, d).

        The pools have equal shapes but for N, and may be on two devices. Each d occurs once.
        """
        ...


class CpuBackend(Backend, Protocol):
    """The ops on a CPU, drawing included; on a GPU gpu/sampling/sample.py draws."""

    def top(self, x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The `count` largest values of each row of x [S, V], or all V, the largest first, and
        their indices, the lowest first of equals -> two [S, count], fp32 and ids.

        They mean nothing where the row has a NaN.
        """
        ...

    def ban(
        self, x: torch.Tensor, rows: torch.Tensor, words: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Make -inf, in place, the tokens of rows [F] of x [S, V] whose bit is not set.

        words  [F, W] int32: bit t % 32 of word t // 32 is token t
        The largest value of each of these rows then, and its index, as Backend.best; a row with a
        NaN has any.
        """
        ...

    def draw(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor:
        """One token for each of F draws from rows of logits [S, V] -> [F] ids.

        Gumbel-max over logits / temperature, with philox.py's noise, over what the filters leave:
        min_p, then top_k, then top_p of what those two leave. Tokens that tie with the last one
        kept are kept, so that the result does not depend on how a sort orders ties. A row without a
        finite maximum gives any id.
        """
        ...

    def stop(self) -> None:
        """End what a Graph began: no thread reads or writes a pool or a weight any more."""
        ...


def block_bytes(
    layers: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Bytes of one block of a pool (see new_pool), all layers, K and V, scales included."""
    rows = block_size + scale_rows(block_size, head_dim, dtype)
    return layers * 2 * kv_heads * rows * head_dim * dtype.itemsize


def layer_view(pool: torch.Tensor, layer: int) -> torch.Tensor:
    """Layer `layer` of a pool as the strided view [N, 2, Hk, B, D] that the other ops take.

    With the rows of its scales, where it is quantized.
    """
    return pool[:, layer]


def choose(device: torch.device) -> Backend:
    """The backend for tensors of this device."""
    if device.type == "cuda":
        from streamer.kernels.gpu import backend

        return backend
    return for_cpu()


def for_cpu() -> CpuBackend:
    """The native backend, or, where `why_not_native` has a reason, torch's operators."""
    native = None if _is_torch_asked_for() else _native()[0]
    if native is not None:
        return native
    from streamer.kernels import reference

    return reference


def why_not_native() -> str:
    """Why for_cpu returns torch's operators; empty where it does not."""
    return "STREAMER_KERNELS=torch" if _is_torch_asked_for() else _native()[1]


def _is_torch_asked_for() -> bool:
    return os.environ.get("STREAMER_KERNELS") == "torch"


@functools.cache
def _native() -> tuple[CpuBackend | None, str]:
    """The native backend, compiled if need be, or why there is none; tried once."""
    from streamer.kernels.cpu.library import Unavailable

    try:
        from streamer.kernels.cpu import native
    except Unavailable as e:
        return None, str(e)
    return native, ""
