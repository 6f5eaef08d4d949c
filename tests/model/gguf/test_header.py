"""The reader of GGUF headers: what an independent writer wrote, and files that lie."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from streamer.errors import ModelNotSupported, StreamerError
from streamer.model.checkpoint import open_checkpoint
from streamer.model.gguf.header import FORMATS, MAX_ITEMS, Room, Unread, read_header
from streamer.model.inspect import recognize
from streamer.tokenizer.gguf import ARRAYS, from_metadata
from tests.checkpoints import make_checkpoint
from tests.model.gguf_files import write_gguf

U32, STRING, ARRAY, U64 = 4, 8, 9, 10


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, raw: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + raw


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def a_file(
    pairs: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: int = 0,
    *,
    version: int = 3,
    num_tensors: int | None = None,
    num_pairs: int | None = None,
) -> bytes:
    """A file of these parts, with `data` bytes of tensors."""
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(pairs) if num_pairs is None else num_pairs,
    )
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


def test_what_the_gguf_package_writes_is_read_as_its_own_reader_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_name("naïve — 模型")
    writer.add_bool("a.flag", True)
    writer.add_float64("a.double", 0.1)
    writer.add_int8("a.byte", -3)
    writer.add_uint64("a.large", 1 << 63)
    writer.add_array("a.list", [1.5, 2.5])
    writer.add_token_list(["a", "ü", "<|x|>"])
    writer.add_token_scores([0.5, -1.0, 2.0])
    rng = np.random.default_rng(0)
    writer.add_tensor("one", rng.random((3, 5), dtype=np.float32))
    for kind, each in FORMATS.items():
        raw = rng.integers(0, 256, (3, 2 * each.bytes), dtype=np.uint8)
        writer.add_tensor(each.name, raw, raw_dtype=gguf.GGMLQuantizationType(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    header = read_header(file, ARRAYS)
    theirs = gguf.GGUFReader(file)
    fields = {f.name: f.contents() for f in theirs.fields.values() if not f.name.startswith("GGUF")}
    assert header.metadata == fields
    places = [
        (t.name, t.tensor_type.name, tuple(map(int, t.shape))[::-1], t.data_offset, t.n_bytes)
        for t in theirs.tensors
    ]
    assert [(p.name, p.format.name, p.shape, p.start, p.num_bytes) for p in header.tensors] == [
        (name, kind, shape, start, size) for name, kind, shape, start, size in places
    ]
    skipped = {"tokenizer.ggml.tokens": Unread(3), "tokenizer.ggml.scores": Unread(3)}
    assert read_header(file).metadata == {**fields, **skipped}


ONE = tensor("t", (32, 2), 0, 0)
HUGE = struct.pack("<Q", 1 << 60)
IMPOSSIBLE: dict[str, tuple[bytes, str]] = {
    "not GGUF": (b"GGML" + bytes(60), "magic"),
    "empty": (b"", "magic"),
    "cut in the counts": (b"GGUF" + struct.pack("<I", 3), "tensor_count"),
    "version 1": (a_file(version=1), "version: version 1"),
    "big-endian": (a_file(version=3 << 24), "version: a big-endian"),
    "tensors beyond the file": (a_file(num_tensors=1 << 60), "tensor_count"),
    "pairs beyond the file": (a_file(num_pairs=1000), "metadata_kv_count"),
    "a key of 2**60 bytes": (a_file((HUGE + bytes(64),)), "the key of pair 0"),
    "a string of 2**60 bytes": (a_file((pair("a", STRING, HUGE + bytes(64)),)), "a: "),
    "a string that is no UTF-8": (
        a_file((pair("a", STRING, struct.pack("<Q", 2) + b"\xff\xff"),)),
        "a: it is no UTF-8",
    ),
    "an unknown type": (a_file((pair("a", 13, bytes(8)),)), "a: its type is 13"),
    "a bool of 7": (a_file((pair("a", 7, b"\x07"),)), "a: 7 is neither"),
    "an array of 2**60": (a_file((pair("a", ARRAY, struct.pack("<I", 0) + HUGE),)), "a: "),
    "an array of 2**60 strings": (a_file((pair("a", ARRAY, struct.pack("<I", 8) + HUGE),)), "a: "),
    "an array of arrays": (
        a_file((pair("a", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(64)),)),
        "a: it is an array of type 9",
    ),
    "a string of an array past the end": (
        a_file((pair("a", ARRAY, struct.pack("<IQ", STRING, 1) + HUGE),)),
        "a: it ends at",
    ),
    "a key of nothing": (a_file((pair("", U32, bytes(4)),)), "the key of pair 0: it is empty"),
    "a key twice": (a_file((pair("a", U32, bytes(4)),) * 2), "a: it is stated twice"),
    "a tensor twice": (a_file((), (ONE, tensor("t", (32,), 0, 256)), 512), "tensor t: it is st"),
    "a name of 2**20 bytes": (
        a_file((), (tensor("t" * (1 << 20), (32,), 0, 0),), 128),
        "ttt...: its name has 1048576 characters, at most 256",
    ),
    "no dimensions": (a_file((), (tensor("t", (), 0, 0),), 64), "tensor t: it has 0 dim"),
    "2**31 dimensions": (
        a_file((), (text("t") + struct.pack("<I", 1 << 31) + bytes(64),)),
        "tensor t: it has 2147483648 dim",
    ),
    "a dimension of 0": (a_file((), (tensor("t", (32, 0), 0, 0),), 64), "tensor t: its shape"),
    "a dimension of 2**63": (a_file((), (tensor("t", (1 << 63, 2), 0, 0),), 64), "tensor t"),
    "an unknown format": (a_file((), (tensor("t", (32,), 99, 0),), 64), "tensor t: its type is 99"),
    "a format that is not read": (
        a_file((), (tensor("t", (256,), 23, 0),), 512),
        "tensor t: its type is IQ4_XS; read are F32, ",
    ),
    "half a block": (a_file((), (tensor("t", (48,), 8, 0),), 64), "tensor t: rows of 48"),
    "past the end": (a_file((), (ONE,), 128), "tensor t: it ends at byte"),
    "far past the end": (a_file((), (tensor("t", (32,), 0, 1 << 63),), 64), "tensor t: it ends"),
    "overlapping": (a_file((), (ONE, tensor("u", (32,), 0, 32)), 512), "u: it overlaps tensor t"),
    "a crooked offset": (a_file((), (tensor("t", (32,), 0, 8),), 512), "tensor t: offset 8"),
    "alignment 0": (
        a_file((pair("general.alignment", U32, bytes(4)),), (ONE,), 512),
        "general.alignment: 0",
    ),
    "alignment 2**40": (
        a_file((pair("general.alignment", U64, struct.pack("<Q", 1 << 40)),), (ONE,), 512),
        "general.alignment",
    ),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_file_that_lies_is_refused_with_the_field(tmp_path: Path, name: str) -> None:
    raw, says = IMPOSSIBLE[name]
    file = tmp_path / "a.gguf"
    file.write_bytes(raw)
    with pytest.raises(ModelNotSupported) as refusal:
        read_header(file)
    assert says in refusal.value.message
    assert refusal.value.param


def test_headers_of_a_split_model_are_bounded_together(tmp_path: Path) -> None:
    """Bytes, items of arrays and tensors: each file has fewer than all may have."""
    items = struct.pack("<IQ", 0, 40) + bytes(40)
    tensors = tuple(tensor(name, (32,), 0, 128 * i) for i, name in enumerate("abc"))
    raw = a_file((pair("some.items", ARRAY, items),), tensors, 3 * 128)
    files = [tmp_path / f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for file in files:
        file.write_bytes(raw)
    read_header(files[0], room=(one := Room()))
    taken = Room().bytes - one.bytes
    for field, most, says in (
        ("bytes", 3 * taken - 1, "headers have at most"),
        ("items", 100, "it counts 40, at most 20 are read"),
        ("tensors", 7, "tensor_count: it counts 3, at most 1 are read"),
    ):
        room = Room(**{field: most})
        for file in files[:2]:
            read_header(file, room=room)
        with pytest.raises(ModelNotSupported, match=says):
            read_header(files[2], room=room)


def test_no_more_of_a_file_is_read_than_its_header_needs(tmp_path: Path) -> None:
    """A split model's files are read one after the other, and most have few bytes of header."""
    strings = struct.pack("<IQ", STRING, 3) + text("a" * (3 << 20)) + text("") + text("b")
    file = tmp_path / "a.gguf"
    peaks = []
    for pairs in ((), (pair("a", ARRAY, strings),)):
        file.write_bytes(a_file(pairs, (ONE,), 256))
        with file.open("rb+") as f:
            f.truncate(64 << 20)
        tracemalloc.start()
        metadata = read_header(file).metadata
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert metadata == {"a": ["a" * (3 << 20), "", "b"]}
    assert peaks[0] < 2 << 20
    assert peaks[1] < 16 << 20


def test_a_large_array_of_nothing_takes_little_memory(tmp_path: Path) -> None:
    """8 bytes a string in the file would be 60 in memory."""
    count = MAX_ITEMS + 1
    array = struct.pack("<IQ", STRING, count) + bytes(8 * count)
    file = tmp_path / "a.gguf"
    file.write_bytes(a_file((pair("tokenizer.ggml.tokens", ARRAY, array),)))
    tracemalloc.start()
    with pytest.raises(ModelNotSupported, match=r"tokens: it counts 4194305, at most 4194304"):
        read_header(file, ARRAYS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * file.stat().st_size


def test_a_mutated_file_is_read_or_refused(tmp_path: Path) -> None:
    """Nothing else happens, all the way to the model's shapes and the tokenizer."""
    folder = make_checkpoint(
        tmp_path / "m", "llama", hidden_size=32, intermediate_size=64, num_hidden_layers=1
    )
    good = write_gguf(folder, tmp_path / "good.gguf")
    raw = good.read_bytes()
    header_bytes = read_header(good).tensors[0].start
    draw = random.Random(5)
    file = tmp_path / "bad.gguf"
    num_refused = 0
    for _ in range(250):
        bad = bytearray(raw)
        for _ in range(draw.choice((1, 1, 2, 8))):
            at = draw.randrange(header_bytes)
            if draw.random() < 0.5:
                bad[at] = draw.randrange(256)
            else:
                value = draw.choice((0, 1, 255, 1 << 31, (1 << 60) + 3, (1 << 64) - 1))
                bad[at : at + 8] = struct.pack("<Q", value)
        if draw.random() < 0.2:
            del bad[draw.randrange(len(bad)) :]
        file.write_bytes(bad)
        num_refused += is_refused(file)
    assert 50 < num_refused < 250  # some changes are harmless: a token's spelling


def is_refused(file: Path) -> bool:
    try:
        recognize(open_checkpoint(file), "auto")
        tokenizer: Any = from_metadata(read_header(file, ARRAYS).metadata)
        tokenizer.token_bytes()
        tokenizer.encode("Hello")
    except StreamerError:
        return True
    return False
