"""The bundled checkpoint folders: complete, small, loadable by others, of one tokenizer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from streamer.demo import CHECKPOINT, DRAFT
from streamer.demo.training.corpus import Document, Turn, encode
from streamer.demo.training.shape import DEMO, Shape
from streamer.demo.training.shape import DRAFT as DRAFT_SHAPE

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


def num_weights(folder: Path) -> int:
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118
    total = 0
    for shape in shapes:
        size = 1
        for side in shape:
            size *= side
        total += size
    return total


@pytest.mark.parametrize(("folder", "shape"), [(CHECKPOINT, DEMO), (DRAFT, DRAFT_SHAPE)])
def test_folder_is_complete_and_in_bf16(folder: Path, shape: Shape) -> None:
    assert {file.name for file in folder.iterdir()} == FILES
    assert num_weights(folder) == shape.num_parameters
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        dtypes = {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
    assert dtypes == {"BF16"}


def test_sizes() -> None:
    files = [*CHECKPOINT.iterdir(), *DRAFT.iterdir()]
    assert sum(file.stat().st_size for file in files) <= 16_000_000
    assert 3_000_000 <= num_weights(CHECKPOINT) <= 8_000_000
    assert num_weights(DRAFT) * 10 <= num_weights(CHECKPOINT)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_both_have_the_same_tokenizer(name: str) -> None:
    assert (CHECKPOINT / name).read_bytes() == (DRAFT / name).read_bytes()


def test_end_tokens_are_in_the_generation_config() -> None:
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    generation = json.loads((CHECKPOINT / "generation_config.json").read_text())
    ends = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    assert generation["eos_token_id"] == ends
    assert json.loads((CHECKPOINT / "config.json").read_text())["eos_token_id"] == ends


def test_any_text_survives_the_tokenizer() -> None:
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    for text in ("What is PagedAttention?", "a\n\n  b\t", "Grüße, 你好 🙂", "--max-num-seqs"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text


def test_transformers_loads_it_and_its_template_equals_the_training_text() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    turns = (
        Turn("system", "Be kind."),
        Turn("user", "Hello!"),
        Turn("assistant", "Hi."),
        Turn("user", "Who are you?"),
        Turn("assistant", "A model."),
    )
    messages = [turn._asdict() for turn in turns]
    (row,) = encode([Document("chat", turns)], tokenizer.backend_tokenizer)
    assert tokenizer.apply_chat_template(messages, return_dict=False) == row.ids
    asked = tokenizer.apply_chat_template(
        messages[:-1], add_generation_prompt=True, return_dict=False
    )
    assert row.ids[: len(asked)] == asked
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.num_parameters() == DEMO.num_parameters


def test_importing_the_room_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, streamer.demo, streamer.demo.training.corpus, streamer.demo.training.train, "
        "streamer.demo.training.report, streamer.demo.training.answering\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'numpy'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
