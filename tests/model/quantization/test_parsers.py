"""Each parser against an independent writer: compressed-tensors, transformers, codes by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from streamer.errors import ModelNotSupported
from streamer.kernels.weights import QuantizedWeight, dequantize
from streamer.model.quantization.bits import unpack, words_as_bytes
from streamer.model.quantization.float4 import Bnb4, Bnb8, Mxfp4, Nvfp4
from streamer.model.quantization.gptq import Awq, Gptq
from streamer.model.quantization.interface import Scheme
from streamer.model.quantization.scaled import Grid, Numbers
from streamer.model.quantization.schemes import parse_quantization
from tests.model.quantization import stores

DTYPES = {
    torch.int32: "I32",
    torch.int64: "I64",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
}


def parse(scheme: Scheme, tensors: stores.Tensors, n: int, k: int) -> torch.Tensor:
    """The matrix that the scheme reads, after a check that it expects just these tensors."""
    expected = scheme.stored(n, k, tensors.keys())
    assert {name for name, e in expected.items() if e.is_needed} <= tensors.keys()
    for name, tensor in tensors.items():
        assert DTYPES[tensor.dtype] in expected[name].dtypes, name
        assert not expected[name].shapes or tuple(tensor.shape) in expected[name].shapes, name
    weight = scheme.read(tensors, n, k)
    assert isinstance(weight, QuantizedWeight)
    assert weight.shape == (n, k)
    form = scheme.form(n, k)
    assert (weight.bits, weight.group) == (form.bits, form.group)
    assert weight.offsets is None or form.has_zeros
    assert weight.group in (16, 32, 64, 128, k)
    assert weight.scales.shape == (n, -(-k // weight.group))
    assert weight.codes.is_contiguous()
    return dequantize(weight)


def random_codes(n: int, k: int, bits: int) -> torch.Tensor:
    return torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8)


@pytest.mark.parametrize("bits", range(2, 9))
def test_codes_of_any_width_run_on_over_bytes(bits: int) -> None:
    """Against one long number, for rows that end within a byte."""
    codes = random_codes(3, 43, bits)
    numbers = [sum(int(c) << (bits * i) for i, c in enumerate(row)) for row in codes]
    packed = torch.tensor([list(x.to_bytes(44, "little")) for x in numbers], dtype=torch.uint8)
    assert torch.equal(unpack(packed, bits, 43), codes)


def test_words_of_a_column_are_bytes_in_order() -> None:
    """Zero points of 8 outputs in pack-quantized: a transposed row, which a view refuses."""
    words = torch.tensor([[0x03020100, 0x07060504, 0x0B0A0908]], dtype=torch.int32).t()
    assert torch.equal(words_as_bytes(words), torch.arange(12, dtype=torch.uint8).view(3, 4))


INT, FLOAT = {"type": "int"}, {"type": "float", "num_bits": 8}
COMPRESSED: list[tuple[str, dict[str, Any]]] = [
    *(("pack-quantized", {**INT, "num_bits": b, "group_size": 32}) for b in range(2, 9)),
    ("pack-quantized", {**INT, "num_bits": 4, "group_size": 96}),
    ("pack-quantized", {**INT, "num_bits": 4, "strategy": "channel"}),
    ("pack-quantized", {**INT, "num_bits": 4, "strategy": "tensor"}),
    ("pack-quantized", {**INT, "num_bits": 4, "group_size": 64, "symmetric": False}),
    ("pack-quantized", {**INT, "num_bits": 3, "group_size": 64, "symmetric": False}),
    ("pack-quantized", {**INT, "num_bits": 8, "strategy": "channel", "symmetric": False}),
    ("int-quantized", {**INT, "num_bits": 8, "strategy": "channel"}),
    ("int-quantized", {**INT, "num_bits": 8, "strategy": "tensor"}),
    ("int-quantized", {**INT, "num_bits": 8, "group_size": 64, "symmetric": False}),
    ("naive-quantized", {**INT, "num_bits": 4, "group_size": 64}),
    ("naive-quantized", {**FLOAT, "strategy": "tensor"}),
    ("float-quantized", {**FLOAT, "strategy": "channel"}),
    ("float-quantized", {**FLOAT, "group_size": 64}),
    ("float-quantized", {**FLOAT, "strategy": "block", "block_structure": [16, 64]}),
]


@pytest.mark.parametrize(("form", "args"), COMPRESSED, ids=str)
def test_compressed_tensors(form: str, args: dict[str, Any]) -> None:
    """What its compressor wrote is read by its own config as its own decompressor reads it."""
    n, k = 40, 192
    given = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=given)
    config = QuantizationConfig(config_groups={"group_0": scheme}, format=form)
    block = given.block_structure or [n if given.strategy == "tensor" else 1, k]
    rows, groups = -(-n // block[0]), -(-k // (given.group_size or block[1]))
    shape = (1,) if given.strategy == "tensor" else (rows, groups)
    state = {"weight": torch.randn(n, k), "weight_scale": torch.rand(shape) * 0.1 + 0.02}
    if not given.symmetric:
        half = 1 << (given.num_bits - 1)
        state["weight_zero_point"] = torch.randint(-half, half, shape, dtype=torch.int8)
    compressor: Any = BaseCompressor.get_value_from_registry(CompressionFormat(form).value)
    tensors = compressor.compress(state, scheme)
    expected = compressor.decompress(tensors, scheme)["weight"]
    schemes = parse_quantization({"quantization_config": config.model_dump(mode="json")})
    got = parse(schemes.of("model.layers.0.mlp.up_proj", {}), tensors, n, k)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def _by_group(values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    return values[:, groups.long()].float()


@pytest.mark.parametrize("is_v1", [True, False], ids=["v1", "v2"])
@pytest.mark.parametrize(
    ("bits", "group", "order"),
    [(4, 32, False), (4, 64, True), (8, 32, True), (4, -1, False), (2, 64, True)],
)
def test_gptq(bits: int, group: int, order: bool, is_v1: bool) -> None:
    """Codes by hand, with zero points of 0 and 15, and columns in the order of activations."""
    n, k = 24, 128
    size = k if group == -1 else group
    groups = torch.arange(k) // size
    if order:
        groups = groups[torch.randperm(k)]
    codes = random_codes(n, k, bits)
    scales = torch.rand(n, k // size).half()
    zeros = random_codes(n, k // size, bits)
    zeros[0], zeros[1] = 0, (1 << bits) - 1
    tensors = stores.gptq(codes, scales, zeros, bits, groups, is_v1=is_v1)
    scheme = Gptq(bits, group, False, order, is_v1)
    expected = (codes - _by_group(zeros, groups)) * _by_group(scales, groups)
    torch.testing.assert_close(parse(scheme, tensors, n, k), expected, rtol=1e-5, atol=1e-5)
    assert isinstance(weight := scheme.read(tensors, n, k), QuantizedWeight)
    assert (weight.permutation is not None) is order


def test_gptq_with_one_zero_point_has_no_offsets() -> None:
    """A symmetric file stores a zero point a group all the same."""
    codes, scales = random_codes(16, 64, 4), torch.rand(16, 2)
    zeros = torch.full((16, 2), 8, dtype=torch.uint8)
    groups = torch.arange(64) // 32
    tensors = stores.gptq(codes, scales, zeros, 4, groups, is_v1=True)
    weight = Gptq(4, 32, True, False, True).read(tensors, 16, 64)
    assert (weight.zero, weight.offsets) == (8, None)
    tensors["g_idx"] = torch.zeros(64, dtype=torch.int32)
    with pytest.raises(ModelNotSupported, match="groups of 32"):
        Gptq(4, 32, True, False, True).read(tensors, 16, 64)


def test_a_gptq_bias_of_a_model_without_is_zero() -> None:
    """AutoGPTQ wrote zeros; others would change the model."""
    codes, scales = random_codes(16, 64, 4), torch.rand(16, 2)
    tensors = stores.gptq(
        codes, scales, random_codes(16, 2, 4), 4, torch.arange(64) // 32, is_v1=False
    )
    scheme = Gptq(4, 32, False, False, False)
    plain = parse(scheme, tensors, 16, 64)
    assert torch.equal(parse(scheme, {**tensors, "bias": torch.zeros(16)}, 16, 64), plain)
    with pytest.raises(ModelNotSupported, match="bias: is not zero"):
        parse(scheme, {**tensors, "bias": torch.ones(16)}, 16, 64)


@pytest.mark.parametrize("group", [32, 128])
def test_awq(group: int) -> None:
    n, k = 24, 128
    codes, zeros = random_codes(n, k, 4), random_codes(n, k // group, 4)
    scales = torch.rand(n, k // group).half()
    groups = torch.arange(k) // group
    expected = (codes - _by_group(zeros, groups)) * _by_group(scales, groups)
    got = parse(Awq(group, False), stores.awq(codes, scales, zeros), n, k)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("n", "k"), [(256, 384), (200, 300)], ids=["whole", "ragged"])
def test_fp8_blocks(n: int, k: int) -> None:
    """128 x 128, with blocks cut off at the edges; transformers' own code reads the whole ones."""
    weight = torch.randn(n, k).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-n // 128), -(-k // 128)) + 0.1
    tensors = {"weight": weight, "weight_scale_inv": scales}
    given = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    scheme = parse_quantization({"quantization_config": given}).of("lm_head", {})
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:n, :k]
    expected = weight.float() * spread
    assert torch.equal(parse(scheme, tensors, n, k), expected)
    if not n % 128:
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize

        theirs = Fp8Dequantize(None)._dequantize_one(weight, scales, torch.float32)
        assert torch.equal(theirs, expected)


@pytest.mark.parametrize("shape", [(), (1,), (48, 1), (48,)], ids=str)
def test_fp8_without_blocks(shape: tuple[int, ...]) -> None:
    """A scale a matrix or an output, told apart by the shape."""
    weight, scales = torch.randn(48, 80).to(torch.float8_e4m3fn), torch.rand(shape) + 0.1
    given = {"quant_method": "fp8", "activation_scheme": "static"}
    scheme = parse_quantization({"quantization_config": given}).of("lm_head", {})
    got = parse(scheme, {"weight": weight, "weight_scale": scales}, 48, 80)
    assert torch.equal(got, weight.float() * scales.view(-1, 1))


def test_scales_that_are_powers_of_two() -> None:
    """e8m0, as a byte or in torch's dtype; 255 is no number."""
    scheme = Numbers("FP8", True, (Grid(1, 32),))
    weight = torch.randn(8, 64).to(torch.float8_e4m3fn)
    scales = torch.randint(120, 130, (8, 2), dtype=torch.uint8)
    expected = weight.float() * torch.exp2(scales.float() - 127).repeat_interleave(32, 1)
    assert torch.equal(parse(scheme, {"weight": weight, "weight_scale": scales}, 8, 64), expected)
    as_float = {"weight": weight, "weight_scale": scales.view(torch.float8_e8m0fnu)}
    assert torch.equal(dequantize(scheme.read(as_float, 8, 64)), expected)
    scales[3, 1] = 255
    with pytest.raises(ModelNotSupported, match="255"):
        scheme.read({"weight": weight, "weight_scale": scales}, 8, 64)


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 += [-value for value in E2M1]


def test_mxfp4_as_gpt_oss_stores_it() -> None:
    codes = random_codes(8, 96, 4)
    exponents = torch.randint(110, 140, (8, 3))
    scales = torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    expected = torch.tensor(E2M1)[codes.long()] * scales
    got = parse(Mxfp4(has_blocks=True), stores.mxfp4(codes, exponents), 8, 96)
    torch.testing.assert_close(got, expected)


def test_mxfp4_of_experts_is_what_transformers_makes_of_it() -> None:
    """Blocks [experts, N, K / 32, 16], which it gives back as [experts, K, N]."""
    blocks = torch.randint(256, (3, 8, 2, 16), dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 8, 2), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    for i in range(3):
        stored = {"weight_blocks": blocks[i], "weight_scales": scales[i]}
        got = parse(Mxfp4(has_blocks=True), stored, 8, 64)
        torch.testing.assert_close(got, expected[i].T)


@pytest.mark.parametrize("form", ["mxfp4-pack-quantized", "nvfp4-pack-quantized"])
def test_four_bit_floats_of_compressed_tensors(form: str) -> None:
    """Its own compressor packs, the config is its preset."""
    n, k, group = 16, 128, 32 if form.startswith("mx") else 16
    scale_dtype = torch.uint8 if group == 32 else torch.float8_e4m3fn
    args = QuantizationArgs(
        num_bits=4,
        type="float",
        strategy="group" if group == 32 else "tensor_group",
        group_size=group,
        scale_dtype=scale_dtype,
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    config = QuantizationConfig(config_groups={"group_0": scheme}, format=form)
    scales = torch.exp2(torch.randint(-4, 3, (n, k // group)).float())
    state = {"weight": torch.randn(n, k), "weight_scale": scales}
    if group == 16:
        state["weight_global_scale"] = torch.tensor([2.5])
    compressor: Any = BaseCompressor.get_value_from_registry(CompressionFormat(form).value)
    tensors = compressor.compress(state, scheme)
    factor = 2.5 if group == 16 else 1.0
    codes = torch.stack((tensors["weight_packed"] & 15, tensors["weight_packed"] >> 4), -1)
    expected = torch.tensor(E2M1)[codes.view(n, k).long()]
    expected = expected * (scales / factor).repeat_interleave(group, 1)
    schemes = parse_quantization({"quantization_config": config.model_dump(mode="json")})
    torch.testing.assert_close(parse(schemes.of("lm_head", {}), tensors, n, k), expected)


def test_eight_bit_floats_with_powers_of_two_of_compressed_tensors() -> None:
    """MXFP8: its own compressor and decompressor, scales of a byte."""
    args = QuantizationArgs(
        num_bits=8, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    config = QuantizationConfig(config_groups={"group_0": scheme}, format="mxfp8-quantized")
    scales = torch.exp2(torch.randint(-9, -6, (16, 4)).float())
    compressor: Any = BaseCompressor.get_value_from_registry("mxfp8-quantized")
    tensors = compressor.compress({"weight": torch.randn(16, 128), "weight_scale": scales}, scheme)
    expected = compressor.decompress(dict(tensors), scheme)["weight"].float()
    schemes = parse_quantization({"quantization_config": config.model_dump(mode="json")})
    assert torch.equal(parse(schemes.of("lm_head", {}), tensors, 16, 128), expected)


def test_nvfp4_of_modelopt_multiplies() -> None:
    codes = random_codes(8, 64, 4)
    scales = torch.rand(8, 4).to(torch.float8_e4m3fn)
    tensors = {
        "weight": codes[:, ::2] | codes[:, 1::2] << 4,
        "weight_scale": scales,
        "weight_scale_2": torch.tensor(0.25),
    }
    expected = torch.tensor(E2M1)[codes.long()] * scales.float().repeat_interleave(16, 1) / 4
    torch.testing.assert_close(parse(Nvfp4(is_modelopt=True), tensors, 8, 64), expected)


def test_bitsandbytes_four_bits() -> None:
    """Within a 254th of a block's largest: the 16 floats become 127ths."""
    values = torch.linspace(-1, 1, 16) ** 3
    codes, largest = random_codes(8, 128, 4), torch.rand(8, 2)
    expected = values[codes.long()] * largest.repeat_interleave(64, 1)
    tensors = stores.bnb4(codes, largest, values, "nf4")
    got = parse(Bnb4("nf4", False), tensors, 8, 128)
    assert ((got - expected).abs() <= largest.repeat_interleave(64, 1) / 253).all()
    with pytest.raises(ModelNotSupported, match=r"nf4 \[8, 128\], not fp4"):
        Bnb4("fp4", False).read(tensors, 8, 128)


def test_bitsandbytes_scales_that_are_quantized_too() -> None:
    """A byte into 256 values times the largest of 256 blocks, plus an offset."""
    values, nested = torch.linspace(-1, 1, 16), torch.linspace(-1, 1, 256)
    codes, coded = random_codes(160, 128, 4), torch.randint(0, 256, (320,), dtype=torch.uint8)
    largest = nested[coded.long()] * torch.tensor([0.5] * 256 + [0.25] * 64) + 0.75
    tensors = stores.bnb4(codes, coded, values, "fp4", nested_blocksize=256, nested_offset=0.75)
    tensors["weight.nested_absmax"] = torch.tensor([0.5, 0.25])
    tensors["weight.nested_quant_map"] = nested
    scales = largest.view(160, 2).repeat_interleave(64, 1)
    got = parse(Bnb4("fp4", True), tensors, 160, 128)
    assert ((got - values[codes.long()] * scales).abs() <= scales / 253).all()
    tensors["weight.nested_absmax"] = torch.ones(3)
    with pytest.raises(ModelNotSupported, match="do not fit nested_absmax"):
        Bnb4("fp4", True).read(tensors, 160, 128)


def test_bitsandbytes_eight_bits() -> None:
    weight = torch.randint(-127, 128, (8, 48), dtype=torch.int8)
    largest = torch.rand(8)
    got = parse(Bnb8(), {"weight": weight, "SCB": largest}, 8, 48)
    torch.testing.assert_close(got, weight.float() * largest.view(-1, 1) / 127)


@pytest.mark.parametrize(
    ("scheme", "change", "says"),
    [
        (Numbers("", False, (Grid(),), 4), {"weight": torch.full((8, 64), 9)}, "beyond 4 bits"),
        (
            Numbers("", False, (Grid(),), 4, has_zeros=True),
            {"weight_zero_point": torch.full((8, 1), -100)},
            "weight_zero_point: has values beyond 4 bits",
        ),
        (Mxfp4(has_blocks=True), {"weight_scales": torch.full((8, 2), 255)}, "255"),
    ],
)
def test_values_that_no_writer_makes(
    scheme: Scheme, change: dict[str, torch.Tensor], says: str
) -> None:
    """Shapes fit, values do not."""
    tensors = {
        "weight": torch.zeros(8, 64, dtype=torch.int8),
        "weight_scale": torch.ones(8, 1),
        "weight_zero_point": torch.zeros(8, 1, dtype=torch.int8),
        "weight_blocks": torch.zeros(8, 2, 16, dtype=torch.uint8),
        "weight_scales": torch.zeros(8, 2, dtype=torch.uint8),
    }
    tensors |= {name: value.to(tensors[name].dtype) for name, value in change.items()}
    with pytest.raises(ModelNotSupported, match=says):
        scheme.read(tensors, 8, 64)


def test_a_scale_for_more_rows_than_there_are_takes_no_more_memory() -> None:
    scales = Grid(1 << 40, 64).spread(torch.tensor([[2.0, 3.0]]), 5, 128)
    assert torch.equal(scales, torch.tensor([2.0, 3.0]).expand(5, 2))


@pytest.mark.parametrize(
    ("state", "values"),
    [
        ({"nested_blocksize": 1 << 70, "nested_offset": 10**400}, torch.linspace(-1, 1, 16)),
        ({"nested_blocksize": 256, "nested_offset": 0}, torch.full((16,), torch.nan)),
    ],
)
def test_a_bitsandbytes_state_that_lies(state: dict[str, int], values: torch.Tensor) -> None:
    with pytest.raises(ModelNotSupported, match=r"quant_state|quant_map"):
        Bnb4("nf4", True).read(stated(state, values), 8, 64)


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("name", ["blocksize", "nested_blocksize"])
@pytest.mark.parametrize("value", [64.0, True, "64", [64], None, 0, -1, 5000, 10**400])
def test_a_bitsandbytes_block_that_is_no_size(name: str, value: object, count: int) -> None:
    """By the field, and cut, whatever number of nested scales there is."""
    state = {"nested_blocksize": 256, "nested_offset": 0, name: value}
    tensors = stated(state, torch.linspace(-1, 1, 16))
    tensors["weight.nested_absmax"] = torch.ones(count)
    with pytest.raises(ModelNotSupported, match=f"^quant_state: {name} ") as error:
        Bnb4("nf4", True).read(tensors, 8, 64)
    assert len(error.value.message) < 200


def stated(state: dict[str, Any], values: torch.Tensor) -> dict[str, torch.Tensor]:
    """A matrix [8, 64] of nested scales whose state says this."""
    said = {"shape": [8, 64], "quant_type": "nf4", "blocksize": 64, **state}
    return {
        "weight": torch.zeros(256, 1, dtype=torch.uint8),
        "weight.absmax": torch.zeros(8, dtype=torch.uint8),
        "weight.quant_map": values,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor([*json.dumps(said).encode()]),
        "weight.nested_absmax": torch.ones(1),
        "weight.nested_quant_map": torch.zeros(256),
    }
