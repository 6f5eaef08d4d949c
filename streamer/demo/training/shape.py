"""The sizes of the demo model and of its draft model, and the config.json that states them.

Owns the two shapes; knows nothing of torch. Called by train.py and network.py.
"""

from __future__ import annotations

from typing import Any

import msgspec

VOCAB_SIZE = 4096
MAX_POSITIONS = 1024


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a Llama decoder with tied embeddings."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int = VOCAB_SIZE

    @property
    def num_parameters(self) -> int:
        """Number of trained weights, the tied embedding counted once."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        feed_forward = 3 * self.hidden_size * self.intermediate_size
        layer = attention + feed_forward + 2 * self.hidden_size
        return self.vocab_size * self.hidden_size + self.num_layers * layer + self.hidden_size


DEMO = Shape(
    hidden_size=256,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=704,
)
DRAFT = Shape(
    hidden_size=64,
    num_layers=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    intermediate_size=192,
)


def llama_config(shape: Shape, *, bos: int, eos: list[int], pad: int) -> dict[str, Any]:
    """The content of config.json for a checkpoint of this shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": bos,
        "dtype": "bfloat16",
        "eos_token_id": eos,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": MAX_POSITIONS,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "pad_token_id": pad,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }
