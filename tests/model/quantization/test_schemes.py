"""quantization_config: which scheme a module has, and refusals that name the field."""

from __future__ import annotations

from typing import Any

import pytest

from streamer.errors import ModelNotSupported
from streamer.model.checkpoint import TensorEntry
from streamer.model.fallback import model_class_of
from streamer.model.quantization import reading
from streamer.model.quantization.interface import DENSE
from streamer.model.quantization.schemes import Schemes, parse_quantization

UP, HEAD = "model.layers.1.mlp.up_proj", "lm_head"
ATTENTION = "model.layers.1.self_attn.q_proj"
EMBEDDING = "model.embed_tokens"
INT4 = {"num_bits": 4, "group_size": 32}


def schemes(method: str, **given: Any) -> Schemes:
    return parse_quantization({"quantization_config": {"quant_method": method, **given}})


def compressed(weights: dict[str, Any], form: str = "pack-quantized", **given: Any) -> Schemes:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return schemes("compressed-tensors", **{"format": form, "config_groups": groups, **given})


def named(found: Schemes, module: str) -> str:
    return found.of(module, {}).name


def test_a_checkpoint_without_quantization_is_dense() -> None:
    assert parse_quantization({}).method == ""
    assert parse_quantization({"quantization_config": None}).of(UP, {}) is DENSE


def test_a_matrix_that_is_stored_dense_is_dense() -> None:
    """Writers match the names of modules that they skip each in their own way."""
    entry = TensorEntry("x", "BF16", (8, 8), "model.safetensors", 0, 128)
    assert schemes("awq").of(UP, {"weight": entry}) is DENSE
    assert schemes("awq").of(UP, {}).name == "AWQ, 4 bits, groups of 128"


def test_names_of_schemes() -> None:
    assert named(schemes("gptq", bits=4, group_size=-1, desc_act=True), UP) == (
        "GPTQ, 4 bits, a scale for each output, activation order"
    )
    assert named(schemes("fp8", weight_block_size=[128, 128]), UP) == "FP8, blocks of 128 x 128"
    assert named(schemes("fp8"), UP) == "FP8, one scale a matrix or a scale for each output"
    assert named(schemes("mxfp4"), UP) == "MXFP4, groups of 32"
    assert named(compressed({**INT4, "symmetric": False}), UP) == (
        "compressed-tensors, 4 bits, groups of 32, zero points"
    )


@pytest.mark.parametrize(
    ("shape", "says"),
    [((), "one scale a matrix"), ((1,), "one scale a matrix"), ((8, 1), "a scale for each output")],
)
def test_the_scales_of_a_file_say_what_they_are_for(shape: tuple[int, ...], says: str) -> None:
    """Of FP8 without blocks config.json does not."""
    scales = TensorEntry("x", "F32", shape, "model.safetensors", 0, 4)
    found = schemes("fp8").of(UP, {"weight_scale": scales})
    assert found.name == f"FP8, {says}"


def test_targets_and_ignored_of_compressed_tensors() -> None:
    """A name comes before a pattern, a pattern before a class; patterns match from the start."""
    groups = {
        "linear": {"targets": ["Linear"], "weights": INT4},
        "mlp": {"targets": [r"re:.*\.mlp\..*"], "weights": {**INT4, "num_bits": 8}},
        "one": {"targets": [UP], "weights": {**INT4, "num_bits": 2}},
    }
    found = compressed({}, config_groups=groups, ignore=[HEAD, r"re:.*layers\.2\."])
    bits = {m: found.of(m, {}).form(64, 64).bits for m in (UP, ATTENTION, HEAD, EMBEDDING)}
    assert bits == {UP: 2, ATTENTION: 4, HEAD: 0, EMBEDDING: 0}
    assert found.of("model.layers.1.mlp.down_proj", {}).form(64, 64).bits == 8
    assert found.of("model.layers.2.mlp.down_proj", {}) is DENSE
    tables = compressed(INT4, config_groups={"g": {"targets": ["Embedding"], "weights": INT4}})
    assert tables.of(EMBEDDING, {}).form(64, 64).bits == 4


def test_dynamic_rules_of_gptqmodel() -> None:
    """The first pattern that fits decides: other bits, or none."""
    dynamic = {r"-:.*\.self_attn\..*": {}, r"+:.*\.layers\.1\..*": {"bits": 8, "group_size": 32}}
    found = schemes("gptq", bits=4, group_size=128, dynamic=dynamic)
    assert named(found, UP) == "GPTQ, 8 bits, groups of 32"
    assert found.of(ATTENTION, {}) is DENSE
    assert named(found, UP.replace("1", "0")) == "GPTQ, 4 bits, groups of 128"
    chosen = schemes("gptq", bits=4, modules_in_block_to_quantize=[["mlp.up_proj"]])
    assert (chosen.of(ATTENTION, {}), named(chosen, UP)) == (DENSE, "GPTQ, 4 bits, groups of 128")


@pytest.mark.parametrize(
    ("method", "field"),
    [
        ("awq", "modules_to_not_convert"),
        ("fp8", "ignored_layers"),
        ("bitsandbytes", "llm_int8_skip_modules"),
    ],
)
def test_skipped_modules(method: str, field: str) -> None:
    """From the start of a name up to a dot, as a pattern, or its end."""
    skipped = ["up_proj", r"model\.layers\.1", "model.layers.2", "model.layers.3.", "lm_head"]
    found = schemes(method, **{field: skipped, "load_in_8bit": True})
    assert found.of("model.layers.0.mlp.up_proj", {}) is DENSE
    assert found.of(ATTENTION, {}) is DENSE
    for layer in (11, 22):
        assert found.of(f"model.layers.{layer}.mlp.gate_proj", {}) is not DENSE
    for layer in (2, 3):
        assert found.of(f"model.layers.{layer}.mlp.gate_proj", {}) is DENSE
    assert found.of(EMBEDDING, {}) is DENSE


@pytest.mark.parametrize(
    ("given", "param", "says"),
    [
        ({"quant_method": "hqq"}, "quant_method", "says hqq"),
        ({"quant_method": None}, "quant_method", "one of gptq, awq"),
        ({"quant_method": "gptq", "bits": 3}, "bits", "2, 4 or 8"),
        ({"quant_method": "gptq"}, "bits", "lacks bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 24}, "group_size", "multiple of 16"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 16 << 30}, "group_size", "at most"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 10**400}, "group_size", "at most"),
        ({"quant_method": "gptq", "bits": 4, "sym": "no"}, "sym", "true or false"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"(": {}}}, "dynamic", "no pattern"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"a": {"bits": 5}}}, "bits", "says 5"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            "checkpoint_format",
            "marlin",
        ),
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int64"}, "pack_dtype", "int64"),
        ({"quant_method": "awq", "version": "gemv"}, "version", "gemm"),
        ({"quant_method": "awq", "bits": 3}, "bits", "must be 4"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt", "e5m2"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size", "two integers"),
        (
            {"quant_method": "fp8", "weight_block_size": [10**330, 128]},
            "weight_block_size",
            "at most",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 10**330]},
            "weight_block_size",
            "at most",
        ),
        ({"quant_method": "fp8", "ignored_layers": "lm_head"}, "ignored_layers", "list of strings"),
        ({"quant_method": "bitsandbytes"}, "load_in_8bit", "load_in_4bit"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "int4"},
            "bnb_4bit_quant_type",
            "nf4 or fp4",
        ),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, "quant_algo", "FP8 or NVFP4"),
        ({"quant_method": "compressed-tensors"}, "config_groups", "an object"),
    ],
)
def test_refused_by_field(given: dict[str, Any], param: str, says: str) -> None:
    """Before any tensor is read."""
    with pytest.raises(ModelNotSupported, match=says) as error:
        parse_quantization({"quantization_config": given})
    assert error.value.param == param


@pytest.mark.parametrize(
    ("weights", "form", "more", "says"),
    [
        (INT4, "marlin-24", {}, "format must be one of"),
        ({**INT4, "num_bits": 9}, "pack-quantized", {}, "num_bits must be 2 to 8"),
        ({**INT4, "type": "float"}, "float-quantized", {}, "floats of 8 bits"),
        ({**INT4, "group_size": 20}, "pack-quantized", {}, "no multiple of 16"),
        ({"num_bits": 4, "strategy": "token"}, "pack-quantized", {}, "strategy must be"),
        (INT4, "float-quantized", {}, "weights.type must be one"),
        ({"num_bits": 4, "symmetric": False}, "pack-quantized", {}, "group or channel"),
        (INT4, "nvfp4-pack-quantized", {}, "groups of 16"),
        (INT4, "pack-quantized", {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config"),
        (INT4, "pack-quantized", {"transform_config": {"config_groups": {"R1": {}}}}, "transform"),
        (INT4, "pack-quantized", {"ignore": ["re:("]}, "no pattern"),
    ],
)
def test_compressed_tensors_refused(
    weights: dict[str, Any], form: str, more: dict[str, Any], says: str
) -> None:
    """Formats, widths and combinations that no parser here reads."""
    with pytest.raises(ModelNotSupported, match=says):
        compressed(weights, form, **more)


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("(?:(.)|(..)|(...))+(?!.)[^a-z]", "takes more than"),
        ("((a{99}){99}){99}", "repeats more than 1000 times"),
    ],
)
def test_a_pattern_that_takes_hours_is_refused(
    monkeypatch: pytest.MonkeyPatch, pattern: str, says: str
) -> None:
    monkeypatch.setattr(reading, "MAX_MATCHING_S", 0.01)
    with pytest.raises(ModelNotSupported, match=says) as error:
        compressed(INT4, ignore=[f"re:{pattern}"]).of(ATTENTION, {})
    assert error.value.param == "ignore"


MANY = [f"layers.{i}.[ab]" for i in range(5000)]
PATTERNS: list[tuple[str, str, dict[str, Any]]] = [
    ("gptq", "dynamic", {"bits": 4, "dynamic": {f"-:{text}": {} for text in MANY}}),
    ("fp8", "modules_to_not_convert", {"ignored_layers": MANY}),
    ("modelopt", "ignore", {"quant_algo": "FP8", "ignore": MANY}),
    (
        "compressed-tensors",
        "ignore",
        {"config_groups": {"g": {}}, "ignore": [f"re:{text}" for text in MANY]},
    ),
    ("compressed-tensors", "config_groups", {"config_groups": {text: {} for text in MANY}}),
    (
        "compressed-tensors",
        "targets",
        {"config_groups": {"g": {"targets": [f"re:{text}" for text in MANY]}}},
    ),
]


@pytest.mark.parametrize(("method", "field", "given"), PATTERNS, ids=[p[1] for p in PATTERNS])
def test_thousands_of_patterns_are_refused(method: str, field: str, given: dict[str, Any]) -> None:
    """Each takes milliseconds to compile, and then some for every module."""
    with pytest.raises(ModelNotSupported, match="at most 4096, the checkpoint says 5000") as error:
        schemes(method, **given)
    assert error.value.param == field


def test_patterns_share_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of these takes long, all of them do."""
    monkeypatch.setattr(reading, "MAX_MATCHING_S", 0.02)
    with pytest.raises(ModelNotSupported, match=r"takes more than 0\.02 s, with those before it"):
        schemes("gptq", bits=4, dynamic={rf"-:.*\.{i}\..*": {} for i in range(1000)})


@pytest.mark.parametrize(
    ("method", "field", "given"),
    [
        ("fp8", "modules_to_not_convert", {}),
        ("modelopt", "ignore", {"quant_algo": "FP8"}),
        (
            "compressed-tensors",
            "ignore",
            {
                "format": "pack-quantized",
                "config_groups": {"g": {"targets": ["Linear"], "weights": INT4}},
            },
        ),
    ],
)
def test_names_are_no_patterns(method: str, field: str, given: dict[str, Any]) -> None:
    """However many: each is looked up."""
    many = [f"model.layers.{i}.mlp" for i in range(5000)] + [f"a.{i}-b" for i in range(5000)]
    found = schemes(method, **{field: [*many, UP], **given})
    assert found.of(UP, {}) is DENSE
    assert found.of(ATTENTION, {}) is not DENSE


def test_names_may_be_nested_however_deep() -> None:
    names: Any = "lm_head"
    for _ in range(5000):
        names = [names]
    assert compressed(INT4, ignore=names).of("lm_head", {}) is DENSE


def test_lists_of_names_are_bounded() -> None:
    with pytest.raises(ModelNotSupported, match="at most 262144"):
        compressed(INT4, ignore=["re:a" * 200] * 400)


def test_other_architectures_are_refused_quantized() -> None:
    """With architecture and scheme: transformers' code would need the weights dense."""
    given = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "quantization_config": {"quant_method": "awq"},
    }
    with pytest.raises(ModelNotSupported, match="Gemma3ForCausalLM quantized as awq"):
        model_class_of(given)
