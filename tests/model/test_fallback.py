"""The fallback serves GPT-2 and Gemma-3 text; what it would get wrong is refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import parse
from safetensors.torch import load_file, save_file

from streamer.errors import ModelNotSupported
from streamer.kernels.ops import for_cpu
from streamer.model import fallback
from streamer.model.checkpoint import open_checkpoint
from streamer.model.fallback import examine, load_fallback
from streamer.model.inspect import inspect_checkpoint
from tests.checkpoints import edit_config, reference_logits, reference_model
from tests.model.hand import paged_logits
from tests.model.test_decoder import random_tokens

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save(folder: Path, config: Any, name: str) -> Path:
    """A random model of any class."""
    getattr(transformers, name)(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["gpt2", "gemma3_text"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_equal_transformers(
    checkpoint: Any, reference: Any, family: str, dtype: torch.dtype
) -> None:
    """Past Gemma's window of 24, in chunks; bf16 against fp32 arithmetic on the same weights."""
    opened = open_checkpoint(checkpoint(family, 1, dtype=dtype))
    model = load_fallback(for_cpu(), opened, examine(opened), dtype, show_progress=False)
    tokens = random_tokens(80)
    want = reference_logits(reference(opened.path), tokens)
    got = paged_logits(model, tokens, cuts=(33, 34))
    assert want.std() > 0.5
    error = (got.float() - want).abs()
    assert error.max() < 1e-4 if dtype is torch.float32 else error.mean() < 0.1 * want.std()


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def gpt_oss(folder: Path) -> tuple[Path, Path]:
    """The same random model twice: its experts dense, and as MXFP4."""
    sizes = {**TINY, "vocab_size": 256, "hidden_size": 64, "intermediate_size": 32, "head_dim": 16}
    config = transformers.GptOssConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
    torch.manual_seed(0)
    folders = save(folder / "dense", config, "GptOssForCausalLM"), folder / "codes"
    shutil.copytree(*folders)
    tensors = load_file(folders[0] / "model.safetensors")
    codes = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors[name].shape
        blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 126, (experts, rows, columns // 32), dtype=torch.uint8)
        del codes[name]
        codes |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        found = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).long()
        values = torch.cat((E2M1, -E2M1))[found] * torch.exp2(scales.float() - 127)[..., None]
        tensors[name] = values.flatten(-2).transpose(1, 2).contiguous()
    for to, stored in zip(folders, (tensors, codes), strict=True):
        save_file(stored, to / "model.safetensors", {"format": "pt"})
    edit_config(folders[1], quantization_config={"quant_method": "mxfp4"})
    return folders


def test_mxfp4_experts_of_gpt_oss_become_dense(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The logits of the same weights stored dense; what that costs is logged, and a fact."""
    dense, codes = gpt_oss(tmp_path)
    opened = open_checkpoint(codes)
    model = load_fallback(for_cpu(), opened, examine(opened), torch.float32, show_progress=False)
    assert "the MXFP4 matrices of GptOssForCausalLM become dense" in caplog.text
    tokens = random_tokens(40)
    want = reference_logits(reference_model(dense), tokens)
    torch.testing.assert_close(paged_logits(model, tokens, cuts=(20,)), want, atol=1e-4, rtol=0)
    facts = inspect_checkpoint(codes)
    assert (facts.scheme, facts.bits_per_weight) == ("MXFP4, made dense", 32)
    assert facts.stored_as == "F32, U8"
    assert facts.stored_bytes < facts.weight_bytes
    other = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    edit_config(codes, quantization_config=other)
    with pytest.raises(ModelNotSupported, match="GptOssForCausalLM quantized as bitsandbytes"):
        examine(open_checkpoint(codes))


@pytest.mark.parametrize(
    ("end", "change", "says"),
    [
        ("scales", None, "scales is missing"),
        ("blocks", None, "blocks is missing"),
        ("scales", lambda t: t[:, :5], r"scales is U8 \[4, 5, 1\], not U8 \[4, 64, 1\]"),
        ("scales", torch.Tensor.float, r"scales is F32 \[4, 64, 1\], not U8"),
        ("blocks", lambda t: t.flatten(2), r"blocks is U8 \[4, 64, 16\], not U8 \[4, 64, 1, 16\]"),
    ],
)
def test_codes_of_gpt_oss_that_do_not_fit_are_named(
    tmp_path: Path, end: str, change: Any, says: str
) -> None:
    """Before anything is read: transformers' code would fail without a name after minutes."""
    _, codes = gpt_oss(tmp_path)
    tensors = load_file(codes / "model.safetensors")
    name = f"model.layers.1.mlp.experts.down_proj_{end}"
    stored = tensors.pop(name)
    if change is not None:
        tensors[name] = change(stored).contiguous()
    save_file(tensors, codes / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelNotSupported, match=rf"layers\.1\.mlp\.experts\.down_proj_{says}"):
        examine(open_checkpoint(codes))


def test_weights_that_are_no_numbers_are_named(checkpoint: Any, tmp_path: Path) -> None:
    """Every answer would be NaN."""
    folder = Path(shutil.copytree(checkpoint("gpt2", 1), tmp_path / "m"))
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("h.1.mlp.c_fc.weight"))
    tensors[name][2, 3] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    opened = open_checkpoint(folder)
    with pytest.raises(ModelNotSupported, match=r"h\.1\.mlp\.c_fc\.weight: 1 are NaN"):
        load_fallback(for_cpu(), opened, examine(opened), torch.float32, show_progress=False)


def test_last_picks_rows(checkpoint: Any) -> None:
    """lm_head computes only the rows that are asked for."""
    from streamer.kernels.ops import AttentionBatch

    opened = open_checkpoint(checkpoint("gpt2", 1))
    model = load_fallback(for_cpu(), opened, examine(opened), torch.float32, show_progress=False)
    batch = AttentionBatch(
        query_lens=[3],
        context_lens=[3],
        block_tables=torch.tensor([[0]]),
        slots=torch.arange(3),
        block_size=16,
    )
    pool = for_cpu().new_pool(1, 3, 16, 4, 16, torch.float32)
    with torch.inference_mode():
        logits = model.forward(
            torch.tensor([1, 2, 3]), torch.arange(3), batch, pool, torch.tensor([2])
        )
    assert logits.shape == (1, 256)


def test_shape_before_loading(checkpoint: Any) -> None:
    """The shape is known before a weight is read."""
    shape = examine(open_checkpoint(checkpoint("gemma3_text", 1)))
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == (3, 2, 32)
    assert (shape.vocab_size, shape.model_limit) == (256, 512)


@pytest.mark.parametrize(
    ("config", "name", "says"),
    [
        ("BloomConfig", "BloomForCausalLM", "its attention can't be replaced"),
        ("MptConfig", "MptForCausalLM", "its attention can't be replaced"),
        ("StableLmConfig", "StableLmForCausalLM", "its attention can't be replaced"),
        ("FalconConfig", "FalconForCausalLM", "its attention can't be replaced"),
        ("MambaConfig", "MambaForCausalLM", "can't be replaced|state between tokens"),
        ("Qwen3NextConfig", "Qwen3NextForCausalLM", "can't be replaced|state|linear_attention"),
        ("Llama4TextConfig", "Llama4ForCausalLM", "chunked_attention"),
        ("BertConfig", "BertLMHeadModel", "not causal"),
        ("BertConfig", "BertForMaskedLM", "only BertLMHeadModel"),
        ("T5Config", "T5ForConditionalGeneration", "no causal language model"),
    ],
)
def test_refused_by_name(
    checkpoint: Any, tmp_path: Path, config: str, name: str, says: str
) -> None:
    """From config.json alone, before any weight is read: the weights here are another model's."""
    folder = shutil.copytree(checkpoint("gpt2", 1), tmp_path / "m")
    getattr(transformers, config)(architectures=[name]).save_pretrained(folder)
    with pytest.raises(ModelNotSupported, match=says) as error:
        examine(open_checkpoint(folder))
    assert name in error.value.message


@pytest.mark.parametrize(
    ("config", "name"), [("GPTJConfig", "GPTJForCausalLM"), ("CodeGenConfig", "CodeGenForCausalLM")]
)
def test_what_a_newer_transformers_lets_replace_is_served(
    tmp_path: Path, config: str, name: str
) -> None:
    """Refused by name before, with the logits of transformers since."""
    torch.manual_seed(5)
    sizes = {"n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 128, "rotary_dim": 8}
    made = getattr(transformers, config)(vocab_size=64, initializer_range=0.3, **sizes)
    opened = open_checkpoint(save(tmp_path, made, name))
    if parse(transformers.__version__) < parse("5.24"):
        with pytest.raises(ModelNotSupported, match="its attention can't be replaced"):
            examine(opened)
        return
    model = load_fallback(for_cpu(), opened, examine(opened), torch.float32, show_progress=False)
    tokens = [t % 64 for t in random_tokens(80)]
    want = reference_logits(reference_model(tmp_path), tokens)
    assert want.std() > 0.5
    torch.testing.assert_close(paged_logits(model, tokens, cuts=(33, 34)), want, atol=1e-4, rtol=0)


def test_unknown_model_types_run_no_code(checkpoint: Any, tmp_path: Path) -> None:
    """auto_map is ignored: nothing is imported from the folder."""
    folder = shutil.copytree(checkpoint("gpt2", 1), tmp_path / "m")
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    edit_config(
        folder,
        model_type="evil",
        architectures=["EvilForCausalLM"],
        auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"},
    )
    with pytest.raises(ModelNotSupported, match=r"EvilForCausalLM.*no model_type 'evil'"):
        examine(open_checkpoint(folder))
    edit_config(folder, model_type="gpt2", architectures=["GPT2LMHeadModel"])
    assert examine(open_checkpoint(folder)).architecture == "GPT2LMHeadModel"


@pytest.mark.parametrize(
    ("config", "name", "extra"),
    [
        ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", {"use_sliding_window": True, "num_experts": 4}),
        ("PhimoeConfig", "PhimoeForCausalLM", {"num_local_experts": 4}),
        ("Qwen2Config", "Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 1}),
    ],
)
def test_a_window_beyond_the_probe_is_seen(
    tmp_path: Path, config: str, name: str, extra: dict[str, Any]
) -> None:
    """Also where the model applies its mask without passing `sliding_window` on."""
    torch.manual_seed(5)
    sizes = {**TINY, "max_position_embeddings": 512, "sliding_window": 64, **extra}
    made = getattr(transformers, config)(
        **sizes, num_experts_per_tok=2, moe_intermediate_size=48, initializer_range=0.3
    )
    opened = open_checkpoint(save(tmp_path, made, name))
    shape = examine(opened)
    assert 64 in shape.windows, shape.windows
    model = load_fallback(for_cpu(), opened, shape, torch.float32, show_progress=False)
    tokens = [t % 64 for t in random_tokens(300)]
    want = reference_logits(reference_model(tmp_path), tokens)
    got = paged_logits(model, tokens, cuts=(33, 150))
    assert torch.equal(got.argmax(-1), want.argmax(-1))


def test_a_mask_of_its_own_is_refused(tmp_path: Path) -> None:
    """Doge's mask keeps the tokens it scores highest, from keep_window_size tokens on."""
    made = transformers.DogeConfig(**TINY, keep_window_size=64, num_experts=16)
    with pytest.raises(ModelNotSupported, match=r"DogeForCausalLM.*a mask of its own"):
        examine(open_checkpoint(save(tmp_path, made, "DogeForCausalLM")))


def test_only_a_causal_mask_or_a_window_has_a_window() -> None:
    """The mask is probed at positions all over the context."""
    from transformers import masking_utils as masks

    causal, sliding = masks.causal_mask_function, masks.sliding_window_causal_mask_function
    assert [fallback.window_of(causal, n) for n in (1, 7, 4096)] == [fallback.FULL] * 3
    assert fallback.window_of(sliding(3000), 4096) == 3000
    assert fallback.window_of(sliding(5000), 4096) == fallback.FULL
    chunked = masks.chunked_causal_mask_function(512, torch.zeros(1, dtype=torch.int64))
    for odd in (chunked, sliding(0), masks.bidirectional_mask_function):
        assert fallback.window_of(odd, 4096) == fallback.ODD


def test_gpt2_with_a_pad_token_is_served(checkpoint: Any, reference: Any) -> None:
    opened = open_checkpoint(checkpoint("gpt2", 1, pad_token_id=0))
    model = load_fallback(for_cpu(), opened, examine(opened), torch.float32, show_progress=False)
    tokens = [0, *random_tokens(20), 0]
    want = reference_logits(reference(opened.path), tokens)
    assert (paged_logits(model, tokens, cuts=(7,)) - want).abs().max() < 1e-4


def test_what_transformers_can_not_make_is_refused(checkpoint: Any, tmp_path: Path) -> None:
    """Whatever exception its code raises."""
    folder = shutil.copytree(checkpoint("gpt2", 1), tmp_path / "m")
    edit_config(folder, n_inner="wide")
    with pytest.raises(ModelNotSupported, match="GPT2LMHeadModel can't be served"):
        examine(open_checkpoint(folder))
    edit_config(folder, n_inner=None, activation_function="nothing")
    with pytest.raises(ModelNotSupported, match="GPT2LMHeadModel can't be served"):
        examine(open_checkpoint(folder))


@pytest.mark.parametrize("name", ["num_hidden_layers", "n_layer", "num_experts", "n_embd"])
def test_a_size_without_end_is_refused_before_anything_is_made(
    checkpoint: Any, tmp_path: Path, name: str
) -> None:
    folder = shutil.copytree(checkpoint("gpt2", 1), tmp_path / "m")
    edit_config(folder, **{name: 10**10})
    with pytest.raises(ModelNotSupported, match=f"{name} is 10000000000, at most"):
        examine(open_checkpoint(folder))


def test_missing_and_leftover_tensors_are_named(checkpoint: Any, tmp_path: Path) -> None:
    """transformers would fill them with random numbers."""
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(checkpoint("gpt2", 1), tmp_path / "m")
    file = folder / "model.safetensors"
    weights = load_file(file)
    renamed = {k.replace("h.2.mlp.c_fc.bias", "h.2.mlp.other"): v for k, v in weights.items()}
    save_file(renamed, file, {"format": "pt"})
    opened = open_checkpoint(folder)
    with pytest.raises(ModelNotSupported, match=r"missing keys: .*h\.2\.mlp\.c_fc\.bias"):
        load_fallback(for_cpu(), opened, examine(opened), torch.float32, show_progress=False)
    save_file({**weights, "extra": torch.ones(2)}, file, {"format": "pt"})
    opened = open_checkpoint(folder)
    with pytest.raises(ModelNotSupported, match=r"unexpected keys: .*extra"):
        load_fallback(for_cpu(), opened, examine(opened), torch.float32, show_progress=False)


def test_other_attention_is_noticed(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison with eager attention after loading can fail."""
    opened = open_checkpoint(checkpoint("gpt2", 1))
    shape = examine(opened)
    kernels = for_cpu()
    real = kernels.paged_attention

    def slightly_off(*args: Any, **kwargs: Any) -> torch.Tensor:
        return real(*args, **kwargs) * 1.01

    monkeypatch.setattr(kernels, "paged_attention", slightly_off)
    with pytest.raises(ModelNotSupported, match=r"GPT2LMHeadModel.*standard deviations"):
        load_fallback(kernels, opened, shape, torch.float32, show_progress=False)


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "default", "rope_theta": 10000.0}, 128),
        (
            {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 8,
                "long_factor": [4.0] * 8,
                "original_max_position_embeddings": 64,
            },
            64,
        ),
    ],
)
def test_unsteady_rope_limits_the_context(tmp_path: Path, rope: dict[str, Any], limit: int) -> None:
    """longrope switches its frequencies with the longest sequence: served up to the switch."""
    config = transformers.Phi3Config(
        **TINY, rope_parameters=rope, original_max_position_embeddings=64
    )
    opened = open_checkpoint(save(tmp_path, config, "Phi3ForCausalLM"))
    assert examine(opened).model_limit == limit


@pytest.mark.parametrize(
    ("config", "name", "extra"),
    [
        ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4}),
        ("Gemma2Config", "Gemma2ForCausalLM", {"head_dim": 16, "attn_logit_softcapping": 2.0}),
        ("OlmoConfig", "OlmoForCausalLM", {}),
        ("Phi3Config", "Phi3ForCausalLM", {}),
        ("GptOssConfig", "GptOssForCausalLM", {"head_dim": 16, "num_local_experts": 4}),
    ],
)
def test_others_pass_their_own_comparison(
    tmp_path: Path, config: str, name: str, extra: dict[str, Any]
) -> None:
    """Experts, soft caps and sinks: loading succeeds only where eager attention agrees."""
    torch.manual_seed(3)
    made = getattr(transformers, config)(**TINY, initializer_range=0.3, **extra)
    opened = open_checkpoint(save(tmp_path, made, name))
    load_fallback(for_cpu(), opened, examine(opened), torch.float32, show_progress=False)
