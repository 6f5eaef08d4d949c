"""Folders that are no checkpoint, or half of one, are refused before anything is read."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamer.errors import ModelNotSupported
from streamer.model.checkpoint import open_checkpoint


@pytest.fixture
def folder(checkpoint: Any, tmp_path: Path) -> Path:
    """A sharded checkpoint that the test may break."""
    return Path(shutil.copytree(checkpoint("llama", 1, max_shard_size="100KB"), tmp_path / "m"))


def shards(folder: Path) -> list[Path]:
    """Its weight files."""
    return sorted(folder.glob("*.safetensors"))


def only_bin(folder: Path) -> None:
    """Weights as in old checkpoints, without safetensors."""
    for file in [*shards(folder), folder / "model.safetensors.index.json"]:
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"pickle")


def cut(folder: Path) -> None:
    """An incomplete download."""
    file = shards(folder)[0]
    file.write_bytes(file.read_bytes()[:-10])


def gguf_alone(folder: Path) -> None:
    """As downloaded from a repository of GGUF files."""
    only_gguf(folder)
    (folder / "config.json").unlink()


def pointer(folder: Path) -> None:
    """As a clone without git-lfs leaves it."""
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (folder / "model.safetensors").write_text(text)


def only_gguf(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "m.gguf").write_bytes(b"GGUF")


def escape(name: str) -> Callable[[Path], object]:
    """An index that names a file by a path, of a file that is there; {} is the folder."""

    def damage(folder: Path) -> None:
        (folder / "sub").mkdir()
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        file = name.format(folder) + shards(folder)[0].name
        assert (folder / file).is_file()
        index["weight_map"]["model.norm.weight"] = file
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return damage


def wrong_index(folder: Path) -> None:
    """An index that names the wrong file for a tensor."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.extra"] = shards(folder)[0].name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def edit_header(folder: Path, **change: object) -> None:
    """A first file of two tensors of 64 numbers, one of which lies."""
    entry = {"dtype": "F16", "shape": [64], "data_offsets": [0, 128]}
    entries = {"a": {**entry, **change}, "b": {**entry, "data_offsets": [128, 256]}}
    write_header(shards(folder)[0], json.dumps(entries).encode())
    with shards(folder)[0].open("ab") as f:
        f.write(bytes(256))


def long_name(folder: Path) -> None:
    """A tensor that a message could not name."""
    entry = {"dtype": "F16", "shape": [0], "data_offsets": [0, 0]}
    write_header(shards(folder)[0], json.dumps({"a" * (1 << 20): entry}).encode())


def write_header(file: Path, header: bytes, length: int | None = None) -> None:
    """A safetensors file of a header alone."""
    file.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header)


def half(name: str, **change: object) -> Callable[[Path], object]:
    """Fields whose strings have half of a pair of UTF-16, as JSON may escape it."""

    def damage(folder: Path) -> None:
        fields = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**fields, **change}))

    return damage


def link_to(target: str) -> Callable[[Path], object]:
    """The first shard as a link; "": to itself."""

    def damage(folder: Path) -> None:
        file = shards(folder)[0]
        file.unlink()
        file.symlink_to(target or file.name)

    return damage


def special(name: str) -> Callable[[Path], object]:
    """A named pipe in the place of a file, or of the first shard: reading it would not end."""

    def damage(folder: Path) -> None:
        file = folder / name if name else shards(folder)[0]
        file.unlink()
        os.mkfifo(file)

    return damage


HALF = r"can't be read as JSON: the last of '.*\\ud[8f][0f][0f]' is half of a character"
BREAKS: list[tuple[str, Callable[[Path], object], str]] = [
    ("gone", lambda f: shutil.rmtree(f), "does not exist"),
    (
        "a file",
        lambda f: (shutil.rmtree(f), f.write_text("")),
        "is a file, and no GGUF; a model is a folder",
    ),
    ("no config", lambda f: (f / "config.json").unlink(), r"no config\.json; .* OWNER/NAME:Q4_K_M"),
    ("GGUF alone", gguf_alone, r"no config\.json; a GGUF file is served by its own name: m\.gguf"),
    ("a pointer", pointer, r"model\.safetensors is a pointer of Git LFS"),
    ("bad config", lambda f: (f / "config.json").write_text("{"), "can't be read as JSON"),
    ("list config", lambda f: (f / "config.json").write_text("[]"), "no JSON object"),
    ("no shard", lambda f: shards(f)[1].unlink(), "lacks 1 of "),
    ("only bin", only_bin, "only pytorch_model.bin.*safetensors and GGUF alone"),
    ("only GGUF", only_gguf, r"a GGUF file is served by its own name: m\.gguf"),
    ("no weights", lambda f: [s.unlink() for s in f.glob("model*")], "neither"),
    ("cut", cut, "incomplete download"),
    ("escape", escape("../m/"), r"names the file '\.\./m/model-"),
    ("an absolute path", escape("{}/"), "names the file '/.*/m/model-"),
    ("a path within the folder", escape("sub/../"), r"names the file 'sub/\.\./model-"),
    ("a path of the folder itself", escape("./"), r"names the file '\./model-"),
    ("wrong_index", wrong_index, "lacks 1 tensors of its index: model.extra"),
    ("empty file", lambda f: shards(f)[0].write_bytes(b""), "no safetensors file"),
    ("huge header", lambda f: write_header(shards(f)[0], b"{}", 1 << 60), "no safetensors file"),
    (
        "large header",
        lambda f: write_header(shards(f)[0], b" " * (33 << 20)),
        "a header of 34603008 bytes; all of a checkpoint may have 33554432",
    ),
    ("header of lists", lambda f: write_header(shards(f)[0], b"[[],[]]"), "broken header"),
    ("half a character", half("config.json", architectures=["\ud800"]), HALF),
    (
        "half a character in a file's name",
        half("model.safetensors.index.json", weight_map={"a": "\ud800"}),
        HALF,
    ),
    (
        "half a character in a tensor's name",
        half("model.safetensors.index.json", weight_map={"a\udfff": "m.safetensors"}),
        HALF,
    ),
    ("half a character in a default", half("generation_config.json", top_k="\ud800"), HALF),
    ("deep config", lambda f: (f / "config.json").write_text("[" * 99999), "can't be read as JSON"),
    ("no json", lambda f: write_header(shards(f)[0], b"xxxx"), "broken header"),
    ("bytes of another shape", lambda f: edit_header(f, shape=[16, 3]), "not in 96 from"),
    ("bytes of another dtype", lambda f: edit_header(f, dtype="F8_E4M3"), "not in 64 from"),
    (
        "bytes from before the file",
        lambda f: edit_header(f, data_offsets=[-9, 256]),
        "a: data_offsets are not from 0",
    ),
    (
        "bytes from after any file",
        lambda f: edit_header(f, data_offsets=[0, 10**4299]),
        "a: data_offsets are not from 0",
    ),
    ("many dimensions", lambda f: edit_header(f, shape=[10**18] * 300), "a: shape has 300 dim"),
    ("a large dimension", lambda f: edit_header(f, shape=[10**4299]), "a: shape has a dimension"),
    ("a negative size", lambda f: edit_header(f, shape=[-64, -1]), "a: shape has a dimension"),
    (
        "a dtype that is not known",
        lambda f: edit_header(f, dtype="F4", shape=[10**18] * 300),
        "a: dtype 'F4' is none of F64",
    ),
    ("no bytes", lambda f: edit_header(f, data_offsets=[256, 0]), "is in bytes"),
    ("a long name", long_name, "aaa: its name has 1048576 characters, at most 1000 can be"),
    ("no dtype", lambda f: write_header(shards(f)[0], b'{"a": {}}'), "broken header"),
    ("a link to nothing", link_to("gone"), "lacks 1 of . weight files"),
    ("a link to itself", link_to(""), "lacks 1 of . weight files"),
    ("a link to a folder", link_to(".."), "lacks 1 of . weight files"),
    ("a link to a device", link_to("/dev/zero"), "lacks 1 of . weight files"),
    ("a pipe", special(""), "lacks 1 of . weight files"),
    ("a pipe as config", special("config.json"), "no config.json"),
    ("a pipe as index", special("model.safetensors.index.json"), "has neither"),
    (
        "empty index",
        lambda f: (f / "model.safetensors.index.json").write_text("{}"),
        "no weight_map",
    ),
]


@pytest.mark.parametrize(("name", "damage", "says"), BREAKS, ids=[b[0] for b in BREAKS])
def test_refusals(folder: Path, name: str, damage: Callable[[Path], object], says: str) -> None:
    """Each says what is wrong with which file."""
    open_checkpoint(folder)
    damage(folder)
    with pytest.raises(ModelNotSupported, match=says):
        open_checkpoint(folder)


def test_links_to_files_are_followed_as_in_the_hubs_cache(folder: Path, tmp_path: Path) -> None:
    """Its snapshots are links to ../../blobs; only what an index names must lie in the folder."""
    whole = open_checkpoint(folder)
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for i, file in enumerate(sorted(f for f in folder.iterdir() if f.is_file())):
        file.rename(blobs / f"{i}")
        file.symlink_to(f"../blobs/{i}")
    linked = open_checkpoint(folder)
    assert linked.tensors == whole.tensors
    assert linked.config == whole.config


def test_headers(folder: Path) -> None:
    """Names, shapes and dtypes without reading weights."""
    found = open_checkpoint(folder)
    entry = found.tensors["model.layers.1.mlp.down_proj.weight"]
    assert (entry.shape, entry.dtype, entry.num_elements) == ((64, 112), "F32", 64 * 112)
    assert found.stored_dtype == "F32"
    assert found.generation["eos_token_id"] == 2
