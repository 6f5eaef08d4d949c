"""Written checkpoints: what compressed-tensors' own code reads of them, and how they load here."""

from __future__ import annotations

import json
import re
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from streamer.config import Config
from streamer.demo import CHECKPOINT
from streamer.demo.training.corpus import documents, encode
from streamer.demo.training.texts.questions import read_questions
from streamer.errors import ConfigError, ModelNotSupported
from streamer.kernels import reference as torch_kernels
from streamer.kernels.weights import QuantizedWeight, dequantize
from streamer.model.checkpoint import open_checkpoint
from streamer.model.families import parse_config
from streamer.model.inspect import inspect_checkpoint
from streamer.model.loader import check_tensors, load_decoder
from streamer.model.quantization import calibrate, write
from streamer.model.quantization.calibrate import compensated, factor_of
from streamer.model.quantization.on_the_fly import quantize
from streamer.model.quantization.write import quantize_checkpoint
from tests.model.gguf_files import Kind, write_gguf
from tests.model.hand import paged_logits
from tests.model.test_decoder import random_tokens

SIZES = {"intermediate_size": 128, "num_hidden_layers": 2}
DENSE = ("model.embed_tokens", "lm_head")


def written(folder: Path, out: Path, kind: str, *how: Any) -> Path:
    quantize_checkpoint(folder, out, kind, *how, show_progress=False)
    return out


def logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    checkpoint = open_checkpoint(folder)
    config = parse_config(checkpoint.config)
    model = load_decoder(torch_kernels, checkpoint, config, torch.float32)
    return paged_logits(model, tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kind", "group"), [("int8", 32), ("int4", 32), ("int4", 64), ("int4", 128), ("fp8", 32)]
)
def test_compressed_tensors_reads_the_same_weights(
    checkpoint: Any, tmp_path: Path, kind: str, group: int, dtype: torch.dtype
) -> None:
    """By its own config and decompressor; they are what is made while loading, too."""
    source = checkpoint("llama", 1, dtype=dtype, hidden_size=128, **SIZES)
    folder = written(source, tmp_path / "q", kind, None, group)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    theirs = QuantizationConfig.model_validate(config)
    assert theirs.ignore == ["lm_head"]
    scheme: Any = theirs.config_groups["group_0"]
    assert scheme.weights.group_size == (group if kind == "int4" else None)
    compressor: Any = BaseCompressor.get_value_from_registry(CompressionFormat(theirs.format).value)
    stored, dense = load_file(folder / "model.safetensors"), load_file(source / "model.safetensors")
    opened = open_checkpoint(folder)
    for module, matrix in check_tensors(opened, parse_config(opened.config)).items():
        if module in DENSE:
            assert torch.equal(stored[f"{module}.weight"], dense[f"{module}.weight"])
            continue
        parts = {name: stored[whole] for name, whole in matrix.names.items()}
        ours = dequantize(matrix.scheme.read(parts, matrix.n, matrix.k))
        expected = quantize(dense[f"{module}.weight"], kind, dtype, group)
        torch.testing.assert_close(ours, dequantize(expected), rtol=1e-5, atol=1e-6)
        read = compressor.decompress(dict(parts), scheme)["weight"].float()
        tolerance = 1e-5 if dtype == torch.float32 else 2**-7  # it multiplies in the scales' dtype
        torch.testing.assert_close(ours, read, rtol=tolerance, atol=1e-6)


def test_shards_and_texts(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight files of a limited size with an index; every other file of the folder that is text."""
    source = checkpoint("qwen3", 1, **SIZES)
    (source / "tokenizer_config.json").write_text("{}")
    one = written(source, tmp_path / "one", "int4")
    monkeypatch.setattr(write, "SHARD_BYTES", 40_000)
    folder = written(source, tmp_path / "many", "int4")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert sorted({*index["weight_map"].values()}) == files
    assert (folder / "tokenizer_config.json").read_text() == "{}"
    assert (folder / "generation_config.json").exists()
    assert (folder / files[0]).stat().st_mode == (folder / "config.json").stat().st_mode
    tokens = random_tokens(20)
    assert torch.equal(logits(one, tokens), logits(folder, tokens))


@pytest.mark.parametrize("end", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interrupted_one_leaves_nothing(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> None:
    """Neither a folder that looks complete, nor files beside it."""
    source, quantized = checkpoint("llama", 1, **SIZES), write.quantize
    found: list[list[str]] = []

    def interrupted(weight: torch.Tensor, *args: Any) -> QuantizedWeight:
        found.append(sorted(p.name for p in tmp_path.iterdir()))
        if len(found) > 9:  # in the second layer
            raise end
        return quantized(weight, *args)

    monkeypatch.setattr(write, "quantize", interrupted)
    with pytest.raises((KeyboardInterrupt, ConfigError)) as caught:
        written(source, tmp_path / "q", "int8")
    assert isinstance(caught.value, KeyboardInterrupt) or "No space left" in str(caught.value)
    assert found[-1] == ["q.part"]
    assert not list(tmp_path.iterdir())


def test_matrices_without_whole_groups_stay_dense(checkpoint: Any, tmp_path: Path) -> None:
    """And are named in `ignore`; int8 has no groups."""
    source = checkpoint("llama", 1)  # 112 columns
    down = [f"model.layers.{i}.mlp.down_proj" for i in range(3)]
    assert quantize_checkpoint(source, tmp_path / "4", "int4", show_progress=False) == down
    config = json.loads((tmp_path / "4" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == [*down, "lm_head"]
    assert logits(tmp_path / "4", random_tokens(9)).isfinite().all()
    assert quantize_checkpoint(source, tmp_path / "8", "int8", show_progress=False) == []


def test_int8_makes_what_a_quantized_checkpoint_stores_dense(
    checkpoint: Any, tmp_path: Path
) -> None:
    """Embeddings and the last matrix; the others are as they were written."""
    folder = written(checkpoint("llama", 1, **SIZES), tmp_path / "q", "int4")
    plain, made = open_checkpoint(folder), open_checkpoint(folder, "int8")
    config = parse_config(plain.config)
    forms = {module: matrix.form for module, matrix in check_tensors(plain, config).items()}
    for module, matrix in check_tensors(made, config).items():
        if module in DENSE:
            assert (forms[module].bits, matrix.form.bits) == (0, 8)
        else:
            assert matrix.form == forms[module]
    tokens = random_tokens(20)
    found = paged_logits(load_decoder(torch_kernels, made, config, torch.float32), tokens)
    expected = logits(folder, tokens)
    assert 0 < (found - expected).norm() < 0.05 * expected.norm()
    facts = inspect_checkpoint(folder, Config(quantization="int8"))
    assert "int8 made while loading" in facts.scheme


def test_what_can_not_be_quantized(checkpoint: Any, tmp_path: Path) -> None:
    """A folder that exists is never written to."""
    source = checkpoint("llama", 1, **SIZES)
    folder = written(source, tmp_path / "q", "int8")
    with pytest.raises(ConfigError, match="is there already"):
        written(source, folder, "int8")
    with pytest.raises(ModelNotSupported, match="quantized already, as compressed-tensors"):
        written(folder, tmp_path / "twice", "int4")
    with pytest.raises(ModelNotSupported, match="GPT2LMHeadModel can't be quantized"):
        written(checkpoint("gpt2", 1), tmp_path / "gpt2", "int4")
    assert not (tmp_path / "twice").exists()


def test_a_gguf_file_is_no_input(checkpoint: Any, tmp_path: Path) -> None:
    """Dense or not; what to do instead is said."""
    source = Path(shutil.copytree(checkpoint("llama", 1, **SIZES), tmp_path / "m"))
    file = write_gguf(source, tmp_path / "m.gguf", lambda name: Kind.BF16)
    with pytest.raises(ModelNotSupported, match="is a GGUF file; a folder of safetensors") as e:
        written(file, tmp_path / "q", "int8")
    assert "`streamer serve FILE --quantization KIND`" in e.value.message
    assert not (tmp_path / "q").exists()


def test_the_folder_of_a_command_that_was_killed(checkpoint: Any, tmp_path: Path) -> None:
    """It is said whose it is, and it is kept: the command may still run."""
    part = tmp_path / "q.part"
    part.mkdir()
    with pytest.raises(ConfigError, match="was killed or still runs; if none does, delete it"):
        written(checkpoint("llama", 1, **SIZES), tmp_path / "q", "int8")
    assert part.exists()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_facts_of_a_packed_checkpoint_that_is_refused(
    checkpoint: Any, tmp_path: Path, kind: str
) -> None:
    """Parameters are those of the model, not the words that they are packed in."""
    folder = written(checkpoint("llama", 1, **SIZES), tmp_path / "q", kind)
    facts = inspect_checkpoint(folder, Config(quantization="int4"))
    assert "quantized as compressed-tensors already" in facts.refused
    assert facts.num_parameters == inspect_checkpoint(folder).num_parameters
    config = json.loads((folder / "config.json").read_text())
    for unknown in ({"architectures": ["GPT2LMHeadModel"]}, {"hidden_act": "none"}):
        (folder / "config.json").write_text(json.dumps(config | unknown))
        facts = inspect_checkpoint(folder)
        assert facts.refused
        assert facts.num_parameters == 0


@pytest.mark.parametrize(("kind", "value"), [("int4", 1e20), ("int8", 3.4e38)])
def test_weights_whose_scales_are_no_numbers_are_refused_by_name(
    checkpoint: Any, tmp_path: Path, kind: str, value: float
) -> None:
    """Not written into a folder that no one could load."""
    folder = Path(shutil.copytree(checkpoint("llama", 1, **SIZES), tmp_path / "m"))
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    tensors[f"{name}.weight"][0, 0] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelNotSupported, match=re.escape(name)):
        written(folder, tmp_path / "q", kind)
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize("group", [32, 128])
def test_compensation_loses_less_where_inputs_go_together(group: int) -> None:
    """In what the matrix gives for such inputs, though its own numbers lose more."""
    inputs = torch.randn(1000, 32) @ torch.randn(32, 128) + 0.3 * torch.randn(1000, 128)
    weight = torch.randn(40, 128)
    plain = quantize(weight, "int4", group=group)
    gram = inputs.t() @ inputs
    better = compensated(weight, gram.diagonal(), factor_of(gram), torch.float32, group)
    assert isinstance(better, QuantizedWeight)

    def lost(found: QuantizedWeight) -> float:
        return float((inputs @ (dequantize(found) - weight).t()).square().mean())

    assert lost(better) < 0.5 * lost(plain)


def test_calibration_brings_the_bundled_model_closer(tmp_path: Path) -> None:
    """On documents that the calibration has not seen, by half of what int4 loses."""
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    rows = encode(list(islice(documents(1, read_questions()), 40)), tokenizer)
    unseen = [row.ids for row in rows[:5]]
    seen = [token for row in rows[5:] for token in row.ids]
    plain = written(CHECKPOINT, tmp_path / "plain", "int4")
    better = written(CHECKPOINT, tmp_path / "better", "int4", seen[:2560])

    def divergence(folder: Path) -> float:
        lost = 0.0
        for tokens in unseen:
            exact, found = (logits(f, tokens).log_softmax(-1) for f in (CHECKPOINT, folder))
            lost += float((exact.exp() * (exact - found)).sum())
        return lost

    assert divergence(better) < 0.7 * divergence(plain)


def test_a_calibration_of_float16(checkpoint: Any, tmp_path: Path) -> None:
    """No kernel of a CPU computes in it: the codes are those of the same numbers in float32, but
    for the scales' rounding; what is written is float16."""
    found = {}
    for dtype in (torch.float16, torch.float32):
        source = checkpoint("llama", 1, dtype=dtype, **SIZES)
        folder = written(source, tmp_path / str(dtype), "int4", random_tokens(2048))
        found[dtype] = load_file(folder / "model.safetensors")
    half, whole = found.values()
    assert {t.dtype for t in half.values() if t.is_floating_point()} == {torch.float16}
    packed = [name for name in half if name.endswith("weight_packed")]
    assert len(packed) == 14
    for name in packed:
        same = half[name].view(torch.uint8) == whole[name].view(torch.uint8)
        assert same.float().mean() > 0.8


def test_a_calibration_needs_a_text(checkpoint: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="100 tokens, at least 2048"):
        written(checkpoint("llama", 1, **SIZES), tmp_path / "few", "int4", random_tokens(100))
    assert not (tmp_path / "few").exists()


def test_a_calibration_in_tokens_that_the_model_does_not_have(
    checkpoint: Any, tmp_path: Path
) -> None:
    tokens = [*random_tokens(2047), 256]
    says = "calibration: the tokenizer makes token 256 of the text, the model has a vocab_size of"
    with pytest.raises(ConfigError, match=f"{says} 256") as error:
        written(checkpoint("llama", 1, **SIZES), tmp_path / "q", "int4", tokens)
    assert error.value.param == "calibration"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [1e30, 3e38])
def test_a_calibration_whose_inputs_have_no_squares(
    checkpoint: Any, tmp_path: Path, value: float
) -> None:
    """The module is named, and nothing is left."""
    folder = Path(shutil.copytree(checkpoint("llama", 1, **SIZES), tmp_path / "m"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.post_attention_layernorm.weight"].fill_(value)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    says = "model.layers.1.mlp.gate_proj: its inputs on the calibration's text are so large"
    with pytest.raises(ModelNotSupported, match=re.escape(says)):
        written(folder, tmp_path / "q", "int4", random_tokens(2048))
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_gram_without_a_factor() -> None:
    with pytest.raises(ModelNotSupported, match=r"mlp\.x: its inputs .* without a Cholesky factor"):
        calibrate._factor("mlp.x", torch.tensor([[1.0, 9.0], [9.0, 1.0]]))
