"""The decoder's logits against transformers', for every family and variant, in fp32 and bf16."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from streamer.kernels.ops import for_cpu
from streamer.model.checkpoint import open_checkpoint
from streamer.model.decoder import Decoder
from streamer.model.families import parse_config
from streamer.model.loader import load_decoder
from tests.checkpoints import edit_config, make_checkpoint, reference_logits, reference_model
from tests.model.hand import paged_logits

THETA = {"rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "plain", {}),
    ("llama", "tied", {"tie_word_embeddings": True}),
    ("llama", "attention and mlp bias", {"attention_bias": True, "mlp_bias": True}),
    ("llama", "one kv head", {"num_key_value_heads": 1}),
    ("llama", "as many kv heads", {"num_key_value_heads": 4}),
    ("llama", "own head_dim", {"head_dim": 32}),
    ("llama", "gelu", {"hidden_act": "gelu"}),
    ("llama", "gelu tanh", {"hidden_act": "gelu_pytorch_tanh"}),
    ("llama", "theta", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    ("llama", "linear", {"rope_parameters": {"rope_type": "linear", "factor": 2.5, **THETA}}),
    ("llama", "dynamic", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, **THETA}}),
    ("llama", "llama3", {"rope_parameters": {**LLAMA3, **THETA}}),
    ("llama", "yarn", {"rope_parameters": {**YARN, **THETA}}),
    (
        "qwen2",
        "yarn betas",
        {"rope_parameters": {**YARN, **THETA, "beta_fast": 16, "beta_slow": 2}},
    ),
    ("qwen3", "yarn scale", {"rope_parameters": {**YARN, **THETA, "attention_factor": 1.3}}),
    ("qwen3", "yarn not cut", {"rope_parameters": {**YARN, **THETA, "truncate": False}}),
    ("mistral", "plain", {}),
    ("mistral", "window", {"sliding_window": 24}),
    ("qwen2", "bias", {}),
    ("qwen2", "tied", {"tie_word_embeddings": True}),
    (
        "qwen2",
        "window from layer 1",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    ("qwen3", "qk-norm", {}),
    ("qwen3", "attention bias", {"attention_bias": True}),
    (
        "qwen3",
        "window by layer types",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
]


def load(folder: Any, dtype: torch.dtype = torch.float32) -> Decoder:
    """The decoder of a folder, without a bar."""
    checkpoint = open_checkpoint(folder)
    return load_decoder(for_cpu(), checkpoint, parse_config(checkpoint.config), dtype)


def random_tokens(count: int, seed: int = 0) -> list[int]:
    """Tokens of the tiny vocabulary."""
    source = random.Random(seed)
    return [source.randrange(256) for _ in range(count)]


@pytest.mark.parametrize(("family", "name", "overrides"), VARIANTS, ids=lambda v: str(v)[:24])
def test_logits_equal_transformers(
    checkpoint: Any, reference: Any, family: str, name: str, overrides: dict[str, Any]
) -> None:
    """90 tokens in three chunks: past every window, over block and chunk boundaries."""
    folder = checkpoint(family, 1, **overrides)
    tokens = random_tokens(90)
    want = reference_logits(reference(folder), tokens)
    got = paged_logits(load(folder), tokens, cuts=(37, 38))
    assert want.std() > 1.0, "degenerate logits prove nothing"
    assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("seed", [0, 2])
def test_other_weights(checkpoint: Any, reference: Any, family: str, seed: int) -> None:
    """The other two of three seeds."""
    folder = checkpoint(family, seed)
    tokens = random_tokens(50, seed)
    want = reference_logits(reference(folder), tokens)
    assert (paged_logits(load(folder), tokens, cuts=(16,)) - want).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_bf16_is_as_good_as_transformers(checkpoint: Any, reference: Any, family: str) -> None:
    """Against fp32 arithmetic on the same weights, no worse than transformers in bf16."""
    folder = checkpoint(family, 1, dtype=torch.bfloat16)
    tokens = random_tokens(60)
    exact = reference_logits(reference(folder), tokens)
    theirs = reference_logits(reference_model(folder, torch.bfloat16), tokens).float()
    ours = paged_logits(load(folder, torch.bfloat16), tokens, cuts=(20,))
    assert ours.dtype is torch.bfloat16
    assert (ours.float() - exact).abs().mean() < 1.2 * (theirs - exact).abs().mean()


def test_a_variant_matters(checkpoint: Any, reference: Any) -> None:
    """The oracle can tell: each variant's logits differ from the plain model's."""
    tokens = random_tokens(90)
    plain = load(checkpoint("llama", 1))
    for overrides in (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.5, **THETA}},
        {"rope_parameters": {**LLAMA3, **THETA}},
        {"rope_parameters": {**YARN, **THETA}},
    ):
        want = reference_logits(reference(checkpoint("llama", 1, **overrides)), tokens)
        assert (paged_logits(plain, tokens) - want).abs().max() > 0.1


def test_old_rope_fields(checkpoint: Any, reference: Any, tmp_path: Any) -> None:
    """transformers 4's rope_theta and rope_scaling with `type` mean the same."""
    new = checkpoint("llama", 1, rope_parameters={**YARN, "rope_theta": 5000.0})
    old = make_checkpoint(tmp_path, "llama", 1)
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    edit_config(old, rope_parameters=None, rope_theta=5000.0, rope_scaling=scaling)
    tokens = random_tokens(70)
    want = reference_logits(reference(new), tokens)
    assert (paged_logits(load(old), tokens) - want).abs().max() < 1e-4


def test_sharded_equals_whole(checkpoint: Any) -> None:
    """Shards with an index hold the same model."""
    whole, sharded = checkpoint("qwen3", 1), checkpoint("qwen3", 1, max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert not (sharded / "model.safetensors").exists()
    tokens = random_tokens(40)
    assert torch.equal(paged_logits(load(whole), tokens), paged_logits(load(sharded), tokens))


def test_last_picks_rows(checkpoint: Any) -> None:
    """Only the asked tokens' logits are computed, and they are the same."""
    from streamer.kernels.ops import AttentionBatch

    model = load(checkpoint("llama", 1))
    tokens = torch.tensor(random_tokens(20))
    out = []
    for last in (None, torch.tensor([3, 19])):
        batch = AttentionBatch(
            query_lens=[20],
            context_lens=[20],
            block_tables=torch.tensor([[1, 0]]),
            slots=torch.cat([torch.arange(16, 32), torch.arange(4)]),
            block_size=16,
        )
        pool = for_cpu().new_pool(2, model.num_layers, 16, 2, model.head_dim, model.dtype)
        with torch.inference_mode():
            out.append(model.forward(tokens, torch.arange(20), batch, pool, last))
    assert out[1].shape == (2, 256)
    assert torch.allclose(out[0][[3, 19]], out[1], atol=1e-6)
