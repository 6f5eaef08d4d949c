"""A GGUF file's metadata as config.json and generation_config.json, and its tensors' usual names.

Pure functions over what header.py read; what would change the mathematics and is not known here is
refused by its key. Called by checkpoint.py of this folder.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from streamer.errors import ModelNotSupported

logger = logging.getLogger(__name__)

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",  # Mistral's too
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"
_NAME = re.compile(r"(?:blk\.(\d{1,5})\.)?(\w+)\.(weight|bias)")
# Keys below the architecture's name that would change what is computed, and none of these has.
FOREIGN_KEYS = (
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.output_scale",
    "attention.scale",
    "attention.sliding_window_pattern",
    "attention.temperature_length",
    "attention.temperature_scale",
    "attn_logit_softcapping",
    "embedding_scale",
    "expert_count",
    "final_logit_softcapping",
    "logit_scale",
    "nextn_predict_layers",
    "residual_scale",
    "rope.dimension_sections",
    "rope.scaling.yarn_log_multiplier",
    "use_parallel_residual",
)
# The author's sampling defaults by our names.
SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
# Tokens that end an answer wherever a vocabulary has them as control tokens: few files state more
# than one id, and models end turns with another token than texts.
END_TOKENS = frozenset(
    [
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<end_of_turn>", "<|endoftext|>"),
        *("<|end_of_text|>", "<|eom_id|>", "<EOT>", "_<EOT>", "<｜end▁of▁sentence｜>"),
        "<end_of_utterance>",
    ]
)
MAX_WARNINGS = 8  # of keys without effect, whose number is the file's choice
CONTROL = 3  # a token's type


def tensor_name(name: str) -> str:
    """`blk.3.ffn_up.weight` is `model.layers.3.mlp.up_proj.weight`; an unknown name stays."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    layer, part, kind = match.groups()
    if layer is None:
        return f"{TOP[part]}.{kind}" if part in TOP else name
    return f"model.layers.{layer}.{PARTS[part]}.{kind}" if part in PARTS else name


class _Keys:
    """Typed reads below the architecture's name; ModelNotSupported names the key."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self._metadata = metadata
        self._prefix = f"{architecture}."

    def get(self, key: str) -> Any:
        return self._metadata.get(self._prefix + key)

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number; of a list for each layer, the one that all of them have."""
        value = self.get(key)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise self.wrong(key, "layers that differ can't be served")
            value = value[0]
        value = default if value is None else value
        if value is None:
            raise self.wrong(key, "it is missing")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, f"{str(value)[:100]} is no whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise self.wrong(key, "it is missing")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise self.wrong(key, f"{str(value)[:100]} is no finite number")
        return float(value)

    def wrong(self, key: str, why: str) -> ModelNotSupported:
        field = self._prefix + key
        return ModelNotSupported(f"{field}: {why}", param=field)


def architecture_of(metadata: Mapping[str, Any]) -> str:
    """One of ARCHITECTURES; ModelNotSupported for another, by its name."""
    named = metadata.get("general.architecture")
    if isinstance(named, str) and named in ARCHITECTURES:
        return named
    raise ModelNotSupported(
        f"general.architecture: {str(named)[:100]!r} is not one of {', '.join(ARCHITECTURES)}",
        param="general.architecture",
    )


def config_of(
    metadata: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], rope_factors: list[float]
) -> dict[str, Any]:
    """The config.json that the file would have had.

    shapes        of the tensors, by their usual names
    rope_factors  what each rotary frequency is divided by (Llama 3.1's stretch), or none
    """
    named = architecture_of(metadata)
    keys = _Keys(metadata, named)
    for key in FOREIGN_KEYS:
        if keys.get(key):
            raise keys.wrong(key, f"{str(keys.get(key))[:100]} is not known here")
    if keys.get("attention.causal") is False:
        raise keys.wrong("attention.causal", "a model that is not causal can't be served")
    if "model.embed_tokens.weight" not in shapes:
        raise ModelNotSupported("token_embd.weight is missing", param="token_embd.weight")
    heads, hidden = keys.size("attention.head_count"), keys.size("embedding_length")
    head_dim = keys.size("attention.key_length", hidden // max(1, heads))
    if keys.size("attention.value_length", head_dim) != head_dim:
        raise keys.wrong("attention.value_length", f"it is not attention.key_length, {head_dim}")
    rotated = keys.size("rope.dimension_count", head_dim)
    config = {
        "architectures": [ARCHITECTURES[named]],
        "hidden_size": hidden,
        "intermediate_size": keys.size("feed_forward_length"),
        "num_hidden_layers": keys.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.size("context_length"),
        "vocab_size": shapes["model.embed_tokens.weight"][0],
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in shapes,
        "mlp_bias": "model.layers.0.mlp.up_proj.bias" in shapes,
        "rope_theta": keys.number("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(keys, rope_factors),
        "partial_rotary_factor": rotated / max(1, head_dim),
    }
    if window := keys.size("attention.sliding_window", 0):
        if named == "llama":
            config["architectures"] = ["MistralForCausalLM"]
        config |= {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
    return config


def _rope_scaling(keys: _Keys, factors: list[float]) -> dict[str, Any] | None:
    kind = keys.get("rope.scaling.type") or ("linear" if keys.get("rope.scale_linear") else "none")
    if factors:
        if kind != "none":
            raise keys.wrong("rope.scaling.type", f"{str(kind)[:100]!r} beside {ROPE_FACTORS}")
        return {"rope_type": "factors", "factors": factors}
    if kind == "none":
        return None
    if kind == "linear":
        factor = keys.number("rope.scaling.factor", keys.get("rope.scale_linear"))
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":  # refused by its name
        return {"rope_type": str(kind)[:100]}
    if keys.number("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise keys.wrong("rope.scaling.yarn_ext_factor", "only 1 is known here")
    factor = keys.number("rope.scaling.factor")
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    if keys.get("rope.scaling.original_context_length") is not None:
        original = keys.size("rope.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = original
    for name in ("beta_fast", "beta_slow"):
        if keys.get(f"rope.scaling.yarn_{name}") is not None:
            scaling[name] = keys.number(f"rope.scaling.yarn_{name}")
    stated = [keys.number(f"rope.scaling.{n}", 1.0) for n in ("attn_factor", "yarn_attn_factor")]
    if (extra := math.prod(stated)) != 1.0:  # on top of YaRN's own
        scaling["attention_factor"] = extra * (0.1 * math.log(max(1.0, factor)) + 1.0)
    return scaling


def generation_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The generation_config.json that the file would have had: sampling defaults, end tokens."""
    found: dict[str, Any] = {}
    unknown = []
    for key, value in metadata.items():
        name = key.removeprefix("general.sampling.")
        if name == key:
            continue
        if name in SAMPLING:
            found[SAMPLING[name]] = value
        elif value:
            unknown.append((key[:100], value))
    for key, value in unknown[:MAX_WARNINGS]:
        logger.warning("%r = %r is not known here and has no effect", key, str(value)[:100])
    if (rest := len(unknown) - MAX_WARNINGS) > 0:
        logger.warning("nor have %d more keys of general.sampling", rest)
    found["eos_token_id"] = _end_ids(metadata)
    return found


def _end_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Ids that end an answer: the stated ones, and control tokens that are known to."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list):
        raise ModelNotSupported("tokenizer.ggml.tokens is missing", param="tokenizer.ggml.tokens")
    ids = []
    for name in ("eos", "eot", "eom"):
        key = f"tokenizer.ggml.{name}_token_id"
        found = metadata.get(key)
        if found is None and name == "eos" and metadata.get("tokenizer.ggml.model") == "llama":
            found = 2  # where a SentencePiece vocabulary states none
        if found is None:
            continue
        if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < len(tokens):
            raise ModelNotSupported(f"{key}: there is no token {str(found)[:100]}", param=key)
        ids.append(found)
    if isinstance(types, list) and len(types) == len(tokens):
        pairs = enumerate(zip(tokens, types, strict=True))
        ids += [i for i, (t, kind) in pairs if kind == CONTROL and t in END_TOKENS]
    return list(dict.fromkeys(ids))
