"""config.json -> DecoderConfig: what each family changes, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from streamer.errors import ModelNotSupported
from streamer.model.families import DecoderConfig, expected_tensors, parse_config

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def parse(architecture: str, **fields: Any) -> DecoderConfig:
    """BASE with changes."""
    return parse_config({**BASE, "architectures": [architecture], **fields})


def test_defaults() -> None:
    """As many KV heads as heads, hidden / heads as head_dim, embeddings of their own."""
    c = parse("LlamaForCausalLM")
    assert (c.num_kv_heads, c.head_dim, c.tied, c.activation) == (4, 16, False, "silu")
    assert (c.rms_norm_eps, c.windows) == (1e-6, (None,) * 4)


@pytest.mark.parametrize(
    ("architecture", "fields", "biases"),
    [
        ("LlamaForCausalLM", {}, (False, False, False)),
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, (True, True, True)),
        ("MistralForCausalLM", {"attention_bias": True, "mlp_bias": True}, (False, False, False)),
        ("Qwen2ForCausalLM", {}, (True, False, False)),
        ("Qwen3ForCausalLM", {"attention_bias": True}, (True, True, False)),
    ],
)
def test_biases(architecture: str, fields: dict[str, Any], biases: tuple[bool, ...]) -> None:
    """(q, k, v), output, feed-forward."""
    c = parse(architecture, **fields)
    assert (c.qkv_bias, c.o_bias, c.mlp_bias) == biases


def test_qwen3_has_its_head_dim_and_norms() -> None:
    """head_dim is 128 where config.json has none."""
    c = parse("Qwen3ForCausalLM")
    assert (c.head_dim, c.qk_norm) == (128, True)
    names = dict(expected_tensors(c))
    assert names["model.layers.3.self_attn.k_norm.weight"] == (128,)
    assert names["model.layers.3.self_attn.q_proj.weight"] == (512, 64)


@pytest.mark.parametrize(
    ("architecture", "fields", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, (None,) * 4),
        ("MistralForCausalLM", {}, (4096,) * 4),  # transformers' default where it is absent
        ("MistralForCausalLM", {"sliding_window": 8}, (8,) * 4),
        ("MistralForCausalLM", {"sliding_window": None}, (None,) * 4),
        ("Qwen2ForCausalLM", {"sliding_window": 8}, (None,) * 4),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
            (None, None, None, 8),
        ),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": True}, (None,) * 4),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, None, 8, None),
        ),
    ],
)
def test_windows(
    architecture: str, fields: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    """Which layers have a sliding window."""
    assert parse(architecture, **fields).windows == windows


def test_the_old_model_type_is_enough() -> None:
    """A config.json without architectures is known by its model_type."""
    config = {**BASE, "model_type": "qwen2"}
    del config["architectures"]
    assert parse_config(config).architecture == "Qwen2ForCausalLM"


def test_auto_map_means_nothing() -> None:
    """No code of a checkpoint is run."""
    fields = {"auto_map": {"AutoModelForCausalLM": "evil.Model"}}
    assert parse("LlamaForCausalLM", **fields) == parse("LlamaForCausalLM")


@pytest.mark.parametrize(
    ("architecture", "fields", "param", "says"),
    [
        ("LlamaForCausalLM", {"hidden_size": None}, "hidden_size", "lacks hidden_size"),
        ("LlamaForCausalLM", {"vocab_size": "100"}, "vocab_size", "must be an integer"),
        ("LlamaForCausalLM", {"num_hidden_layers": True}, "num_hidden_layers", "integer"),
        ("LlamaForCausalLM", {"num_hidden_layers": 0}, "num_hidden_layers", "at least 1"),
        ("LlamaForCausalLM", {"num_key_value_heads": 3}, "num_key_value_heads", "can't share 3"),
        ("LlamaForCausalLM", {"hidden_act": "relu"}, "hidden_act", "'relu'"),
        ("LlamaForCausalLM", {"hidden_act": 3}, "hidden_act", "a string"),
        ("LlamaForCausalLM", {"tie_word_embeddings": 1}, "tie_word_embeddings", "true or false"),
        ("LlamaForCausalLM", {"logits_scaling": 8.0}, "logits_scaling", "8.0"),
        ("LlamaForCausalLM", {"head_dim": 15}, "head_dim", "odd"),
        ("MistralForCausalLM", {"num_local_experts": 8}, "num_local_experts", "8"),
        (
            "Qwen2ForCausalLM",
            {"layer_types": ["full_attention"]},
            "layer_types",
            "1 entries for 4 layers",
        ),
        (
            "Qwen3ForCausalLM",
            {"layer_types": ["full_attention"] * 3 + ["linear_attention"]},
            "layer_types",
            "linear_attention",
        ),
        ("Qwen3ForCausalLM", {"layer_types": "full"}, "layer_types", "list of strings"),
        (
            "MistralForCausalLM",
            {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * 2},
            "layer_types",
            "mixes",
        ),
    ],
)
def test_refusals(architecture: str, fields: dict[str, Any], param: str, says: str) -> None:
    """Each refusal names the field."""
    with pytest.raises(ModelNotSupported, match=says) as error:
        parse(architecture, **fields)
    assert error.value.param == param


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("vocab_size", 10**30),
        ("max_position_embeddings", 1 << 31),
        ("rms_norm_eps", 1e308),
        ("rms_norm_eps", 10**400),
        ("rope_theta", 1e300),
    ],
)
def test_a_size_that_no_model_has_is_refused_before_anything_is_made(
    name: str, value: float
) -> None:
    with pytest.raises(ModelNotSupported, match=f"{name} must be at most") as error:
        parse("LlamaForCausalLM", **{name: value})
    assert error.value.param == name
    assert len(error.value.message) < 200
