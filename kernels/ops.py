"""The doors: every op's signature, shapes and dtypes, and the one place that picks a backend.

Called by streamer.model on the GPU thread. `backend` names the CPU's implementation, chosen at
import: "native" (cpu/, compiled on first use) or, where that can't be, "torch" (reference.py), with
`why_not_native` saying why. STREAMER_KERNELS=torch asks for the latter. `use`, called once a start,
says on which device the model is: on CUDA the implementation is gpu/. Ops check nothing a step;
shapes are the caller's promise, and AttentionBatch checked its own.

Letters: T packed tokens, R rows, Hq query heads, Hk KV heads (Hq is a multiple of Hk), D head_dim,
B tokens a block, N blocks. Floats are fp32 or bf16, all of one call alike but for a quantized pool;
ids are int64.
"""

from __future__ import annotations

import os
from typing import Any, Protocol

import torch

from streamer.kernels.batch import AttentionBatch as AttentionBatch
from streamer.kernels.batch import Forward as Forward
from streamer.kernels.batch import Limits as Limits
from streamer.kernels.draws import Draws as Draws
from streamer.kernels.quantized import scale_rows


class Weight(Protocol):
    """What pack_weight makes: the matrix [N, K] in the backend's own form."""

    shape: tuple[int, int]


def _choose() -> tuple[Any, str]:
    """The backend's module, and why it is not the native one."""
    why = "STREAMER_KERNELS=torch"
    if os.environ.get("STREAMER_KERNELS") != "torch":
        from streamer.kernels.cpu.library import Unavailable

        try:
            from streamer.kernels.cpu import native
        except Unavailable as e:
            why = str(e)
        else:
            return native, ""
    from streamer.kernels import reference

    return reference, why


class _Backend:
    """The doors of the module in use."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


_of_cpu, why_not_native = _choose()
_backend = _chosen = _Backend(_of_cpu)
backend = "torch" if why_not_native else "native"


def use(device: torch.device) -> None:
    """From now on tensors are on this device; models on both kinds at a time are not served."""
    if device.type == "cuda":
        from streamer.kernels.gpu import backend as of_gpu

        _chosen.module = of_gpu
    else:
        _chosen.module = _of_cpu


def set_threads(count: int) -> None:
    """Threads that the ops use from now on; to be called on the thread that calls them."""
    _backend.set_threads(count)


def new_pool(
    num_blocks: int,
    layers: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """A block pool [N, layers, 2, Hk, B, D] (0 is K, 1 is V); one block is contiguous, all layers.

    dtype  that of the ops' floats, or int8 or float8_e4m3fn: heads then have B + scale_rows rows,
           see quantized.py, and what is stored is quantized. The native backend has neither

    Zeroed lazily where the system can: memory is touched on first use.
    """
    return _backend.new_pool(num_blocks, layers, block_size, kv_heads, head_dim, dtype, device)  # type: ignore[no-any-return]


def block_bytes(
    layers: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Bytes of one block of such a pool, all layers, K and V, scales included."""
    rows = block_size + scale_rows(block_size, head_dim, dtype)
    return layers * 2 * kv_heads * rows * head_dim * dtype.itemsize


def layer_view(pool: torch.Tensor, layer: int) -> torch.Tensor:
    """Layer `layer` of a pool as the strided view [N, 2, Hk, B, D] that the other ops take.

    With the rows of its scales, where it is quantized.
    """
    return pool[:, layer]


def graph(forward: Forward, limits: Limits) -> Forward:
    """`forward` as one launch, where the backend can record its ops; else itself.

    It is run once, on buffers of the limits' size, and must call nothing but ops and views on
    tensors whose first dimension is T or S. Steps beyond the limits take `forward` as it is.
    """
    return _backend.graph(forward, limits)  # type: ignore[no-any-return]


def pack_weight(
    weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
) -> Weight:
    """A weight [N, K] (and bias [N]) in the form that `linear` reads; the argument may be freed.

    activation  silu, gelu or gelu_tanh: the first N / 2 outputs are gates, the others their ups,
                and `linear` gives act(gate) * up
    """
    return _backend.pack_weight(weight, bias, activation)  # type: ignore[no-any-return]


def linear(x: torch.Tensor, weight: Weight, *, add_to: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K] (rows of any stride) @ weight.T + bias -> [T, N], or [T, N / 2] of gates and ups.

    With add_to [T, N], which is not for gates, the product is added to it and it is returned. On a
    CPU a row's result does not depend on how many rows there are.
    """
    return _backend.linear(x, weight, add_to)  # type: ignore[no-any-return]


def embedding(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rows of table [V, H] for tokens [T] -> [T, H]."""
    return _backend.embedding(tokens, table)  # type: ignore[no-any-return]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """x / sqrt(mean(x**2) + eps) * weight over the last dimension; statistics in fp32.

    x [T, H], weight [H] -> [T, H], or [S, H] of `rows` [S] alone. A family that scales by 1 + w
    adds the 1 when loading.
    """
    return _backend.rms_norm(x, weight, eps, rows)  # type: ignore[no-any-return]


def rope_tables(angles: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Angles [P, rotary / 2] fp32 -> (cos, sin), each [P, rotary], as rope_and_store reads them.

    The first half of sin is negated, so that no layer has to. Scale factors (YaRN's attention
    factor) may be multiplied into both.
    """
    return _backend.rope_tables(angles, dtype)  # type: ignore[no-any-return]


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
    """Rotate q and k, write k and v into pool_layer at batch.slots -> q [T, Hq, D].

    qkv        [T, (Hq + 2 * Hk) * D], the three side by side
    tables     (cos, sin) of rope_tables; neox style: pairs (i, i + rotary / 2) of the first
               `rotary` dimensions
    positions  [T]
    norms      ([D] of q, [D] of k): rms_norm of each head with `eps`, before the rotation
    """
    return _backend.rope_and_store(qkv, tables, positions, pool_layer, batch, norms, eps)  # type: ignore[no-any-return]


def store_kv(
    k: torch.Tensor, v: torch.Tensor, pool_layer: torch.Tensor, batch: AttentionBatch
) -> None:
    """Write k and v [T, Hk, D] (strides of whole D) into pool_layer at batch.slots."""
    _backend.store_kv(k, v, pool_layer, batch)


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
    """Causal attention of every row over its own context, read through its block table.

    q [T, Hq, D] (any strides) -> [T, Hq, D], contiguous. Query head h reads KV head h // (Hq / Hk).
    All rows' K and V of this step are in the pool already, so a row may read what another row
    stored in the same step.

    scale           multiplies q . k
    sliding_window  a token at position p sees positions p - sliding_window + 1 to p; None: all
    softcap         scores become softcap * tanh(score / softcap), before masking; None: off
    sinks           [Hq] a logit per head that takes part in the softmax and adds no value
    """
    return _backend.paged_attention(  # type: ignore[no-any-return]
        q, pool_layer, batch, scale, sliding_window=sliding_window, softcap=softcap, sinks=sinks
    )


def best(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of each row of x [S, V] and where it is -> [S] fp32, [S] ids.

    The first of equals; NaN (and any id) where the row has a NaN.
    """
    return _backend.best(x)  # type: ignore[no-any-return]


def draw(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """One token for each of F draws from rows of logits [S, V] -> [F] ids; not on a GPU, where
    gpu/sample.py takes its place.

    Gumbel-max over logits / temperature, with philox.py's noise, over what the filters leave:
    min_p, then top_k, then top_p of what those two leave. Tokens that tie with the last one kept
    are kept, so that the result does not depend on how a sort orders equals. A row without a finite
    maximum gives any id.
    """
    return _backend.draw(logits, draws)  # type: ignore[no-any-return]


def copy_blocks(pool: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """pool[dst[i]] = pool[src[i]] for all i (copy-on-write); src and dst [C] share no block."""
    _backend.copy_blocks(pool, src, dst)


def swap_blocks(
    src_pool: torch.Tensor, dst_pool: torch.Tensor, pairs: list[tuple[int, int]]
) -> None:
    """dst_pool[d] = src_pool[s] for all (s, d).

    The pools have equal shapes but for N, and may be on two devices. Each d occurs once.
    """
    _backend.swap_blocks(src_pool, dst_pool, pairs)
