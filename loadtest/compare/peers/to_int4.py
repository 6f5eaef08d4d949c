"""Writes a checkpoint in 4 bits as vLLM reads it: `python to_int4.py FOLDER TARGET awq|symmetric`.

Rounded to the nearest, in groups of 128; the last matrix stays as it is. `awq` is AutoAWQ's gemm
form, with zero points. `symmetric` is compressed-tensors without zero points, packed by that
package: the only form that zentorch multiplies by activations in int8. Runs in vLLM's environment.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

GROUP = 128
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ's outputs of a word, lowest bits first
HEAD = "lm_head"
AWQ = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": GROUP, "zero_point": True}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
SYMMETRIC = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": WEIGHTS | {"group_size": GROUP}}
    },
    "ignore": [HEAD],
}


def words(codes: Any) -> Any:
    """Eight columns of codes in each int32, in AutoAWQ's order."""
    import torch

    eights = codes.to(torch.int32).reshape(len(codes), -1, 8)
    shifted = [eights[:, :, column] << 4 * place for place, column in enumerate(ORDER)]
    return torch.stack(shifted).sum(0, dtype=torch.int32)


def awq(stem: str, groups: Any) -> dict[str, Any]:
    """AutoAWQ's tensors of a matrix [N, K / GROUP, GROUP]."""
    import torch

    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-6)
    zeros = (-low / scales).round()
    codes = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, 15)
    return {
        f"{stem}.qweight": words(codes.flatten(1).t()),
        f"{stem}.qzeros": words(zeros.t()),
        f"{stem}.scales": scales.t().to(torch.float16).contiguous(),
    }


def symmetric(stem: str, groups: Any) -> dict[str, Any]:
    """compressed-tensors' tensors of a matrix [N, K / GROUP, GROUP]."""
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    scales = (groups.abs().amax(-1) / 7).clamp(min=1e-6)
    codes = (groups / scales[..., None]).round().clamp(-8, 7).to(torch.int8).flatten(1)
    return {
        f"{stem}.weight_packed": pack_to_int32(codes, 4),
        f"{stem}.weight_scale": scales.to(torch.bfloat16),
        f"{stem}.weight_shape": torch.tensor(codes.shape),
    }


FORMS = {"awq": (awq, AWQ), "symmetric": (symmetric, SYMMETRIC)}


def main(source: Path, target: Path, form: str) -> None:
    """Write the whole folder, renamed to its final name only when complete."""
    from safetensors.torch import load_file, save_file

    pack, quantization = FORMS[form]
    part = target.with_name(target.name + ".part")
    shutil.copytree(source, part, ignore=shutil.ignore_patterns("*.safetensors"))
    found: dict[str, Any] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if weight.ndim == 2 and name.endswith("proj.weight"):
            groups = weight.float().reshape(len(weight), -1, GROUP)
            found |= pack(name.removesuffix(".weight"), groups)
        else:
            found[name] = weight
    save_file(found, part / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = quantization
    (part / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    part.rename(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
