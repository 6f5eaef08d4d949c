"""Names of GGUF files: split models, and a repository's file for a quantization."""

from __future__ import annotations

import pytest

from streamer.errors import ConfigError, ModelNotSupported
from streamer.model.gguf.names import choose_file, files_of, model_name, split_files

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
        ("Qwen3-8B-Q6_K-00001-of-00002", "Q6_K/Qwen3-8B-Q6_K-00001-of-00002.gguf"),
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


@pytest.mark.parametrize("numbers", ["00001-of-00000", "00000-of-00002", "00003-of-00002"])
def test_a_name_whose_numbers_can_not_be_is_a_whole_models(numbers: str) -> None:
    """It is no file for the quantization before its numbers, and hides none beside it."""
    file = f"m-Q4_K_M-{numbers}.gguf"
    assert split_files(file) == [file]
    assert model_name(file) == file.removesuffix(".gguf")
    assert choose_file([file, "x-Q4_K_M.gguf"], "a/b", "Q4_K_M") == "x-Q4_K_M.gguf"
    assert choose_file([file, "x-Q4_K_M.gguf"], "a/b", file) == file


def test_a_model_of_too_many_files_is_refused_once_it_is_chosen() -> None:
    """Not while names are looked through: of these that took minutes."""
    listed = [f"m{i}-Q8_0-00001-of-99999.gguf" for i in range(2000)]
    assert choose_file([*listed, "m-Q4_0.gguf"], "a/b", "Q4_0") == "m-Q4_0.gguf"
    with pytest.raises(ModelNotSupported, match=r"^m7-.* of 99999 files of a model; at most 1000"):
        files_of(listed[7], listed, "a/b")


def test_all_files_of_a_split_model_have_to_be_listed() -> None:
    first, second = (f"Q6_K/Qwen3-8B-Q6_K-0000{i}-of-00002.gguf" for i in (1, 2))
    assert files_of(first, iter(LISTED), "a/b") == [first, second]
    with pytest.raises(ConfigError, match=f"^a/b lacks 1 of 2 files: {second} "):
        files_of(first, [name for name in LISTED if name != second], "a/b")
