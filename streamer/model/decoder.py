"""The decoder family: embedding, layers of attention and feed-forward, norm, logits.

Llama, Mistral, Qwen2 and Qwen3 are this one decoder with the DecoderConfig that families.py makes.
Owns the weights and computes with the kernels it is handed; never sees a Plan, a file or a sampling
parameter. Called by the runners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from streamer.kernels import ops
from streamer.kernels.weights import NotFinite, QuantizedWeight
from streamer.model.families import DecoderConfig
from streamer.model.layers import (
    Attention,
    FeedForward,
    HeadNorms,
    RopeTable,
    Step,
    Tables,
    WeightSource,
)
from streamer.model.quantization.interface import check_finite, wrong

if TYPE_CHECKING:
    from streamer.model.ranks.linear import Shared


class DecoderLayer:
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(
        self,
        kernels: ops.Backend,
        c: DecoderConfig,
        index: int,
        source: WeightSource,
        shared: Shared | None = None,
    ) -> None:
        layer, attn, mlp = (f"model.layers.{index}{part}" for part in ("", ".self_attn", ".mlp"))
        qkv = [f"{attn}.{name}_proj" for name in "qkv"]
        gate_up = [f"{mlp}.{name}_proj" for name in ("gate", "up")]

        def out_of(name: str, has_bias: bool) -> ops.Linear:
            part = _weight(kernels, source, [name], has_bias)
            return part if shared is None else shared.summed(part, name)

        self._kernels = kernels
        self._eps = c.rms_norm_eps
        self._input_norm = source.take(f"{layer}.input_layernorm.weight")
        self._attention = Attention(
            kernels,
            qkv=_weight(kernels, source, qkv, c.qkv_bias),
            out=out_of(f"{attn}.o_proj", c.o_bias),
            head_dim=c.head_dim,
            window=c.windows[index],
            norms=(
                HeadNorms(
                    source.take(f"{attn}.q_norm.weight"),
                    source.take(f"{attn}.k_norm.weight"),
                    c.rms_norm_eps,
                )
                if c.qk_norm
                else None
            ),
        )
        self._post_norm = source.take(f"{layer}.post_attention_layernorm.weight")
        self._feed_forward = FeedForward(
            gate_up=_weight(kernels, source, gate_up, c.mlp_bias, c.activation),
            down=out_of(f"{mlp}.down_proj", c.mlp_bias),
        )

    def __call__(self, residual: torch.Tensor, pool_layer: torch.Tensor, step: Step) -> None:
        """Both parts add to residual [T, H] in place."""
        x = self._kernels.rms_norm(residual, self._input_norm, self._eps)
        self._attention(x, residual, pool_layer, step)
        x = self._kernels.rms_norm(residual, self._post_norm, self._eps)
        self._feed_forward(x, residual)


class Decoder:
    """Token ids in, logits out; K and V live in the pool of the caller."""

    def __init__(
        self,
        kernels: ops.Backend,
        config: DecoderConfig,
        source: WeightSource,
        shared: Shared | None = None,
    ) -> None:
        self._kernels = kernels
        self.config = config
        self._is_whole = shared is None
        self.dtype = source.dtype
        self.vocab_size = config.vocab_size
        self.num_layers = config.num_layers
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        name = "model.embed_tokens"
        table = source.weight(name)
        embedding = None
        self._embed: Callable[[torch.Tensor], torch.Tensor]
        if config.tied or not isinstance(table, torch.Tensor):
            with _finite([name], [table]):
                embedding = kernels.pack_weight([table], dtype=source.dtype, is_table=True)
            self._embed = embedding.rows
        else:
            self._embed = partial(kernels.embedding, table=table)
        del table
        # Before the layers, since what packing the largest matrices takes is free again for them.
        self._head: Callable[[torch.Tensor], torch.Tensor] = (
            embedding
            if config.tied and embedding is not None
            else _weight(kernels, source, ["lm_head"], has_bias=False)
        )
        if shared is not None:
            self._embed = shared.embedding(self._embed)
            self._head = shared.head(self._head)
        self._rope = RopeTable(kernels, config.rope, source.dtype, source.device)
        self._layers = []
        for i in range(config.num_layers):
            self._layers.append(DecoderLayer(kernels, config, i, source, shared))
            source.layer_done()
        self._norm = source.take("model.norm.weight")
        self._graph: ops.Graph | None = None
        self._graph_of: tuple[object, ...] = ()
        self._limits: ops.Limits | None = None

    @property
    def recordable(self) -> Decoder | None:
        """The decoder, unless it waits for other ranks within a step."""
        return self if self._is_whole else None

    def prepare(self, limits: ops.Limits) -> None:
        """Bounds of all steps, each launched as one graph where the kernels have graphs."""
        self._limits = limits
        self._graph, self._graph_of = None, ()

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        batch: ops.AttentionBatch,
        pool: torch.Tensor,
        last: torch.Tensor | None,
    ) -> torch.Tensor:
        """Logits [S, V] of the tokens whose packed indices are in `last` [S] (None: of all).

        tokens, positions  [T] int64;  pool  [N, layers, 2, Hk, B, D]. The result may be overwritten
        by the next call.
        """
        return self._graph_for(batch, pool)(tokens, positions, batch, last)

    def begin(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        batch: ops.AttentionBatch,
        pool: torch.Tensor,
    ) -> bool:
        """See interface.CausalModel."""
        if batch.max_context > self._rope.length:  # it may be beyond the model's last position
            return False
        return self._graph_for(batch, pool).begin(tokens, positions, batch)

    def _graph_for(self, batch: ops.AttentionBatch, pool: torch.Tensor) -> ops.Graph:
        tables = self._rope.up_to(batch.max_context)
        made_for = (pool.data_ptr(), self._rope.length, self._limits)
        if self._graph is None or self._graph_of != made_for:
            compute = partial(self._compute, pool, tables)
            limits = self._limits if self._is_whole else None
            self._graph = self._kernels.graph(compute, limits) if limits else ops.Direct(compute)
            self._graph_of = made_for
        return self._graph

    def forward_hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        batch: ops.AttentionBatch,
        pool: torch.Tensor,
        last: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits of `forward`, op by op, and the hidden states [S, H] that they come from."""
        return self.logits(self.states(tokens, positions, batch, pool), last)

    def states(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        batch: ops.AttentionBatch,
        pool: torch.Tensor,
    ) -> torch.Tensor:
        """See interface.Recordable, as `logits`."""
        tables = self._rope.up_to(batch.max_context)
        return self._run_layers(pool, tables, tokens, positions, batch)

    def logits(
        self, states: torch.Tensor, last: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self._last_norm(states, last)
        return self._head(hidden), hidden

    def _compute(
        self,
        pool: torch.Tensor,
        tables: Tables,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        batch: ops.AttentionBatch,
        last: torch.Tensor | None,
    ) -> torch.Tensor:
        states = self._run_layers(pool, tables, tokens, positions, batch)
        return self._head(self._last_norm(states, last))

    def _run_layers(
        self,
        pool: torch.Tensor,
        tables: Tables,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        batch: ops.AttentionBatch,
    ) -> torch.Tensor:
        step = Step(batch, positions, tables)
        residual = self._embed(tokens)
        for i, layer in enumerate(self._layers):
            layer(residual, ops.layer_view(pool, i), step)
        return residual

    def _last_norm(self, states: torch.Tensor, last: torch.Tensor | None) -> torch.Tensor:
        return self._kernels.rms_norm(states, self._norm, self.config.rms_norm_eps, rows=last)


def _weight(
    kernels: ops.Backend,
    source: WeightSource,
    names: list[str],
    has_bias: bool,
    activation: str | None = None,
) -> ops.Linear:
    """One packed weight of the named projections; the unpacked one is freed here."""
    parts = [source.weight(name) for name in names]
    bias = torch.cat([source.take(f"{name}.bias") for name in names]) if has_bias else None
    with _finite(names, parts):
        return kernels.pack_weight(parts, bias, activation, dtype=source.dtype)


@contextmanager
def _finite(names: list[str], parts: list[ops.Weight]) -> Iterator[None]:
    """Say which of the parts holds scales or codes that are no numbers."""
    try:
        yield
    except NotFinite as e:
        for name, part in zip(names, parts, strict=True):
            if isinstance(part, QuantizedWeight):
                check_finite(name, part.unpacked())
        # Finite each, but not what the kernels make of them.
        raise wrong(", ".join(names), "scales are too large for float32", "model") from e
