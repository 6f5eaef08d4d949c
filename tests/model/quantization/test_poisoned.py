"""Quantized checkpoints that are cut off or lie, in every format: refused by name, nothing read."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from safetensors.torch import load_file, save_file

from streamer.errors import ModelNotSupported
from streamer.kernels import reference as torch_kernels
from streamer.kernels.ops import for_cpu
from streamer.model.checkpoint import open_checkpoint
from streamer.model.families import parse_config
from streamer.model.files import WeightFiles
from streamer.model.inspect import inspect_checkpoint
from streamer.model.loader import load_decoder
from tests.checkpoints import edit_config
from tests.model.quantization import stores
from tests.model.quantization.test_loading import SIZES, STORES

Store = Callable[[torch.Tensor], stores.Tensors]
MODULE = "model.layers.1.mlp.down_proj"  # [64, 128]


def compressed(form: str, **args: Any) -> tuple[Store, dict[str, Any]]:
    """compressed-tensors' own writer of a format, and its config."""
    given = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=given)
    config = QuantizationConfig(config_groups={"group_0": scheme}, format=form)
    compressor: Any = BaseCompressor.get_value_from_registry(form)

    def store(weight: torch.Tensor) -> stores.Tensors:
        n, k = weight.shape
        shape = (n, k // given.group_size if given.group_size else 1)
        state = {"weight": weight, "weight_scale": torch.full(shape, 2.0**-6)}
        if not given.symmetric:
            state["weight_zero_point"] = torch.ones(shape, dtype=torch.int8)
        return dict(compressor.compress(state, scheme))

    return store, json.loads(config.model_dump_json())


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(256, shape, dtype=torch.uint8)


def store_mxfp4(weight: torch.Tensor) -> stores.Tensors:
    n, k = weight.shape
    blocks, scales = random_bytes(n, k // 32, 16), random_bytes(n, k // 32) // 2
    return {"weight_blocks": blocks, "weight_scales": scales}


def store_nf4(weight: torch.Tensor) -> stores.Tensors:
    n, k = weight.shape
    codes = torch.randint(16, (n, k), dtype=torch.uint8)
    return stores.bnb4(codes, torch.rand(n, k // 64), torch.linspace(-1, 1, 16), "nf4")


def store_nested(weight: torch.Tensor) -> stores.Tensors:
    """Scales that are quantized too, in blocks of 256."""
    n, k = weight.shape
    codes = torch.randint(16, (n, k), dtype=torch.uint8)
    more = {"nested_blocksize": 256, "nested_offset": 0.1}
    blocks = n * k // 64
    return {
        **stores.bnb4(codes, random_bytes(blocks), torch.linspace(-1, 1, 16), "nf4", **more),
        "weight.nested_absmax": torch.rand(-(-blocks // 256)),
        "weight.nested_quant_map": torch.linspace(-1, 1, 256),
    }


def store_int8(weight: torch.Tensor) -> stores.Tensors:
    codes = random_bytes(*weight.shape).view(torch.int8)
    return {"weight": codes, "SCB": torch.rand(weight.shape[0])}


BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FORMATS: dict[str, tuple[Store, dict[str, Any]]] = {
    **STORES,
    "pack-quantized": compressed("pack-quantized", num_bits=4, group_size=32, symmetric=False),
    "int-quantized": compressed("int-quantized", num_bits=8, strategy="channel"),
    "float-quantized": compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "mxfp4-pack-quantized": compressed(
        "mxfp4-pack-quantized", num_bits=4, type="float", group_size=32, scale_dtype=torch.uint8
    ),
    "mxfp4": (store_mxfp4, {"quant_method": "mxfp4"}),
    "bitsandbytes-nf4": (store_nf4, BNB4),
    "bitsandbytes-nested": (store_nested, {**BNB4, "bnb_4bit_use_double_quant": True}),
    "bitsandbytes-int8": (store_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}
# Of any length; what is in them is checked when they are read.
UNSHAPED = ("weight.quant_state.bitsandbytes__nf4", "weight.nested_absmax")


class Poisoned:
    """A quantized checkpoint, whose tensors and bytes can be changed again and again."""

    def __init__(self, dense: Path, folder: Path, form: str) -> None:
        store, config = FORMATS[form]
        self.folder, self.file = folder, folder / "model.safetensors"
        self.tensors: stores.Tensors = {}
        for name, tensor in load_file(dense / "model.safetensors").items():
            module = name.removesuffix("weight")
            stored = store(tensor) if name.endswith("_proj.weight") else {"weight": tensor}
            self.tensors |= {module + suffix: part for suffix, part in stored.items()}
        folder.mkdir()
        (folder / "config.json").write_bytes((dense / "config.json").read_bytes())
        edit_config(folder, quantization_config=config)
        self.write()
        self.whole = self.file.read_bytes()

    @property
    def parts(self) -> list[str]:
        """Names of the tensors of one matrix that may not be missing."""
        unused = (f"{MODULE}.input_scale",)
        return [n for n in self.tensors if n.startswith(f"{MODULE}.") and n not in unused]

    def write(self, *drop: str, **change: torch.Tensor) -> None:
        kept = {name: tensor for name, tensor in self.tensors.items() if name not in drop}
        save_file({**kept, **change}, self.file, {"format": "pt"})

    def lie(self, name: str) -> None:
        """A header that says one row more of a tensor than there are bytes."""
        (length,) = struct.unpack("<Q", self.whole[:8])
        header = json.loads(self.whole[8 : 8 + length])
        shape = header[name]["shape"]
        header[name]["shape"] = [shape[0] + 1, *shape[1:]] if shape else [2]
        text = json.dumps(header).encode()
        self.file.write_bytes(struct.pack("<Q", len(text)) + text + self.whole[8 + length :])

    def refusal(self) -> str:
        """What loading says."""
        with pytest.raises(ModelNotSupported) as error:
            load(self.folder)
        return error.value.message


def load(folder: Path, kernels: Any = torch_kernels) -> Any:
    checkpoint = open_checkpoint(folder)
    return load_decoder(kernels, checkpoint, parse_config(checkpoint.config), torch.float32)


@pytest.fixture(params=FORMATS)
def poisoned(request: Any, checkpoint: Any, tmp_path: Path) -> Poisoned:
    return Poisoned(checkpoint("llama", 1, **SIZES), tmp_path / "m", request.param)


def test_what_headers_tell_is_refused_by_name_before_anything_is_read(
    poisoned: Poisoned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tensor of a matrix: missing, of another shape, of another dtype, with a header that
    lies; and a file that is cut off."""
    load(poisoned.folder)

    def read(*_: object) -> None:
        raise AssertionError("a tensor is read")

    monkeypatch.setattr(WeightFiles, "read", read)
    assert len(poisoned.parts) >= 2
    for name in poisoned.parts:
        tensor = poisoned.tensors[name]
        poisoned.write(name)
        assert f"missing 1: {name}" in poisoned.refusal()
        if not name.endswith(UNSHAPED):
            poisoned.write(**{name: torch.zeros(3, *tensor.shape, dtype=tensor.dtype)})
            assert f"misshapen 1: {name} is [3, " in poisoned.refusal()
        for dtype, says in ((torch.float64, "F64"), (torch.int16, "I16")):
            poisoned.write(**{name: torch.zeros(tensor.shape, dtype=dtype)})
            assert re.search(rf"{re.escape(name)} (is {says}, not|\({says}\))", poisoned.refusal())
        poisoned.lie(name)
        assert f"broken header: {name}, " in poisoned.refusal()
    poisoned.file.write_bytes(poisoned.whole[:-1])
    assert f"{poisoned.file} has " in poisoned.refusal()
    assert inspect_checkpoint(poisoned.folder).refused.endswith("an incomplete download?")


def state_of(tensor: torch.Tensor, **change: object) -> torch.Tensor:
    """bitsandbytes' state with another field."""
    state = {**json.loads(bytes(tensor.tolist())), **change}
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def with_one(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """The first number another one."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        changed.view(-1)[0] = value
        return changed

    return change


NF4_STATE = "weight.quant_state.bitsandbytes__nf4"
# What is changed of a format's tensor, and what is said of it.
LIES: list[tuple[str, str, Callable[[torch.Tensor], torch.Tensor], str]] = [
    ("awq", "scales", with_one(float("nan")), r"\.scales: 1 are NaN"),
    ("pack-quantized", "weight_shape", with_one(128), r": weight_shape: is \[128, 128\], not"),
    ("pack-quantized", "weight_scale", with_one(float("inf")), r"\.weight_scale: 1 are NaN"),
    ("int-quantized", "weight_scale", with_one(float("nan")), r"\.weight_scale: 1 are NaN"),
    ("float-quantized", "weight", with_one(float("nan")), r"\.weight: 1 are NaN"),
    ("mxfp4", "weight_scales", with_one(255), ": scales: hold an exponent of 255"),
    ("mxfp4-pack-quantized", "weight_scale", with_one(255), ": scales: hold an exponent of 255"),
    ("bitsandbytes-nf4", "weight.quant_map", with_one(1.5), r": weight\.quant_map: has values"),
    ("bitsandbytes-nf4", "weight.absmax", with_one(float("nan")), r"\.weight\.absmax: 1 are NaN"),
    ("bitsandbytes-nf4", NF4_STATE, torch.zeros_like, ": quant_state: can't be read as JSON"),
    (
        "bitsandbytes-nf4",
        NF4_STATE,
        lambda t: state_of(t, shape=[128, 64]),
        r": quant_state: says nf4 \[128, 64\], not",
    ),
    ("bitsandbytes-nf4", NF4_STATE, lambda t: state_of(t, blocksize=0), ": quant_state: blocksize"),
    (
        "bitsandbytes-nested",
        NF4_STATE,
        lambda t: state_of(t, nested_blocksize=64),
        ": quant_state: nested_blocksize and",
    ),
    (
        "bitsandbytes-nested",
        "weight.nested_absmax",
        lambda t: torch.ones(7),
        ": quant_state: nested_blocksize and",
    ),
    (
        "bitsandbytes-nested",
        "weight.nested_absmax",
        lambda t: t[:0].clone(),
        ": quant_state: nested_blocksize and",
    ),
    ("bitsandbytes-int8", "SCB", with_one(float("inf")), r"\.SCB: 1 are NaN"),
]


@pytest.mark.parametrize("poisoned", ["bitsandbytes-nf4"], indirect=True)
def test_a_state_in_rows_is_read_as_one_in_line(poisoned: Poisoned) -> None:
    name = f"{MODULE}.{NF4_STATE}"
    poisoned.write(**{name: poisoned.tensors[name].view(1, -1)})
    assert load(poisoned.folder) is not None


@pytest.mark.parametrize(
    ("poisoned", "part", "change", "says"),
    LIES,
    indirect=["poisoned"],
    ids=[f"{lie[0]}-{i}" for i, lie in enumerate(LIES)],
)
def test_values_that_lie_are_refused_with_their_matrix(
    poisoned: Poisoned, part: str, change: Callable[[torch.Tensor], torch.Tensor], says: str
) -> None:
    name = f"{MODULE}.{part}"
    poisoned.write(**{name: change(poisoned.tensors[name])})
    assert re.search(re.escape(MODULE) + says, poisoned.refusal())


@pytest.mark.parametrize(
    ("poisoned", "scales", "value"),
    [
        ("float-quantized", "weight_scale", 3e38),
        ("gptq", "scales", 3e37),
        ("pack-quantized", "weight_scale", 3e37),
        ("int-quantized", "weight_scale", 3e36),
    ],
    indirect=["poisoned"],
)
def test_numbers_too_large_for_float32_are_refused_with_their_matrix(
    poisoned: Poisoned, scales: str, value: float
) -> None:
    """A finite scale whose weights are infinite, on every backend."""
    name = f"{MODULE}.{scales}"
    poisoned.write(**{name: torch.full(poisoned.tensors[name].shape, value)})
    for kernels in (torch_kernels, for_cpu()):
        with pytest.raises(ModelNotSupported, match=re.escape(MODULE) + ": scales are too large"):
            load(poisoned.folder, kernels)
