"""A GGUF file in the engine and on the command line: the bundled model, quantized."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from streamer import LLM, SamplingParams
from streamer.cli import main
from streamer.demo import CHECKPOINT
from streamer.kernels import ops
from streamer.model.checkpoint import open_checkpoint
from streamer.model.inspect import generation_defaults, recognize
from streamer.model.loader import load_decoder
from streamer.tokenizer.tokenizer import Tokenizer
from tests.model import stories
from tests.model.gguf_files import Kind, add_bytes, add_tokenizer, rounded, write_gguf
from tests.model.hand import paged_logits

MESSAGES = [{"role": "user", "content": "What is 12 + 30?  naïve <|im_end|> 日本"}]


def demo(to: Path) -> Path:
    """A copy of the bundled checkpoint, for write_gguf."""
    folder = Path(shutil.copytree(CHECKPOINT, to))
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_theta": config["rope_theta"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file; beside it, in `m`, the checkpoint with the weights that it holds."""
    folder = demo(tmp_path_factory.mktemp("demo") / "m")

    def add(writer: gguf.GGUFWriter) -> None:
        add_tokenizer(writer, folder)
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 7)

    def kind_of(name: str) -> Kind:
        return Kind.Q8_0 if "embed" in name else Kind.Q5_1

    return write_gguf(folder, folder.parent / "demo-Q5_1.gguf", kind_of, add=add)


def test_answers_are_those_of_the_checkpoint_with_the_same_weights(file: Path) -> None:
    greedy = SamplingParams(max_tokens=40, temperature=0)
    tokenizer = Tokenizer.from_folder(file.parent / "m")
    prompts = [tokenizer.encode_chat(MESSAGES), tokenizer.encode("Once upon a time\n\n there  was")]
    with LLM(str(file), dtype="float32") as llm, LLM(str(file.parent / "m"), dtype="float32") as m:
        found = llm.chat([MESSAGES], greedy)[0]
        assert found.prompt_token_ids == tuple(prompts[0])
        answers = llm.generate(prompts, greedy)
        assert answers[0].choices[0].text == found.choices[0].text
        for answer, expected in zip(answers, m.generate(prompts, greedy), strict=True):
            # The native kernels' rounding of activations: the greedy tokens of a trained model
            # are far from ties nearly everywhere.
            num_same = sum(
                a == b
                for a, b in zip(
                    answer.choices[0].token_ids, expected.choices[0].token_ids, strict=False
                )
            )
            assert num_same >= 0.9 * len(expected.choices[0].token_ids)
            assert answer.choices[0].finish_reason == expected.choices[0].finish_reason


def test_requests_start_from_the_authors_sampling_defaults(file: Path) -> None:
    assert generation_defaults(open_checkpoint(file)) == {"temperature": 0.5, "top_k": 7}


def test_info_says_what_the_file_is(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "LlamaForCausalLM, served by the engine's own decoder" in shown
    assert "GGUF Q5_1" in shown
    assert "4,096 tokens, ends (2, 3)" in shown


def test_info_of_a_damaged_file_names_the_field(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:-1000])
    assert main(["info", str(cut)]) == 1
    shown = capsys.readouterr().out
    assert "refused" in shown
    assert "it ends at byte" in shown


def test_info_of_a_file_whose_split_is_unknown_names_it(
    checkpoint: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its weights fit; its texts would be split otherwise than in training."""

    def add(writer: gguf.GGUFWriter) -> None:
        add_bytes(writer)
        writer.kv_data[0]["tokenizer.ggml.pre"].value = "no-such-split"

    folder = Path(shutil.copytree(checkpoint("llama", 1), tmp_path / "m"))
    file = write_gguf(folder, tmp_path / "m.gguf", lambda name: Kind.F32, add=add)
    assert main(["info", str(file)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "refused tokenizer.ggml.pre: 'no-such-split' is not one of" in shown


# What int8 activations lose beside the file's own weights in float32, in nats a token: 128 columns
# share a scale, beside Q8_0 32. Compiled for AVX2, or for no vectors, it is within 11% of it.
ACTIVATIONS = {
    "Q4_0": 1.3e-4,
    "Q4_1": 1.3e-4,
    "Q5_0": 1.4e-4,
    "Q5_1": 1.4e-4,
    "Q8_0": 0.6e-4,
    "MXFP4": 1.2e-4,
    "IQ4_NL": 1.6e-4,
    "Q2_K": 6.2e-4,
    "Q3_K": 1.4e-4,
    "Q4_K": 1.0e-4,
    "Q5_K": 1.0e-4,
    "Q6_K": 0.9e-4,
    "Q4_K_M": 1.0e-4,
    "Q5_K_M": 1.1e-4,
}
ACROSS = 1.2


def llamacpp_mix(name: str, body: Kind, finer: Kind, short: Kind) -> Kind:
    """As llama-quantize makes Q4_K_M and Q5_K_M of such a model: `finer` for embeddings, and for
    values in half of the layers; down_proj, whose 704 columns are no blocks of 256, in 32s."""
    is_finer = any(f".{layer}." in name for layer in (0, 1, 4))
    if "down_proj" in name:
        return Kind.Q8_0 if is_finer else short
    return finer if "embed" in name or ("v_proj" in name and is_finer) else body


MIXTURES = {
    "Q4_K_M": (Kind.Q4_K, Kind.Q6_K, Kind.Q5_0),
    "Q5_K_M": (Kind.Q5_K, Kind.Q6_K, Kind.Q5_1),
}


@pytest.fixture(scope="module")
def truth() -> tuple[stories.Windows, list[torch.Tensor]]:
    """Unseen stories, and transformers' probabilities of the dense model in float32."""
    windows = stories.windows(256, 6)
    return windows, stories.probabilities(CHECKPOINT, windows)


@pytest.mark.skipif(ops.why_not_native() != "", reason="of the native kernels")
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_no_more_is_lost_than_the_file_loses(
    tmp_path: Path, truth: tuple[stories.Windows, list[torch.Tensor]], kind: str
) -> None:
    """Its weights in float32, as the gguf package reads them and transformers runs them: beside
    these ours lose what activations in int8 do, and beside the dense model a twentieth more."""
    windows, expected = truth
    folder = demo(tmp_path / "m")

    def kind_of(name: str) -> Kind:
        if kind in MIXTURES:
            return llamacpp_mix(name, *MIXTURES[kind])
        is_short = "down_proj" in name and "K" in kind  # 704 columns are no blocks of 256
        return Kind.Q8_0 if is_short else Kind[kind]

    file = write_gguf(folder, tmp_path / "m.gguf", kind_of, quantize=rounded)
    of_file = stories.probabilities(folder, windows)
    known = recognize(open_checkpoint(file), "float32")
    assert known.decoder is not None
    model = load_decoder(ops.for_cpu(), known.checkpoint, known.decoder, torch.float32)
    found = [paged_logits(model, window).log_softmax(-1)[:-1] for window in windows]
    most = ACROSS * ACTIVATIONS[kind]
    assert 0 < stories.divergence(of_file, found) < most
    lost = stories.divergence(expected, of_file)
    assert stories.divergence(expected, found) < 1.05 * lost + most
