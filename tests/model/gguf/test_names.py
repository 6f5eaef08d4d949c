"""Names of GGUF files: split models, and a repository's file for a quantization."""

from __future__ import annotations

import pytest

from streamer.errors import ConfigError
from streamer.model.gguf.names import choose_file, model_name, split_files

LISTED = [
    "README.md",
    "Qwen3-8B-Q4_K_M.gguf",
    "Qwen3-8B-Q8_0.gguf",
    "Q6_K/Qwen3-8B-Q6_K-00001-of-00002.gguf",
    "Q6_K/Qwen3-8B-Q6_K-00002-of-00002.gguf",
    "qwen3-8b.q4_0.gguf",
    "mmproj-F16.gguf",
    "UD/Qwen3-8B-Q5_K_M.gguf",
    "Qwen3-8B-Q5_K_M.gguf",
]


@pytest.mark.parametrize(
    ("selector", "file"),
    [
        ("Q4_K_M", "Qwen3-8B-Q4_K_M.gguf"),
        ("q4_k_m", "Qwen3-8B-Q4_K_M.gguf"),
        ("Q4_0", "qwen3-8b.q4_0.gguf"),
        ("Q6_K", "Q6_K/Qwen3-8B-Q6_K-00001-of-00002.gguf"),
        ("UD/Qwen3-8B-Q5_K_M.gguf", "UD/Qwen3-8B-Q5_K_M.gguf"),
        ("Qwen3-8B-Q5_K_M.gguf", "Qwen3-8B-Q5_K_M.gguf"),
    ],
)
def test_a_file_is_found_by_its_quantization_or_its_name(selector: str, file: str) -> None:
    assert choose_file(LISTED, "a/b", selector) == file


@pytest.mark.parametrize(
    ("selector", "says"),
    [
        ("F16", "a/b has no F16, but: "),  # the projector's file is no model
        ("K_M", "a/b has 3 files for K_M, name one: "),
        (".*", "a/b has no .*, but: "),
        ("Q5_K_M", "2 files for Q5_K_M, name one: Qwen3-8B-Q5_K_M.gguf, UD/"),
    ],
)
def test_what_is_not_one_file_is_refused_with_those_there_are(selector: str, says: str) -> None:

    listed = LISTED
    if selector == "K_M":
        listed = ["x-K_M.gguf", "y-K_M.gguf", "z.K_M.gguf"]
    with pytest.raises(ConfigError) as refusal:
        choose_file(listed, "a/b", selector)
    assert says in refusal.value.message


def test_a_repository_without_gguf_files_says_so() -> None:
    with pytest.raises(ConfigError, match="a/b has no GGUF files"):
        choose_file(["model.safetensors"], "a/b", "Q8_0")


def test_the_files_of_a_split_model() -> None:
    files = ["m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf"]
    assert split_files(files[0]) == split_files(files[1]) == files
    assert split_files("m.gguf") == ["m.gguf"]
    assert model_name(files[1]) == model_name("m.gguf") == "m"
