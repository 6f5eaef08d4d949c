"""inspect_checkpoint: facts without weights, a refusal as a fact."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from streamer.config import Config
from streamer.errors import ModelNotSupported
from streamer.kernels import ops
from streamer.model import loader, memory
from streamer.model.checkpoint import open_checkpoint
from streamer.model.inspect import (
    eos_token_ids,
    generation_defaults,
    inspect_checkpoint,
    recognize,
)
from tests.checkpoints import edit_config


@pytest.fixture
def folder(checkpoint: Any, tmp_path: Path) -> Path:
    """A checkpoint that the test may change."""
    return Path(shutil.copytree(checkpoint("qwen3", 1), tmp_path / "m"))


def test_facts_of_a_decoder(checkpoint: Any, reference: Any) -> None:
    """Counted from headers, equal to what transformers counts."""
    folder = checkpoint("qwen2", 1, tie_word_embeddings=True, dtype=torch.bfloat16)
    facts = inspect_checkpoint(folder)
    assert facts.refused == ""
    assert (facts.architecture, facts.served_by) == ("Qwen2ForCausalLM", "decoder")
    assert facts.num_parameters == reference(folder).num_parameters()
    assert (facts.dtype, facts.stored_as) == ("bfloat16", "BF16")
    assert facts.weight_bytes == 2 * facts.num_parameters
    assert facts.kv_bytes_per_token == 3 * 2 * 2 * 16 * 2
    assert (facts.model_limit, facts.max_model_len, facts.vocab_size) == (512, 512, 256)
    assert facts.fitting_tokens == facts.num_blocks * 16 == 256 * 512
    assert (
        inspect_checkpoint(folder, Config(dtype="float32")).weight_bytes == 2 * facts.weight_bytes
    )


def test_facts_of_a_fallback(checkpoint: Any, reference: Any) -> None:
    """Sizes come from the modelling code itself, without memory."""
    folder = checkpoint("gpt2", 1)
    facts = inspect_checkpoint(folder)
    assert (facts.served_by, facts.refused) == ("transformers", "")
    assert facts.num_parameters == reference(folder).num_parameters()
    assert facts.kv_bytes_per_token == 3 * 2 * 64 * 4


@pytest.mark.parametrize(
    ("family", "is_native", "dtype"),
    [("llama", True, "bfloat16"), ("llama", False, "float32"), ("gpt2", True, "float32")],
)
def test_bfloat16_where_torch_emulates_it(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch, family: str, is_native: bool, dtype: str
) -> None:
    """The native kernels compute it on every CPU; torch's operators take float32 instead."""
    monkeypatch.setattr(loader, "has_bf16", lambda: False)
    monkeypatch.setattr(ops, "why_not_native", lambda: "" if is_native else "no compiler")
    folder = checkpoint(family, 1, dtype=torch.bfloat16)
    assert recognize(open_checkpoint(folder), "auto").dtype == dtype


def test_a_block_of_32_layers_16_tokens_8_heads_of_128_in_two_bytes_is_2097152_bytes(
    folder: Path,
) -> None:
    """The size that memory is planned with is the size of the pool's blocks."""
    known = msgspec.structs.replace(
        recognize(open_checkpoint(folder), "bfloat16"), num_layers=32, num_kv_heads=8, head_dim=128
    )
    assert known.block_bytes(Config()) == 2_097_152
    pool = ops.for_cpu().new_pool(3, 32, 16, 8, 128, torch.bfloat16)
    assert pool[:1].numel() * pool.element_size() == 2_097_152


def test_a_refusal_is_a_fact(folder: Path) -> None:
    """Facts found before the refusal are kept."""
    edit_config(folder, rope_parameters={"rope_type": "longrope", "factor": 2.0})
    facts = inspect_checkpoint(folder)
    assert "'longrope'" in facts.refused
    assert (facts.architecture, facts.served_by) == ("Qwen3ForCausalLM", "")
    assert facts.num_parameters > 100_000
    assert "does not exist" in inspect_checkpoint(folder / "nowhere").refused


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_act": "x" * 10_000},
        {"num_experts": "x" * 10_000},
        {"rope_parameters": {"rope_type": "x" * 10_000}},
        {"architectures": ["x" * 10_000]},
    ],
)
def test_a_refusal_is_cut(folder: Path, fields: dict[str, object]) -> None:
    edit_config(folder, **fields)
    assert 0 < len(inspect_checkpoint(folder).refused) < 2100


@pytest.mark.parametrize(
    ("family", "sizes", "param", "says"),
    [
        ("llama", {"head_dim": 1026}, "head_dim", "head_dim 1026: it can be at most 1024"),
        (
            "llama",
            {
                "num_attention_heads": 129,
                "num_key_value_heads": 1,
                "head_dim": 2,
                "hidden_size": 129,
            },
            "num_attention_heads",
            "num_attention_heads 129, num_key_value_heads 1: at most 128",
        ),
        (
            "gpt2",
            {"n_embd": 1026, "n_head": 1, "n_layer": 1, "n_inner": 8},
            "head_dim",
            "head_dim 1026: it can be at most 1024",
        ),
    ],
)
def test_heads_beyond_the_native_kernels_are_refused_where_those_serve(
    checkpoint: Any,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    sizes: dict[str, int],
    param: str,
    says: str,
) -> None:
    """Not by their ValueError, at load or at the first request."""
    folder = checkpoint(family, 1, **sizes)
    monkeypatch.delenv("STREAMER_KERNELS", raising=False)
    assert says in inspect_checkpoint(folder, Config(device="cpu")).refused
    with pytest.raises(ModelNotSupported, match=says) as error:
        recognize(open_checkpoint(folder), "auto")
    assert error.value.param == param
    monkeypatch.setenv("STREAMER_KERNELS", "torch")
    assert recognize(open_checkpoint(folder), "auto").num_layers


def test_heads_at_the_limits_of_the_native_kernels(checkpoint: Any) -> None:
    heads = {"num_attention_heads": 128, "num_key_value_heads": 1, "hidden_size": 128}
    for sizes in ({**heads, "head_dim": 2}, {"head_dim": 1024}):
        known = recognize(open_checkpoint(checkpoint("llama", 1, **sizes)), "auto")
        assert known.head_dim == sizes["head_dim"]


def test_too_little_memory_is_a_fact(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal has the numbers."""
    monkeypatch.setattr(memory, "free_bytes", lambda: 100_000)
    facts = inspect_checkpoint(folder)
    assert "the weights need" in facts.refused
    assert facts.kv_bytes_per_token == 3 * 2 * 2 * 32 * 4


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, (5, 6)),
        ({"eos_token_id": 0}, {"eos_token_id": 7}, (0,)),
        ({}, {"eos_token_id": 7}, (7,)),
        ({"eos_token_id": None}, {"eos_token_id": [7]}, (7,)),
        ({}, {"eos_token_id": None}, ()),
        ({"eos_token_id": "</s>"}, {}, (2,)),
    ],
)
def test_end_tokens(
    folder: Path, generation: dict[str, Any], config: dict[str, Any], ids: tuple[int, ...]
) -> None:
    """generation_config.json first; one id or a list."""
    (folder / "generation_config.json").write_text(json.dumps(generation))
    edit_config(folder, **config)
    assert eos_token_ids(open_checkpoint(folder)) == ids


def test_generation_defaults(folder: Path) -> None:
    """Only numbers among the known fields are taken."""
    fields = {"temperature": 0.6, "top_k": 20, "top_p": None, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(fields))
    assert generation_defaults(open_checkpoint(folder)) == {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize(
    ("name", "value"), [("top_k", float("inf")), ("top_p", 7), ("temperature", "warm")]
)
def test_a_generation_default_that_no_request_could_have_is_refused(
    folder: Path, name: str, value: object
) -> None:
    """Each request that started from such a default was answered with a 500."""
    (folder / "generation_config.json").write_text(json.dumps({name: value}))
    refused = inspect_checkpoint(folder).refused
    assert refused.startswith(f"generation_config.json: {name} is "), refused


def test_own_families_do_not_import_transformers(folder: Path) -> None:
    """Recognizing and loading our own families does not import transformers: memory and seconds."""
    recognize(open_checkpoint(folder), "auto")
    code = (
        "import sys; from streamer.config import Config; "
        "from streamer.model.runner.load import load_runner; "
        f"load_runner(Config(model={str(folder)!r}, load_progress=False)); "
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
