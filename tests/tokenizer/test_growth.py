"""A tokenizer.json may not make a gigabyte of a letter, nor take forever for a line."""

from __future__ import annotations

import base64
import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from streamer.errors import ConfigError, RequestFailed
from streamer.tokenizer import tokenizer as ours
from streamer.tokenizer.growth import growth

DOUBLE = [normalizers.Replace("a", "aa")] * 30
MANY_BYTES = [pre_tokenizers.ByteLevel(add_prefix_space=False)] * 30
SPLIT = [pre_tokenizers.Split(Regex("(a+)+$"), "isolated"), pre_tokenizers.ByteLevel()]


def folder(path: Path, **parts: Any) -> Path:
    """A checkpoint folder of a tokenizer with these parts."""
    made = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    made.decoder = decoders.ByteLevel()
    for name, part in parts.items():
        setattr(made, name, part)
    (path / "tokenizer.json").write_text(made.to_str())
    return path


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("normalizer", normalizers.Sequence(DOUBLE)),
        ("normalizer", normalizers.Replace("a", "a" * 1_000_000)),
        ("normalizer", normalizers.Replace(Regex(""), "a" * 1_000_000)),
        ("normalizer", normalizers.Sequence([normalizers.Prepend("a" * 999_999)])),
        ("normalizer", normalizers.Sequence([normalizers.Prepend("aaa")] * 20)),
        ("normalizer", normalizers.Sequence([normalizers.ByteLevel()] * 30)),
        ("pre_tokenizer", pre_tokenizers.Sequence(MANY_BYTES)),
        ("decoder", decoders.Sequence([decoders.Replace("a", "aa")] * 30)),
        (
            "post_processor",
            processors.TemplateProcessing(single=" ".join(["$A"] * 1000), special_tokens=[]),
        ),
        (
            "post_processor",
            processors.TemplateProcessing(
                single=" ".join(["a"] * 5000 + ["$A"]), special_tokens=[("a", 0)]
            ),
        ),
    ],
)
def test_what_grows_is_refused_by_its_part(tmp_path: Path, name: str, part: Any) -> None:
    began = time.perf_counter()
    with pytest.raises(ConfigError, match=f"the tokenizer's {name} makes up to"):
        ours.Tokenizer.from_folder(folder(tmp_path, **{name: part}))
    assert time.perf_counter() - began < 5.0


def test_a_table_of_long_texts_is_refused() -> None:
    trie = struct.pack("<I", 8) + bytes(8)
    for longest, expected in ((33, 33), (100_000, 100_000)):
        data = trie + b"fi\0" + b"x" * longest + b"\0"
        table = base64.b64encode(data).decode()
        assert growth({"type": "Precompiled", "precompiled_charsmap": table}) == expected


def test_ordinary_parts_grow_little(tmp_path: Path) -> None:
    """Those of Llama, Qwen, Gemma and XLM-RoBERTa."""
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"), normalizers.NFKC()]
    steps += [normalizers.Replace(Regex(" {2,}"), "▁")]
    template = processors.TemplateProcessing(single="a $A a", special_tokens=[("a", 0)])
    for name, part in (
        ("normalizer", normalizers.Sequence(steps)),
        ("pre_tokenizer", pre_tokenizers.ByteLevel()),
        ("post_processor", processors.Sequence([processors.ByteLevel(), template])),
    ):
        assert growth(json.loads(part.__getstate__())) <= 8
        ours.Tokenizer.from_folder(folder(tmp_path, **{name: part})).encode("a b")


def test_an_expression_that_takes_exponential_time_fails_its_request_alone(tmp_path: Path) -> None:
    """The library's engine gives up after 10 million steps of one match: a third of a second."""
    made = ours.Tokenizer.from_folder(
        folder(tmp_path, pre_tokenizer=pre_tokenizers.Sequence(SPLIT))
    )
    began = time.perf_counter()
    with pytest.raises(RequestFailed, match="retry-limit"):
        made.encode("a" * 60 + "!")
    assert time.perf_counter() - began < 20.0
    assert made.encode("a")
