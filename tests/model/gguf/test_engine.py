"""A GGUF file in the engine and on the command line: the bundled model, quantized."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import pytest

from streamer import LLM, SamplingParams
from streamer.cli import main
from streamer.demo import CHECKPOINT
from streamer.model.checkpoint import open_checkpoint
from streamer.model.inspect import generation_defaults
from streamer.tokenizer.tokenizer import Tokenizer
from tests.model.gguf_files import Kind, add_tokenizer, write_gguf

MESSAGES = [{"role": "user", "content": "What is 12 + 30?  naïve <|im_end|> 日本"}]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file; beside it, in `m`, the checkpoint with the weights that it holds."""
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path_factory.mktemp("demo") / "m"))
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_theta": config["rope_theta"]}
    (folder / "config.json").write_text(json.dumps(config))

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
