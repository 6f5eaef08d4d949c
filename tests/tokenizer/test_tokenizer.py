"""Tokenizer: encoding, special tokens, the token-to-bytes table, and what it reads of a folder."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from streamer.errors import ConfigError, InvalidRequest, ModelNotSupported, RequestFailed
from streamer.tokenizer.token_bytes import byte_alphabet
from streamer.tokenizer.tokenizer import Tokenizer

CORPUS = [
    "the cat sat on the mat, the cat",
    "naïve café, über 東京 🙂🙂",
    "  two  spaces\n\nlines\t",
]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def byte_level(**kwargs: Any) -> tokenizers.Tokenizer:
    """A trained byte-level BPE with a begin and an end token."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        **kwargs,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


def sentence_piece() -> tokenizers.Tokenizer:
    """A vocabulary in Llama 2's way: U+2581 for spaces, bytes where it has no token."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    tokens += ["\u2581", "t", "h", "e", "c", "a", "th", "the", "\u2581the", "\u2581c"]
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("\u2581", "c")]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def write(folder: Path, backend: tokenizers.Tokenizer, **settings: Any) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


BYTE_LEVEL = Tokenizer(byte_level(), {"bos_token": "<s>", "eos_token": {"content": "</s>"}})
SIZE = BYTE_LEVEL.vocab_size
SENTENCE_PIECE = Tokenizer(sentence_piece(), {"eos_token": "</s>"})


def test_special_tokens() -> None:
    t = BYTE_LEVEL
    assert (t.bos_token_id, t.eos_token_id, t.vocab_size) == (0, 1, SIZE)
    assert t.special_ids == {0, 1}
    assert t.special_bytes == {0: b"<s>", 1: b"</s>"}
    assert SENTENCE_PIECE.bos_token_id is None


def test_begin_token_once_or_never() -> None:
    t = BYTE_LEVEL
    assert t.encode("the cat")[0] == 0
    assert 0 not in t.encode("the cat", add_special_tokens=False)
    assert t.encode("<s>the", add_special_tokens=False).count(0) == 1
    assert t.decode(t.encode("the cat")) == "the cat"
    assert t.decode([0, 1], skip_special_tokens=False) == "<s></s>"


@pytest.mark.parametrize("t", [BYTE_LEVEL, SENTENCE_PIECE], ids=["byte_level", "sentence_piece"])
@given(text=TEXT)
def test_bytes_of_tokens_are_the_text(t: Tokenizer, text: str) -> None:
    table = t.token_bytes()
    ids = t.encode(text, add_special_tokens=False)
    assert len(table) == t.vocab_size
    if not t.special_ids & {*ids}:
        assert b"".join(table[i] for i in ids) == text.encode()
        if "\u2581" not in text:
            assert t.decode(ids) == text


@pytest.mark.parametrize("t", [BYTE_LEVEL, SENTENCE_PIECE], ids=["byte_level", "sentence_piece"])
@given(data=st.data())
def test_any_tokens_decode_as_their_bytes(t: Tokenizer, data: st.DataObject) -> None:
    """Any tokens a model draws, also halves of characters, and special tokens in between."""
    ids = data.draw(st.lists(st.integers(0, t.vocab_size - 1), max_size=12))
    joined = b"".join(t.token_bytes()[i] for i in ids)
    try:
        text = joined.decode()
    except UnicodeDecodeError:
        return  # the library writes another number of U+FFFD for byte tokens
    assert t.decode(ids) == text


def test_byte_tokens_and_spaces_of_sentence_piece() -> None:
    table = SENTENCE_PIECE.token_bytes()
    assert table[3 + 0x0A] == b"\n"
    assert b" the" in table
    assert [table[i] for i in SENTENCE_PIECE.special_ids] == [b""] * 3


def test_byte_alphabet_is_the_librarys() -> None:
    assert set(byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))
    for text in ("\n", " ", "é", "\x00\x7f", "\xad"):
        (written, _), *_ = pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(text)
        assert bytes(byte_alphabet()[c] for c in written) == text.encode()


def test_added_tokens_that_are_not_special_are_their_own_text() -> None:
    backend = byte_level()
    backend.add_tokens([AddedToken("éß"), AddedToken("<think>"), AddedToken("two words")])
    t = Tokenizer(backend, {})
    table = t.token_bytes()
    for text in ("éß", "<think>", "two words"):
        (token,) = t.encode(text, add_special_tokens=False)
        assert token >= SIZE
        assert table[token] == text.encode()
        assert token not in t.special_ids


def test_ids_without_a_token_have_no_bytes() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 5}, unk_token="a"))
    backend.decoder = decoders.ByteLevel()
    t = Tokenizer(backend, {})
    assert t.vocab_size == 6
    assert t.token_bytes() == (b"a", b"", b"", b"", b"", b"b")


def test_byte_level_is_seen_from_the_pre_tokenizer_alone() -> None:
    backend = byte_level()
    backend.decoder = None
    assert b"\n" in Tokenizer(backend, {}).token_bytes()


STEPS = {
    "fuse": [decoders.Fuse()],
    "bytes": [decoders.ByteFallback(), decoders.Fuse()],
    "strip": [decoders.Strip("_", 1, 0), decoders.Strip("o", 0, 1)],
    "metaspace": [decoders.Metaspace()],
    "metaspace of another": [decoders.Metaspace("_")],
    "metaspace without a prefix": [decoders.Metaspace("_", prepend_scheme="never")],
    "metaspace first": [decoders.Metaspace("_", prepend_scheme="first")],
    "fuse, then metaspace": [decoders.Fuse(), decoders.Metaspace("_", prepend_scheme="never")],
    "replace": [decoders.Replace("_", " ")],
    "replace two": [decoders.Replace("lo", "_-"), decoders.Replace("_", " ")],
    "replace by nothing": [decoders.Replace("_", "")],
    "bytes, then replace": [decoders.ByteFallback(), decoders.Replace("_", " ")],
    "llama": [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ],
    "replace, then byte level": [decoders.Replace("_", "\u0120"), decoders.ByteLevel()],
}
WRITTEN = [
    "\u2581a",
    "_hello",
    "_wo_rld_",
    "ooo",
    "x",
    "<0x5F>",
    "<0xe6>",
    "<0x9D>",
    "<0xB1>",
    "lo",
]


@pytest.mark.parametrize("name", STEPS)
def test_every_decoder_streams_what_the_library_decodes(name: str) -> None:
    """Whatever stands for a space; except the first token, which may lose it."""
    backend = tokenizers.Tokenizer(models.WordLevel({t: i for i, t in enumerate(WRITTEN)}))
    backend.decoder = decoders.Sequence(STEPS[name])
    table = Tokenizer(backend, {}).token_bytes()
    for ids in ([0, 1], [0, 2, 3], [3, 2, 1], [9, 0, 1], [3, 5, 1], [3, 6, 7, 8, 2], [3, 4, 2]):
        first, text = backend.decode(ids[:1]), backend.decode(ids)
        assert text.startswith(first)
        assert b"".join(table[i] for i in ids[1:]) == text[len(first) :].encode(), ids


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([decoders.WordPiece()], "WordPiece"),
        ([decoders.BPEDecoder()], "BPEDecoder"),
        ([decoders.Fuse(), decoders.CTC()], "CTC"),
        ([decoders.Replace(tokenizers.Regex("a+"), "b")], "Replace.*not a string"),
        ([decoders.Fuse(), decoders.Replace("ab", "b")], "Replace.*across tokens"),
        ([decoders.Fuse(), decoders.Strip(" ", 0, 1)], "Strip"),
        ([decoders.ByteFallback(), decoders.Strip(" ", 1, 0)], "Strip"),
        ([decoders.Fuse(), decoders.Metaspace("_")], "Metaspace"),
        ([], "none"),
    ],
)
def test_a_vocabulary_that_is_no_concatenation_is_refused(steps: list[Any], says: str) -> None:
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}))
    backend.decoder = decoders.Sequence(steps)
    with pytest.raises(ModelNotSupported, match=says):
        Tokenizer(backend, {}).token_bytes()


def test_tokens_with_a_role_are_special_even_if_the_vocabulary_forgot() -> None:
    backend = byte_level()
    backend.add_tokens(["<|end|>"])
    t = Tokenizer(backend, {"eos_token": "<|end|>", "pad_token": "<absent>"})
    assert t.eos_token_id == SIZE
    assert t.special_ids == {0, 1, SIZE}
    assert t.vocab_size == SIZE + 1  # <absent> did not grow it
    assert t.token_bytes()[SIZE] == b""
    assert t.decode([SIZE]) == ""


def test_prompts_are_never_cut_or_padded() -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    t = Tokenizer(backend, {})
    assert len(t.encode("the cat " * 20)) > 20
    assert len(t.encode("the")) < 5


def test_a_lone_surrogate_is_the_callers_mistake() -> None:
    with pytest.raises(InvalidRequest) as caught:
        BYTE_LEVEL.encode("a\ud800b")
    assert caught.value.param == "prompt"


def test_a_panic_of_the_library_is_one_requests_failure() -> None:
    """A panic is a BaseException, which the handlers of routes and lanes do not catch."""
    backend = tokenizers.Tokenizer(models.WordLevel({"o": 0}, unk_token="o"))
    backend.decoder = decoders.Strip("o", 0, 2)  # more than the token has
    with pytest.raises(RequestFailed, match="the tokenizer failed: index out of bounds"):
        Tokenizer(backend, {}).decode([0])


def test_a_tokenizer_file_over_the_maximum_size_is_not_read(tmp_path: Path) -> None:
    for name in ("tokenizer_config.json", "tokenizer.json"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(1 << 34)  # a sparse file
        with pytest.raises(ConfigError, match=rf"{name} has 17179869184 bytes; the maximum is"):
            Tokenizer.from_folder(tmp_path)
        (tmp_path / name).unlink()


def test_encoding_lets_other_threads_run() -> None:
    """While a long text is encoded, this thread keeps counting; with the GIL held it could not."""
    text, laps = "the cat sat on the mat " * 20_000, 0
    done = threading.Event()

    def work() -> None:
        BYTE_LEVEL.encode(text)
        done.set()

    thread = threading.Thread(target=work)
    longest, last = 0.0, time.perf_counter()
    begin = last
    thread.start()
    while not done.is_set():
        now = time.perf_counter()
        longest, last, laps = max(longest, now - last), now, laps + 1
    thread.join()
    took = time.perf_counter() - begin
    assert longest < 0.7 * took, f"stood still for {longest} of {took} s, {laps} laps"


# ------------------------------------------------------------ folders


def test_folder(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<s>"}')
    t = Tokenizer.from_folder(write(tmp_path, byte_level(), eos_token={"content": "</s>"}))
    assert (t.bos_token_id, t.eos_token_id) == (0, 1)
    assert t.encode("the cat") == BYTE_LEVEL.encode("the cat")


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelNotSupported, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_bad_file_is_named(tmp_path: Path, name: str, content: str) -> None:
    write(tmp_path, byte_level())
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=name):
        Tokenizer.from_folder(tmp_path)


def test_an_older_checkpoint_is_converted(tmp_path: Path) -> None:
    """vocab.json and merges.txt, as GPT-2 has them, without tokenizer.json."""
    byte_level().model.save(str(tmp_path))
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>", "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    t = Tokenizer.from_folder(tmp_path)
    ids = t.encode("the café", add_special_tokens=False)
    assert ids == BYTE_LEVEL.encode("the café", add_special_tokens=False)
    assert b"".join(t.token_bytes()[i] for i in ids) == "the café".encode()


def test_torch_is_not_loaded(tmp_path: Path) -> None:
    """Reading a folder, encoding, templates and the table; in a process of its own."""
    write(tmp_path, byte_level(), eos_token="</s>", chat_template="{{ messages[0].content }}")
    script = """
import sys
from pathlib import Path
from streamer.tokenizer.tokenizer import TextStream, Tokenizer
t = Tokenizer.from_folder(Path(sys.argv[1]))
ids = t.encode(t.render_chat([{"role": "user", "content": "the cat"}]), False)
stream = TextStream(t.token_bytes())
assert "".join(map(stream.push, ids)) + stream.finish() == "the cat"
sys.exit(", ".join({"torch", "transformers"} & set(sys.modules)) or 0)
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
