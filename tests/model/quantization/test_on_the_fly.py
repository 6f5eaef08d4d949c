"""Quantizing while loading: what the kinds lose, odd shapes, and what is refused."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest
import torch

from streamer.config import Config
from streamer.errors import ConfigError
from streamer.kernels import ops
from streamer.kernels import reference as torch_kernels
from streamer.kernels.weights import dequantize
from streamer.model.checkpoint import open_checkpoint
from streamer.model.families import parse_config
from streamer.model.inspect import inspect_checkpoint, recognize
from streamer.model.loader import check_tensors, load_decoder
from streamer.model.quantization.on_the_fly import KINDS, kind_for, made_on_the_fly, quantize
from streamer.model.quantization.schemes import METHODS
from tests.checkpoints import reference_logits, reference_model
from tests.model.hand import paged_logits
from tests.model.test_decoder import random_tokens

UP = "model.layers.0.mlp.up_proj"


def q4_0(weight: torch.Tensor) -> torch.Tensor:
    """Round to nearest as llama.cpp's Q4_0: 32 numbers share a scale of which the largest is -8."""
    parts = weight.view(-1, 32)
    largest = parts.gather(1, parts.abs().argmax(1, keepdim=True))
    scales = (largest / -8).half().float()
    return ((parts / scales).round().clamp(-8, 7) * scales).view_as(weight)


def error(weight: torch.Tensor, rounded: torch.Tensor) -> float:
    """Root mean square, relative."""
    return float((rounded - weight).square().mean().sqrt() / weight.square().mean().sqrt())


def test_int4_loses_less_than_q4_0() -> None:
    """On normal numbers; on numbers that are not centred much less."""
    weight = torch.randn(64, 256)
    got = error(weight, dequantize(quantize(weight, "int4")))
    assert got < 0.92 * error(weight, q4_0(weight))
    moved = weight + 2
    assert error(moved, dequantize(quantize(moved, "int4"))) < 0.6 * error(moved, q4_0(moved))


@pytest.mark.parametrize(("kind", "limit"), [("int8", 0.012), ("fp8", 0.03), ("int4", 0.08)])
def test_errors_of_the_kinds(kind: str, limit: float) -> None:
    """Relative to the weights, for normal numbers."""
    weight = torch.randn(64, 256)
    assert error(weight, dequantize(quantize(weight, kind))) < limit


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(2, 32), (7, 40), (700, 96)], ids=str)
def test_odd_shapes(kind: str, n: int, k: int) -> None:
    """A ragged last group, rows that are no multiple of anything, several pieces of work."""
    weight = torch.randn(n, k, dtype=torch.bfloat16)
    found = quantize(weight, kind)
    assert found.scales.shape == (n, -(-k // found.group))
    assert error(weight.float(), dequantize(found)) < 0.12
    halves = [quantize(part, kind) for part in (weight[: n // 2], weight[n // 2 :])]
    assert torch.equal(dequantize(found), torch.cat([dequantize(half) for half in halves]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", [32, 128])
def test_the_search_in_c_loses_no_more_than_the_one_in_torch(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, scale_dtype: torch.dtype, group: int
) -> None:
    """The same search; sums are rounded in another order, so a few groups differ in a tie."""
    if why := ops.why_not_native():
        pytest.skip(why)
    weight = (torch.randn(70, 8 * 32 + 8) * 0.03 + torch.randn(70, 1) * 0.02).to(dtype)
    weight[3], weight[5, 32:64] = 0, 0.02
    weight[6, 40], weight[7, 100] = torch.nan, torch.inf
    native = quantize(weight, "int4", scale_dtype, group)
    monkeypatch.setenv("STREAMER_KERNELS", "torch")
    plain = quantize(weight, "int4", scale_dtype, group)
    assert torch.equal(native.scales.isfinite(), plain.scales.isfinite())
    assert torch.equal(
        native.scales.to(scale_dtype).float().nan_to_num(), native.scales.nan_to_num()
    )
    finite = [row for row in range(70) if row not in (6, 7)]
    assert float((native.codes[finite] == plain.codes[finite]).float().mean()) > 0.99
    numbers = weight.float()[finite]
    errors = [error(numbers, dequantize(found)[finite]) for found in (native, plain)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_int8_in_c_is_int8_in_torch(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    if why := ops.why_not_native():
        pytest.skip(why)
    weight = torch.randn(9, 85).to(dtype)
    weight[2], weight[3, 84], weight[4, 7], weight[5] = 0, -9, 9, 127.5
    weight[5, 1:6] = torch.tensor([0.5, 1.5, -2.5, 126.5, -127.5])  # ties
    native = quantize(weight, "int8")
    monkeypatch.setenv("STREAMER_KERNELS", "torch")
    plain = quantize(weight, "int8")
    assert torch.equal(native.codes, plain.codes)
    assert torch.equal(native.scales, plain.scales)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1e-4, 1e-3, 1e-2])
def test_scales_of_small_weights_in_float16(kind: str, scale: float) -> None:
    """Below its normal numbers, the smallest of which took bits from weights up to 0.008."""
    weight = torch.randn(4, 256) * scale
    exact, found = (
        error(weight, dequantize(quantize(weight, kind, *to))) for to in ((), (torch.float16,))
    )
    assert found < 1.5 * exact


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros(kind: str) -> None:
    """Groups and rows without a number, which have no scale of their own; nor do they make the
    kernels hold all scales in float32."""
    weight = torch.randn(4, 64)
    weight[0], weight[1, :32] = 0, 0
    made = quantize(weight, kind)
    found = dequantize(made)
    assert found.isfinite().all()
    assert not found[0].any()
    assert not found[1, :32].any() or kind != "int4"
    assert (made.scales >= torch.finfo(torch.float16).tiny).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_so(kind: str, value: float) -> None:
    """A damaged checkpoint would otherwise answer as if it were whole; other rows are as they
    were."""
    weight = torch.randn(4, 64)
    expected = dequantize(quantize(weight, kind))
    weight[2, 37] = value
    found = dequantize(quantize(weight, kind))
    assert not found[2].isfinite().all()
    others = torch.tensor([0, 1, 3])
    assert torch.equal(found[others], expected[others])


def test_embeddings_and_head_keep_eight_bits(checkpoint: Any) -> None:
    source = open_checkpoint(checkpoint("llama", 1), "int4")
    matrices = check_tensors(source, parse_config(source.config))
    forms = {module: matrix.form.bits for module, matrix in matrices.items()}
    assert forms["model.embed_tokens"] == forms["lm_head"] == 8
    assert {bits for module, bits in forms.items() if "layers" in module} == {4}
    assert kind_for(UP, "fp8") == "fp8"


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_quantized_weights(checkpoint: Any, kind: str) -> None:
    """Beside transformers' own, whose matrices are quantized and dequantized."""
    folder = checkpoint("qwen3", 1)
    source = open_checkpoint(folder, kind)
    config = parse_config(source.config)
    made = load_decoder(torch_kernels, source, config, torch.float32)
    model = reference_model(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                to = kind_for(name.removesuffix(".weight"), kind)
                parameter.copy_(dequantize(quantize(parameter, to)))
    tokens = random_tokens(30)
    expected = reference_logits(model, tokens)
    torch.testing.assert_close(paged_logits(made, tokens), expected, rtol=1e-3, atol=2e-3)


def test_facts_are_of_the_quantized_model(checkpoint: Any) -> None:
    """Bits a weight fall, parameters do not."""
    folder = checkpoint("llama", 1)
    dense, four = (inspect_checkpoint(folder, Config(quantization=q)) for q in (None, "int4"))
    assert four.refused == ""
    assert four.num_parameters == dense.num_parameters
    head = "int8 made while loading, a scale for each output"
    assert four.scheme == f"int4 made while loading, groups of 32; {head}"
    assert (dense.bits_per_weight, dense.scheme) == (32, "")
    assert 5 < four.bits_per_weight < 9


@pytest.mark.parametrize(
    ("method", "asked", "made"),
    [
        ("", None, None),
        ("", "int8", "int8"),
        ("awq", None, None),
        ("awq", "int8", "int8"),
        ("fp8", "fp8", None),
    ],
)
def test_what_is_made_while_loading(method: str, asked: str | None, made: str | None) -> None:
    assert made_on_the_fly(method, asked) == made


@pytest.mark.parametrize(
    ("method", "asked", "says"),
    [("awq", "int4", "quantized as awq already"), ("", "gptq", "is dense; int8, int4, fp8")],
)
def test_refused(method: str, asked: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        made_on_the_fly(method, asked)
    assert raised.value.param == "quantization"


def test_models_of_transformers_code_are_not_quantized(checkpoint: Any) -> None:
    with pytest.raises(ConfigError, match="GPT2LMHeadModel runs on transformers' code"):
        recognize(open_checkpoint(checkpoint("gpt2", 1), "int8"), "auto")


def test_the_setting_has_all_names() -> None:
    """Those of quantized checkpoints besides what can be made."""
    hint = get_type_hints(Config)["quantization"]
    assert {*get_args(get_args(hint)[0])} == {*KINDS, *METHODS, "gguf"}
