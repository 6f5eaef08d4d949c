"""Loading: leftovers and gaps by name, dtypes, the progress bar."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from streamer.config import Config
from streamer.errors import ModelNotSupported
from streamer.model import loader
from streamer.model.loader import choose_dtype, progress_bar
from streamer.model.runner.load import load_runner
from tests.checkpoints import edit_config
from tests.model.hand import paged_logits
from tests.model.test_decoder import load, random_tokens


@pytest.fixture
def folder(checkpoint: Any, tmp_path: Path) -> Path:
    """A checkpoint that the test may change."""
    return Path(shutil.copytree(checkpoint("llama", 1), tmp_path / "m"))


def change(folder: Path, *drop: str, **add: torch.Tensor) -> None:
    """Write the weights again without some, with others."""
    weights = load_file(folder / "model.safetensors")
    for name in drop:
        del weights[name]
    save_file({**weights, **add}, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
@pytest.mark.parametrize("name", ["mlp.up_proj.weight", "input_layernorm.weight"])
def test_numbers_that_make_every_answer_nan_are_named(
    folder: Path, name: str, value: float, dtype: torch.dtype
) -> None:
    name = f"model.layers.1.{name}"
    tensor = load_file(folder / "model.safetensors")[name].to(dtype)
    tensor.view(-1)[-3] = value
    change(folder, **{name: tensor})
    with pytest.raises(ModelNotSupported, match=rf"{name}: 1 are NaN or infinite"):
        load(folder)


def test_large_numbers_are_numbers(folder: Path) -> None:
    """Although their sum is none in float16."""
    name = "model.layers.1.input_layernorm.weight"
    change(folder, **{name: torch.full((64,), 60000.0, dtype=torch.float16)})
    load(folder)


def test_missing_leftover_and_misshapen_are_named(folder: Path) -> None:
    """All three kinds in one message."""
    change(
        folder,
        "model.layers.2.self_attn.k_proj.weight",
        **{
            "model.layers.0.self_attn.q_proj.bias": torch.zeros(64),
            "model.norm.weight": torch.zeros(65),
        },
    )
    with pytest.raises(ModelNotSupported) as error:
        load(folder)
    assert "missing 1: model.layers.2.self_attn.k_proj.weight;" in error.value.message
    assert "left over 1: model.layers.0.self_attn.q_proj.bias;" in error.value.message
    assert "model.norm.weight is [65], not [64]" in error.value.message


def test_rotary_buffers_are_no_leftovers(folder: Path) -> None:
    """Old Llama checkpoints have one in every layer."""
    before = paged_logits(load(folder), random_tokens(9))
    names = ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
    change(folder, **{name: torch.ones(8) for name in names})
    assert torch.equal(paged_logits(load(folder), random_tokens(9)), before)
    change(folder, **{"model.rotary_emb.cos_cached": torch.ones(8)})
    with pytest.raises(ModelNotSupported, match=r"left over 1: .*cos_cached"):
        load(folder)


def test_a_tied_head_may_be_stored_too(folder: Path) -> None:
    """With tied embeddings the stored head is not read."""
    edit_config(folder, tie_word_embeddings=True)
    tied = paged_logits(load(folder), random_tokens(9))
    change(folder, "lm_head.weight")
    assert torch.equal(paged_logits(load(folder), random_tokens(9)), tied)


def test_an_untied_head_must_be_there(folder: Path) -> None:
    """A missing head is an error unless the embeddings are tied."""
    change(folder, "lm_head.weight")
    with pytest.raises(ModelNotSupported, match="missing 1: lm_head"):
        load(folder)


def test_quantized_tensors_are_refused(folder: Path) -> None:
    """Refused whatever config.json says."""
    change(folder, **{"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)})
    with pytest.raises(ModelNotSupported, match=r"model.norm.weight \(F8_E4M3\)"):
        load(folder)


def test_weights_outlive_their_file(folder: Path) -> None:
    """Overwriting a checkpoint while it is served changes nothing."""
    model = load(folder)
    before = paged_logits(model, random_tokens(20))
    file = folder / "model.safetensors"
    file.write_bytes(b"\0" * file.stat().st_size)
    assert torch.equal(paged_logits(model, random_tokens(20)), before)


@pytest.mark.parametrize(
    ("setting", "stored", "has_bf16", "dtype", "says"),
    [
        ("auto", "F32", True, torch.float32, ""),
        ("auto", "BF16", True, torch.bfloat16, ""),
        ("auto", "F16", True, torch.float32, "float16"),
        ("bfloat16", "F16", True, torch.bfloat16, ""),
        ("float32", "BF16", True, torch.float32, ""),
        ("auto", "BF16", False, torch.float32, "no bfloat16"),
        ("bfloat16", "F32", False, torch.float32, "no bfloat16"),
    ],
)
def test_choose_dtype(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    setting: str,
    stored: str,
    has_bf16: bool,
    dtype: torch.dtype,
    says: str,
) -> None:
    """The checkpoint's own dtype is the default; a changed one is logged."""
    monkeypatch.setattr(loader, "has_bf16", lambda: has_bf16)
    with caplog.at_level(logging.WARNING):
        assert choose_dtype(setting, stored) is dtype
    assert says in caplog.text
    assert bool(says) == bool(caplog.text)
    assert choose_dtype("bfloat16", stored, is_native=True) is torch.bfloat16


def test_float16_is_computed_as_such_on_a_gpu_alone(caplog: pytest.LogCaptureFixture) -> None:
    cuda = torch.device("cuda")
    assert choose_dtype("auto", "F16", cuda) is torch.float16
    assert choose_dtype("float16", "BF16", cuda) is torch.float16
    assert caplog.text == ""
    with pytest.raises(ModelNotSupported, match="float16 needs a GPU"):
        choose_dtype("float16", "BF16")


def test_an_unknown_dtype() -> None:
    """The refusal names the dtype and the field."""
    with pytest.raises(ModelNotSupported, match="'float64'"):
        choose_dtype("float64", "F32")


def test_the_progress_bar_counts_layers_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the model and reaches the total, on stderr."""
    with progress_bar("Loading tiny", 1, "layers", True) as advance:
        advance()
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes this for a terminal
    with progress_bar("Loading tiny", 3, "layers", True) as advance:
        for _ in range(3):
            advance()
    err = capsys.readouterr().err
    assert "Loading tiny" in err
    assert "3/3" in err
    with progress_bar("Loading tiny", 3, "layers", False) as advance:
        advance()
    assert capsys.readouterr().err == ""


def test_load_shows_one_bar(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It advances once per layer; what is called beside it may end the loading."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    config = Config(model=str(folder), num_gpu_blocks_override=8, swap_space=0)
    load_runner(config)
    assert "3/3" in capsys.readouterr().err

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_runner(config, go_on=stop)
    assert "1/3" in capsys.readouterr().err
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 3
