"""The header of a GGUF file: its metadata and where each tensor lies.

Bounded against files that lie: every count, length, type and offset is compared with what the file
holds before it is used, and ModelNotSupported names the field. Reads no weights and imports no
torch. Called by checkpoint.py of this folder and, for the tokenizer's metadata, by build.py.

Why not the `gguf` package's GGUFReader: it makes arrays of every string. For 32,000 tokens and
31,741 merges it takes 4.6 to 5.1 s and 105 MiB, this 0.35 s and 70 MiB. A string's length of 2**40
it accepts; other untrue counts and offsets end in an IndexError or ValueError that names nothing,
in a header of 0.8 MB after 8 s (on a busy machine, 2026-11-23). Of true files both say the same.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Container
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from streamer.errors import ModelNotSupported

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # version 1 counted in 32 bits; its few files are of 2023
# Of one file, or of all files of a split model together. Gemma's 262,144 tokens and their merges
# take 16 MB; a string of them some 60 bytes of memory more.
MAX_HEADER_BYTES = 64 << 20
STEP_BYTES = 1 << 20  # read at first, and then twice as many: of most files of a split model enough
MAX_ITEMS = 4 << 20  # of all arrays together
MAX_PAIRS = 1 << 16
MAX_TENSORS = 1 << 18
MAX_DIMS = 4
MAX_NAME = 256  # characters of a tensor's name; llama.cpp's have up to 63
MAX_ALIGNMENT = 1 << 16

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "B",
    10: "Q",
    11: "q",
    12: "d",
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_U64 = struct.Struct("<Q")


class Format(msgspec.Struct, frozen=True):
    """A type of tensor: `bytes` hold `weights` of them, along a row."""

    name: str
    weights: int
    bytes: int


FORMATS = {
    0: Format("F32", 1, 4),
    1: Format("F16", 1, 2),
    2: Format("Q4_0", 32, 18),
    3: Format("Q4_1", 32, 20),
    6: Format("Q5_0", 32, 22),
    7: Format("Q5_1", 32, 24),
    8: Format("Q8_0", 32, 34),
    10: Format("Q2_K", 256, 84),
    11: Format("Q3_K", 256, 110),
    12: Format("Q4_K", 256, 144),
    13: Format("Q5_K", 256, 176),
    14: Format("Q6_K", 256, 210),
    20: Format("IQ4_NL", 32, 18),
    30: Format("BF16", 1, 2),
    39: Format("MXFP4", 32, 17),
}
# Known by name only, for the refusal.
_OTHERS = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
    41: "Q1_0",
}


class TensorPlace(msgspec.Struct, frozen=True):
    """One tensor of a file: `shape` as torch has it (rows first), `start` from the file's begin."""

    name: str
    format: Format
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.format.weights * self.format.bytes


class Room(msgspec.Struct):
    """What headers may still take; the files of a split model share one."""

    bytes: int = MAX_HEADER_BYTES
    items: int = MAX_ITEMS
    tensors: int = MAX_TENSORS


class Unread(msgspec.Struct, frozen=True):
    """An array that was not asked for: no number, so that a reader of one refuses it."""

    num_items: int

    def __str__(self) -> str:
        return f"[{self.num_items} items]"


class Header(msgspec.Struct, frozen=True):
    """What a file says of itself; arrays that were not asked for are Unread."""

    metadata: dict[str, Any]
    tensors: tuple[TensorPlace, ...]


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF does."""
    try:
        with path.open("rb") as f:
            return f.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_header(path: Path, arrays: Container[str] = (), room: Room | None = None) -> Header:
    """The header of one file; ModelNotSupported names the field that can't be.

    arrays  keys below `tokenizer.` whose arrays are read: they are most of a header
    room    for files that are read together; made less by what this header takes
    """
    room = Room() if room is None else room
    try:
        size = path.stat().st_size
        with path.open("rb") as f:
            return _Reader(path, f, size, arrays, room).header()
    except OSError as e:
        raise ModelNotSupported(f"{path} can't be read: {e}", param="model") from e


def peek(start: bytes) -> dict[str, Any]:
    """The metadata in the first bytes of a file, as far as they go; empty if it is no GGUF."""
    reader = _Reader(Path("a file"), io.BytesIO(start), MAX_HEADER_BYTES, (), Room())
    metadata: dict[str, Any] = {}
    with suppress(ModelNotSupported):
        _, num_pairs = reader.counts()
        reader.read_metadata(num_pairs, metadata)
    return metadata


class _Reader:
    """Reads fields one after the other; `_at` never passes the end of `_data`."""

    def __init__(
        self, path: Path, file: BinaryIO, size: int, arrays: Container[str], room: Room
    ) -> None:
        self._path = path
        self._file = file
        self._data = b""  # what was read of it
        self._size = size
        self._arrays = arrays
        self._room = room
        self._at = 0

    def header(self) -> Header:
        num_tensors, num_pairs = self.counts()
        metadata: dict[str, Any] = {}
        self.read_metadata(num_pairs, metadata)
        places = [self._place() for _ in range(num_tensors)]
        self._room.tensors -= num_tensors
        self._room.bytes -= self._at
        return Header(metadata, self._checked(places, self._alignment(metadata)))

    def counts(self) -> tuple[int, int]:
        """How many tensors and pairs of metadata follow."""
        if self._take(4, "magic") != MAGIC:
            raise self._wrong("magic", "it does not begin with GGUF", param="model")
        version = self._number("I", "version")
        if version not in VERSIONS:
            big = version & 0xFFFF == 0
            why = "a big-endian file" if big else f"version {version}, read are {VERSIONS}"
            raise self._wrong("version", why)
        # A tensor takes 32 bytes of header or more, a pair of key and value 13.
        num_tensors = self._count("tensor_count", 32, self._room.tensors)
        return num_tensors, self._count("metadata_kv_count", 13, MAX_PAIRS)

    # ------------------------------------------------------------ fields

    def read_metadata(self, num_pairs: int, metadata: dict[str, Any]) -> None:
        """Fill `metadata` with that many pairs."""
        for i in range(num_pairs):
            key = self._string(f"the key of pair {i}")
            if not key:
                raise self._wrong(f"the key of pair {i}", "it is empty")
            if key in metadata:
                raise self._wrong(key, "it is stated twice")
            metadata[key] = self._value(key)

    def _value(self, key: str) -> Any:
        kind = self._number("I", key)
        if kind in _SCALARS:
            value = self._number(_SCALARS[kind], key)
            if kind == _BOOL and value not in (0, 1):
                raise self._wrong(key, f"{value} is neither true nor false")
            return bool(value) if kind == _BOOL else value
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY:
            return self._array(key)
        raise self._wrong(key, f"its type is {kind}, which GGUF does not have")

    def _array(self, key: str) -> Any:
        kind = self._number("I", key)
        width = struct.calcsize(_SCALARS[kind]) if kind in _SCALARS else 8
        if kind not in _SCALARS and kind != _STRING:
            raise self._wrong(key, f"it is an array of type {kind}, read are numbers and strings")
        count = self._count(key, width, self._room.items)
        self._room.items -= count
        is_read = key in self._arrays or not key.startswith("tokenizer.")
        if kind == _STRING:
            strings = self._strings(key, count, is_read)
            return strings if is_read else Unread(count)
        raw = self._take(count * width, key)
        return list(struct.unpack(f"<{count}{_SCALARS[kind]}", raw)) if is_read else Unread(count)

    def _strings(self, key: str, count: int, is_read: bool) -> list[str]:
        """`count` strings, or none where only their end is needed."""
        found: list[str] = []
        data, at, length_at = self._data, self._at, _U64.unpack_from
        try:
            for _ in range(count):
                if at + 8 > len(data):
                    data = self._up_to(at + 8, key)
                (length,) = length_at(data, at)
                end = at + 8 + length
                if end > len(data):
                    data = self._up_to(end, key)
                if is_read:
                    found.append(data[at + 8 : end].decode())
                at = end
        except UnicodeDecodeError as e:
            raise self._wrong(key, f"string {len(found)} is no UTF-8") from e
        self._at = at
        return found

    def _place(self) -> TensorPlace:
        name = self._string("the name of a tensor")
        field = f"tensor {name}"
        if len(name) > MAX_NAME:
            raise self._wrong(field, f"its name has {len(name)} characters, at most {MAX_NAME}")
        num_dims = self._number("I", field)
        if not 1 <= num_dims <= MAX_DIMS:
            raise self._wrong(field, f"it has {num_dims} dimensions, 1 to {MAX_DIMS} can be")
        shape = tuple(self._number("Q", field) for _ in range(num_dims))[::-1]
        kind, offset = self._number("I", field), self._number("Q", field)
        if kind not in FORMATS:
            what = _OTHERS.get(kind, f"{kind}, which GGUF does not have")
            known = ", ".join(f.name for f in FORMATS.values())
            raise self._wrong(field, f"its type is {what}; read are {known}")
        if min(shape) < 1 or max(shape) >= 1 << 31:
            raise self._wrong(field, f"its shape is {list(shape)}")
        if shape[-1] % FORMATS[kind].weights:
            each, wide = FORMATS[kind], shape[-1]
            raise self._wrong(
                field, f"rows of {wide} are no blocks of {each.weights} ({each.name})"
            )
        return TensorPlace(name, FORMATS[kind], shape, offset)

    def _alignment(self, metadata: dict[str, Any]) -> int:
        found = metadata.get("general.alignment", 32)
        is_power = isinstance(found, int) and found >= 8 and found & (found - 1) == 0
        if not is_power or found > MAX_ALIGNMENT:
            why = f"{str(found)[:100]} is no power of 2 from 8 to {MAX_ALIGNMENT}"
            raise self._wrong("general.alignment", why)
        return int(found)

    def _checked(self, places: list[TensorPlace], alignment: int) -> tuple[TensorPlace, ...]:
        """The tensors with their place in the file, each in it and apart from the others."""
        begin = -(-self._at // alignment) * alignment
        end, before = 0, ""
        names = set()
        for place in sorted(places, key=lambda p: p.start):
            field = f"tensor {place.name}"
            if place.name in names:
                raise self._wrong(field, "it is stated twice")
            names.add(place.name)
            if place.start % alignment:
                raise self._wrong(field, f"offset {place.start} is no multiple of {alignment}")
            if place.start < end:
                raise self._wrong(field, f"it overlaps tensor {before}")
            end, before = place.start + place.num_bytes, place.name
            if begin + end > self._size:
                held = f"it ends at byte {begin + end}, the file has {self._size}"
                raise self._wrong(field, f"{held}: an incomplete download?")
        replace = msgspec.structs.replace
        return tuple(replace(place, start=begin + place.start) for place in places)

    # ------------------------------------------------------------ bytes

    def _number(self, kind: str, field: str) -> Any:
        (value,) = struct.unpack(f"<{kind}", self._take(struct.calcsize(f"<{kind}"), field))
        return value

    def _count(self, field: str, min_bytes: int, maximum: int) -> int:
        """A count of things that take at least so many bytes of header each."""
        count = int(self._number("Q", field))
        if count > maximum:
            raise self._wrong(field, f"it counts {count}, at most {maximum} are read")
        left = min(self._size, self._room.bytes) - self._at
        if count * min_bytes > left:
            raise self._wrong(field, f"{count} can't be in the {left} bytes that follow")
        return count

    def _string(self, field: str) -> str:
        length = self._number("Q", field)
        try:
            return self._take(length, field).decode()
        except UnicodeDecodeError as e:
            raise self._wrong(field, "it is no UTF-8") from e

    def _take(self, num_bytes: int, field: str) -> bytes:
        end = self._at + num_bytes
        taken = self._up_to(end, field)[self._at : end]
        self._at = end
        return taken

    def _up_to(self, end: int, field: str) -> bytes:
        """The file's beginning, `end` bytes or more; what is missing of them is read."""
        most = min(self._size, self._room.bytes)
        while end > len(self._data):
            step = min(max(STEP_BYTES, len(self._data)), most - len(self._data))
            more = self._file.read(step) if end <= most else b""
            if not more:
                raise self._ends(field, end)
            self._data += more
        return self._data

    def _ends(self, field: str, end: int) -> ModelNotSupported:
        if self._size > self._room.bytes:
            most = f"headers have at most {MAX_HEADER_BYTES} bytes together"
            return self._wrong(field, f"it ends at byte {end}; {most}")
        return self._wrong(field, f"it ends at byte {end}, the file has {self._size}")

    def _wrong(self, field: str, why: str, param: str | None = None) -> ModelNotSupported:
        shown = field if len(field) <= 100 else f"{field[:100]}..."
        return ModelNotSupported(f"{self._path.name}: {shown}: {why}", param=param or shown)
