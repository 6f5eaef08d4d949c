"""What each architecture changes: a table, and the strict parser from config.json to DecoderConfig.

No weights: the answer to "can this be served, and how" comes before loading. Called by
inspect.py and loader.py; decoder.py reads the DecoderConfig and knows no family by name.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

import msgspec

from streamer.errors import ModelNotSupported
from streamer.model.fields import MAX_COUNT, Fields
from streamer.model.rope import RopeConfig, parse_rope


class Sliding(enum.Enum):
    """Which layers see only a window of the context."""

    NEVER = "never"
    EVERY_LAYER = "every layer"  # sliding_window, where set
    FROM_LAYER = "from a layer on"  # use_sliding_window, max_window_layers or layer_types


class Family(msgspec.Struct, frozen=True):
    """One architecture's differences. None for a bias: the config's own field decides."""

    qkv_bias: bool | None
    o_bias: bool | None
    mlp_bias: bool | None
    qk_norm: bool
    sliding: Sliding
    head_dim: int | None = None  # where config.json names none; None: hidden / heads


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(None, None, None, False, Sliding.NEVER),
    "MistralForCausalLM": Family(False, False, False, False, Sliding.EVERY_LAYER),
    "Qwen2ForCausalLM": Family(True, False, False, False, Sliding.FROM_LAYER),
    "Qwen3ForCausalLM": Family(None, None, False, True, Sliding.FROM_LAYER, head_dim=128),
}
MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# Fields that would change the mathematics and that none of these families has.
FOREIGN_FIELDS = (
    "attention_multiplier",
    "attn_logit_softcapping",
    "embedding_multiplier",
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "no_rope_layers",
    "num_experts",
    "num_local_experts",
    "residual_multiplier",
)


# transformers' MistralConfig where the field is absent; null means full attention.
MISTRAL_WINDOW = 4096


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything decoder.py needs; sizes in elements, windows in tokens (None: full attention)."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    activation: str  # silu, gelu, gelu_tanh
    rope: RopeConfig
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]


def architecture_of(config: dict[str, Any]) -> str:
    """The class name that config.json states, or the family's for a bare model_type; "" if none."""
    named = config.get("architectures")
    if isinstance(named, list) and named and isinstance(named[0], str):
        return named[0]
    return MODEL_TYPES.get(str(config.get("model_type")), "")


def parse_config(config: dict[str, Any]) -> DecoderConfig:
    """config.json of one of FAMILIES -> DecoderConfig; ModelNotSupported names the field."""
    architecture = architecture_of(config)
    family = FAMILIES[architecture]
    for name in FOREIGN_FIELDS:
        if config.get(name) is not None:
            raise ModelNotSupported(
                f"{architecture} with {name} = {config[name]!r} is not known here", param=name
            )
    read = Fields(config, architecture)
    hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
    layers = read.size("num_hidden_layers", maximum=MAX_COUNT)
    kv_heads = read.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelNotSupported(
            f"{heads} attention heads can't share {kv_heads} key-value heads",
            param="num_key_value_heads",
        )
    head_dim = read.size("head_dim", family.head_dim or hidden // heads)
    max_positions = read.size("max_position_embeddings")
    attention_bias = read.flag("attention_bias", False)
    act = read.text("hidden_act", "silu")
    if act not in ACTIVATIONS:
        raise ModelNotSupported(
            f"hidden_act {act!r} is not one of {', '.join(ACTIVATIONS)}", param="hidden_act"
        )
    return DecoderConfig(
        architecture=architecture,
        vocab_size=read.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.size("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=read.number("rms_norm_eps", 1e-6, maximum=1.0),
        activation=ACTIVATIONS[act],
        rope=parse_rope(config, head_dim, max_positions),
        tied=read.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=read.flag("mlp_bias", False) if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        windows=_windows(read, family.sliding, layers),
    )


def _windows(read: Fields, rule: Sliding, layers: int) -> tuple[int | None, ...]:
    """Each layer's attention window in tokens."""
    if rule is Sliding.NEVER:
        return (None,) * layers
    window = read.size_or_none("sliding_window")
    if rule is Sliding.EVERY_LAYER and not read.has("sliding_window"):
        window = MISTRAL_WINDOW
    kinds = read.texts_or_none("layer_types")
    if kinds is not None:
        if len(kinds) != layers:
            raise ModelNotSupported(
                f"layer_types has {len(kinds)} entries for {layers} layers", param="layer_types"
            )
        if strange := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
            raise ModelNotSupported(
                f"layer_types {', '.join(strange)} can't be served", param="layer_types"
            )
    if rule is Sliding.EVERY_LAYER:
        if kinds is not None and window is not None and "full_attention" in kinds:
            raise ModelNotSupported(
                "layer_types mixes full and sliding attention, which this family does not",
                param="layer_types",
            )
        return (window,) * layers
    if not read.flag("use_sliding_window", False):
        return (None,) * layers
    if kinds is None:
        first = read.count("max_window_layers", 28)
        return tuple(window if i >= first else None for i in range(layers))
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def expected_tensors(c: DecoderConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor a checkpoint of this config must have, and no others."""
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    yield "model.embed_tokens.weight", (c.vocab_size, c.hidden_size)
    for i in range(c.num_layers):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (c.hidden_size,)
        yield f"{layer}.post_attention_layernorm.weight", (c.hidden_size,)
        for name, size in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            yield f"{layer}.self_attn.{name}.weight", (size, c.hidden_size)
            if c.qkv_bias:
                yield f"{layer}.self_attn.{name}.bias", (size,)
        if c.qk_norm:
            yield f"{layer}.self_attn.q_norm.weight", (c.head_dim,)
            yield f"{layer}.self_attn.k_norm.weight", (c.head_dim,)
        yield f"{layer}.self_attn.o_proj.weight", (c.hidden_size, q)
        if c.o_bias:
            yield f"{layer}.self_attn.o_proj.bias", (c.hidden_size,)
        inner, outer = c.intermediate_size, c.hidden_size
        for name, rows, columns in (
            ("gate_proj", inner, outer),
            ("up_proj", inner, outer),
            ("down_proj", outer, inner),
        ):
            yield f"{layer}.mlp.{name}.weight", (rows, columns)
            if c.mlp_bias:
                yield f"{layer}.mlp.{name}.bias", (rows,)
    yield "model.norm.weight", (c.hidden_size,)
    if not c.tied:
        yield "lm_head.weight", (c.vocab_size, c.hidden_size)
