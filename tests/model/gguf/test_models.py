"""Models from GGUF files that the gguf package wrote: logits as transformers' own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from streamer.errors import ConfigError, ModelNotSupported
from streamer.kernels import reference
from streamer.kernels.ops import for_cpu, why_not_native
from streamer.model.checkpoint import open_checkpoint
from streamer.model.gguf.header import FORMATS, Room, read_header
from streamer.model.inspect import recognize
from streamer.model.layers import has_bf16
from streamer.model.loader import load_decoder
from streamer.tokenizer.gguf import ARRAYS, from_metadata
from tests.checkpoints import reference_logits, reference_model
from tests.model.gguf_files import Kind, add_bytes, write_gguf
from tests.model.hand import paged_logits
from tests.model.rounding import Rounding, error
from tests.model.test_decoder import random_tokens

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "initializer_range": 0.05,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def mixed(name: str) -> Kind:
    """As Q4_K_M mixes: Q6_K where it matters most."""
    is_finer = "v_proj" in name or "down_proj" in name or "embed" in name
    return Kind.Q6_K if is_finer else Kind.Q4_K


def all_formats(name: str) -> Kind:
    """Every format somewhere in one model."""
    every = [gguf.GGMLQuantizationType(kind) for kind in FORMATS]
    return every[sum(name.encode()) % len(every)]


def load(file: Path, kernels: Any = reference, dtype: str = "float32") -> Any:
    known = recognize(open_checkpoint(file), dtype)
    assert known.decoder is not None
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return load_decoder(kernels, known.checkpoint, known.decoder, dtypes[known.dtype])


@pytest.mark.parametrize(
    ("family", "architecture", "kind_of", "more"),
    [
        ("llama", "llama", lambda name: Kind.Q8_0, {"tie_word_embeddings": True}),
        ("llama", "llama", all_formats, {"attention_bias": True, "num_hidden_layers": 4}),
        ("qwen3", "qwen3", all_formats, {"head_dim": 64, "num_hidden_layers": 4}),
        ("mistral", "llama", mixed, {"head_dim": 128}),
        ("qwen2", "qwen2", mixed, {}),
        ("qwen3", "qwen3", mixed, {"head_dim": 64, "tie_word_embeddings": True}),
    ],
)
def test_logits_are_transformers_on_the_dequantized_weights(
    checkpoint: Any,
    tmp_path: Path,
    family: str,
    architecture: str,
    kind_of: Any,
    more: dict[str, Any],
) -> None:
    """In the reference's fp32 to rounding. With the native kernels each linear layer's product to
    rounding that of the same inputs in int8, and logits as far off as those in int8 are, 0.02 to
    0.1: which activations are rounded up and which down depends on the last bit."""
    folder = Path(shutil.copytree(checkpoint(family, 1, **{**SIZES, **more}), tmp_path / "m"))
    file = write_gguf(folder, tmp_path / "m.gguf", kind_of, architecture=architecture)
    tokens = random_tokens(40, 3)
    expected = reference_logits(reference_model(folder), tokens)
    assert error(paged_logits(load(file), tokens), expected) < 1e-4
    checked = Rounding(beside=for_cpu())
    native = error(paged_logits(load(file, checked), tokens), expected)
    assert checked.worst < 2**-11  # to which scales are rounded
    assert native < 1.25 * error(paged_logits(load(file, Rounding()), tokens), expected)


def test_llama3s_stretched_rope_is_read_from_its_factors(checkpoint: Any, tmp_path: Path) -> None:
    made = checkpoint("llama", 1, **SIZES, rope_parameters=LLAMA3)
    folder = Path(shutil.copytree(made, tmp_path / "m"))
    turns = 64 * 10000.0 ** (-np.arange(0, 64, 2) / 64) / (2 * np.pi)
    kept = np.clip((turns - 1.0) / 3.0, 0, 1)
    factors = 1 / ((1 - kept) / 8.0 + kept)

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))

    file = write_gguf(folder, tmp_path / "m.gguf", add=add)
    tokens = random_tokens(300, 3)  # far enough for the slow frequencies to matter
    expected = reference_logits(reference_model(folder), tokens)
    assert error(paged_logits(load(file), tokens), expected) < 1e-4


def test_a_split_model_is_read_from_its_first_file(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(checkpoint("llama", 1, **SIZES), tmp_path / "m"))
    write_gguf(folder, tmp_path / "m.gguf", split_max_tensors=8)
    files = sorted(tmp_path.glob("m-*.gguf"))
    assert len(files) == 3
    tokens = random_tokens(20, 3)
    expected = reference_logits(reference_model(folder), tokens)
    assert error(paged_logits(load(files[0]), tokens), expected) < 1e-4

    with monkeypatch.context() as patch:
        patch.setattr("streamer.model.gguf.checkpoint.Room", lambda: Room(tensors=15))
        with pytest.raises(ModelNotSupported, match=r"00002-.*counts 8, at most 7 are read"):
            open_checkpoint(files[0])
    with pytest.raises(ModelNotSupported, match=r"name the first, m-00001-of-00003\.gguf"):
        open_checkpoint(files[1])
    third = files[2].read_bytes()
    files[2].write_bytes(files[1].read_bytes())
    with pytest.raises(ModelNotSupported, match=r"00003-of-00003\.gguf: split\.no: 1, not 2"):
        open_checkpoint(files[0])
    files[2].write_bytes(third[:-64])
    with pytest.raises(ModelNotSupported, match="an incomplete download"):
        open_checkpoint(files[0])
    files[2].unlink()
    with pytest.raises(ModelNotSupported, match=r"lacks 1 of 3 files: m-00003-of-00003\.gguf"):
        open_checkpoint(files[0])


def test_a_split_models_files_are_refused_by_the_first_that_is_another(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before those after it are read; and too many before any is looked for."""
    folder = Path(shutil.copytree(checkpoint("llama", 1, **SIZES), tmp_path / "m"))
    write_gguf(folder, tmp_path / "m.gguf", split_max_tensors=8)
    files = sorted(tmp_path.glob("m-*.gguf"))
    shutil.copy(files[2], files[1])
    seen: list[Path] = []

    def read(path: Path, *given: Any, **named: Any) -> Any:
        seen.append(path)
        return read_header(path, *given, **named)

    monkeypatch.setattr("streamer.model.gguf.checkpoint.read_header", read)
    with pytest.raises(ModelNotSupported, match=r"^m-00002-of-00003\.gguf: split\.no: 2, not 1"):
        open_checkpoint(files[0])
    assert seen == files[:2]
    write_gguf(folder, files[1])  # of a model in one file
    with pytest.raises(ModelNotSupported, match=r"^m-00002-.*: split\.no: None is no whole number"):
        open_checkpoint(files[0])
    many = shutil.copy(files[0], tmp_path / "m-00001-of-01001.gguf")
    with pytest.raises(ModelNotSupported, match="one of 1001 files of a model; at most 1000"):
        open_checkpoint(many)


def test_a_name_of_no_files_is_a_whole_models(checkpoint: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("llama", 1, **SIZES), tmp_path / "m"))
    file = write_gguf(folder, tmp_path / "m-00001-of-00000.gguf")
    assert recognize(open_checkpoint(file), "auto").decoder is not None


def test_an_array_in_place_of_a_tokens_id_is_refused(checkpoint: Any, tmp_path: Path) -> None:
    """It was its length, and so the id of some token."""
    folder = Path(shutil.copytree(checkpoint("llama", 1, **SIZES), tmp_path / "m"))
    key = "tokenizer.ggml.eos_token_id"

    def add(writer: gguf.GGUFWriter) -> None:
        add_bytes(writer)
        del writer.kv_data[0][key]
        writer.add_array(key, [9] * 5)

    file = write_gguf(folder, tmp_path / "m.gguf", add=add)
    for read in (open_checkpoint, lambda f: from_metadata(read_header(f, ARRAYS).metadata)):
        with pytest.raises(ModelNotSupported, match=r"there is no token \[5 items\]") as refusal:
            read(file)
        assert refusal.value.param == key


def test_more_tokens_than_rows_of_the_embedding_are_refused(
    checkpoint: Any, tmp_path: Path
) -> None:
    """A prompt's token beyond them would be read from what lies after."""
    folder = Path(shutil.copytree(checkpoint("llama", 1, **SIZES), tmp_path / "m"))
    file = write_gguf(folder, tmp_path / "m.gguf", add=lambda writer: add_bytes(writer, 257))
    with pytest.raises(ModelNotSupported, match=r"tokens: 257 tokens, token_embd\.weight has 256"):
        open_checkpoint(file)


def test_what_most_numbers_are_decides_of_dense_files_alone(
    checkpoint: Any, tmp_path: Path
) -> None:
    """Of one with codes the large embedding may be in float16, which a CPU has no use for."""
    sizes = {**SIZES, "vocab_size": 4096}
    folder = Path(shutil.copytree(checkpoint("llama", 1, **sizes), tmp_path / "m"))

    def stored(name: str) -> Kind:
        return Kind.F16 if "embed" in name or "head" in name else Kind.Q4_0

    of_codes = "bfloat16" if has_bf16() or not why_not_native() else "float32"
    for kind_of, expected in ((stored, of_codes), (lambda name: Kind.F16, "float32")):
        file = write_gguf(folder, tmp_path / "m.gguf", kind_of)
        assert recognize(open_checkpoint(file), "auto").dtype == expected


def test_a_sampling_default_that_no_request_could_have_is_refused_by_its_key(
    checkpoint: Any, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint("llama", 1, **SIZES), tmp_path / "m"))

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_float32("general.sampling.penalty_repeat", -7.0)

    file = write_gguf(folder, tmp_path / "m.gguf", add=add)
    with pytest.raises(ModelNotSupported, match=r"^general\.sampling\.penalty_repeat is -7"):
        recognize(open_checkpoint(file), "auto")


def test_a_dense_file_can_be_quantized_while_it_is_loaded(checkpoint: Any, tmp_path: Path) -> None:
    """As a folder can be; blocks are served as they are."""
    folder = Path(shutil.copytree(checkpoint("llama", 1, **SIZES), tmp_path / "m"))
    file = write_gguf(folder, tmp_path / "m.gguf", lambda name: Kind.BF16)
    for asked, says in (("int8", "int8 made while loading"), ("gguf", "")):
        assert recognize(open_checkpoint(file, asked), "auto").scheme.startswith(says)
    known = recognize(open_checkpoint(file, "int8"), "float32")
    assert known.decoder is not None
    model = load_decoder(reference, known.checkpoint, known.decoder, torch.float32)
    tokens = random_tokens(20, 3)
    expected = reference_logits(reference_model(folder), tokens)
    assert 1e-4 < error(paged_logits(model, tokens), expected) < 0.05
    blocks = write_gguf(folder, tmp_path / "q.gguf")
    with pytest.raises(ConfigError, match="quantization int8: the checkpoint is quantized as gguf"):
        recognize(open_checkpoint(blocks, "int8"), "auto")


def test_loading_leaves_the_file_as_it_was(checkpoint: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("llama", 1, **SIZES), tmp_path / "m"))
    file = write_gguf(folder, tmp_path / "m.gguf")
    before = file.read_bytes()
    load(file)
    assert file.read_bytes() == before


def test_a_file_cut_after_it_was_opened_is_refused(checkpoint: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("llama", 1, **SIZES), tmp_path / "m"))
    file = write_gguf(folder, tmp_path / "m.gguf")
    known = recognize(open_checkpoint(file), "float32")
    assert known.decoder is not None
    with file.open("rb+") as f:
        f.truncate(read_header(file).tensors[4].start)
    with pytest.raises(ModelNotSupported, match="was cut while it was read"):
        load_decoder(reference, known.checkpoint, known.decoder, torch.float32)


def test_a_blocks_scale_that_is_no_number_is_refused(checkpoint: Any, tmp_path: Path) -> None:
    """Every answer would be NaN."""
    folder = Path(shutil.copytree(checkpoint("llama", 1, **SIZES), tmp_path / "m"))
    file = write_gguf(folder, tmp_path / "m.gguf", lambda name: Kind.Q4_0)
    place = next(p for p in read_header(file).tensors if p.name == "blk.1.ffn_up.weight")
    with file.open("rb+") as f:
        f.seek(place.start + 18 * 5)
        f.write(np.float16(np.nan).tobytes())
    with pytest.raises(ModelNotSupported, match=r"1\.mlp\.up_proj: scales: 1 are NaN or infinite"):
        load(file, for_cpu())
