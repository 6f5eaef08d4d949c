"""Tiny random checkpoints, made with transformers: the material of the model's tests.

`make_checkpoint(folder, family, seed, **overrides)` saves one; `reference_logits` and
`reference_greedy` are transformers' own answers, the oracle. Weights are large enough that logits
are far from ties.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
GPT2_SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 512,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", SIZES),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**SIZES, "sliding_window": None}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", SIZES),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**SIZES, "head_dim": 32}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2_SIZES),
    "gemma3_text": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            **SIZES,
            "head_dim": 32,
            "sliding_window": 24,
            "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


def make_checkpoint(
    folder: Path,
    family: str,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | None = None,
    **overrides: Any,
) -> Path:
    """Save a random model of the family into `folder` and return the folder."""
    config_name, model_name, sizes = FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, config_name)(**{**sizes, **overrides})
    model = getattr(transformers, model_name)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # transformers initializes these to zero
                parameter.normal_(0.0, 0.3)
            elif "norm" in name or "ln_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    limit = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    model.to(dtype).save_pretrained(folder, **limit)
    return folder


def edit_config(folder: Path, **changes: Any) -> Path:
    """Change config.json in place; None removes a field."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for name, value in changes.items():
        config[name] = value
        if value is None:
            del config[name]
    file.write_text(json.dumps(config))
    return folder


def reference_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own model of the checkpoint, eager attention."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )
    return model.eval()


@torch.inference_mode()
def reference_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), V] of one sequence, without a cache."""
    ids = torch.tensor([tokens])
    out: torch.Tensor = model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
    return out


def reference_greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """The greedy continuation: each token from a fresh forward of everything before it."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(reference_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]
