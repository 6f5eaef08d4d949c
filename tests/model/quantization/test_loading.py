"""Quantized checkpoints as folders: what fits, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from streamer.config import Config
from streamer.errors import ModelNotSupported
from streamer.kernels import reference as torch_kernels
from streamer.model.checkpoint import open_checkpoint
from streamer.model.families import parse_config
from streamer.model.inspect import inspect_checkpoint
from streamer.model.loader import load_decoder
from streamer.model.quantization.schemes import parse_quantization
from streamer.model.runner.load import load_runner
from tests.checkpoints import edit_config
from tests.model.hand import paged_logits
from tests.model.quantization import stores
from tests.model.test_decoder import random_tokens

SIZES = {"intermediate_size": 128, "num_hidden_layers": 2}


def store_gptq(weight: torch.Tensor) -> stores.Tensors:
    """4 bits, v1, groups of 32 in the order of activations, and a bias of zeros."""
    n, k = weight.shape
    groups = (torch.arange(k) // 32)[torch.randperm(k)]
    scales = (weight.abs().amax(1, keepdim=True) / 7).expand(n, k // 32).contiguous()
    zeros = torch.randint(5, 11, scales.shape)
    codes = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, 15)
    return stores.gptq(codes.to(torch.uint8), scales.half(), zeros, 4, groups, is_v1=True)


def store_awq(weight: torch.Tensor) -> stores.Tensors:
    n, k = weight.shape
    parts = weight.view(n, k // 64, 64)
    scales = (parts.amax(-1) - parts.amin(-1)) / 15
    zeros = (-parts.amin(-1) / scales).round().clamp(0, 15)
    codes = (parts / scales.unsqueeze(-1) + zeros.unsqueeze(-1)).round().clamp(0, 15)
    return stores.awq(codes.view(n, k).to(torch.uint8), scales.half(), zeros.to(torch.uint8))


def store_fp8(weight: torch.Tensor) -> stores.Tensors:
    """Blocks of 48 x 64: ragged edges, and static scales of activations, which are not used."""
    n, k = weight.shape
    scales = torch.rand(-(-n // 48), -(-k // 64)) / 64 + 1 / 448
    spread = scales.repeat_interleave(48, 0).repeat_interleave(64, 1)[:n, :k]
    codes = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales, "input_scale": torch.tensor(1.0)}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}
FP8 = {"quant_method": "fp8", "weight_block_size": [48, 64], "activation_scheme": "static"}
STORES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gptq": (store_gptq, GPTQ),
    "awq": (store_awq, {"quant_method": "awq", "group_size": 64}),
    "fp8": (store_fp8, FP8),
}


def quantize_folder(folder: Path, to: Path, kind: str) -> Path:
    """The checkpoint with the matrices of its layers stored by STORES[kind]."""
    store, config = STORES[kind]
    tensors: stores.Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            module = name.removesuffix("weight")
            tensors |= {module + suffix: part for suffix, part in store(tensor).items()}
        else:
            tensors[name] = tensor
    to.mkdir()
    (to / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return edit_config(to, quantization_config=config)


def load(folder: Path) -> Any:
    checkpoint = open_checkpoint(folder)
    config = parse_config(checkpoint.config)
    return load_decoder(torch_kernels, checkpoint, config, torch.float32)


@pytest.fixture
def folder(checkpoint: Any, tmp_path: Path) -> Path:
    """A GPTQ checkpoint that the test may change."""
    return quantize_folder(checkpoint("llama", 1, **SIZES), tmp_path / "m", "gptq")


def change(folder: Path, *drop: str, **add: torch.Tensor) -> None:
    """Write the weights again without some, with others."""
    tensors = load_file(folder / "model.safetensors")
    for name in drop:
        del tensors[name]
    save_file({**tensors, **add}, folder / "model.safetensors", {"format": "pt"})


def test_tensors_that_do_not_fit_are_named(folder: Path) -> None:
    """Missing, left over and misshapen, before anything is read."""
    up, down = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj"
    change(
        folder,
        f"{up}.scales",
        **{
            f"{up}.weight_scale": torch.ones(2),
            f"{down}.qzeros": torch.zeros(3, 3, dtype=torch.int32),
        },
    )
    with pytest.raises(ModelNotSupported) as error:
        load(folder)
    assert f"missing 1: {up}.scales;" in error.value.message
    assert f"left over 1: {up}.weight_scale;" in error.value.message
    assert f"{down}.qzeros is [3, 3], not [4, 8]" in error.value.message


NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


@pytest.mark.parametrize(
    ("config", "width", "says"),
    [
        ({"quant_method": "mxfp4"}, 40, "down_proj: MXFP4: 40 columns are no multiple of 32"),
        (NVFP4, 40, "down_proj: NVFP4: 40 columns are no multiple of 16"),
        ({"quant_method": "awq"}, 36, "gate_proj: AWQ: 36 outputs are no multiple of 8"),
    ],
)
def test_shapes_that_a_scheme_can_not_hold_are_named_with_their_matrix(
    checkpoint: Any, tmp_path: Path, config: dict[str, Any], width: int, says: str
) -> None:
    dense = checkpoint("llama", 1, **{**SIZES, "intermediate_size": width})
    folder = Path(shutil.copytree(dense, tmp_path / "m"))
    change(folder, *(n for n in load_file(folder / "model.safetensors") if "_proj" in n))
    edit_config(folder, quantization_config=config)
    with pytest.raises(ModelNotSupported, match=rf"^model\.layers\.0\.mlp\.{says}"):
        load(folder)


def test_what_config_says_is_named_beside_shapes_that_do_not_fit(folder: Path) -> None:
    """Tensors alone do not tell whether a width or a group is wrong."""
    edit_config(folder, quantization_config={**GPTQ, "group_size": 16})
    says = "do not fit LlamaForCausalLM quantized as GPTQ, 4 bits, groups of 16, activation order:"
    assert says in inspect_checkpoint(folder).refused


def test_quantized_tensors_that_config_does_not_name_are_told_from_strange_ones(
    folder: Path, checkpoint: Any, tmp_path: Path
) -> None:
    edit_config(folder, quantization_config=None)
    assert "and config.json has no quantization_config" in inspect_checkpoint(folder).refused
    skipped = {**GPTQ, "dynamic": {r"-:.*\.1\.mlp\.up_proj": {}}}
    edit_config(folder, quantization_config=skipped)
    says = "; quantization_config leaves out what is quantized, 1: model.layers.1.mlp.up_proj"
    assert inspect_checkpoint(folder).refused.endswith(says)
    dense = Path(shutil.copytree(checkpoint("llama", 1, **SIZES), tmp_path / "dense"))
    change(dense, **{"model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(2, 2)})
    refused = inspect_checkpoint(dense).refused
    assert refused.endswith("left over 1: model.layers.0.mlp.up_proj.lora_A.weight")


@pytest.mark.parametrize(
    ("kind", "name", "stated"),
    [
        ("gptq", "quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": True}),
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": 64, "version": "GEMM"}),
        ("fp8", "quantize_config.json", FP8),
        (
            "fp8",
            "hf_quant_config.json",
            {"producer": {"name": "modelopt"}, "quantization": FP8},
        ),
    ],
)
def test_a_quantization_that_a_file_of_its_own_states(
    checkpoint: Any, tmp_path: Path, kind: str, name: str, stated: dict[str, Any]
) -> None:
    """As older writers have it; what config.json has comes first."""
    folder = quantize_folder(checkpoint("llama", 1, **SIZES), tmp_path / "m", kind)
    want = inspect_checkpoint(folder).scheme
    edit_config(folder, quantization_config=None)
    assert inspect_checkpoint(folder).refused
    (folder / name).write_text(json.dumps(stated))
    facts = inspect_checkpoint(folder)
    assert (facts.scheme, facts.refused) == (want, "")
    edit_config(folder, quantization_config={"quant_method": "hqq"})
    assert "the checkpoint says hqq" in inspect_checkpoint(folder).refused


def test_strange_dtypes_are_named(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.qweight"
    change(folder, **{name: torch.zeros(8, 128)})
    with pytest.raises(ModelNotSupported, match=f"{name} is F32, not I32"):
        load(folder)


def test_values_that_lie_are_named_with_their_module(folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj"
    change(folder, **{f"{name}.g_idx": torch.full((64,), 99, dtype=torch.int32)})
    with pytest.raises(ModelNotSupported, match=rf"{name}: g_idx: does not divide 64 columns"):
        load(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_scales_that_are_no_numbers_are_named(folder: Path, value: float) -> None:
    """Every answer would be NaN."""
    name = "model.layers.1.mlp.up_proj"
    scales = load_file(folder / "model.safetensors")[f"{name}.scales"]
    scales[1, 5] = value
    change(folder, **{f"{name}.scales": scales})
    with pytest.raises(ModelNotSupported, match=rf"{name}\.scales: 1 are NaN or infinite"):
        load(folder)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_codes_of_fp8_that_are_no_numbers_are_named(
    checkpoint: Any, tmp_path: Path, code: int
) -> None:
    folder = quantize_folder(checkpoint("llama", 1, **SIZES), tmp_path / "m", "fp8")
    name = "model.layers.1.mlp.up_proj.weight"
    codes = load_file(folder / "model.safetensors")[name].view(torch.uint8)
    codes[3, 4:7] = torch.tensor([0x7E, code, 0xFE])  # beside 448 and -448, which are numbers
    change(folder, **{name: codes.view(torch.float8_e4m3fn)})
    with pytest.raises(ModelNotSupported, match=rf"{name}: 1 are NaN or infinite"):
        load(folder)


def test_a_truncated_file_is_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelNotSupported, match="an incomplete download"):
        load(folder)


def test_scales_of_a_cache_are_known_and_not_used(folder: Path) -> None:
    """A dense checkpoint may not have them."""
    before = paged_logits(load(folder), random_tokens(9))
    of_attention = "model.layers.0.self_attn"
    names = ("model.layers.1.mlp.up_proj.input_scale", f"{of_attention}.k_scale")
    names += (f"{of_attention}.kv_scale",)
    change(folder, **{name: torch.ones(1) for name in names})
    assert torch.equal(paged_logits(load(folder), random_tokens(9)), before)


def test_dense_matrices_among_quantized_ones(folder: Path, checkpoint: Any) -> None:
    """Whatever config.json says of their names."""
    source = load_file(checkpoint("llama", 1, **SIZES) / "model.safetensors")
    stored = load_file(folder / "model.safetensors")
    drop = [name for name in stored if name.startswith("model.layers.0.")]
    dense = {name: tensor for name, tensor in source.items() if name.startswith("model.layers.0.")}
    change(folder, *drop, **dense)
    assert paged_logits(load(folder), random_tokens(9)).isfinite().all()


def test_facts_of_a_quantized_checkpoint(folder: Path) -> None:
    """Sizes are those of the packed weights, in the number of parameters of the dense model."""
    facts = inspect_checkpoint(folder)
    assert facts.refused == ""
    assert facts.scheme == "GPTQ, 4 bits, groups of 32, activation order"
    shapes = 2 * [(64, 64), (32, 64), (32, 64), (64, 64), (128, 64), (128, 64), (64, 128)]
    matrices = sum(n * k for n, k in shapes)
    others = 2 * 256 * 64 + 5 * 64
    assert facts.num_parameters == matrices + others
    scales = sum(n * k // 32 * 2 for n, k in shapes)
    zeros = sum(n * 2 for n, _ in shapes)  # of up to 4 groups
    assert facts.weight_bytes == matrices // 2 + scales + zeros + 4 * others
    assert facts.bits_per_weight == 8 * facts.weight_bytes / facts.num_parameters
    assert facts.stored_as == "F32, I32, F16"
    assert facts.stored_bytes < (folder / "model.safetensors").stat().st_size


def test_unknown_schemes_are_facts_too(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["bits"] = 3
    (folder / "config.json").write_text(json.dumps(config))
    assert "bits must be 2, 4 or 8" in inspect_checkpoint(folder).refused
    assert parse_quantization({}).method == ""


def test_torch_kernels_say_what_they_cost(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They hold the weights dense, and so does their count."""
    monkeypatch.setenv("STREAMER_KERNELS", "torch")
    facts = inspect_checkpoint(folder)
    assert facts.weight_bytes == 4 * facts.num_parameters
    load_runner(Config(model=str(folder), num_gpu_blocks_override=8, swap_space=0))
    assert "held dense, 0 MiB, and gain nothing in speed: STREAMER_KERNELS=torch" in caplog.text
    assert "many times slower than with the native kernels: STREAMER_KERNELS" in caplog.text
