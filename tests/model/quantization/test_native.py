"""Safetensors formats on the native kernels: logits beside transformers' on the same values.

The values of each file's codes are reckoned here by hand, or by the writer that made them, and
never by our parsers.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from safetensors.torch import load_file, save_file

from streamer.demo import CHECKPOINT
from streamer.kernels import ops, reference
from streamer.model.checkpoint import open_checkpoint
from streamer.model.families import parse_config
from streamer.model.loader import load_decoder
from streamer.model.quantization.float4 import Nvfp4
from tests.checkpoints import edit_config, reference_logits, reference_model
from tests.model import stories
from tests.model.hand import paged_logits
from tests.model.quantization import stores
from tests.model.rounding import Rounding, error
from tests.model.test_decoder import random_tokens

pytestmark = pytest.mark.skipif(ops.why_not_native() != "", reason="native kernels")

Written = tuple[stores.Tensors, torch.Tensor]  # a module's tensors, and the matrix they stand for
Writer = Callable[[torch.Tensor], Written]
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "initializer_range": 0.08,
}
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = torch.cat((E2M1, -E2M1))


def nearest(
    weight: torch.Tensor, bits: int, group: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [N, K] rounded to nearest, with float16 scales and zero points [N, K / group]."""
    n, k = weight.shape
    parts, top = weight.view(n, k // group, group), (1 << bits) - 1
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scales = ((high - low) / top).half()
    zeros = (-low / scales.float()).round().clamp(0, top)
    codes = (parts / scales.float().unsqueeze(-1) + zeros.unsqueeze(-1)).round().clamp(0, top)
    return codes.view(n, k).to(torch.uint8), scales, zeros.to(torch.uint8)


def gptq(weight: torch.Tensor, *, bits: int, group: int, is_v1: bool, is_ordered: bool) -> Written:
    """With `is_ordered`, columns' groups are in the order of activations."""
    groups = torch.arange(weight.shape[1]) // group
    order = torch.randperm(len(groups)) if is_ordered else torch.arange(len(groups))
    sorted_codes, scales, zeros = nearest(weight[:, order], bits, group)
    own = torch.empty_like(groups)
    own[order] = groups
    codes = torch.empty_like(sorted_codes)
    codes[:, order] = sorted_codes
    dense = (codes.float() - zeros[:, own].float()) * scales[:, own].float()
    return stores.gptq(codes, scales, zeros, bits, own, is_v1=is_v1), dense


def awq(weight: torch.Tensor, *, group: int) -> Written:
    codes, scales, zeros = nearest(weight, 4, group)
    groups = torch.arange(weight.shape[1]) // group
    dense = (codes.float() - zeros[:, groups].float()) * scales[:, groups].float()
    return stores.awq(codes, scales, zeros), dense


def scheme_of(args: dict[str, Any]) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))


def compressed(weight: torch.Tensor, *, form: str, args: dict[str, Any]) -> Written:
    """By compressed-tensors' compressor and decompressor, with scales of the largest numbers."""
    (n, k), scheme = weight.shape, scheme_of(args)
    given: Any = scheme.weights
    block = given.block_structure or [
        n if given.strategy == "tensor" else 1,
        given.group_size or k,
    ]
    rows, columns = -(-n // block[0]), -(-k // block[1])
    wide = torch.zeros(rows * block[0], columns * block[1])
    wide[:n, :k] = weight
    parts = wide.view(rows, block[0], columns, block[1]).transpose(1, 2)
    top = 2 ** (given.num_bits - 1) - 1 if given.type == "int" else 448
    state = {"weight": weight, "weight_scale": parts.abs().amax((2, 3)) / top}
    if not given.symmetric:
        low, high = parts.amin((2, 3)).clamp(max=0), parts.amax((2, 3)).clamp(min=0)
        state["weight_scale"] = (high - low) / (2 * top + 1)
        points = (-top - 1 - low / state["weight_scale"]).round()
        state["weight_zero_point"] = points.to(torch.int8)
    if given.strategy == "tensor":
        state["weight_scale"] = state["weight_scale"].view(1)
    compressor: Any = BaseCompressor.get_value_from_registry(CompressionFormat(form).value)
    tensors = compressor.compress(state, scheme)
    return tensors, compressor.decompress(dict(tensors), scheme)["weight"].float()


def fp8(weight: torch.Tensor, *, rows: int, columns: int) -> Written:
    """Blocks of rows x columns, the last ones ragged; a block of 0 is the matrix."""
    n, k = weight.shape
    rows, columns = rows or n, columns or k
    count = (-(-n // rows), -(-k // columns))
    scales = torch.stack(
        [
            weight[r * rows : (r + 1) * rows, c * columns : (c + 1) * columns].abs().amax() / 448
            for r in range(count[0])
            for c in range(count[1])
        ]
    ).view(count)
    spread = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:n, :k]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    if count == (1, 1):
        tensors = {"weight": codes, "weight_scale": scales.view(())}
    else:
        tensors = {"weight": codes, "weight_scale_inv": scales}
    return {**tensors, "input_scale": torch.tensor(1.0)}, codes.float() * spread


def four_bit_floats(
    weight: torch.Tensor, scales: torch.Tensor, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N, K] of e2m1 and what they stand for."""
    spread = scales.repeat_interleave(group, 1)
    codes = (weight / spread).unsqueeze(-1).sub(E2M1).abs().argmin(-1)
    return codes.to(torch.uint8), E2M1[codes] * spread


def mxfp4(weight: torch.Tensor) -> Written:
    exponents = (weight.view(len(weight), -1, 32).abs().amax(-1) / 6).log2().ceil()
    codes, dense = four_bit_floats(weight, torch.exp2(exponents), 32)
    return stores.mxfp4(codes, exponents + 127), dense


def nvfp4(weight: torch.Tensor) -> Written:
    """ModelOpt's: the matrix' own scale multiplies."""
    whole = weight.abs().amax() / (6 * 448)
    largest = weight.view(len(weight), -1, 16).abs().amax(-1)
    scales = (largest / 6 / whole).to(torch.float8_e4m3fn)
    codes, dense = four_bit_floats(weight, scales.float() * whole, 16)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return {"weight": packed, "weight_scale": scales, "weight_scale_2": whole}, dense


def nf4(weight: torch.Tensor) -> Written:
    """Quantiles of normal numbers, as bitsandbytes has them but for the asymmetry."""
    values = torch.distributions.Normal(0, 1).icdf(torch.linspace(0.03, 0.97, 16))
    values /= values.abs().max()
    largest = weight.view(len(weight), -1, 64).abs().amax(-1)
    spread = largest.repeat_interleave(64, 1)
    codes = (weight / spread).unsqueeze(-1).sub(values).abs().argmin(-1)
    return stores.bnb4(codes.to(torch.uint8), largest, values, "nf4"), values[codes] * spread


def llm_int8(weight: torch.Tensor) -> Written:
    largest = weight.abs().amax(1)
    codes = (weight / largest.view(-1, 1) * 127).round()
    return {"weight": codes.to(torch.int8), "SCB": largest}, codes * largest.view(-1, 1) / 127


def of_gptq(**given: Any) -> tuple[Writer, dict[str, Any]]:
    config = {"quant_method": "gptq", "bits": given["bits"], "group_size": given["group"]}
    version = "gptq" if given["is_v1"] else "gptq_v2"
    config |= {"desc_act": given["is_ordered"], "sym": False, "checkpoint_format": version}
    return partial(gptq, **given), config


def of_compressed(form: str, **args: Any) -> tuple[Writer, dict[str, Any]]:
    config = QuantizationConfig(config_groups={"group_0": scheme_of(args)}, format=form)
    return partial(compressed, form=form, args=args), config.model_dump(mode="json")


INT4, INT8 = {"type": "int", "num_bits": 4}, {"type": "int", "num_bits": 8}
FLOAT8 = {"type": "float", "num_bits": 8}
BNB = {"quant_method": "bitsandbytes"}
FORMATS: dict[str, tuple[Writer, dict[str, Any]]] = {
    "gptq-4-v1-order": of_gptq(bits=4, group=32, is_v1=True, is_ordered=True),
    "gptq-4-v2": of_gptq(bits=4, group=128, is_v1=False, is_ordered=False),
    "gptq-8-v2-order": of_gptq(bits=8, group=64, is_v1=False, is_ordered=True),
    "awq": (partial(awq, group=64), {"quant_method": "awq", "group_size": 64}),
    "packed-4": of_compressed("pack-quantized", **INT4, group_size=32),
    "packed-4-zeros": of_compressed("pack-quantized", **INT4, group_size=64, symmetric=False),
    "packed-8": of_compressed("pack-quantized", **INT8, strategy="channel"),
    "w8a8": of_compressed("int-quantized", **INT8, strategy="channel"),
    "naive": of_compressed("naive-quantized", **INT8, group_size=128),
    "float-channel": of_compressed("float-quantized", **FLOAT8, strategy="channel"),
    "float-block": of_compressed(
        "float-quantized", **FLOAT8, strategy="block", block_structure=[64, 128]
    ),
    "fp8": (partial(fp8, rows=0, columns=0), {"quant_method": "fp8"}),
    "fp8-ragged": (
        partial(fp8, rows=48, columns=80),
        {"quant_method": "fp8", "weight_block_size": [48, 80], "activation_scheme": "static"},
    ),
    "mxfp4": (mxfp4, {"quant_method": "mxfp4"}),
    "nvfp4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "nf4": (nf4, {**BNB, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "llm-int8": (llm_int8, {**BNB, "load_in_8bit": True}),
}


def written(source: Path, to: Path, name: str) -> tuple[Path, Path]:
    """The checkpoint with the matrices of its layers in a format, and the same values dense."""
    write, config = FORMATS[name]
    tensors: stores.Tensors = {}
    dense: stores.Tensors = {}
    for tensor_name, tensor in load_file(source / "model.safetensors").items():
        if tensor_name.endswith("_proj.weight"):
            parts, dense[tensor_name] = write(tensor.float())
            dense[tensor_name] = dense[tensor_name].contiguous()
            module = tensor_name.removesuffix("weight")
            tensors |= {module + suffix: part.contiguous() for suffix, part in parts.items()}
        else:
            tensors[tensor_name] = dense[tensor_name] = tensor.float()
    folders = to / "quantized", to / "dense"
    for folder, held in zip(folders, (tensors, dense), strict=True):
        folder.mkdir()
        shutil.copy(source / "config.json", folder)
        save_file(held, folder / "model.safetensors", {"format": "pt"})
    edit_config(folders[0], quantization_config=config)
    return folders


def logits(folder: Path, kernels: Any, tokens: list[int]) -> torch.Tensor:
    found = open_checkpoint(folder)
    model = load_decoder(kernels, found, parse_config(found.config), torch.float32)
    return paged_logits(model, tokens)


CASES = [(name, family) for name in FORMATS for family in ("llama", "qwen3")]
# What the native kernels lose of the bundled model beside its dequantized matrices, in nats a
# token of 255, which tell less than those of gguf/test_engine.py: compiled for AVX2, or for no
# vectors, a third more or less.
ACTIVATIONS = {
    "packed-4-zeros": 2.4e-5,
    "w8a8": 0.9e-5,
    "float-channel": 1.3e-5,
    "float-block": 1.5e-5,
    "mxfp4": 2.1e-5,
    "nvfp4": 3.3e-5,
    "nf4": 3.2e-5,
}
ACROSS = 1.4
CASES += [(name, "bundled") for name in ACTIVATIONS]


@pytest.mark.parametrize(("name", "family"), CASES)
def test_logits_are_those_of_the_dequantized_model(
    checkpoint: Any, tmp_path: Path, name: str, family: str
) -> None:
    """Run by transformers in float32: to rounding with torch's kernels; with the native ones, whose
    activations are int8, each product is to rounding that of its arithmetic, and logits are no
    further off than the format took them from the dense model's. On a story, the bundled model's
    distributions lose what activations in int8 cost."""
    source = CHECKPOINT if family == "bundled" else checkpoint(family, 1, **SIZES)
    quantized, dense = written(source, tmp_path, name)
    tokens = stories.windows(256, 1)[0] if family == "bundled" else random_tokens(40, 3)
    expected = reference_logits(reference_model(dense), tokens)
    plain = error(logits(quantized, reference, tokens), expected)
    own = error(expected, reference_logits(reference_model(source), tokens))
    checked = Rounding(beside=ops.for_cpu())
    found = logits(quantized, checked, tokens)
    native = error(found, expected)
    arithmetic = error(logits(quantized, Rounding(), tokens), expected)
    assert plain < (own / 10 if name == "nf4" else 1e-4)  # its 16 floats become 127ths
    # to which scales are rounded; products of scales and zero points of 8 bits, too, which cancel
    assert checked.worst < (2**-10 if name.startswith("gptq-8") else 2**-11)
    assert native < 1.25 * arithmetic
    assert native < own
    if family == "bundled":
        dequantized, ours = ([x.log_softmax(-1)] for x in (expected, found))
        assert stories.divergence(dequantized, ours) < ACROSS * ACTIVATIONS[name]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "nvfp4",
            "ModelOpt, NVFP4, groups of 16: "
            "packed, its scales take 16 bits, not 8: 5 bits a weight",
        ),
        ("nf4", "bitsandbytes, nf4: the 16 values are rounded to 127ths"),
        ("llm-int8", "bitsandbytes, int8, a scale for each output: no columns of activations"),
        ("mxfp4", ""),
    ],
)
def test_formats_that_are_held_otherwise_say_what_it_costs(
    checkpoint: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, says: str
) -> None:
    """Once, not for each matrix, and what is held is what is said."""
    quantized, _ = written(checkpoint("llama", 1, **SIZES), tmp_path, name)
    logits(quantized, ops.for_cpu(), [1])
    assert [says in record.message for record in caplog.records] == [True] * bool(says)
    if name == "nvfp4":
        weight = torch.nn.functional.normalize(torch.ones(64, 128))
        parts, _ = nvfp4(weight)
        held = Nvfp4(is_modelopt=True).read(parts, 64, 128)
        packed = ops.for_cpu().pack_weight([held], dtype=torch.float32)
        assert sum(matrix.num_bytes for matrix in packed.matrices) == 64 * 128 * 5 // 8  # type: ignore[attr-defined]
