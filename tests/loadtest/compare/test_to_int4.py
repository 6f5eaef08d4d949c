"""The two 4-bit forms that peers/to_int4.py writes, read back by this engine's parsers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from streamer.kernels.weights import QuantizedWeight, dequantize
from streamer.loadtest.compare.peers import to_int4
from streamer.model.quantization.schemes import parse_quantization

N, K, MODULE = 16, 256, "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("form", ["awq", "symmetric"])
def test_codes_are_within_half_a_step_of_the_weights(tmp_path: Path, form: str) -> None:
    """What the format itself costs: the last matrix is as it was, and so are other files."""
    source, target = tmp_path / "bf16", tmp_path / form
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0)).bfloat16()
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "llama"}')
    (source / "tokenizer.json").write_text("{}")
    save_file(
        {f"{MODULE}.weight": weight, "lm_head.weight": weight.clone()},
        source / "model.safetensors",
    )
    to_int4.main(source, target, form)
    assert {path.name for path in target.iterdir()} == {path.name for path in source.iterdir()}
    found = load_file(target / "model.safetensors")
    assert torch.equal(found.pop("lm_head.weight"), weight)
    scheme = parse_quantization(json.loads((target / "config.json").read_text())).of(MODULE, {})
    read = scheme.read({n.removeprefix(f"{MODULE}."): x for n, x in found.items()}, N, K)
    assert isinstance(read, QuantizedWeight)
    assert (read.bits, read.group) == (4, to_int4.GROUP)
    groups = weight.float().reshape(N, -1, to_int4.GROUP)
    is_awq = form == "awq"
    steps = (groups.amax(-1) - groups.amin(-1)) / 15 if is_awq else groups.abs().amax(-1) / 7
    off = (dequantize(read).float().reshape(groups.shape) - groups).abs().amax(-1)
    # And what scales in 16 bits round (8 bits of it in bfloat16), and a zero point at the ends.
    assert torch.all(off <= steps * (1.01 if is_awq else 0.53))
    assert torch.any(off >= steps * 0.4)
