"""GGUF metadata as config.json: what each key becomes, and what is refused by its key."""

from __future__ import annotations

import math
from typing import Any

import pytest

from streamer.errors import ModelNotSupported
from streamer.model.families import parse_config
from streamer.model.gguf.config import config_of, generation_of, tensor_name

SHAPES = {"model.embed_tokens.weight": (100, 64), "lm_head.weight": (100, 64)}
LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 1024,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def parsed(shapes: Any = SHAPES, factors: list[float] | None = None, **changes: Any) -> Any:
    """The DecoderConfig of LLAMA with changes; `a__b` is the key llama.a.b."""
    changed = {f"llama.{name.replace('__', '.')}": value for name, value in changes.items()}
    return parse_config(config_of({**LLAMA, **changed}, shapes, factors or []))


@pytest.mark.parametrize(
    ("name", "usual"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output.weight", "lm_head.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.12.attn_q.bias", "model.layers.12.self_attn.q_proj.bias"),
        ("blk.0.attn_k_norm.weight", "model.layers.0.self_attn.k_norm.weight"),
        ("blk.3.ffn_down.weight", "model.layers.3.mlp.down_proj.weight"),
        ("blk.3.ffn_gate_exps.weight", "blk.3.ffn_gate_exps.weight"),
        ("blk.token_embd.weight", "blk.token_embd.weight"),
        ("attn_q.weight", "attn_q.weight"),
    ],
)
def test_tensors_have_the_names_that_safetensors_would_have(name: str, usual: str) -> None:
    assert tensor_name(name) == usual


def test_what_the_file_does_not_say() -> None:
    config = parsed()
    assert (config.num_kv_heads, config.head_dim, config.rope.theta) == (4, 16, 10_000.0)
    assert (config.tied, config.qkv_bias, config.mlp_bias) == (False, False, False)
    assert config.rope.kind == "default"
    assert config.rope.limit == 1024


def test_what_the_tensors_say() -> None:
    biases = {
        "model.layers.0.self_attn.q_proj.bias": (64,),
        "model.layers.0.mlp.up_proj.bias": (9,),
    }
    config = parsed({"model.embed_tokens.weight": (100, 64), **biases})
    assert (config.tied, config.qkv_bias, config.mlp_bias) == (True, True, True)


def test_each_layers_heads_may_be_listed_if_they_are_equal() -> None:
    assert parsed(attention__head_count_kv=[2, 2]).num_kv_heads == 2
    with pytest.raises(ModelNotSupported, match=r"head_count_kv: layers that differ") as refusal:
        parsed(attention__head_count_kv=[2, 4])
    assert refusal.value.param == "llama.attention.head_count_kv"


def test_a_window_makes_it_mistral() -> None:
    config = parsed(attention__sliding_window=48)
    assert config.architecture == "MistralForCausalLM"
    assert config.windows == (48, 48)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_qwens_window_is_of_every_layer(architecture: str) -> None:
    metadata = {k.replace("llama.", f"{architecture}."): v for k, v in LLAMA.items()}
    metadata |= {
        "general.architecture": architecture,
        f"{architecture}.attention.sliding_window": 48,
    }
    assert parse_config(config_of(metadata, SHAPES, [])).windows == (48, 48)


def test_rope_scaling() -> None:
    linear = parsed(rope__scaling__type="linear", rope__scaling__factor=4.0).rope
    assert (linear.kind, linear.factor, linear.limit) == ("linear", 4.0, 4096)
    old = parsed(rope__scale_linear=2.0).rope
    assert (old.kind, old.factor) == ("linear", 2.0)
    yarn = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 512,
        "rope__scaling__yarn_beta_fast": 16.0,
    }
    rope = parsed(**yarn).rope
    assert (rope.kind, rope.factor, rope.original, rope.beta_fast) == ("yarn", 4.0, 512, 16.0)
    assert math.isclose(rope.attention_factor, 0.1 * math.log(4) + 1)
    scaled = parsed(**yarn, rope__scaling__attn_factor=0.5).rope
    assert math.isclose(scaled.attention_factor, 0.5 * (0.1 * math.log(4) + 1))
    factors = parsed(factors=[1.0] * 7 + [8.0]).rope
    assert (factors.kind, factors.factors[-1]) == ("factors", 8.0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"block_count": None}, r"llama\.block_count: it is missing"),
        ({"block_count": "x"}, r"llama\.block_count: x is no whole number"),
        ({"block_count": 1 << 40}, "num_hidden_layers must be at most"),
        ({"attention__head_count": 0}, "num_attention_heads must be at least 1"),
        ({"attention__value_length": 8}, r"attention\.value_length: it is not"),
        ({"rope__dimension_count": 8}, "partial_rotary_factor 0.5 needs another family"),
        ({"rope__freq_base": float("inf")}, r"rope\.freq_base: inf is no finite number"),
        ({"rope__scaling__type": "longrope"}, "rope type 'longrope' is not one of"),
        ({"rope__scaling__type": "linear"}, r"rope\.scaling\.factor: it is missing"),
        ({"expert_count": 8}, r"llama\.expert_count: 8 is not known here"),
        ({"logit_scale": 0.5}, r"llama\.logit_scale: 0\.5 is not known here"),
        ({"attention__causal": False}, r"llama\.attention\.causal"),
        ({"factors": [1.0]}, "factors must be a list of 8 numbers"),
        ({"factors": [0.0] * 8}, "factors must be a finite number above 0"),
        ({"factors": [1.0] * 8, "rope__scaling__type": "yarn"}, "'yarn' beside rope_freqs"),
        ({"factors": [1.0] * 8, "rope__scaling__type": "y" * 999}, "'y{100}' beside rope_freqs"),
        ({"shapes": {}}, r"token_embd\.weight is missing"),
    ],
)
def test_what_can_not_be_is_refused_by_its_key(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelNotSupported, match=says):
        parsed(**changes)


@pytest.mark.parametrize("named", ["gemma3", None, 3])
def test_an_unknown_architecture_is_refused_by_name(named: Any) -> None:
    with pytest.raises(ModelNotSupported, match=r"general\.architecture: .* is not one of llama"):
        config_of({**LLAMA, "general.architecture": named}, SHAPES, [])


VOCABULARY = {
    "tokenizer.ggml.tokens": ["a", "<|im_end|>", "<|endoftext|>", "<|end|>"],
    "tokenizer.ggml.token_type": [1, 3, 3, 1],
}


def test_an_answer_ends_with_the_stated_tokens_and_those_known_to_end_one() -> None:
    ids = generation_of({**VOCABULARY, "tokenizer.ggml.eot_token_id": 0})["eos_token_id"]
    assert ids == [0, 1, 2]
    with pytest.raises(ModelNotSupported, match=r"eos_token_id: there is no token 9"):
        generation_of({**VOCABULARY, "tokenizer.ggml.eos_token_id": 9})


def test_warnings_of_what_has_no_effect_are_few_and_short(caplog: pytest.LogCaptureFixture) -> None:
    """However many keys a file has, and however long they are."""
    keys = [f"general.sampling.{i}{'x' * 1000}" for i in range(1000)]
    generation_of({**VOCABULARY, **dict.fromkeys(keys, 1)})
    assert len(caplog.messages) == 9
    assert max(map(len, caplog.messages)) < 200
    assert caplog.messages[-1] == "nor have 992 more keys of general.sampling"


def test_the_authors_sampling_defaults(caplog: pytest.LogCaptureFixture) -> None:
    sampling = {"temp": 0.6, "top_k": 20, "penalty_repeat": 1.1, "mirostat": 0, "xtc_threshold": 1}
    found = generation_of(
        VOCABULARY | {f"general.sampling.{name}": value for name, value in sampling.items()}
    )
    del found["eos_token_id"]
    assert found == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    assert "'general.sampling.xtc_threshold' = '1' is not known here" in caplog.text
    generation_of(VOCABULARY | {"general.sampling.a\nb": "c\nd"})
    assert "'general.sampling.a\\nb' = 'c\\nd' is not known here" in caplog.text
    assert "mirostat" not in caplog.text
