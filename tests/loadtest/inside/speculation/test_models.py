"""Dear models: the same tokens as their source at more parameters."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from streamer.demo import DRAFT
from streamer.loadtest.inside.speculation import models


def test_a_dear_model_draws_its_sources_tokens_and_is_larger(
    tmp_path: Path,
) -> None:
    small = (DRAFT / "model.safetensors").stat().st_size
    wide = 3 * 256 * 400
    models.make_dear(DRAFT, tmp_path / "dear", 2 * wide * 6, wide_layer=wide)
    large = (tmp_path / "dear" / "model.safetensors").stat().st_size
    config = json.loads((tmp_path / "dear" / "config.json").read_text())
    assert config["num_hidden_layers"] == 6
    assert large > 3 * small
    ids = torch.randint(10, 4000, (2, 40), generator=torch.Generator().manual_seed(1))
    logits = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
        for folder in (DRAFT, tmp_path / "dear")
    ]
    assert torch.equal(logits[0].argmax(-1), logits[1].argmax(-1))
    assert torch.allclose(logits[0], logits[1], atol=1e-3)
