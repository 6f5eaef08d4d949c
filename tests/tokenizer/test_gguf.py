"""A tokenizer from GGUF metadata: ids as transformers' own rebuild of the same file has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from streamer.errors import InvalidRequest, ModelNotSupported
from streamer.model.gguf.header import read_header
from streamer.tokenizer.gguf import ARRAYS, SPLITS, from_metadata
from streamer.tokenizer.text import TextStream
from streamer.tokenizer.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 1234567 o'clock, isn't it?\n\n",
    "def f(x):\n\treturn  x**2  # ünïcödé — 你好，世界 Привет мир\r\n",
    "I'LL WE'VE they're 3.14 100,000 foo_bar FooBarBaz <|tag|> \U0001f642\U0001f600",
]
NASTY = [
    *("", " ", "  ", "\n", " \n \n  x", "a", " a", "  a  b   c", "\t\tif x:\n\n\n  y\r\n z"),
    *CORPUS,
    "I'm HE'S you'Ve 'tis 12345 1 22 333 4444 ½ ² ٣٤",
    "naïve café cafe\u0301 Ａ １２ ﬁ \u200d\u200b \ufeff \u00a0x \u3000y",
    "한국어 日本語テキスト ไทย हिन्दी العربية עברית ελληνικά",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea e\u0301\u0301 \x00\x7f",
    "path/to/file.py:12 https://x.y/?a=b&c=d {}[]()<>!@#$%^&*~`|\\",
    "<|im_start|>user\nhi<|im_end|> <think>hm</think> <s>[INST]</s>",
]


def byte_level(pre: str) -> tuple[list[str], list[str]]:
    """Tokens and merges, trained with transformers' split of that name."""
    backend = tokenizers.Tokenizer(models.BPE())
    split = GGUF_PRE_TOKENIZER_SPLITS.get(pre)
    parts: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)]
    if split is not None:
        parts.insert(0, pre_tokenizers.Split(tokenizers.Regex(split), behavior="isolated"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(parts)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=sorted(alphabet), show_progress=False, min_frequency=1
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    model = backend.model
    described = json.loads(model.__getstate__())
    vocabulary = described["vocab"]
    merges = [m if isinstance(m, str) else " ".join(m) for m in described["merges"]]
    return sorted(vocabulary, key=vocabulary.__getitem__), merges


def sentencepiece() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types of a vocabulary as SentencePiece's BPE makes them."""
    trained = tokenizers.SentencePieceBPETokenizer(fuse_unk=True)
    trained.train_from_iterator(CORPUS * 3, vocab_size=300, show_progress=False)
    vocabulary = trained.get_vocab()
    pieces = [t for t in sorted(vocabulary, key=vocabulary.__getitem__) if t != "<unk>"]
    # As SentencePiece has them: the pieces that merges make, then single characters.
    pieces.sort(key=lambda t: len(t) == 1)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    scores = [0.0] * 259 + [float(-i) for i in range(len(pieces))]
    return tokens, scores, types


def write(file: Path, add: Callable[[gguf.GGUFWriter], None]) -> Path:
    writer = gguf.GGUFWriter(str(file), "llama")
    for key in ("block_count", "context_length", "embedding_length", "feed_forward_length"):
        getattr(writer, f"add_{key}")(8)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def write_byte_level(file: Path, pre: str, begin: str = "<|begin|>", **more: Any) -> Path:
    tokens, merges = byte_level(pre)
    special = ["<|im_start|>", "<|im_end|>", begin]

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list([*tokens, *special, "<think>", "[PAD]"])
        writer.add_token_types([*[NORMAL] * len(tokens), *[CONTROL] * 3, USER_DEFINED, UNUSED])
        writer.add_token_merges(merges)
        writer.add_bos_token_id(len(tokens) + 2)
        writer.add_eos_token_id(len(tokens) + 1)
        for name, value in more.items():
            getattr(writer, name)(value)

    return write(file, add)


def write_sentencepiece(file: Path, **more: Any) -> Path:
    tokens, scores, types = sentencepiece()

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(types)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        for name, value in more.items():
            getattr(writer, name)(value)

    return write(file, add)


def ours(file: Path) -> Tokenizer:
    return from_metadata(read_header(file, ARRAYS).metadata)


def theirs(file: Path) -> Any:
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    """What clients read, token by token."""
    stream = TextStream(tokenizer.token_bytes())
    text = "".join(map(stream.push, ids))
    return text + stream.finish()


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "gpt-4o", "gpt-2"])
def test_byte_level_ids_are_those_of_transformers(tmp_path: Path, pre: str) -> None:
    file = write_byte_level(tmp_path / "a.gguf", pre, add_add_bos_token=False)
    own, other = ours(file), theirs(file)
    for text in NASTY:
        if pre == "qwen2" and "e\u0301" in text:
            continue  # Qwen2's own tokenizer.json brings text to NFC, transformers' rebuild doesn't
        ids = own.encode(text)
        assert ids == other.encode(text, add_special_tokens=False), text
        visible = text.replace("<|im_start|>", "").replace("<|im_end|>", "")
        assert streamed(own, ids) == visible


def test_sentencepiece_ids_are_those_of_transformers(tmp_path: Path) -> None:
    """Apart from the space before a text that follows a special token: llama.cpp and the models'
    training have it, transformers' rebuild has it at the beginning alone."""
    file = write_sentencepiece(tmp_path / "a.gguf")
    own, other = ours(file), theirs(file)
    for text in NASTY:
        if "<s>" in text or text.startswith(" "):
            continue
        ids = own.encode(text)
        assert ids == other.encode(text), text
        assert ids[0] == own.bos_token_id == 1
        assert streamed(own, ids) == (" " + text if text else "")
    turn = own.encode("<s>[INST]", add_special_tokens=False)
    assert turn == [1, *own.encode("[INST]", add_special_tokens=False)]
    assert own.decode(own.encode("  a ")) == "  a "


def test_without_a_space_prefix(tmp_path: Path) -> None:
    own = ours(write_sentencepiece(tmp_path / "a.gguf", add_add_space_prefix=False))
    with_prefix = ours(write_sentencepiece(tmp_path / "b.gguf"))
    assert own.encode(" fox") == with_prefix.encode("fox")
    assert own.encode("fox") != with_prefix.encode("fox")
    assert own.decode(own.encode(" fox")) == " fox"


@pytest.mark.parametrize("pre", sorted(SPLITS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys()))
def test_texts_are_split_as_transformers_splits_them(pre: str) -> None:
    other = pre_tokenizers.Split(
        tokenizers.Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), behavior="isolated"
    )
    for text in NASTY:
        assert split(pre, text) == [piece for piece, _ in other.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "I'LL be  there: 123", ["I", "'", "LL", " be", " ", " there", ":", " 123"]),
        ("smollm", "abc 123", ["abc", " ", "1", "2", "3"]),
        ("starcoder", "x=42", ["x", "=", "4", "2"]),
        ("default", "x = 1234+5", ["x", " ", "=", " ", "123", "4", "+", "5"]),
        ("deepseek-v3", "12345 你好x/path", ["123", "45", " ", "你好", "x", "/path"]),
        ("deepseek-coder", "a\n 12", ["a", "\n", " ", "1", "2"]),
        ("llama-bpe", "it's 12345\n\n x", ["it", "'s", " ", "123", "45", "\n\n", " x"]),
    ],
)
def test_the_splits_that_transformers_does_not_have(pre: str, text: str, pieces: list[str]) -> None:
    assert split(pre, text) == pieces


def split(pre: str, text: str) -> list[str]:
    parts = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
        for pattern in SPLITS[pre].patterns
    ]
    return [piece for piece, _ in pre_tokenizers.Sequence(parts).pre_tokenize_str(text)]


def test_qwens_text_is_brought_to_nfc(tmp_path: Path) -> None:
    own = ours(write_byte_level(tmp_path / "a.gguf", "qwen2"))
    assert own.encode("cafe\u0301") == own.encode("café")
    plain = ours(write_byte_level(tmp_path / "b.gguf", "gpt-2"))
    assert plain.encode("cafe\u0301") != plain.encode("café")


def test_begin_and_end_tokens_as_the_file_or_its_kind_wants_them(tmp_path: Path) -> None:
    def ends(pre: str, **more: Any) -> tuple[bool, bool]:
        own = ours(write_byte_level(tmp_path / "a.gguf", pre, **more))
        ids = own.encode("x")
        return ids[0] == own.bos_token_id, ids[-1] == own.eos_token_id

    assert ends("llama-bpe") == (True, False)
    assert ends("qwen2") == (False, False)
    assert ends("llama-bpe", add_add_bos_token=False) == (False, False)
    assert ends("qwen2", add_add_bos_token=True, add_add_eos_token=True) == (True, True)


@pytest.mark.parametrize("begin", ["$A", "$B", "$1", "$A:1", "bos_token", "eos_token"])
def test_a_begin_token_may_have_any_text(tmp_path: Path, begin: str) -> None:
    """One that post-processors take for a part of the text would be the text once more."""
    own = ours(write_byte_level(tmp_path / "a.gguf", "llama-bpe", begin, add_add_eos_token=True))
    plain = ours(write_byte_level(tmp_path / "b.gguf", "llama-bpe", add_add_eos_token=True))
    assert own.encode("abc") == plain.encode("abc")


def test_special_tokens_are_special_and_the_users_own_are_text(tmp_path: Path) -> None:
    own = ours(write_byte_level(tmp_path / "a.gguf", "qwen2"))
    named = {own.decode([i], skip_special_tokens=False): i for i in own.special_ids}
    assert named.keys() == {"<|im_start|>", "<|im_end|>", "<|begin|>"}
    (think,) = own.encode("<think>")
    assert own.token_bytes()[think] == b"<think>"
    assert own.token_bytes()[named["<|im_end|>"]] == b""
    assert len(own.encode("[PAD]")) > 1  # unused: never found in a text
    assert own.vocab_size == max(think, *named.values()) + 2


def test_chat_templates_of_the_file_or_the_operator(tmp_path: Path) -> None:
    templates = [
        {"name": "default", "template": "{{ messages[0].content }}{{ eos_token }}"},
        {"name": "tool_use", "template": "tools {{ tools | length }}"},
    ]
    file = write_byte_level(tmp_path / "a.gguf", "qwen2", add_chat_template=templates)
    messages = [{"role": "user", "content": "hi <|im_end|>"}]
    own = ours(file)
    assert own.render_chat(messages) == "hi <|im_end|><|im_end|>"
    assert own.render_chat(messages, tools=[{}]) == "tools 1"
    ids = own.encode_chat(messages)
    assert ids.count(own.eos_token_id) == 1  # the user's is text
    given = tmp_path / "mine.jinja"
    given.write_text("mine")
    metadata = read_header(file, ARRAYS).metadata
    assert from_metadata(metadata, str(given)).render_chat(messages) == "mine"
    bare = ours(write_byte_level(tmp_path / "b.gguf", "qwen2"))
    with pytest.raises(InvalidRequest, match="no chat template"):
        bare.render_chat(messages)


GOOD: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<x>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3],
    "tokenizer.ggml.merges": ["a b"],
}
SPM: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, 0.0],
}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "tokenizer.ggml.model: 'rwkv' is not one of gpt2, ll"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model"),
        ({"tokenizer.ggml.model": ["gpt2"]}, "tokenizer.ggml.model: \"['gpt2']\" is not one of"),
        ({"tokenizer.ggml.pre": ["gpt-2"]}, "tokenizer.ggml.pre"),
        ({"tokenizer.ggml.pre": "newest"}, "tokenizer.ggml.pre: 'newest' is not one of"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": [1, 2, 3, 4]}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a", "ab"]}, "tokens: 'a' is there twice"),
        ({"tokenizer.ggml.tokens": ["a", "b", "ab", "x" * 5000]}, "a token of 5000 characters"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type: it must be an array of 4"),
        ({"tokenizer.ggml.merges": ["ab"]}, "merges: 'ab' is no pair"),
        ({"tokenizer.ggml.merges": ["a c"]}, "no tokenizer can be made of it"),
        ({"tokenizer.ggml.bos_token_id": 4}, "bos_token_id: there is no token 4"),
        ({"tokenizer.ggml.eos_token_id": True}, "eos_token_id: there is no token True"),
        ({"tokenizer.ggml.add_bos_token": 1}, "add_bos_token: it must be true or false"),
        ({"tokenizer.ggml.add_bos_token": True}, "add_bos_token: there is no bos_token"),
        ({"tokenizer.chat_template": 3}, "tokenizer.chat_template: it must be a string"),
        ({**SPM, "tokenizer.ggml.scores": None}, "tokenizer.ggml.scores"),
        ({**SPM, "tokenizer.ggml.scores": [float("nan")] * 4}, "array of finite numbers"),
        ({**SPM, "tokenizer.ggml.add_space_prefix": "no"}, "add_space_prefix"),
    ],
)
def test_what_is_missing_or_unknown_is_refused_by_its_key(
    change: dict[str, Any], field: str
) -> None:
    metadata = {k: v for k, v in {**GOOD, **change}.items() if v is not None}
    with pytest.raises(ModelNotSupported) as refusal:
        from_metadata(metadata)
    assert field in refusal.value.message


def test_nested_tokens_do_not_take_the_machines_memory() -> None:
    """4,000 tokens of which each pair is a third: 8 MB in the file, 16 GB as pairs."""
    tokens = ["a" * length for length in range(1, 4000)]
    nested = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": [0.0] * len(tokens)}
    with pytest.raises(ModelNotSupported, match=r"tokens: its pairs have more than 67108864"):
        from_metadata({"tokenizer.ggml.model": "llama", **nested})
    # As special tokens, those that may be so many would be a regular expression of 1,400 levels.
    control = {
        "tokenizer.ggml.tokens": tokens[:1400],
        "tokenizer.ggml.scores": [0.0] * 1400,
        "tokenizer.ggml.token_type": [CONTROL] * 1400,
        "tokenizer.chat_template": "{{ messages }}",
    }
    with pytest.raises(ModelNotSupported, match="no tokenizer can be made of it: maximum recurs"):
        from_metadata({"tokenizer.ggml.model": "llama", **nested, **control})


def test_special_tokens_do_not_take_the_machines_memory() -> None:
    tokens = [f"{i:04}{'x' * 4000}" for i in range(300)]
    many = {
        **GOOD,
        "tokenizer.ggml.tokens": ["a", "b", "ab", *tokens],
        "tokenizer.ggml.token_type": [1, 1, 1, *[3] * 300],
    }
    with pytest.raises(ModelNotSupported, match="type 3 have 1201500 characters; 1048576 can be"):
        from_metadata(many)


def test_a_file_that_does_not_name_its_split_is_warned_of(caplog: Any) -> None:
    from_metadata({k: v for k, v in GOOD.items() if k != "tokenizer.ggml.pre"})
    assert "tokenizer.ggml.pre is missing" in caplog.text
