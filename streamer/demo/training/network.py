"""The demo model's network as plain torch modules, written for training speed on a CPU.

Owns the parameters while they are trained and returns them under the names and in the layout of a
Llama checkpoint. Never used to serve: the engine reads the saved checkpoint like any other.
Called by train.py, which imports it inside functions because it needs torch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamer.demo.training.shape import Shape

ROPE_THETA = 10_000.0
NORM_EPS = 1e-5


def rotary_tables(length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of shape (length, head_dim), with two equal halves, as in Llama."""
    inverse = ROPE_THETA ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * inverse[None, :]
    doubled = torch.cat([angles, angles], dim=-1)
    return doubled.cos().to(torch.bfloat16), doubled.sin().to(torch.bfloat16)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x of shape (batch, length, heads, head_dim) with rotary positions applied."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None, :] + torch.cat([-second, first], dim=-1) * sin[:, None, :]


class Block(nn.Module):
    """One decoder layer: attention and a gated feed-forward, each behind an RMSNorm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        hidden, head = shape.hidden_size, shape.head_dim
        self.input_norm = nn.Parameter(torch.ones(hidden))
        self.q = nn.Linear(hidden, shape.num_heads * head, bias=False)
        self.k = nn.Linear(hidden, shape.num_kv_heads * head, bias=False)
        self.v = nn.Linear(hidden, shape.num_kv_heads * head, bias=False)
        self.o = nn.Linear(shape.num_heads * head, hidden, bias=False)
        self.post_norm = nn.Parameter(torch.ones(hidden))
        self.gate = nn.Linear(hidden, shape.intermediate_size, bias=False)
        self.up = nn.Linear(hidden, shape.intermediate_size, bias=False)
        self.down = nn.Linear(shape.intermediate_size, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        head = self.shape.head_dim
        normed = F.rms_norm(x, (hidden,), self.input_norm, NORM_EPS)
        q = rotate(self.q(normed).view(batch, length, -1, head), cos, sin)
        k = rotate(self.k(normed).view(batch, length, -1, head), cos, sin)
        v = self.v(normed).view(batch, length, -1, head)
        group = self.shape.num_heads // self.shape.num_kv_heads
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.repeat_interleave(group, dim=2).transpose(1, 2),
            v.repeat_interleave(group, dim=2).transpose(1, 2),
            is_causal=True,
        )
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, -1))
        normed = F.rms_norm(x, (hidden,), self.post_norm, NORM_EPS)
        out: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return out


class Network(nn.Module):
    """A Llama decoder with tied embeddings; `forward` returns the last hidden states."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, max_length: int) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden_size))
        cos, sin = rotary_tables(max_length, shape.head_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.reset()

    def reset(self) -> None:
        """Initial weights: normal, std 0.02; o and down scaled by (2 * num_layers) ** -0.5."""
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            scale = (
                (2 * self.shape.num_layers) ** -0.5
                if name.endswith(("o.weight", "down.weight"))
                else 1
            )
            nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, ids: Tensor) -> Tensor:
        """ids (batch, length) -> hidden states (batch, length, hidden) after the last norm."""
        x = self.embed(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        normed: Tensor = F.rms_norm(x, (self.shape.hidden_size,), self.norm, NORM_EPS)
        return normed

    def token_losses(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy of each target, in nats, flat: (batch * length,)."""
        hidden = self(ids).flatten(0, 1)
        logits = F.linear(hidden, self.embed.weight)
        return F.cross_entropy(logits.float(), targets.flatten(), reduction="none")

    def hidden_matrices(self) -> list[nn.Parameter]:
        """The layers' matrices, trained by Muon."""
        return [p for n, p in self.named_parameters() if p.ndim == 2 and n != "embed.weight"]

    def other_parameters(self) -> list[nn.Parameter]:
        """The embedding and the norms, trained by AdamW."""
        return [p for n, p in self.named_parameters() if p.ndim != 2 or n == "embed.weight"]

    def llama_tensors(self) -> dict[str, Tensor]:
        """The weights in bf16 under the names of a Llama checkpoint with tied embeddings."""
        tensors: dict[str, Any] = {
            "model.embed_tokens.weight": self.embed.weight,
            "model.norm.weight": self.norm,
        }
        for index, block in enumerate(self.blocks):
            prefix = f"model.layers.{index}."
            tensors[prefix + "input_layernorm.weight"] = block.input_norm
            tensors[prefix + "post_attention_layernorm.weight"] = block.post_norm
            for name in ("q", "k", "v", "o"):
                tensors[f"{prefix}self_attn.{name}_proj.weight"] = getattr(block, name).weight
            for name in ("gate", "up", "down"):
                tensors[f"{prefix}mlp.{name}_proj.weight"] = getattr(block, name).weight
        return {k: v.detach().to(torch.bfloat16).contiguous() for k, v in tensors.items()}
