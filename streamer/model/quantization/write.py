"""A dense checkpoint -> a compressed-tensors checkpoint, a layer at a time.

Reads through loader.py, quantizes by on_the_fly.py or calibrate.py, and writes what vLLM and
transformers load too: the matrices of the layers; embeddings and the last matrix stay as they are.
Called by `streamer quantize`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from streamer.errors import ConfigError, ModelNotSupported
from streamer.kernels import ops
from streamer.kernels.weights import QuantizedWeight
from streamer.model.checkpoint import Checkpoint, open_checkpoint
from streamer.model.families import (
    FAMILIES,
    DecoderConfig,
    architecture_of,
    expected_tensors,
    parse_config,
)
from streamer.model.loader import FileSource, check_tensors, progress_bar
from streamer.model.quantization.calibrate import Calibration
from streamer.model.quantization.interface import check_finite
from streamer.model.quantization.on_the_fly import GROUP, quantize
from streamer.model.quantization.schemes import parse_quantization
from streamer.model.runner.device import CPU

SHARD_BYTES = 4 << 30
COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")  # tokenizer, generation config
NOT_COPIED = ("config.json", "model.safetensors.index.json")
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
FORMATS = {"int4": "pack-quantized", "int8": "int-quantized", "fp8": "float-quantized"}


def quantize_checkpoint(
    folder: Path,
    out: Path,
    kind: str,
    calibration: list[int] | None = None,
    group: int = GROUP,
    *,
    show_progress: bool,
) -> list[str]:
    """Write `folder`, quantized as int8, int4 or fp8, into the new folder `out`.

    calibration: tokens of a text on which the errors of int4 are compensated
    group: columns of int4 that share a scale: 32, 64 or 128

    Returns the modules that stay dense, because their inputs are no whole groups.
    """
    with _new_folder(out) as part:
        return _write(folder, part, kind, calibration, group, show_progress=show_progress)


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` that gets its name once all is written, and is removed else."""
    part = out.with_name(f"{out.name}.part")
    if out.exists():
        raise ConfigError(f"out: {out} is there already", param="out")
    if part.exists():
        raise ConfigError(
            f"out: {part} is there already, of a `streamer quantize` that was killed or still "
            "runs; if none does, delete it",
            param="out",
        )
    try:
        yield part
        part.rename(out)
    except (OSError, SafetensorError) as e:
        raise ConfigError(f"out: {out} can't be written: {e}", param="out") from e
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write(
    folder: Path,
    out: Path,
    kind: str,
    calibration: list[int] | None,
    group: int,
    *,
    show_progress: bool,
) -> list[str]:
    """See quantize_checkpoint; makes `out`."""
    checkpoint, config = _open_dense(folder)
    dtype = DTYPES[checkpoint.stored_dtype]
    computing = torch.float32 if dtype is torch.float16 else dtype  # as the CPU's kernels can
    matrices = check_tensors(checkpoint, config)
    names = [name for name, _ in expected_tensors(config)]
    dense = [m for m, matrix in matrices.items() if kind == "int4" and matrix.k % group]
    shards = _Shards(out)
    title = f"Quantizing {folder.name}"
    with (
        torch.inference_mode(),
        FileSource(checkpoint, matrices, dtype, CPU, lambda: None) as source,
        FileSource(checkpoint, matrices, computing, CPU, lambda: None) as computed,
        progress_bar(title, config.num_layers, "layers", show_progress) as advance,
    ):
        calibrated = None
        if calibration is not None:
            calibrated = Calibration(ops.for_cpu(), config, computed, calibration)
        out.mkdir(parents=True)
        for index in range(config.num_layers):
            of_layer = [name for name in names if name.startswith(f"model.layers.{index}.")]
            modules = [n.removesuffix(".weight") for n in of_layer if n.endswith("_proj.weight")]
            modules = [module for module in modules if module not in dense]
            if calibrated is not None:
                made = calibrated.layer(index, modules, dtype, group)
            else:
                made = {
                    m: quantize(source.take(f"{m}.weight"), kind, dtype, group) for m in modules
                }
            for name in of_layer:
                module = name.removesuffix(".weight")
                if module in made:
                    parts = _stored(module, made[module], kind, dtype)
                    shards.add({f"{module}.{part}": tensor for part, tensor in parts.items()})
                else:
                    shards.add({name: source.take(name)})
            source.layer_done()
            advance()
        shards.add({name: source.take(name) for name in names if ".layers." not in name})
    shards.finish()
    _write_texts(checkpoint, out, quantization_config(kind, group, [*dense, "lm_head"]))
    return dense


def _open_dense(folder: Path) -> tuple[Checkpoint, DecoderConfig]:
    """A dense checkpoint of one of our architectures, or ModelNotSupported."""
    checkpoint = open_checkpoint(folder)
    if checkpoint.is_gguf:
        raise ModelNotSupported(
            f"{folder} is a GGUF file; a folder of safetensors can be quantized here. "
            "`streamer serve FILE --quantization KIND` quantizes one of F32, BF16 or F16 while it "
            "is loaded",
            param="model",
        )
    architecture = architecture_of(checkpoint.config)
    if architecture not in FAMILIES:
        raise ModelNotSupported(f"{architecture} can't be quantized here", param="model")
    if method := parse_quantization(checkpoint.config).method:
        raise ModelNotSupported(f"{folder} is quantized already, as {method}", param="model")
    return checkpoint, parse_config(checkpoint.config)


def _stored(
    module: str, weight: QuantizedWeight, kind: str, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The tensors of a matrix as compressed-tensors names and packs them; ModelNotSupported for
    scales with which it would not load."""
    scales = weight.scales.to(dtype)
    check_finite(module, replace(weight, scales=scales))
    if kind == "fp8":
        return {"weight": weight.codes, "weight_scale": scales}
    if kind == "int8":
        return {"weight": (weight.codes ^ 0x80).view(torch.int8), "weight_scale": scales}
    if weight.zeros is None:
        raise ModelNotSupported("int4 is made with zero points")
    return {
        "weight_packed": _words(weight.codes),
        "weight_scale": scales,
        "weight_zero_point": _words(weight.zeros.t()).t().contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }


def _words(codes: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits [R, C] -> int32 [R, ceil(C / 8)], the first in the lowest bits."""
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 8))
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return packed.flatten().view(torch.int32).view(len(codes), -1)


def quantization_config(kind: str, group: int, ignored: list[str]) -> dict[str, Any]:
    """What config.json says of the checkpoint."""
    weights: dict[str, Any] = {
        "num_bits": 4 if kind == "int4" else 8,
        "type": "float" if kind == "fp8" else "int",
        "symmetric": kind != "int4",
        "strategy": "group" if kind == "int4" else "channel",
        "group_size": group if kind == "int4" else None,
        "dynamic": False,
    }
    inputs = None
    if kind != "int4":
        inputs = {**weights, "strategy": "token", "dynamic": True}
    linear = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": FORMATS[kind],
        "config_groups": {"group_0": linear},
        "ignore": ignored,
    }


def _write_texts(checkpoint: Checkpoint, out: Path, quantization: dict[str, Any]) -> None:
    config = {**checkpoint.config, "quantization_config": quantization}
    written = out / "config.json"
    written.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for weights in out.glob("*.safetensors"):
        weights.chmod(written.stat().st_mode)  # safetensors makes them its user's alone
    for file in sorted(f for pattern in COPIED for f in checkpoint.path.glob(pattern)):
        if file.name not in NOT_COPIED:
            shutil.copyfile(file, out / file.name)


class _Shards:
    """Weight files of at most SHARD_BYTES, each written when it is full; the index at the end."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._waiting: dict[str, torch.Tensor] = {}
        self._bytes = 0
        self._written: list[list[str]] = []
        self._total = 0

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._waiting and self._bytes + size > SHARD_BYTES:
            self._flush()
        self._waiting.update(tensors)
        self._bytes += size
        self._total += size

    def finish(self) -> None:
        """Write the rest; files of several get their number and their count."""
        self._flush()
        count = len(self._written)
        if count == 1:
            self._path(0).rename(self._out / "model.safetensors")
            return
        weight_map = {}
        for i, names in enumerate(self._written):
            file = f"model-{i + 1:05}-of-{count:05}.safetensors"
            self._path(i).rename(self._out / file)
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        text = json.dumps(index, indent=2) + "\n"
        (self._out / "model.safetensors.index.json").write_text(text, encoding="utf-8")

    def _flush(self) -> None:
        save_file(self._waiting, self._path(len(self._written)), {"format": "pt"})
        self._written.append(list(self._waiting))
        self._waiting.clear()
        self._bytes = 0

    def _path(self, number: int) -> Path:
        return self._out / f"part-{number}"
