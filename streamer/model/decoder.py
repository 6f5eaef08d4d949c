"""The decoder family: embedding, layers of attention and feed-forward, norm, logits.

Llama, Mistral, Qwen2 and Qwen3 are this one decoder with the DecoderConfig that families.py makes.
Owns the weights; never sees a Plan, a file or a sampling parameter. Called by runner.py.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from streamer.kernels import ops
from streamer.model.families import DecoderConfig
from streamer.model.layers import Attention, FeedForward, Linear, RopeTable, Step


class WeightSource(Protocol):
    """Where a decoder takes its tensors from, once each, in the dtype it computes in."""

    dtype: torch.dtype

    def take(self, name: str) -> torch.Tensor:
        """The tensor of that name."""
        ...

    def merge(self, *names: str) -> torch.Tensor:
        """The tensors of those names, one below the other."""
        ...

    def layer_done(self) -> None:
        """One more layer is built (for the progress bar)."""
        ...


class DecoderLayer:
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, c: DecoderConfig, index: int, source: WeightSource) -> None:
        layer, attn, mlp = (f"model.layers.{index}{part}" for part in ("", ".self_attn", ".mlp"))
        qkv = [f"{attn}.{name}_proj" for name in "qkv"]
        gate_up = [f"{mlp}.{name}_proj" for name in ("gate", "up")]
        self._eps = c.rms_norm_eps
        self._input_norm = source.take(f"{layer}.input_layernorm.weight")
        self._attention = Attention(
            qkv=_linear(source, qkv, c.qkv_bias),
            out=_linear(source, [f"{attn}.o_proj"], c.o_bias),
            heads=c.num_heads,
            kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            window=c.windows[index],
            eps=c.rms_norm_eps,
            q_norm=source.take(f"{attn}.q_norm.weight") if c.qk_norm else None,
            k_norm=source.take(f"{attn}.k_norm.weight") if c.qk_norm else None,
        )
        self._post_norm = source.take(f"{layer}.post_attention_layernorm.weight")
        self._feed_forward = FeedForward(
            gate_up=_linear(source, gate_up, c.mlp_bias),
            down=_linear(source, [f"{mlp}.down_proj"], c.mlp_bias),
            activation=c.activation,
        )

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, pool_layer: torch.Tensor, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum x + residual is what flows; it is taken inside the next norm."""
        if residual is None:
            residual, x = x, ops.rms_norm(x, self._input_norm, self._eps)
        else:
            x, residual = ops.add_rms_norm(x, residual, self._input_norm, self._eps)
        x = self._attention(x, pool_layer, step)
        x, residual = ops.add_rms_norm(x, residual, self._post_norm, self._eps)
        return self._feed_forward(x), residual


class Decoder:
    """Token ids in, logits out; K and V live in the pool of the caller."""

    def __init__(self, config: DecoderConfig, source: WeightSource) -> None:
        self.config = config
        self.dtype = source.dtype
        self.vocab_size = config.vocab_size
        self.num_layers = config.num_layers
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self._embedding = source.take("model.embed_tokens.weight")
        self._rope = RopeTable(config.rope, source.dtype)
        self._layers = []
        for i in range(config.num_layers):
            self._layers.append(DecoderLayer(config, i, source))
            source.layer_done()
        self._norm = source.take("model.norm.weight")
        head = self._embedding if config.tied else source.take("lm_head.weight")
        self._head = Linear(head)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        batch: ops.AttentionBatch,
        pool: torch.Tensor,
        last: torch.Tensor | None,
    ) -> torch.Tensor:
        """Logits [S, V] of the tokens whose packed indices are in `last` [S] (None: of all).

        tokens, positions  [T] int64;  pool  [N, layers, 2, B, Hk, D]
        """
        step = Step(batch, *self._rope.rows(positions, max(batch.context_lens)))
        x, residual = F.embedding(tokens, self._embedding), None
        for i, layer in enumerate(self._layers):
            x, residual = layer(x, residual, ops.layer_view(pool, i), step)
        if residual is None:
            residual = torch.zeros_like(x)
        if last is not None:
            x, residual = x[last], residual[last]
        x, _ = ops.add_rms_norm(x, residual, self._norm, self.config.rms_norm_eps)
        return self._head(x)


def _linear(source: WeightSource, names: list[str], has_bias: bool) -> Linear:
    """One Linear of the named projections; the unpacked weight is freed here."""
    weight = source.merge(*(f"{name}.weight" for name in names))
    bias = source.merge(*(f"{name}.bias" for name in names)) if has_bias else None
    return Linear(weight, bias)
